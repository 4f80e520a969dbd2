"""Tables of what a plan would deploy beside what was published; without measurements, the page stays as it is."""

from __future__ import annotations

from datetime import date
from functools import cache
from typing import Any

import pandas as pd

from docs.computed import slow, table
from docs.computed.served import DATA, from_data, lines, paths, written
from lab.calibration.served.boards import boards, judged_boards, met
from lab.calibration.served.optimum import GROUP, HEIGHTS, heights_by, judged_optima, split_groups
from lab.calibration.served.read import read_files, read_rows

#: What a kind of layout has of the best of all kinds where it counts as near. [1]
NEAR = 0.97


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
            *(number(line.gpus_for_run, 0), number(line.run, 0), number(line.share), number(line.plan, 0)),
            number(line.plan_over_run) + " †" * bool(line.set_aside),
            (line.reason or line.planned) + " \\*" * bool(line.never_served),
        ]
        for line in planned().itertuples()
    ]
    head = ["model", "system", "scenario", "results", "GPUs", "at its rate", "best", "share", "plan", "plan/run"]
    return table([*head, "planned"], rows)


@slow
@from_data
def optimum_boards_met() -> str:
    """Boards whose plan is within the limits of its run, and the median: of all, and without boards of weak runs."""
    known = planned().dropna(subset=["plan_over_run"])
    kept, several = known[known["set_aside"] == ""], known[known["submissions"] > 1]
    return (
        f"{met(known)} boards, {met(kept)} without those set aside; of those with two results and more {met(several)}"
    )


@slow
@from_data
def optimum_boards_ran() -> str:
    """Boards that state a layout: what the best design of the kind that ran has of the plan."""
    known = planned().dropna(subset=["of_kind"])
    both = [sorted(known[name], reverse=True) for name in ("of_kind", "of_kind_together")]
    near = [sum(ratio >= NEAR for ratio in ratios) for ratios in both]
    far = [", ".join(number(ratio) for ratio in ratios if ratio < NEAR) for ratios in both]
    return (
        f"{len(known)} of {len(planned())} boards state the layout of an instance: the best designs that decode on "
        f"this kind have {NEAR:.2f} or more of the plan on {near[0]} ({far[0]} on the other), co-located ones on "
        f"{near[1]} ({far[1]} on the others)"
    )


@slow
@from_data
def optimum_kinds() -> str:
    """Groups in which the kinds of layouts that ran have nearly what all kinds have, and what prefill of these is."""
    runs = optima().assign(more=lambda each: each["free"] / each["same_kinds"])
    more = runs.groupby(list(GROUP))["more"].median()
    piped = runs["found"].str.partition(" + ")[0].str.contains("PP").sum()
    return (
        f"{(more <= 1 / NEAR).sum()} of {len(more)} groups ({(more <= 1.1).sum()} within 10 %, median "
        f"{more.median():.2f}); {piped} of {len(runs)} free designs"
    )


@slow
@from_data
def optimum_heights() -> str:
    """Forecast over published frontiers by system, weights and class of interactivity."""
    rows = [
        [line.system, line.weights, line.tokens_per_s_per_user, str(line.points)]
        + [number(getattr(line, height)) for height in HEIGHTS]
        for line in heights_by(optima()).itertuples()
    ]
    heights = [height.replace("_", " ") for height in HEIGHTS]
    return table(["system", "weights", "tokens/s/user", "runs", *heights], rows)


@slow
@from_data
def optimum_date() -> str:
    """Day on which the table of boards was last found to be another than before."""
    today = date.today()
    return written("optimum-date") if written("optimum-boards") == optimum_boards() else f"{today.day} {today:%B %Y}"
