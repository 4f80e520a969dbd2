"""Predict and fit measured modules of attention: the whole of a layer's attention, projections included.

Latent attention: nothing is fitted. A block is input norms, projections, attention and output projection of a DeepSeek
layer; the prediction is the sum of the layer's matrix multiplies and of its attention by their fits, as a pass adds
them up. Norms, rotary embedding and cache write between them are not in the sum.

Sparse attention: fitted is what it adds to the kernels that others time. A row is projections, index, choice, scores
and values. Projections, and scores and values of a decode step, take what the shipped fits of their kernels say, norms
and rotary embedding what a plain share of the memory bandwidth does; the rest is fitted
(``physics.attention_parts``): in prefill scores and values on chosen keys and the index, both together; in decode the
index, or the small kernels alone where a kind has none. Errors are those of whole modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import (
    CHOSEN,
    INDEX,
    INDEX_STEP,
    PROMPT_LENGTH,
    SMALL_STEP,
    AttentionPartFit,
    DecodeAttentionFit,
    Fit,
    GemmFit,
    PrefillAttentionFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.layers import LayerKind, NoFfn
from disagg_sim.facts.load import load_efficiency, load_model, load_precision, load_profile
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import BF16, FORMATS, Precision
from disagg_sim.physics.attention import decode_attention_cost, prefill_attention_cost
from disagg_sim.physics.attention_parts import part_cost, part_rate
from disagg_sim.physics.blocks import elementwise, layer_of
from disagg_sim.physics.blocks.mla import absorbed_product
from disagg_sim.physics.cost import kernel_cost
from disagg_sim.physics.gemm import gemm_cost
from disagg_sim.physics.rates import decode_attention_rate, gemm_rate, prefill_attention_rate, resolve_rates
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.physics.work import AttentionShape, Operator, Tokens, Work
from disagg_sim.units import US
from lab.calibration.kernels.gemm import FORMAT_OF
from lab.calibration.kernels.limits import MLA_NOPE, MLA_RANK, TYPES
from lab.calibration.kernels.robust import Array, Parameter, by_name, mean_loss, origin, solved

#: The model whose blocks are measured.
_MODEL = "deepseek_r1"


def predict_mla_bmm(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[Fit]) -> Array:
    """Time of the batched products that fold ``W_kv_b`` into queries and out of values; NaN without a GEMM fit. [s]

    As one GEMM of all heads in bf16, in which libraries multiply them whatever the weights are stored in; its
    activations are those of every head apart.
    """
    result = np.full(len(rows), np.nan)
    tokens, heads = (rows[name].to_numpy(dtype=float) for name in ("num_tokens", "heads"))
    into = (rows["op"] == "mla_gen_pre").to_numpy()
    sizes = np.where(into, MLA_NOPE, MLA_RANK), np.where(into, MLA_RANK, MLA_NOPE)
    product = absorbed_product("", tokens, heads, *sizes)
    for fit in fits:
        if isinstance(fit, GemmFit) and fit.format == BF16.name:
            mine = (rows["framework"] == fit.engine).to_numpy()
            cost = gemm_cost(*product.shape, product.work, gemm_rate(fit, system))
            result[mine] = np.asarray(cost.time)[mine]
    return result


def predict_mla_module(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[Fit]) -> Array:
    """Time of each row of a mla_module table by the fits of its library; NaN where one of them is missing. [s]"""
    result = np.full(len(rows), np.nan)
    bf16 = load_precision("bf16").resolve(load_model(_MODEL))
    groups = rows.reset_index(drop=True).groupby(["framework", "phase", "kv_dtype", "gemm_dtype"])
    for words, part in groups:
        framework, phase, cache, weights = (str(word) for word in words)
        mine = [fit for fit in fits if fit.engine == framework]
        recipe = replace(
            bf16, attention_projection={"mla": FORMATS[FORMAT_OF[weights]]}, cache=FORMATS[TYPES[cache][1]]
        )
        times = [_time(op, mine, recipe, system) for op in _operators(part, phase, recipe)]
        if all(time is not None for time in times):
            result[part.index] = sum(np.asarray(time) for time in times if time is not None)
    return result


def _operators(rows: pd.DataFrame, phase: str, precision: Precision) -> Iterator[Operator]:
    """Kernels of the attention block of a layer, its all-reduce left out: one GPU was measured."""
    model = load_model(_MODEL)
    attention = layer_of(model.kinds[0]).attention
    batch, new, past, heads = (rows[c].to_numpy(dtype=float) for c in ("batch", "q_len", "past_len", "heads"))
    tp = attention.spec.q_heads / heads
    for op in attention.projections(model, precision, tp, batch * new):
        if op.kind == "gemm":
            yield op
    if phase == "generation":
        tokens = Tokens(decodes=batch, context=past + 1.0)
        yield from attention.decode(precision, tp, tokens, "auto")[0]
    else:
        tokens = Tokens(prompts=batch, new=new, past=past)
        yield from attention.prefill(precision, tp, tokens, "naive")[0]


def _time(op: Operator, fits: Sequence[Fit], precision: Precision, system: SystemSpec) -> Any:
    """Time of an operator by the fit of its kind, None without one. [s]"""
    cache = "bf16" if precision.cache is BF16 else "fp8"
    for fit in fits:
        if op.kind == "gemm" and isinstance(fit, GemmFit) and fit.format == op.format:
            return gemm_cost(*op.shape, op.work, gemm_rate(fit, system)).time * op.runs
        if getattr(fit, "kind", "") != "mla" or getattr(fit, "cache", "") != cache:
            continue
        if op.kind == "prefill_attention" and isinstance(fit, PrefillAttentionFit):
            rate = prefill_attention_rate(fit, system, reads_past_at=system.hbm_bandwidth)
            return prefill_attention_cost(op.work, op.attention, op.keys, rate).time
        if op.kind == "decode_attention" and isinstance(fit, DecodeAttentionFit):
            return decode_attention_cost(op.work, op.attention, decode_attention_rate(fit, system)).time
    return None


#: Phase of one new token a sequence; all others are prompts.
GENERATION = "generation"
#: Columns of one module: all its rows have the same layer on the same GPUs.
_MODULE = ("kind", "phase", "model", "kv_dtype", "gemm_dtype", "heads", "tp_size", "shared_index")
_SIZES = ("batch", "new_tokens", "past_tokens")
_FLOOR, _TOKEN = Parameter("t0", 30 * US, 0.3 * US, 2000 * US), Parameter("token", 1e-3 * US, 1e-5 * US, 10.0 * US)
_COMPUTE = Parameter("e_compute", 0.3, 1e-3, 2.0)
_CHOICE, _KEY = Parameter("choice", 20 * US, 0.1 * US, 2000 * US), Parameter("key_walk", 1e-9, 1e-11, 1e-6)
_MEMORY, _FEW = Parameter("e_memory", 0.5, 1e-2, 2.0), Parameter("few_token", 0.5 * US, 0.01 * US, 10 * US)
#: Share of the HBM bandwidth that prompts read keys at: it never binds in the tables, so no row tells it. [1]
_PROMPTS_READ = 0.6
#: The walk over keys is left out where the loss rises by no more than this share. [1]
_WALK_TOLD = 1e-3
#: Part -> numbers that are fitted.
_NUMBERS = {
    CHOSEN: (_FLOOR, _TOKEN, _COMPUTE),
    INDEX: (_CHOICE, _COMPUTE, _KEY),
    INDEX_STEP: (_FLOOR, _TOKEN, _CHOICE, _MEMORY, _KEY),
    SMALL_STEP: (_FLOOR, _TOKEN),
}
#: Query heads, and new tokens of a sequence, that kernels may pad to; MSA shares blocks among the heads of a KV head.
_HEAD_TILES, _QUERY_TILES = {"msa": (0.0, 16.0)}, (0.0, 64.0)
_LATENT_TILES = (0.0, 64.0)
#: Longest context that pays the start of a choice, where a library has another kernel beyond; 0 = none has. [token]
_UNTIL = (0.0, 131_072.0)
#: Modules that a library launches without a graph, so that a floor of the host hides kernels of small prompts.
_LAUNCHED = (("sglang", "dsa"), ("sglang", "msa"))
#: vLLM on Hopper attends to an fp8 cache with its decode kernel where a GPU has fewer heads than that
#: (``MIN_HEADS_FOR_BF16_PREFILL`` of vllm/v1/attention/backends/mla/flashmla_sparse.py). [1]
_FEW_HEADS = {("vllm", "dsa", "Hopper"): 32.0}


class _Modules(NamedTuple):
    """Rows of one library and kind in one phase: what is beside the parts that are fitted, and the parts."""

    others: Array  # [s]
    parts: dict[str, tuple[Work, AttentionShape]]  # arrays of all rows
    fp8: NDArray[np.bool_]  # whether the cache is


def fit_sparse_attention(rows: pd.DataFrame, system: SystemSpec) -> list[AttentionPartFit]:
    """Fits of a sparse_attention table, of rows of one (framework, version), ``latency`` in s."""
    found: list[AttentionPartFit] = []
    rows = rows[_served(rows)]
    for _, group in rows.groupby(["kind", rows["phase"] == GENERATION], sort=True):
        modules = _modules(group, system)
        if modules is not None:
            found += _fit(modules, group, system)
    return found


def predict_sparse_attention(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AttentionPartFit]) -> Array:
    """Time of each row of a sparse_attention table by the fits of its library, kind and phase. [s]

    NaN without a fit (of the index, too, where the context exceeds the choice), for layers that take the choice of
    another, and for prompts of one token.
    """
    result = np.full(len(rows), np.nan)
    decodes = rows["phase"] == GENERATION
    for engine, version, kind, step in dict.fromkeys(unit_of(fit) for fit in fits):
        mine = [fit for fit in fits if unit_of(fit) == (engine, version, kind, step)]
        same = (rows["framework"] == engine) & (rows["version"] == version) & (rows["kind"] == kind)
        where = (same & (decodes == step) & _served(rows)).to_numpy()
        modules = _modules(rows[where], system) if where.any() else None
        if modules is not None:
            result[where] = _times(modules, mine, system)
    return result


def _served(rows: pd.DataFrame) -> pd.Series:
    """Whether rows are of layers with an index of their own, and no prompts of one token: engines decode those."""
    return (rows["shared_index"] == 0) & ((rows["phase"] == GENERATION) | (rows["new_tokens"] > 1))


def unit_of(fit: AttentionPartFit) -> tuple[Hashable, ...]:
    """Fits that predict together: those of the prompts, or of the decode steps, of one library and kind."""
    return fit.engine, fit.version, fit.kind, fit.part in (INDEX_STEP, SMALL_STEP)


def _fit(modules: _Modules, rows: pd.DataFrame, system: SystemSpec) -> list[AttentionPartFit]:
    """Fits of all parts of these rows together; of tiles and regimes those with the least loss."""
    engine, kind = str(rows["framework"].iloc[0]), str(rows["kind"].iloc[0])
    measured = rows["latency"].to_numpy(dtype=float)
    numbers = {part: list(_NUMBERS[part]) for part in modules.parts}
    few = _FEW_HEADS.get((engine, kind, system.architecture), 0.0)
    if few and CHOSEN in numbers and modules.fp8.any():
        numbers[CHOSEN].append(_FEW)
    if (engine, kind) in _LAUNCHED and CHOSEN in numbers:
        for part, low in _floors(modules, measured).items():
            numbers[part].append(Parameter("host", low, 1 * US, 5000 * US))
    free = [parameter for each in numbers.values() for parameter in each]
    ends = np.cumsum([len(each) for each in numbers.values()])[:-1]

    def build(bare: Sequence[AttentionPartFit], values: Array) -> list[AttentionPartFit]:
        own = zip(bare, numbers.values(), np.split(values, ends), strict=True)
        return [replace(fit, **by_name(parameters, found)) for fit, parameters, found in own]

    tried = []
    for fixed in _variants(kind, modules, few, float(rows["past_tokens"].max())):
        bare = [_bare(kind, part, fixed[part], rows, parameters=len(each)) for part, each in numbers.items()]
        tried.append(solved(partial(build, bare), lambda fits: _times(modules, fits, system), measured, free))
    if not tried:
        return []
    loss, fits = min(tried, key=lambda each: each[0])
    # without the time of a key that is walked, where the rows do not tell it
    fewer = [replace(fit, key_walk=0.0, parameters=fit.parameters - 1) if fit.key_walk else fit for fit in fits]
    return fewer if mean_loss(_times(modules, fewer, system), measured) <= (1.0 + _WALK_TOLD) * loss else fits


def _variants(kind: str, modules: _Modules, few: float, longest: float) -> Iterator[dict[str, dict[str, float]]]:
    """Numbers that are not free: tiles in prefill, the longest context that pays for a choice in decode."""
    if CHOSEN in modules.parts:
        for head, query in product(
            _HEAD_TILES.get(kind, _LATENT_TILES), _QUERY_TILES if INDEX in modules.parts else (0.0,)
        ):
            chosen = {"head_tile": head, "e_memory": _PROMPTS_READ, "few_heads": few if modules.fp8.any() else 0.0}
            yield {CHOSEN: chosen, INDEX: {"query_tile": query, "e_memory": _PROMPTS_READ}}
        return
    for until in _UNTIL:
        if until < longest:
            yield {INDEX_STEP: {"choice_until": until}, SMALL_STEP: {}}


def _floors(modules: _Modules, measured: Array) -> dict[str, float]:
    """Where to start with the floors of the host: a low quantile of the rows without, and with, an index. [s]"""
    beyond = _beyond(modules.parts[INDEX][1])
    found = {CHOSEN: measured[~beyond], INDEX: measured[beyond]}
    return {part: float(np.quantile(mine, 0.1)) if mine.size else 100 * US for part, mine in found.items()}


def _beyond(shape: AttentionShape) -> NDArray[np.bool_]:
    """Whether an index has to choose."""
    return np.asarray(shape.past + shape.new > shape.chosen, dtype=bool)


def _modules(rows: pd.DataFrame, system: SystemSpec) -> _Modules | None:
    """Rows of one library, kind and phase; None where a model has no such layer, or a format no fit."""
    others = np.zeros(len(rows))
    columns: dict[str, list[Array]] = {}
    for words, group in rows.groupby(list(_MODULE), sort=True):
        where = rows.index.get_indexer(group.index)
        sizes = tuple(group[name].to_numpy(dtype=float).tobytes() for name in _SIZES)
        found = _module(tuple(words), str(group["framework"].iloc[0]), system.name, sizes)
        if found is None:
            return None
        others[where] = found[0]
        for part, numbers in found[1].items():
            stored = columns.setdefault(part, [np.zeros(len(rows)) for _ in numbers])
            for column, values in zip(stored, numbers, strict=True):
                column[where] = values
    parts = {
        part: (Work(flops, moved), AttentionShape(sequences, new, past, heads, 1.0, 0.0, chosen=chosen))
        for part, (flops, moved, sequences, new, past, heads, chosen) in columns.items()
    }
    return _Modules(others, parts, (rows["kv_dtype"].map(TYPES).str[1] == "fp8").to_numpy())


@lru_cache(maxsize=8192)
def _module(
    words: tuple[Any, ...], engine: str, system: str, sizes: tuple[bytes, ...]
) -> tuple[Array, dict[str, tuple[Array, ...]]] | None:
    """Rows of one module: what is beside its parts [s], and FLOP, bytes and shape of each part."""
    kind, phase, name, cache, weights, heads, tp, shared = words
    model = _model(str(name), str(kind), int(heads) * int(tp), shared=bool(shared))
    if model is None or weights not in FORMAT_OF or cache not in TYPES:
        return None
    at = _setup(model, system, engine, TYPES[cache][1], FORMAT_OF[weights])
    batch, new, past = (np.frombuffer(size) for size in sizes)
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
    parts = {
        op.table.split()[1]: tuple(
            np.broadcast_to(np.asarray(value, dtype=float), batch.shape)
            for value in (*op.work, *op.attention[:4], op.attention.chosen)
        )
        for op in operators
        if op.kind == "attention_part"
    }
    return others, parts


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


def _setup(model: ModelSpec, system: str, engine: str, cache: str, weights: str) -> Setup:
    """Bare kernels at the shipped fits, projections in the format of the row."""
    recipe = load_precision("fp8" if cache == "fp8" else "bf16").resolve(model)
    recipe = replace(recipe, attention_projection=dict.fromkeys(model.attention_kinds, FORMATS[weights]))
    at = replace(setup(model, system, "bf16", engine=engine), overheads=None, precision=recipe)
    fits = load_efficiency(system)
    if fits is None:
        raise InputError(f"system {system!r} has no fitted efficiencies: modules of sparse attention need them")
    return replace(at, rates=resolve_rates(model, at.system, recipe, load_profile("measured"), fits, engine))


def _times(modules: _Modules, fits: Sequence[AttentionPartFit], system: SystemSpec) -> Array:
    """Times of all rows; NaN where a part that a row needs has no fit. [s]"""
    total, host = modules.others, np.zeros(len(modules.others))
    known = {fit.part: fit for fit in fits}
    for part, (work, shape) in modules.parts.items():
        needed = _beyond(shape) if part == INDEX else np.ones(len(total), dtype=bool)
        if part not in known:
            total = np.where(needed, np.nan, total)
            continue
        fit = known[part]
        time = np.asarray(part_cost(work, shape, part_rate(fit, system)).time)
        if fit.few_heads:
            few = part_cost(work, shape, part_rate(fit, system, cache="fp8")).time
            time = np.where(modules.fp8, few, time)
        total = total + time
        host = np.where(needed, np.maximum(host, fit.host), host)
    return np.asarray(np.maximum(total, host))


def _bare(kind: str, part: str, fixed: dict[str, float], rows: pd.DataFrame, parameters: int) -> AttentionPartFit:
    """A fit to these rows before its free numbers are known."""
    longest = rows.assign(**{PROMPT_LENGTH: rows["past_tokens"] + rows["new_tokens"]})
    words = origin(longest, ("batch", PROMPT_LENGTH)) | {"t0": 0.0} | fixed
    return AttentionPartFit(kind=kind, part=part, parameters=parameters, **words)
