"""Make the versioned JSON of results (``report.schemas``): of explain, sweep, compare and simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.certainty.passes import LATENCIES
from disagg_sim.certainty.trust import COLUMN as TRUST
from disagg_sim.certainty.trust import Shares, shares_of_text
from disagg_sim.domain import ServingMode
from disagg_sim.report.breakdown import memory_of_pools, too_full, trust_shares
from disagg_sim.report.schemas import (
    COMPARE,
    EXPLAIN,
    SIMULATE,
    SWEEP,
    CaseJson,
    ChangedPointJson,
    CompareJson,
    ExplainJson,
    FrontChangeJson,
    FrontJson,
    PointJson,
    SimulateJson,
    SweepJson,
    labels,
    plain,
)
from disagg_sim.report.words import records
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, WITH_SPARES
from disagg_sim.sweep.compare import Comparison, FrontChange, Frontier, PointChange
from disagg_sim.sweep.digests import Change
from disagg_sim.sweep.kv_links import HandedOver
from disagg_sim.techniques.availability.law import Spares
from disagg_sim.techniques.prefill_delay.plan_effect import PrefillDelayEffect
from disagg_sim.techniques.prefix.plan import TierUse

#: Interactivities at which the best points of a frontier are told, besides the best of all. [token/s]
AT = (20.0, 50.0, 100.0)
#: Columns that say what the throughput of a frontier was taken in, where it is not a GPU.
_PER = (
    *(f"{name}{WITH_SPARES}" for name in (THROUGHPUT, "tokens_per_usd", "tokens_per_joule", "tokens_per_drawn_joule")),
    *("tokens_per_usd", "tokens_per_drawn_joule", "tokens_per_joule"),
)
#: Columns that every point has.
_TOLD = ("mode", INTERACTIVITY, THROUGHPUT, *_PER, TRUST)


def _shares(shares: Shares) -> dict[str, float]:
    return {str(label): share for label, share in shares.items()}


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [plain(row) for row in records(table)]


def explain_json(
    found: Breakdown,
    energy: pd.DataFrame | None,
    tiers: Sequence[TierUse],
    spares: Spares | None,
    held: PrefillDelayEffect | None,
    handed: HandedOver | None,
) -> ExplainJson:
    """Make the JSON of designs taken apart."""
    told = [(row, latency) for row in found.points.index for latency in LATENCIES if len(found.latency(row, latency))]
    full = next(filter(None, (too_full(memory_of_pools(found, row)) for row in found.points.index)), "")
    whole: ExplainJson = {
        "schema": EXPLAIN,
        "status": "infeasible" if full else "feasible",
        "binds": full,
        "labels": labels(),
        "points": _rows(found.points),
        "operators": _rows(found.operators),
        "fits": _rows(found.fits),
        "memory": _rows(found.memory),
        "elasticities": _rows(found.elasticities),
        "trust": [
            {"row": plain(row), "latency": latency, "rests_on": _shares(trust_shares(found, row, latency))}
            for row, latency in told
        ],
    }
    if energy is not None:
        whole["energy"] = _rows(energy)
    if tiers:
        whole["tiers"] = [plain({**asdict(each), "loads": each.loads}) for each in tiers]
    if spares is not None:
        whole["spares"] = plain(asdict(spares))
    if held is not None:
        whole["held_prompts"] = plain(asdict(held))
    if handed is not None:
        whole["hand_over"] = plain(asdict(handed))
    return whole


def sweep_json(front: Frontier) -> SweepJson:
    """Make the JSON of the results of a sweep: the best points of each frontier."""
    table = front.table
    verdicts = front.manifest.verdicts if front.manifest else {}
    groups = {case: table[table["case"] == case] for case in front.cases}
    return {
        "schema": SWEEP,
        "labels": labels(),
        "name": front.manifest.name if front.manifest else "",
        "results": str(front.path),
        "cases": [_case(case, mine, verdicts.get(case, "")) for case, mine in groups.items()],
    }


def _case(name: str, table: pd.DataFrame, verdict: str) -> CaseJson:
    agreed = [column for column in table if column not in _TOLD and len(table[column].unique()) == 1]
    throughput = next((column for column in _PER if column in table), THROUGHPUT)
    modes = {str(mode): rows for mode, rows in table.groupby("mode", sort=False)}
    gain = {}
    for at in (0.0, *AT):
        best = {mode: rows[rows[INTERACTIVITY] >= at][throughput].max() for mode, rows in modes.items()}
        shared = [value for mode, value in best.items() if mode != ServingMode.DISAGGREGATED and value > 0]
        if shared and best.get(ServingMode.DISAGGREGATED, 0.0) > 0:
            gain[f"{at:g}"] = float(best[ServingMode.DISAGGREGATED] / max(shared))
    return {
        "case": name,
        "verdict": verdict,
        "common": _rows(table[agreed].head(1))[0] if len(table) else {},
        "gain": gain,
        "modes": [_front(mode, rows.drop(columns=agreed), throughput) for mode, rows in modes.items()],
    }


def _front(mode: str, table: pd.DataFrame, throughput: str) -> FrontJson:
    best: list[PointJson] = []
    for at in (0.0, *AT):
        fast = table[table[INTERACTIVITY] >= at]
        if len(fast):
            (row,) = _rows(fast.loc[[fast[throughput].idxmax()]])
            rests = _shares(shares_of_text(str(row.pop(TRUST, ""))))
            best.append({"at_least": at or None, "rests_on": rests, "point": row})
    return {"mode": mode, "points": len(table), "best": best}


def compare_json(
    comparison: Comparison, causes: Sequence[Change] | None, *, baseline: Path, results: Path, rtol: float
) -> CompareJson:
    """Make the JSON of a comparison of frontiers."""
    return {
        "schema": COMPARE,
        "baseline": str(baseline),
        "results": str(results),
        "rtol": rtol,
        "same": comparison.same,
        "worse": comparison.worse,
        "inputs": None if causes is None else [plain(asdict(cause)) for cause in causes],
        "fronts": [_front_change(front) for front in comparison.fronts],
    }


def _front_change(front: FrontChange) -> FrontChangeJson:
    return {
        "case": front.group[0],
        "mode": front.group[1],
        "same": front.same,
        "worse": front.worse,
        "points": {"baseline": front.points[0], "results": front.points[1]},
        "area": {"baseline": front.areas[0], "results": front.areas[1], "relative_change": plain(front.area_change)},
        "lost": [_changed(point) for point in front.lost],
        "new": [_changed(point) for point in front.new],
        "moved": [_changed(point) for point in front.moved],
    }


def _changed(point: PointChange) -> ChangedPointJson:
    made: ChangedPointJson = {"configuration": plain(dict(point.key))}
    if point.old is not None:
        made["baseline"] = {"tokens_per_s_per_user": point.old[0], "tokens_per_s_per_gpu": point.old[1]}
    if point.new is not None:
        made["results"] = {"tokens_per_s_per_user": point.new[0], "tokens_per_s_per_gpu": point.new[1]}
    if point.moves:
        made["moves"] = [plain({**asdict(move), "relative": move.relative}) for move in point.moves]
    else:
        made["curve_kept"] = point.reached
    return made


def simulate_json(name: str, results: Path, runs: pd.DataFrame, capacity: pd.DataFrame) -> SimulateJson:
    """Make the JSON of a scenario."""
    return {"schema": SIMULATE, "name": name, "results": str(results), "runs": _rows(runs), "capacity": _rows(capacity)}
