"""Judge runs that drafted: TPOT, and its gain over equal runs that did not.

A run that states neither drafts nor acceptance counts as one draft at the acceptance that was measured on its model.
TPOT is that of the steady state without drafts, its decode step replaced by the verifying one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from disagg_sim.facts.speculation import EAGLE3, DraftLayer, Speculation
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import setup
from disagg_sim.techniques.speculation.facts_asked import measured_speculation
from lab.calibration.served.evaluate import engine_of, evaluate
from lab.calibration.served.read import SPECULATIVE
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.steady_state import of_random_tokens

#: EAGLE-3 heads of runs that state acceptance. Their width is not stated; assumed: that of the model, as the rest.
HEADS = {"gpt_oss_120b": DraftLayer(width=2880, q_heads=64, kv_heads=8, head_dim=64, vocab=201_088)}
#: In flight up to which few are. [request]
FEW = 8


def judged_drafts(rows: Sequence[ServingRow]) -> pd.DataFrame:
    """One line a run with drafts: times of an output token [s], errors of the forecast and of its gain [1]."""
    plain: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if not (row.speculative or row.reason or row.qa_flag) and row.isl > 0 and row.osl > 0:
            plain.setdefault(_alike(row), []).append(_tpot(row))
    judged = (row for row in rows if row.reason == SPECULATIVE and all((row.model, row.system, row.engine)))
    drafted = [row for row in judged if row.load == "closed_loop" and np.isfinite(_tpot(row)) and not row.qa_flag]
    table = evaluate([replace(row, reason="", speculative=False) for row in drafted])
    steady = table[table["quantity"] == "tpot"].set_index(["file", "row"])["predicted"]
    lines = []
    for row in drafted:
        step, verifying = _steps(row)
        without = float(steady[row.file, row.row])
        line = {name: getattr(row, name) for name in ("file", "row", "system", "model", "framework", "mode")}
        line |= {"concurrency": row.concurrency, "held_out": row.held_out, "stated": bool(row.accepted)}
        line |= {"drafts": row.drafts, "measured": _tpot(row), "predicted": without - step + verifying}
        lines.append(line | {"without": without, "measured_without": np.median(plain.get(_alike(row), [np.nan]))})
    if not lines:
        return pd.DataFrame()
    found = pd.DataFrame(lines)
    gain = found["without"] / found["predicted"] / (found["measured_without"] / found["measured"])
    return found.assign(error=found["predicted"] / found["measured"] - 1.0, gain_error=gain - 1.0)


def drafts_summed(found: pd.DataFrame) -> pd.DataFrame:
    """Median errors of TPOT and of its gain [1], by model: of all runs and of parts of them."""
    lines = []
    for (model, stated), mine in found.groupby(["model", "stated"]):
        parts = {
            "all": mine,
            "held out": mine[mine["held_out"]],
            f"to {FEW} in flight": mine[mine["concurrency"] <= FEW],
        }
        for part, some in (*parts.items(), *((f"drafts: {k}", own) for k, own in mine.groupby("drafts"))):
            pairs = some["gain_error"].abs().dropna()
            line = {"model": model, "acceptance": "stated" if stated else "assumed", "part": part, "runs": len(some)}
            line |= {"error_tpot": some["error"].abs().median(), "pairs": len(pairs), "error_gain": pairs.median()}
            lines.append(line)
    found = pd.DataFrame(lines)
    return found[found["runs"] > 0]


def _tpot(row: ServingRow) -> float:
    """Measured time of an output token. [s]"""
    return next((each.measured for each in row.quantities if each.name == "tpot"), float("nan"))


def _alike(row: ServingRow) -> tuple[object, ...]:
    """What two runs share that differ in drafts alone."""
    workers = [(each.count, each.mapping) if each else None for each in (row.workers, row.prefill)]
    names = (row.system, row.model, row.framework, row.recipe, row.mode)
    return (*names, round(row.isl), round(row.osl), row.concurrency, repr(workers))


def _steps(row: ServingRow) -> tuple[float, float]:
    """Times of a decode step without and with the drafts of a run, over the tokens that it makes. [s]"""
    assert row.workers is not None
    if row.accepted:
        head = HEADS[row.model]
        drafter = Speculation(
            name="stated", title="", model=row.model, method=EAGLE3, acceptance=row.accepted, layer=head
        )
    else:
        drafter = measured_speculation(row.model)
    at = setup(row.model, row.system, row.recipe, "measured", engine_of(row, {}), drafter)
    at = of_random_tokens(at) if row.random_tokens else at
    batch, context = max(1.0, row.concurrency / row.workers.count), row.isl + row.osl / 2
    drafts = replace(row.workers.mapping, draft_tokens=row.drafts)
    cases = ((replace(at, speculation=None), row.workers.mapping), (at, drafts))
    step, verifying = (float(decode_step(*case, batch=batch, context=context).ttl) for case in cases)
    return step, verifying
