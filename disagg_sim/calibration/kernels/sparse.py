"""Fit what chooses the keys of sparse attention, from measured modules of a layer.

A row is the whole attention of a layer: projections, index, choice, scores and values. Projections, scores and values
take what the shipped fits of their kernels say, norms and rotary embedding what a plain share of the memory bandwidth
does; the rest is the index (``physics.attention_parts``), its start holding the small kernels around it. Errors are
those of whole modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.calibration.kernels.gemm import FORMAT_OF
from disagg_sim.calibration.kernels.limits import TYPES
from disagg_sim.calibration.kernels.robust import Parameter, fit_logarithm, ranges
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import INDEX, INDEX_STEP, PROMPT_LENGTH, AttentionPartFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.layers import LayerKind, NoFfn
from disagg_sim.facts.load import load_efficiency, load_model, load_precision, load_profile
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import FORMATS
from disagg_sim.physics.attention_parts import part_cost, part_rate
from disagg_sim.physics.blocks import elementwise, layer_of
from disagg_sim.physics.cost import kernel_cost
from disagg_sim.physics.operators import Operator, Tokens
from disagg_sim.physics.rates import resolve_rates
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.units import US

Array = NDArray[np.float64]
#: Phase of one new token a sequence; all others are prompts.
GENERATION = "generation"
#: Columns of one module: all its rows have the same layer on the same GPUs.
_MODULE = ("kind", "phase", "model", "kv_dtype", "gemm_dtype", "heads", "tp_size", "shared_index")
_FLOOR = Parameter("t0", 30 * US, 0.3 * US, 2000 * US)
_COMPUTE, _MEMORY = Parameter("e_compute", 0.3, 1e-3, 2.0), Parameter("e_memory", 0.5, 1e-2, 2.0)
#: A step of decode is too short to tell what multiplying takes.
_NUMBERS = {INDEX: (_FLOOR, _COMPUTE, _MEMORY), INDEX_STEP: (_FLOOR, _MEMORY)}


class _Call(NamedTuple):
    """Rows of one module."""

    where: NDArray[np.intp]  # their positions
    others: Array  # all but the index [s]
    chooser: Operator | None  # None where the layer takes the choice of another


def fit_sparse_attention(rows: pd.DataFrame, system: SystemSpec) -> list[AttentionPartFit]:
    """Fits of a sparse_attention table, of rows of one (framework, version), ``latency`` in s."""
    found = []
    rows = rows[rows["shared_index"] == 0]
    for (kind, part), group in rows.groupby([rows["kind"], _part_of(rows)], sort=True):
        calls = [call for call in _calls(group, system) if call.chooser is not None]
        where = np.concatenate([call.where for call in calls]) if calls else np.zeros(0, dtype=int)
        if len(where) < len(group) or not calls:
            continue
        times = partial(_fitted_times, calls, str(kind), str(part), system)
        values = fit_logarithm(times, group["latency"].to_numpy(dtype=float), _NUMBERS[str(part)])
        found.append(_build(str(kind), str(part), values, group))
    return found


def predict_sparse_attention(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AttentionPartFit]) -> Array:
    """Time of each row of a sparse_attention table by the fit of its library, kind and phase, else NaN. [s]"""
    result, parts = np.full(len(rows), np.nan), _part_of(rows)
    for fit in fits:
        same = (rows["framework"] == fit.engine) & (rows["version"] == fit.version) & (rows["kind"] == fit.kind)
        mine = (same & (parts == fit.part)).to_numpy()
        if mine.any():
            result[mine] = _times(list(_calls(rows[mine], system)), int(mine.sum()), fit, system)
    return result


def _part_of(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(np.where(rows["phase"] == GENERATION, INDEX_STEP, INDEX), index=rows.index)


def _calls(rows: pd.DataFrame, system: SystemSpec) -> Iterator[_Call]:
    """Rows of one module at a time; none of a model without such a layer, or in a format that has no fit."""
    words: Any
    for words, group in rows.groupby(list(_MODULE), sort=True):
        kind, phase, name, cache, weights, heads, tp, shared = words
        model = _model(str(name), str(kind), int(heads) * int(tp), shared=bool(shared))
        if model is None or weights not in FORMAT_OF or cache not in TYPES:
            continue
        at = _setup(model, system, str(rows["framework"].iloc[0]), TYPES[cache][1], FORMAT_OF[weights])
        batch, new, past = (group[c].to_numpy(dtype=float) for c in ("batch", "new_tokens", "past_tokens"))
        tokens = Tokens(prompts=batch, new=new, past=past)
        if phase == GENERATION:
            tokens = Tokens(decodes=batch, context=past + 1.0)
        layer = layer_of(model.kinds[0])
        block = layer.attention
        attend = block.decode if phase == GENERATION else block.prefill
        operators = attend(at.precision, float(tp), tokens, "auto")[0]
        linear = tokens.linear
        beside = [
            *block.served_projections(model, at.precision, float(tp), linear, tokens.decodes),
            *(op for op in operators if op.kind != "attention_part"),
            elementwise(model, layer, float(tp), linear),
        ]
        others = sum((np.broadcast_to(kernel_cost(op, at).time, batch.shape) for op in beside), np.zeros(batch.size))
        index = next((op for op in operators if op.kind == "attention_part"), None)
        yield _Call(rows.index.get_indexer(group.index), others, index)


def _model(name: str, kind: str, heads: int, *, shared: bool) -> ModelSpec | None:
    """The model's first layer of that kind, its attention alone, with so many query heads."""
    model = load_model(name)
    for layer in model.kinds:
        spec: Any = layer.attention
        if spec.kind == kind and bool(getattr(spec, "shared_index", False)) == shared:
            if hasattr(spec, "kv_heads"):  # grouped heads are cut with their queries
                group = spec.q_heads // spec.kv_heads
                own = max(heads // group, 1)
                spec = replace(spec, q_heads=heads, kv_heads=own, index_heads=own)
            else:
                spec = replace(spec, q_heads=heads)
            return replace(model, layers=(LayerKind(spec, NoFfn()),))
    return None


def _setup(model: ModelSpec, system: SystemSpec, engine: str, cache: str, weights: str) -> Setup:
    """Bare kernels at the shipped fits, projections in the format of the row."""
    recipe = load_precision("fp8" if cache == "fp8" else "bf16").resolve(model)
    recipe = replace(recipe, attention_projection=dict.fromkeys(model.attention_kinds, FORMATS[weights]))
    at = replace(setup(model, system.name, "bf16", engine=engine), overheads=None, precision=recipe)
    fits = load_efficiency(system.name)
    if fits is None:
        raise InputError(f"system {system.name!r} has no fitted efficiencies: modules of sparse attention need them")
    return replace(at, rates=resolve_rates(model, at.system, recipe, load_profile("measured"), fits, engine))


def _fitted_times(calls: list[_Call], kind: str, part: str, system: SystemSpec, values: Array) -> Array:
    return _times(calls, sum(len(call.where) for call in calls), _build(kind, part, values), system)


def _times(calls: list[_Call], rows: int, fit: AttentionPartFit, system: SystemSpec) -> Array:
    rate = part_rate(fit, system)
    result = np.full(rows, np.nan)
    for call in calls:
        own = 0.0 if call.chooser is None else part_cost(call.chooser.work, call.chooser.attention, rate).time
        result[call.where] = call.others + own
    return result


def _build(kind: str, part: str, values: Array, rows: pd.DataFrame | None = None) -> AttentionPartFit:
    """A fit of these numbers; whose it is where its rows are told."""
    numbers: dict[str, Any] = dict(zip((p.name for p in _NUMBERS[part]), values.tolist(), strict=True))
    words: dict[str, Any] = {"engine": "", "version": "", "points": 0}
    if rows is not None:
        longest = rows.assign(**{PROMPT_LENGTH: rows["past_tokens"] + rows["new_tokens"]})
        words = {
            "engine": str(rows["framework"].iloc[0]),
            "version": str(rows["version"].iloc[0]),
            "points": len(rows),
            "valid": ranges(longest, ("batch", PROMPT_LENGTH)),
        }
    told: dict[str, Any] = {"parameters": len(numbers), "median_error": 0.0, "p90_error": 0.0}
    return AttentionPartFit(kind=kind, part=part, **words, **told, **numbers)
