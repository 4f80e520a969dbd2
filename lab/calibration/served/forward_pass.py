"""Judge forward passes of an engine, one step of a whole model: prompts of new tokens on a cached past, and decodes.

The table is that of NVIDIA's aisimulate wheels (``fpm_forward_perf.parquet``): wall time of one engine step by
requests, new tokens and cached tokens. Each pass of prompts is predicted twice:

* whole: the kernels of the step, with what the engine profile adds to them;
* past: the pass that was measured with at most ``NO_PAST`` cached tokens, and what attention on the past adds.

All requests of such a pass are new to the engine, whose host takes over their tokens one by one: ``ADMISSION`` a token.
A step of more decodes than the engine captured a graph of is launched kernel by kernel, each in
``EngineSpec.uncaptured_launch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError, InputError, quoted
from disagg_sim.facts.load import load_engine, load_model, load_system
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.engine_time import all_stages, prefill_stretch, step_time
from disagg_sim.physics.passes.layers import attention_cost, attention_side, join_experts, stretched
from disagg_sim.physics.tabulate import DistinctCounts
from disagg_sim.physics.work import Numeric, Tokens
from disagg_sim.units import MS
from lab.calibration.files import kept_from_fits
from lab.calibration.kernels.residuals import part_of
from lab.calibration.kernels.tables import read_measured, require_numbers, spec_name
from lab.calibration.names import engine_named, model_named, recipe_of
from lab.calibration.served.steady_state import ServedModel, served

#: Columns of a group of passes that are predicted together, and all that a table of forward passes needs.
_LAYOUT = ("engine", "model_path", "system", "weight_quantization", "kv_cache_dtype", "tp", "dp", "moe_tp", "moe_ep")
COLUMNS = (
    *(*_LAYOUT, "backend_version", "workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens"),
    *("latency_ms", "flag"),
)
#: Bounds of the cells by new and by cached tokens of a request. [token]
NEW = (0, 1, 16, 64, 128, 256, 512, 1024, 2048, 8192, np.inf)
PAST = (-1, 0, 1024, 4096, 16_384, 65_536, np.inf)
#: Host time of a token of a request that is new to the engine, from passes of vLLM 0.25.1 on an H200 (median of those
#: of the first part with 30,000 cached tokens and more, attention taken off); GLM-5.2 on a B200 shows 55-86 ns. [s]
ADMISSION = 79e-9
#: Cached tokens of a request up to which a pass counts as one without a past. [token]
NO_PAST = 64
#: Passes below which the median of a cell says little. [1]
LEAST_PASSES = 5


def judge_passes(path: Path) -> pd.DataFrame:
    """Predict every prefill of a table of forward passes: the whole pass, and ``from_past_ms``, on the measured pass of
    that batch and new tokens without a past. What was learnt from such passes was learnt from the part "fitted".
    """
    found = _predicted(path, "prefill", _predict)
    none = found["past_tokens"] <= NO_PAST
    keys = ["engine", "version", "model", "system", "layout", "batch", "new_tokens"]
    bare = found["measured_ms"].where(none).groupby([found[key] for key in keys]).transform("median")
    added = found.pop("added_ms")
    return found.assign(from_past_ms=(bare + added).where(~none))


def judge_steps(path: Path) -> pd.DataFrame:
    """Predict every step of decodes: columns of ``judge_passes``; ``past_tokens`` are those of a request on average."""
    return _predicted(path, "decode", _predict_step).drop(columns=["added_ms", "new_tokens"])


def _predicted(path: Path, kind: str, predict: Callable[..., tuple[Numeric, Numeric]]) -> pd.DataFrame:
    """The passes of one kind with two numbers each, the whole and what was added [ms]; NaN where there is a reason."""
    table = _read(path)
    table = table[(table["workload_kind"] == kind) & (table["flag"] == "")].reset_index(drop=True)
    batch = table["batch_size"].to_numpy(dtype=float)
    found = pd.DataFrame(
        {
            "engine": table["engine"],
            "version": table["backend_version"],
            "model": table["model_path"],
            "system": table["system"],
            "layout": [
                f"TP{tp} DP{dp} EP{ep}" for tp, dp, ep in zip(table["tp"], table["dp"], table["moe_ep"], strict=True)
            ],
            "batch": table["batch_size"],
            "new_tokens": table["total_prefill_tokens"] / batch,
            "past_tokens": table["total_kv_read_tokens"] / batch,
            "measured_ms": table["latency_ms"],
        }
    )
    shapes = zip(table["batch_size"], table["total_prefill_tokens"], table["total_kv_read_tokens"], strict=True)
    part = [part_of(kept_from_fits(f"forward_pass|{b}|{new}|{past}")) for b, new, past in shapes]
    predicted, added = np.full(len(found), np.nan), np.full(len(found), np.nan)
    reason = np.full(len(found), "", dtype=object)
    for words, rows in found.groupby([table[column] for column in _LAYOUT], sort=False):
        try:
            run, mapping = _run_of(dict(zip(_LAYOUT, map(str, words), strict=True)))
            predicted[rows.index], added[rows.index] = predict(run, mapping, rows)
        except DisaggSimError as error:
            reason[rows.index] = str(error)
    return found.assign(predicted_ms=predicted / MS, added_ms=added / MS, part=part, reason=reason)


def pass_cells(passes: pd.DataFrame, predicted: str) -> pd.DataFrame:
    """Tabulate the median of predicted over measured by new and cached tokens of a request (the largest of the cell),
    with the passes; cells of fewer than ``LEAST_PASSES`` are left out.
    """
    ratio = passes[predicted] / passes["measured_ms"]
    upper = {
        name: pd.cut(passes[name], bounds, labels=[str(bound) for bound in bounds[1:]])
        for name, bounds in (("new_tokens", NEW), ("past_tokens", PAST))
    }
    cells = ratio.groupby([upper["new_tokens"], upper["past_tokens"]], observed=True).agg(
        passes="count", ratio="median"
    )
    told: pd.DataFrame = cells[cells["passes"] >= LEAST_PASSES].reset_index()
    return told


def pass_time(run: ServedModel, mapping: Sharding, *, batch: Numeric, new: Numeric, past: Numeric) -> Numeric:
    """Time of one engine step of ``batch`` requests a DP rank, each with ``new`` tokens on ``past`` cached ones. [s]"""
    at = run.at
    tokens = Tokens(prompts=batch, new=new, past=past, emitted=batch)
    times = join_experts(
        at,
        mapping,
        attention_side(at, mapping.tp_attn, tokens, "auto", "prefill"),
        phase="prefill",
        rank=DistinctCounts(batch * new),
        total=DistinctCounts(batch * new * mapping.dp_attn),
    )
    kernels = all_stages(at.model, stretched(times, prefill_stretch(at)))
    return step_time(at, mapping, 1.0, kernels, kernels, decodes=0.0, graphs=False)


def past_time(run: ServedModel, mapping: Sharding, *, batch: Numeric, new: Numeric, past: Numeric) -> Numeric:
    """What attention on the past adds to a step, without any overhead of the engine. [s]"""
    added: Numeric = 0.0
    for layer, count in layers_of(run.at.model):
        with_past, without = (
            attention_cost(
                layer.attention, run.at, mapping.tp_attn, Tokens(prompts=batch, new=new, past=cached), "auto"
            )
            for cached in (past, 0.0 * past)
        )
        added = added + count * (with_past.time - without.time)
    return added


def _run_of(words: dict[str, str]) -> tuple[ServedModel, Sharding]:
    """What a layout of the table ran."""
    name, engine = model_named(words["model_path"]), engine_named(words["engine"])
    if not name or not engine:
        raise InputError(
            f"no model {quoted(words['model_path'])}" if engine else f"no engine {quoted(words['engine'])}"
        )
    recipe = recipe_of(words["weight_quantization"], "fp8" if "fp8" in words["kv_cache_dtype"] else "bf16", name)
    run = served(load_model(name), load_system(spec_name(words["system"])), recipe, load_engine(engine))
    tp, dp, moe_tp, ep = (int(words[column]) for column in ("tp", "dp", "moe_tp", "moe_ep"))
    return run, Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=moe_tp, ep=ep)


def _predict(run: ServedModel, mapping: Sharding, rows: pd.DataFrame) -> tuple[Numeric, Numeric]:
    """Times of the passes of one layout, and what their past adds. [s]"""
    batch, new, past = (rows[column].to_numpy(dtype=float) for column in ("batch", "new_tokens", "past_tokens"))
    sizes = {"batch": batch, "new": new, "past": past}
    admitted = ADMISSION * batch
    return (
        pass_time(run, mapping, **sizes) + admitted * (new + past),
        past_time(run, mapping, **sizes) + admitted * past,
    )


def _predict_step(run: ServedModel, mapping: Sharding, rows: pd.DataFrame) -> tuple[Numeric, Numeric]:
    """Times of the steps of one layout, and what launching kernel by kernel adds. [s]"""
    batch, past = (rows[column].to_numpy(dtype=float) for column in ("batch", "past_tokens"))
    whole, captured = (
        decode_step(at, mapping, batch=batch * mapping.dp_attn, context=past).ttl
        for at in (replace(run.at, overheads=run.engine.as_started()), run.at)
    )
    return whole, whole - captured


def _read(path: Path) -> pd.DataFrame:
    table = read_measured(path, COLUMNS, "forward passes")
    table = require_numbers(path, table, ("tp", "dp", "moe_tp", "moe_ep", "batch_size"), least=1, whole=True)
    table = require_numbers(path, table, ("total_prefill_tokens", "total_kv_read_tokens"), whole=True)
    return require_numbers(path, table, ("latency_ms",))
