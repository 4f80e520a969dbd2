"""Judge the memory of servers: what start-up logs tell of weights, activations, libraries and the KV cache.

A row is one server. It is predicted by the memory that grids, plans and simulations count with
(``physics.memory.instance_parts``, ``simulation.physical_site.kv_blocks``), at the step, the share of the memory and
the formats of the row. The log of a pipeline tells of its first stage, which does not sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError, InputError, quoted
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_checkpoints, load_model
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.yaml_files import canonical_name, shown
from disagg_sim.physics.memory import instance_parts, profiled_bytes
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.mappings import mappings_for
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.physical_site import kv_blocks
from disagg_sim.units import GIB
from lab.calibration.kernels.tables import TableError, read_measured, require_numbers
from lab.calibration.names import derived_from, system_named
from lab.calibration.served.cells import count, instance, text, value

#: Columns that a file of servers' memory needs.
COLUMNS = (
    *("model", "gpu", "tp", "pp", "dp", "dtype", "quantisation", "kv_cache_dtype", "gpu_memory_utilization"),
    *("max_num_batched_tokens", "weights_gib", "activation_gib", "non_torch_gib", "kv_gib", "kv_tokens"),
)
#: Term -> its column in the file, and in what. ``graphs_gib`` may be missing.
TERMS = {
    "weights": ("weights_gib", GIB),
    "activations": ("activation_gib", GIB),
    "libraries": ("non_torch_gib", GIB),
    "graphs": ("graphs_gib", GIB),
    "KV cache": ("kv_gib", GIB),
    "KV tokens": ("kv_tokens", 1.0),
}
#: Columns by which rows are one case: servers that differ in the longest context alone hold the same.
_CASE = ("model", "tp", "pp", "dp", "dtype", "quantisation", "kv_cache_dtype", "max_num_batched_tokens")
#: Weights of one byte, by how a name of a quantisation begins, and what cannot be counted. Recipes have the same bytes.
_ONE_BYTE = ("fp8", "int8")


def judge_memory(path: Path, engine: EngineSpec) -> pd.DataFrame:
    """Predict the memory of every server of a file: a line for each row (from 1) and term of ``TERMS``, in B or token.

    ``part`` is "fitted" where the engine's numbers saw the model, ``case`` equal for rows that hold the same,
    ``within`` the error of the measurement itself (0 = as printed) [1]; ``reason`` says why there is no prediction, or
    no measurement.
    """
    table = _read(path)
    cases = table.groupby([table[column] for column in _CASE], sort=False).ngroup() + 1
    lines = [
        line for number, row in enumerate(table.itertuples(index=False), 1) for line in _lines(row, number, engine)
    ]
    found = pd.DataFrame(lines)
    found.insert(1, "case", cases.to_numpy()[found["row"] - 1])
    return found.assign(error=found["predicted"] / found["measured"] - 1.0)


def memory_errors(found: pd.DataFrame) -> pd.DataFrame:
    """Sum up the relative errors of each term and part, each case counted once. [1]"""
    good = found[(found["reason"] == "") & found["error"].notna()].drop_duplicates(["part", "term", "case"])
    lines = []
    for (part, term), rows in good.groupby(["part", "term"], sort=False):
        size = rows["error"].abs()
        numbers = (size.median(), size.quantile(0.9), size.max(), rows["error"].median())
        lines.append((part, term, len(rows), rows["spec"].nunique(), *(round(float(each), 6) for each in numbers)))
    return pd.DataFrame(lines, columns=["part", "term", "cases", "models", "median", "p90", "worst", "bias"])


def _lines(row: Any, number: int, engine: EngineSpec) -> Iterator[dict[str, Any]]:
    """A line of each term of a server."""
    head: dict[str, Any] = {
        "row": number,
        "model": row.model,
        "spec": "",
        "tp": count(row, "tp"),
        "pp": count(row, "pp"),
    }
    predicted, reason, recipe = dict.fromkeys(TERMS, np.nan), "", ""
    known = engine.memory.fitted_on if engine.memory else ()
    try:
        model = _model(str(row.model))
        recipe = _recipe(row)
        head["spec"] = model.name
        predicted |= _predicted(row, model, recipe, engine)
    except DisaggSimError as error:
        reason = str(error)
    head |= {"recipe": recipe, "part": "fitted" if head["spec"] in known else "judged"}
    for term, (column, unit) in TERMS.items():
        measured = value(row, column) * unit
        silent = "" if measured > 0 else "not measured"
        within = _within(text(row, "weights_how")) * GIB / measured if term == "weights" and not silent else 0.0
        yield head | {
            "term": term,
            "measured": measured,
            "predicted": predicted[term],
            "within": within,
            "reason": reason or silent,
        }


def _predicted(row: Any, model: ModelSpec, recipe: str, engine: EngineSpec) -> dict[str, float]:
    """Terms of a server. [B], [token]"""
    family = re.match(r"[A-Za-z]+\d+[A-Za-z]*", str(row.gpu))
    system, reason = system_named(family[0] if family else str(row.gpu))
    if reason:
        raise InputError(reason)
    ranks, pp = count(row, "dp"), count(row, "pp")
    mapping = instance(count(row, "tp") * ranks * pp, dp=ranks, pp=pp)
    own = replace(
        engine,
        memory_utilisation=value(row, "gpu_memory_utilization"),
        chunk_tokens=count(row, "max_num_batched_tokens"),
    )
    at = setup(model, system, recipe, engine=own)
    mappings_for(at, mapping)  # refuses degrees that the model cannot be sharded by
    held = _resident_bytes(at, mapping)
    spare = at.memory_limit - held["weights"] - held["activations"] - held["libraries"]
    tokens = BLOCK_TOKENS * kv_blocks(
        at, mapping, max_sequences=own.max_running * ranks, max_tokens=own.chunk_tokens * ranks
    )
    graphs = at.server_memory.graphs if at.server_memory else np.nan
    return held | {"graphs": graphs, "KV cache": spare, "KV tokens": float(tokens)}


def _resident_bytes(at: Setup, mapping: Sharding) -> dict[str, float]:
    """What the GPU of the first stage holds beside its cache. [B]"""
    engine = at.overheads
    assert engine is not None
    step = Residents(
        sequences=0.0,
        tokens=0.0,
        live=float(engine.chunk_tokens),
        live_total=float(engine.chunk_tokens * mapping.dp_attn),
        emitted=float(engine.max_running),
    )
    parts = instance_parts(at, mapping, step, at.profile.prefill_imbalance)
    activations = parts.activations
    if at.server_memory is not None and mapping.pp > 1:
        activations = profiled_bytes(at, mapping, step, at.profile.prefill_imbalance, last=False)
    found = {"weights": parts.weights, "activations": activations + parts.communication, "libraries": parts.runtime}
    return {name: float(np.max(size)) for name, size in found.items()}


def _recipe(row: Any) -> str:
    """Precision recipe of a server."""
    kind, cache = text(row, "quantisation"), "fp8" in text(row, "kv_cache_dtype")
    if (dtype := text(row, "dtype")) not in ("bf16", "f16"):
        raise InputError(f"dtype {quoted(dtype)}: no recipe of weights in 32 bit; evaluated: bf16, f16")
    if kind in ("", "none"):
        return "bf16_fp8kv" if cache else "bf16"
    if not kind.startswith(_ONE_BYTE):
        raise InputError(f"quantisation {quoted(kind)}: no recipe of 4-bit integer weights; evaluated: fp8, int8, none")
    return "fp8" if cache else "fp8_bf16kv"


def _model(name: str) -> ModelSpec:
    """The shipped model of a checkpoint."""
    if spec := _shipped().get(canonical_name(derived_from(name))):
        return load_model(spec)
    raise InputError(f"no model {quoted(name)}: no shipped one has this checkpoint")


@cache
def _shipped() -> dict[str, str]:
    """Name of a checkpoint -> its model."""
    return {
        canonical_name(name): model for model, names in load_checkpoints().models.items() for name in names.values()
    }


def _within(how: str) -> float:
    """Error of a measurement, as its words state it; 0 where they state none. [GiB]"""
    found = re.search(r"\+-([\d.]+) GiB", how)
    return float(found[1]) if found else 0.0


def _read(path: Path) -> pd.DataFrame:
    table = read_measured(path, COLUMNS, "servers")
    if table.empty:
        raise TableError(f"{shown(path)}: no servers in it")
    table = require_numbers(path, table, ("tp", "pp", "dp", "max_num_batched_tokens"), least=1, whole=True)
    return require_numbers(path, table, ("gpu_memory_utilization",), least=0.01, most=1.0)
