"""Tables of what a plan would deploy beside what was published; without measurements, the page stays as it is."""

from __future__ import annotations

from datetime import date
from functools import cache
from typing import Any

import pandas as pd

from docs.computed import slow, table
from docs.computed.served import DATA, from_data, lines, paths, written
from lab.calibration.served.boards import NEAR, boards, judged_boards
from lab.calibration.served.optimum import heights_by, judged_optima, split_groups
from lab.calibration.served.read import read_files, read_rows


@cache
def planned() -> pd.DataFrame:
    """Every board of MLPerf with its plan."""
    return judged_boards(boards(read_rows(DATA / "measured" / "mlperf_inference.csv")))


@cache
def optima() -> pd.DataFrame:
    """Every run on a published frontier of disaggregated runs."""
    rows, _ = read_files(paths())
    return judged_optima(split_groups(lines(), rows))


def number(value: Any, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "–" if pd.isna(value) else f"{value:,.{digits}f}"


@slow
@from_data
def optimum_boards() -> str:
    """Plan over the best submission, board by board."""
    rows = [
        [
            *(line.model, line.system, line.scenario, str(line.submissions), str(line.gpus)),
            *(number(line.gpus_for_run, 0), number(line.run, 0), number(line.plan, 0), number(line.plan_over_run)),
            (line.reason or line.planned) + " \\*" * bool(line.never_served),
        ]
        for line in planned().itertuples()
    ]
    head = ["model", "system", "scenario", "results", "GPUs", "at its rate", "best", "plan", "plan/run", "planned"]
    return table(head, rows)


@slow
@from_data
def optimum_boards_met() -> str:
    """Boards whose plan is within the limits of its run, and the median: of all, and of those with several results."""

    def met(ratio: pd.Series) -> str:
        return f"{ratio.between(*NEAR).sum()} of {len(ratio)} (median {ratio.median():.2f})"

    known = planned().dropna(subset=["plan_over_run"])
    several = known.loc[known["submissions"] > 1, "plan_over_run"]
    return f"{met(known['plan_over_run'])} boards; of those with two results and more {met(several)}"


@slow
@from_data
def optimum_heights() -> str:
    """Forecast over published frontiers by system, weights and class of interactivity."""
    rows = [
        [line.system, line.weights, line.tokens_per_s_per_user, str(line.points)]
        + [number(each) for each in (line.as_run, line.same_workers, line.same_kinds, line.free)]
        for line in heights_by(optima()).itertuples()
    ]
    return table(["system", "weights", "tokens/s/user", "runs", "as run", "same workers", "same kinds", "free"], rows)


@slow
@from_data
def optimum_date() -> str:
    """Day on which the table of boards was last found to be another than before."""
    today = date.today()
    return written("optimum-date") if written("optimum-boards") == optimum_boards() else f"{today.day} {today:%B %Y}"
