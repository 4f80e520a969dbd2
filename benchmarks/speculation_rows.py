"""Judge speculative decoding against measured rows that had it: TPOT, and the gain over equal rows without it.

``python benchmarks/speculation_rows.py FILE...`` with files of ``disagg-sim validate serving``, tables of launch flags
among them. The rows state neither drafts nor acceptance: one draft is counted, at the acceptance that was measured on
DeepSeek-R1. TPOT is that of the steady state without speculation, its decode step replaced by the verifying one.

``--stated FILE`` judges cells of gpt-oss 120B on one H200 under vLLM that state acceptance by position
(``gptoss_h200_speculation.csv``). The width of their EAGLE-3 head is not stated: ``--width``, that of the model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.techniques.speculation.facts import DraftLayer, Speculation
from disagg_sim.techniques.speculation.facts_asked import measured_speculation
from disagg_sim.units import MS
from lab.calibration.served.evaluate import engine_of, evaluate
from lab.calibration.served.forms import INFERENCEX_MEAN_LENGTH, INFERENCEX_SPREAD, INFERENCEX_WAVES
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.steady_state import ClosedLoopRun, RowLengths, colocated, served

#: Setup of the cells that state acceptance.
CELLS = ("gpt_oss_120b", "h200_sxm", "mxfp4")
#: Heads of attention and vocabulary of their EAGLE-3 head: those of the model. Its width is an option.
HEAD = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201_088}
#: In flight up to which they are judged: beyond, some wait for a place. [request]
MOST_IN_FLIGHT = 128


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
    return both_steps(at, replace(row.workers.mapping, draft_tokens=1), batch, context)


def both_steps(at: Setup, mapping: Sharding, batch: float, context: float) -> tuple[float, float]:
    """TTL of a decode step without and with the drafts of a mapping. [s]"""
    bare = replace(at, speculation=None), replace(mapping, draft_tokens=0)
    cases = (bare, (at, mapping))
    plain, drafted = (float(decode_step(*case, batch=batch, context=context).ttl) for case in cases)
    return plain, drafted


def stated(path: Path, width: int) -> pd.DataFrame:
    """One line a cell that drafts at a stated acceptance, beside the cell of the same load that does not."""
    table = pd.read_csv(path)
    table = table[table["concurrency"] <= MOST_IN_FLIGHT]
    plain = table[table["num_spec"] == 0].set_index("concurrency")["tpot_mean_ms"] * MS
    engine, one = load_engine("vllm"), Sharding()
    run, pattern = served(*CELLS, engine, random_tokens=True), ClosedLoopRun(INFERENCEX_WAVES, INFERENCEX_SPREAD)
    lines = []
    for cell in table[table["num_spec"] > 0].itertuples():
        isl, osl = INFERENCEX_MEAN_LENGTH * cell.isl, INFERENCEX_MEAN_LENGTH * cell.osl
        lengths, load = RowLengths(np.array([isl]), np.array([osl])), np.array([float(cell.concurrency)])
        steady = float(colocated(run, one, lengths, load, pattern).tpot[0])
        shares = np.minimum.accumulate([getattr(cell, f"accept_pos{i}") for i in range(cell.num_spec)]).tolist()
        head = DraftLayer(width=width, **HEAD)
        told = {"name": "stated", "title": "", "model": CELLS[0], "method": "eagle3"}
        drafter = Speculation(acceptance=tuple(shares), layer=head, **told)
        at = setup(*CELLS, "measured", engine, drafter)
        mapping = replace(one, draft_tokens=cell.num_spec)
        without, step = both_steps(at, mapping, float(cell.concurrency), isl + osl / 2)
        line = {"drafts": cell.num_spec, "concurrency": cell.concurrency, "measured": cell.tpot_mean_ms * MS}
        line |= {"predicted": steady - without + step, "without": steady}
        lines.append(line | {"measured_without": plain[cell.concurrency]})
    return pd.DataFrame(lines)


def judged(rows: list[ServingRow]) -> pd.DataFrame:
    """One line a row with speculation."""
    plain: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if not (row.speculative or row.reason or row.qa_flag) and row.isl > 0 and row.osl > 0:
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


def with_errors(table: pd.DataFrame) -> pd.DataFrame:
    """The lines with the errors of TPOT and of its gain. [1]"""
    gain = (table["without"] / table["predicted"]) / (table["measured_without"] / table["measured"]) - 1.0
    return table.assign(error=table["predicted"] / table["measured"] - 1.0, gain=gain)


def print_stated(table: pd.DataFrame) -> None:
    """Print both errors of cells with a stated acceptance: all, by drafts, and at few in flight."""
    few = table["concurrency"] <= 8
    parts = {"all": table, **{f"{k} drafts": mine for k, mine in table.groupby("drafts")}, "to 8": table[few]}
    for name, mine in parts.items():
        print(f"{name}: TPOT {mine['error'].abs().median():.1%}, gain {mine['gain'].abs().median():.1%} of {len(mine)}")
    print(table[["drafts", "concurrency", "error", "gain"]].round(2).to_string(index=False))


def print_assumed(table: pd.DataFrame) -> None:
    """Print both errors of rows with an assumed acceptance, and those of TPOT by system, framework and mode."""
    print(told("TPOT", table["error"], table["held_out"]))
    print(told("gain over no speculation", table["gain"], table["held_out"]))
    for engine in ("trt", "sglang"):
        own = table[table["framework"].str.contains(engine)]
        print(told(f"TPOT of {engine}", own["error"], own["held_out"]))
    print(table.groupby(["system", "framework", "mode"])["error"].agg(["count", "median"]).round(2).to_string())


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Judge speculative decoding against rows that had it.")
    parser.add_argument("files", nargs="*", type=Path, help="measurements, and tables of their launch flags")
    parser.add_argument("--stated", type=Path, help="cells that state acceptance by position")
    parser.add_argument("--width", type=int, default=2880, help="of the FFN of their EAGLE-3 head")
    asked = parser.parse_args()
    if asked.stated:
        print_stated(with_errors(stated(asked.stated, asked.width)))
    if asked.files:
        print_assumed(with_errors(judged(read_files(asked.files)[0])))


if __name__ == "__main__":
    main()
