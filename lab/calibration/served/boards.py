"""Judge what ``plan`` deploys on the boards of MLPerf: beside the best submission, on as many GPUs, under its limits.

A **board** is one model on one system in one scenario, that is under one pair of limits. Submitters differ by a factor
of up to 1.7 there, so the run that a plan is held against is the **best** submission: the most output tokens a second
and GPU. The plan is asked with the lengths of the data set (``traffic/mlperf_*.yaml``, distributions where they are
published), the recipe and the engine of that submission, and with drafts where the rules have them.

A best run may be far from what its GPUs do. Its **share** is what it has of the best result on its system in any
scenario, Offline among them; where it is less than half of the share that another system's best run has in the same
scenario, the board is set aside: no tuned run is known there. Measurements alone say so, no forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.facts.speculation import Speculation
from disagg_sim.facts.yaml_files import list_specs, read_mapping
from disagg_sim.planning.answer import Plan, answer
from disagg_sim.planning.design import Design
from disagg_sim.planning.limits import Limit
from disagg_sim.planning.plan import plan, played_if_flattered
from disagg_sim.planning.pools import DecodeChoice, PrefillChoice
from disagg_sim.planning.question import PlanOptions
from disagg_sim.report.words import text_of
from disagg_sim.search.layouts import layouts_of, why_unserved
from disagg_sim.techniques.speculation.facts_asked import asked_speculation
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.named import lengths_named
from lab.calibration.served.forms import MLPERF_TRAFFIC
from lab.calibration.served.rows import ServingRow

_Pools = tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
#: Share of the requests that keep the limits of MLPerf. [1]
P99 = 0.99
#: Plan over run within which a board counts as met. [1]
NEAR = (0.85, 1.15)
#: Part of the largest share in its scenario below which a board is set aside (chosen with the boards in view). [1]
LEAST_SHARE = 0.5
#: Columns of ``judged_boards``, in order.
COLUMNS = (
    "model",
    "system",
    "scenario",
    "ttft_limit_s",
    "tpot_limit_s",
    "gpus",
    "submissions",
    "run",  # of the best submission [token/s/GPU]
    "share",  # of the best result on its system in any scenario [1]
    "set_aside",  # why the best run is none to judge by; "" where it is
    "plan",  # [token/s/GPU]
    "plan_over_run",  # [1]
    "gpus_for_run",  # that the plan takes at the rate of the run [1]
    "submitter",
    "ran",  # layout of the best submission that states it
    "mode",
    "planned",
    "never_served",  # what of the planned layouts nobody is known to have run
    "of_kind",  # the best design whose decode instances have the kind of layout that ran, over the plan [1]
    "of_kind_together",  # the best of them of one pool, likewise [1]
    "reason",  # why there is no plan
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Submissions of one model on one system in one scenario, the best of them first."""

    submissions: tuple[ServingRow, ...]
    highest: float  # of all results on its system, in any scenario [token/s/GPU]

    @property
    def share(self) -> float:
        """What its best run has of the best result on its system. [1]"""
        return tokens_per_gpu(self.best) / self.highest

    @property
    def best(self) -> ServingRow:
        """The submission with the most output tokens a second and GPU."""
        return self.submissions[0]

    @property
    def traffic(self) -> str:
        """Name of the lengths of its data set."""
        return MLPERF_TRAFFIC.format(model=self.best.model)

    @property
    def drafts(self) -> Speculation | None:
        """Drafts that the rules of the scenario have."""
        return _drafts().get((self.best.model, self.best.scenario))


def tokens_per_gpu(row: ServingRow) -> float:
    """Output tokens of the requests that a submission completes. [token/s/GPU]"""
    completed = next((each.measured for each in row.quantities if each.name == "throughput"), row.rate)
    return completed * row.osl / row.gpus


def boards(rows: Iterable[ServingRow]) -> list[Board]:
    """Put submissions under limits of latency together by board; those that cannot be evaluated are left out."""
    found: dict[tuple[object, ...], list[ServingRow]] = {}
    highest: dict[tuple[str, str], float] = {}
    known = set(list_specs("traffic"))
    for row in rows:
        limits, where = (row.ttft_limit, row.tpot_limit), (row.model, row.system)
        if row.reason or not row.rate > 0.0 or MLPERF_TRAFFIC.format(model=row.model) not in known:
            continue
        highest[where] = max(highest.get(where, 0.0), tokens_per_gpu(row))
        if not any(map(math.isnan, limits)):
            found.setdefault((*where, row.scenario, *limits), []).append(row)
    return [
        Board(
            submissions=tuple(sorted(mine, key=tokens_per_gpu, reverse=True)),
            highest=highest[mine[0].model, mine[0].system],
        )
        for _, mine in sorted(found.items(), key=lambda each: each[0])
    ]


def set_aside(several: Sequence[Board]) -> list[str]:
    """Why boards are none to judge a plan by, in order; "" where they are."""
    most: dict[tuple[str, str], float] = {}
    for board in several:
        where = board.best.model, board.best.scenario
        most[where] = max(most.get(where, 0.0), board.share)
    return [
        f"its best run has {board.share:.0%} of the best result on its system, another's in this scenario {other:.0%}"
        if board.share < LEAST_SHARE * (other := most[board.best.model, board.best.scenario])
        else ""
        for board in several
    ]


def planned(board: Board, lengths: Lengths) -> Plan:
    """Ask what to deploy on as many GPUs as the best submission had, under the limits of the board."""
    run = board.best
    options = PlanOptions(engine=run.engine, precision=run.recipe, speculation=board.drafts)
    ttft, tpot = Limit(run.ttft_limit, P99), Limit(run.tpot_limit, P99)
    return plan(run.model, run.system, lengths, ttft=ttft, tpot=tpot, gpus=int(run.gpus), options=options)


def of_kind(found: Plan, ran: Sharding, *, together: bool = False) -> float:
    """The best design whose decode instances have the kind of layout that ``ran``, of one pool alone with ``together``,
    over the plan; 0 if none serves. [1]
    """
    assert found.best is not None
    (kind,) = layouts_of(Sharding.stack([ran]))

    def alike(choices: Sequence[Any]) -> list[Any]:
        return [each for each in choices if layouts_of(Sharding.stack([each.mapping]))[0] == kind]

    def split(pools: _Pools) -> _Pools:
        return ((), ()) if together else (pools[0], alike(pools[1]))

    case = found.case
    kept = replace(case, colocated=alike(case.colocated), inside=split(case.inside), across=split(case.across))
    asked = replace(found, best=None, cases=(kept,))
    best = answer(asked, partial(played_if_flattered, asked, {})).best
    return 0.0 if best is None else best.rate / found.best.rate


def judged_boards(several: Sequence[Board], *, listen: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """Plan every board, also for the rate of its best submission, and hold the plan against that."""
    lines = []
    for board, aside in zip(several, set_aside(several), strict=True):
        lines.append({"set_aside": aside} | _judged(board))
        listen()
    return pd.DataFrame(lines, columns=list(COLUMNS))


def met(planned: pd.DataFrame) -> str:
    """How many of these boards have a plan near their best run, and the median ratio."""
    ratio = planned["plan_over_run"].dropna()
    return f"{ratio.between(*NEAR).sum()} of {len(ratio)} (median {ratio.median():.2f})"


def _judged(board: Board) -> dict[str, object]:
    run, lengths = board.best, lengths_named(board.traffic)
    tokens = [tokens_per_gpu(each) for each in board.submissions]
    ran = next((row.workers for row in board.submissions if row.workers and not row.assumed_layout), None)
    told: dict[str, object] = {
        "model": run.model,
        "system": run.system,
        "scenario": run.scenario,
        "ttft_limit_s": run.ttft_limit,
        "tpot_limit_s": run.tpot_limit,
        "gpus": int(run.gpus),
        "submissions": len(tokens),
        "run": tokens[0],
        "share": board.share,
        "submitter": run.submitter,
        "ran": "" if ran is None else f"{ran.count} x {text_of(ran.mapping)}",
    }
    found = planned(board, lengths)
    if found.best is None or found.ask is None:
        return told | {"plan": math.nan, "plan_over_run": math.nan, "reason": found.infeasible}
    design = found.best
    unserved = [
        str(why)
        for pool in design.pools
        for why in why_unserved(pool.setup, pool.mapping, prefill=pool.role == "prefill")
    ]
    told |= {
        "plan": design.tokens_per_s / run.gpus,
        "plan_over_run": design.tokens_per_s / run.gpus / tokens[0],
        "mode": str(design.mode.value),
        "planned": _pools(design),
        "never_served": "; ".join(dict.fromkeys(filter(None, unserved))),
        "reason": "",
    }
    if ran is not None:
        told |= {"of_kind": of_kind(found, ran.mapping), "of_kind_together": of_kind(found, ran.mapping, together=True)}
    fewest = found.ask(rate=tokens[0] * run.gpus / lengths.mean_osl, gpus=None).best
    return told | {"gpus_for_run": math.nan if fewest is None else fewest.gpus}


def _pools(design: Design) -> str:
    """Pools of a design: ``prefill 25 x 1 GPU; decode 11 x DP4 FFN-TP4``."""
    several = design.mode == ServingMode.DISAGGREGATED
    words = (f"{pool.role} " * several + f"{pool.instances} x {text_of(pool.mapping)}" for pool in design.pools)
    return "; ".join(words)


@cache
def _drafts() -> dict[tuple[str, str], Speculation | None]:
    """Drafts by model and scenario, as ``boards.yaml`` has them."""
    lines = read_mapping(Path(__file__).with_name("boards.yaml"))["drafts"]
    return {
        (each["model"], each["scenario"]): asked_speculation(each["model"], str(each["drafts"]), each["acceptance"])
        for each in lines
    }
