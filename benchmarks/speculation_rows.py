"""Judge speculative decoding against measured rows that had it: TPOT, and the gain over equal rows without it.

``python benchmarks/speculation_rows.py FILE...`` with files of ``disagg-sim validate serving``. The rows state neither
drafts nor acceptance: one draft is counted, at the acceptance that was measured on DeepSeek-R1. TPOT is that of the
steady state without speculation, its decode step replaced by the verifying one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import setup
from disagg_sim.techniques.speculation.facts_asked import measured_speculation
from lab.calibration.served.evaluate import engine_of, evaluate
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import ServingRow


def tpot_of(row: ServingRow) -> float:
    """Measured time of an output token. [s]"""
    return next((each.measured for each in row.quantities if each.name == "tpot"), float("nan"))


def alike(row: ServingRow) -> tuple[object, ...]:
    """What two rows share that differ in speculation alone."""
    workers = [(each.count, each.mapping) if each else None for each in (row.workers, row.prefill)]
    names = (row.system, row.model, row.framework, row.recipe, row.mode)
    return (*names, round(row.isl), round(row.osl), row.concurrency, repr(workers))


def steps_of(row: ServingRow) -> tuple[float, float]:
    """TTL of a decode step without and with one draft. [s]"""
    assert row.workers is not None
    drafter = measured_speculation(row.model)
    at = setup(row.model, row.system, row.recipe, "measured", engine_of(row, {}), drafter)
    batch, context = max(1.0, row.concurrency / row.workers.count), row.isl + row.osl / 2
    mapping = row.workers.mapping
    plain = decode_step(replace(at, speculation=None), mapping, batch=batch, context=context).ttl
    drafted = decode_step(at, replace(mapping, draft_tokens=1), batch=batch, context=context).ttl
    return float(plain), float(drafted)


def judged(rows: list[ServingRow]) -> pd.DataFrame:
    """One line a row with speculation."""
    plain: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if not (row.speculative or row.reason or row.qa_flag):
            plain.setdefault(alike(row), []).append(tpot_of(row))
    drafted = [row for row in rows if row.reason.startswith("speculative") and row.workers and not row.qa_flag]
    cleared = [replace(row, reason="", speculative=False) for row in drafted]
    table = evaluate(cleared)
    table = table[table["quantity"] == "tpot"].set_index(["file", "row"])["predicted"]
    lines = []
    for row in drafted:
        without, step = steps_of(row)
        steady = float(table[row.file, row.row])
        line = {"system": row.system, "framework": row.framework, "mode": row.mode, "held_out": row.held_out}
        line |= {"measured": tpot_of(row), "predicted": steady - without + step, "without": steady}
        lines.append(line | {"measured_without": float(np.median(plain.get(alike(row), [np.nan])))})
    return pd.DataFrame(lines)


def told(name: str, error: pd.Series, held_out: pd.Series) -> str:
    """Median error of all rows and of those that no fit has seen."""
    some = error.notna()
    held = error[some & held_out].abs()
    return f"{name}: {error[some].abs().median():.1%} of {some.sum()} rows, held out {held.median():.1%} of {held.size}"


def main(paths: list[str]) -> None:
    """Print both errors, and those of TPOT by system, framework and mode."""
    rows, _ = read_files([Path(path) for path in paths])
    table = judged(rows)
    table["error"] = table["predicted"] / table["measured"] - 1.0
    gain = (table["without"] / table["predicted"]) / (table["measured_without"] / table["measured"]) - 1.0
    print(told("TPOT", table["error"], table["held_out"]))
    print(told("gain over no speculation", gain, table["held_out"]))
    for engine in ("trt", "sglang"):
        own = table[table["framework"].str.contains(engine)]
        print(told(f"TPOT of {engine}", own["error"], own["held_out"]))
    print(table.groupby(["system", "framework", "mode"])["error"].agg(["count", "median"]).round(2).to_string())


if __name__ == "__main__":
    main(sys.argv[1:])
