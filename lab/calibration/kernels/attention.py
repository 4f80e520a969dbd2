"""Fit attention kernels: the equations of ``physics.attention`` to rows of one library and version.

A *variant* is a kernel with one arithmetic and one cache format. Each variant has parameters of its own. All variants
of a library share the parameters that do not depend on the format, and those whose sharing hardly raises the error.
The fit tries both values of two choices: whether the longest block stays visible in prefill (grid of blocks) or not
(persistent kernel), and whether MLA decode splits the keys of a sequence over blocks.

In half of the rows the time is mostly launch; the other rows get twice the weight, because serving runs such kernels.
Tables repeat a kernel on the same data, so L2 holds a part of the cache; the fit models this. The rates of a model
leave it out, because the other layers evict the cache from L2 between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import (
    CACHE_LENGTH,
    HEADS,
    LATENT_HEADS,
    PROMPT_LENGTH,
    DecodeAttentionFit,
    PrefillAttentionFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.attention import (
    GRID_TAIL,
    RESIDENT_SHARE,
    SPLIT_POWER,
    decode_attention_cost,
    prefill_attention_cost,
)
from disagg_sim.physics.blocks.gqa import gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.blocks.mla import MlaDims, absorbed_shape, expanded_shape, mla_work
from disagg_sim.physics.rates import decode_attention_rate, prefill_attention_rate
from disagg_sim.physics.work import AttentionShape, Work, causal_pairs
from disagg_sim.units import US
from lab.calibration.kernels.limits import MLA_NOPE, MLA_RANK, MLA_ROPE, MLA_VALUE, TYPES
from lab.calibration.kernels.residuals import SHORT
from lab.calibration.kernels.robust import Parameter, enough, error_quantiles, fit_logarithm, mean_loss, ranges

Array = NDArray[np.float64]
AttentionFit = TypeVar("AttentionFit", PrefillAttentionFit, DecodeAttentionFit)
#: Kernel ("" where a library has one), arithmetic and cache format, as fits name them.
Variant = tuple[str, str, str]
#: Columns that are sizes, in any of the tables.
_SIZES = ("batch", PROMPT_LENGTH, CACHE_LENGTH, *HEADS, *LATENT_HEADS)


class Calls(NamedTuple):
    """What the rows of a table ask of a kernel, arrays of shape (rows,)."""

    work: Work
    shape: AttentionShape
    keys: Any = 0.0  # twice the mean key length of a prefill [token]


def context_attention(rows: pd.DataFrame) -> Calls:
    """Prompts without a past, grouped-query attention."""
    batch, new, q_heads, kv_heads = (_column(rows, c) for c in ("batch", "seq_len", "q_heads", "kv_heads"))
    size: Any = _column(rows, "head_dim")
    work = gqa_prefill_work(
        sequences=batch,
        new=new,
        past=0.0,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=size,
        window=0.0,
        cache_bytes=_cache_bytes(rows),
    )
    return Calls(work, AttentionShape(batch, new, 0.0, q_heads, kv_heads, size), 2.0 * causal_pairs(new) / new)


def generation_attention(rows: pd.DataFrame) -> Calls:
    """One token a sequence, grouped-query attention."""
    batch, length, q_heads, kv_heads = (_column(rows, c) for c in ("batch", "kv_len", "q_heads", "kv_heads"))
    size: Any = _column(rows, "head_dim")
    work = gqa_decode_work(
        sequences=batch,
        context=length,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=size,
        window=0.0,
        cache_bytes=_cache_bytes(rows),
    )
    return Calls(work, AttentionShape(batch, 1.0, length - 1.0, q_heads, kv_heads, size))


def mla_context(rows: pd.DataFrame) -> Calls:
    """Prompts without a past, latent attention with up-projected keys and values."""
    batch, new, dims = _column(rows, "batch"), _column(rows, "seq_len"), _mla_dims(rows)
    work = mla_work("cached", dims, sequences=batch, new=new, past=0.0)
    return Calls(work, expanded_shape(dims, batch, new, 0.0), new)


def mla_generation(rows: pd.DataFrame) -> Calls:
    """One token a sequence, absorbed latent attention."""
    batch, length, dims = _column(rows, "batch"), _column(rows, "kv_len"), _mla_dims(rows)
    work = mla_work("absorbed", dims, sequences=batch, new=1.0, past=length - 1.0)
    work = Work(work.flops, batch * length * (dims.latent * dims.cache_bytes))
    return Calls(work, absorbed_shape(dims, batch, 1.0, length - 1.0))


def _column(rows: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return rows[name].to_numpy(dtype=float)


def _cache_bytes(rows: pd.DataFrame) -> Any:
    return np.array([TYPES[word][0] for word in rows["kv_dtype"]])


def _mla_dims(rows: pd.DataFrame) -> MlaDims:
    return MlaDims(_column(rows, "heads"), MLA_RANK, MLA_NOPE, MLA_ROPE, MLA_VALUE, _cache_bytes(rows))


@dataclass(frozen=True)
class _Table(Generic[AttentionFit]):
    """How rows of one form of table become fits, and fits times."""

    kind: str
    compute_column: str  # where the arithmetic is told; decode and latent attention use that of their cache
    calls: Callable[[pd.DataFrame], Calls]
    numbers: tuple[Parameter, ...]  # all that are fitted
    own: tuple[tuple[str, ...], ...]  # which of them each variant may have to itself
    most: int  # numbers of all variants of a library together [1]
    option: str  # field that is chosen among
    options: tuple[float, ...]
    fit: type[AttentionFit]
    times: Callable[[Calls, AttentionFit, SystemSpec], Array]


def _build(table: _Table[AttentionFit], variant: Variant, numbers: Mapping[str, Any]) -> AttentionFit:
    """A fit of a variant with these numbers; whose it is and how well it holds is told later."""
    kernel, compute, cache = variant
    words: dict[str, Any] = {"kind": table.kind, "cache": cache, "kernel": kernel}
    words |= {"compute": compute} if table.fit is PrefillAttentionFit else {}
    return table.fit(engine="", version="", points=0, median_error=0.0, p90_error=0.0, **words, **numbers)


def prefill_times(calls: Calls, fit: PrefillAttentionFit, system: SystemSpec) -> Array:
    """Times of prefills without a cached past. [s]"""
    rate = prefill_attention_rate(fit, system, reads_past_at=system.hbm_bandwidth)
    return np.asarray(prefill_attention_cost(calls.work, calls.shape, calls.keys, rate).time)


def decode_times(calls: Calls, fit: DecodeAttentionFit, system: SystemSpec) -> Array:
    """Times of decode calls that find their cache in L2 where it fits. [s]"""
    rate = decode_attention_rate(fit, system, resident=RESIDENT_SHARE * system.l2_capacity)
    return np.asarray(decode_attention_cost(calls.work, calls.shape, rate).time)


_PREFILL = (
    Parameter("t0", 12 * US, 1 * US, 100 * US),
    Parameter("e_compute", 0.7, 0.02, 2.0),
    Parameter("e_io", 0.3, 0.01, 2.0),
)
_DECODE = (
    Parameter("t0", 10 * US, 1 * US, 100 * US),
    Parameter("e_memory", 0.85, 0.02, 1.0),
    Parameter("block_time", 3 * US, 0.01 * US, 200 * US),
    Parameter("serial_time", 2 * US, 0.01 * US, 500 * US),
    Parameter("ramp", 7 * US, 0.01 * US, 100 * US),
)
_PREFILL_OWN = (("e_compute",), ("e_compute", "t0"), ("e_compute", "t0", "e_io"))
_CONTEXT = _Table(
    "gqa",
    "compute_dtype",
    context_attention,
    _PREFILL,
    _PREFILL_OWN,
    9,
    "tail",
    (0.0, GRID_TAIL),
    PrefillAttentionFit,
    prefill_times,
)
_MLA_CONTEXT = replace(_CONTEXT, kind="mla", compute_column="kv_dtype", calls=mla_context)
_GENERATION = _Table(
    "gqa",
    "kv_dtype",
    generation_attention,
    _DECODE,
    (("e_memory",), ("e_memory", "t0"), ("e_memory", "t0", "block_time")),
    11,
    "serial_power",
    (SPLIT_POWER,),
    DecodeAttentionFit,
    decode_times,
)
_MLA_GENERATION = replace(
    _GENERATION,
    kind="mla",
    calls=mla_generation,
    numbers=(Parameter("e_compute", 0.6, 0.02, 2.0), *_DECODE),
    own=(("e_compute",),),
    options=(SPLIT_POWER, 1.0),
)


def fit_context_attention(rows: pd.DataFrame, system: SystemSpec) -> list[PrefillAttentionFit]:
    """Causal prefill of grouped-query attention: one fit a variant, of rows of one (framework, version).

    Takes ``rows`` (rows of a context_attention table that may be fitted, with ``latency`` [s]). The result is in the
    order of kernel, arithmetic and cache; numbers that they share count as parameters of the first.
    """
    return _fit(_CONTEXT, rows, system)


def fit_mla_context(rows: pd.DataFrame, system: SystemSpec) -> list[PrefillAttentionFit]:
    """Causal prefill of latent attention with up-projected keys and values, as ``fit_context_attention``."""
    return _fit(_MLA_CONTEXT, rows, system)


def fit_generation_attention(rows: pd.DataFrame, system: SystemSpec) -> list[DecodeAttentionFit]:
    """One token a sequence against a cache of keys and values, as ``fit_context_attention``."""
    return _fit(_GENERATION, rows, system)


def fit_mla_generation(rows: pd.DataFrame, system: SystemSpec) -> list[DecodeAttentionFit]:
    """One token a sequence against a latent cache, absorbed, as ``fit_context_attention``."""
    return _fit(_MLA_GENERATION, rows, system)


def predict_context_attention(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[PrefillAttentionFit]) -> Array:
    """Time of each row of a context_attention table by the fit of its variant; NaN where there is none. [s]"""
    return _predict(_CONTEXT, rows, system, fits)


def predict_mla_context(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[PrefillAttentionFit]) -> Array:
    """Time of each row of a mla_context table; NaN where there is no fit. [s]"""
    return _predict(_MLA_CONTEXT, rows, system, fits)


def predict_generation_attention(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[DecodeAttentionFit]) -> Array:
    """Time of each row of a generation_attention table; NaN where there is no fit. [s]"""
    return _predict(_GENERATION, rows, system, fits)


def predict_mla_generation(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[DecodeAttentionFit]) -> Array:
    """Time of each row of a mla_generation table; NaN where there is no fit. [s]"""
    return _predict(_MLA_GENERATION, rows, system, fits)


def _fit(table: _Table[AttentionFit], rows: pd.DataFrame, system: SystemSpec) -> list[AttentionFit]:
    """Fit all variants together, each with the fewest own parameters that fit nearly as well as the most."""
    parts = {v: part for v, part in _by_variant(rows, table.compute_column) if v[1] in system.peak_flops}
    if not parts:
        return []
    tried = [_fit_jointly(table, parts, system, own) for own in table.own]
    told = []
    for fit, part in zip(enough(tried, table.most), parts.values(), strict=True):
        predicted = table.times(table.calls(part), fit, system)
        median, p90 = error_quantiles(predicted, part["latency"].to_numpy(dtype=float))
        told.append(
            replace(
                fit,
                engine=str(part["framework"].iloc[0]),
                version=str(part["version"].iloc[0]),
                points=len(part),
                median_error=median,
                p90_error=p90,
                valid=ranges(part, _SIZES),
            )
        )
    return told


def _fit_jointly(
    table: _Table[AttentionFit], parts: Mapping[Variant, pd.DataFrame], system: SystemSpec, names: Sequence[str]
) -> tuple[float, list[AttentionFit]]:
    """Loss and fits where each variant has the numbers ``names`` to itself, under the option that leaves least loss."""
    own = [number for number in table.numbers if number.name in names]
    shared = [number for number in table.numbers if number.name not in names]
    calls = {variant: table.calls(part) for variant, part in parts.items()}
    target = np.concatenate([part["latency"].to_numpy(dtype=float) for part in parts.values()])
    weighed = np.concatenate([np.arange(target.size), np.flatnonzero(target >= SHORT)])  # long kernels count twice
    count = len(own) * len(parts)

    def fits(option: float, numbers: Array) -> list[AttentionFit]:
        common = dict(zip((p.name for p in shared), numbers[count:].tolist(), strict=True))
        found: list[AttentionFit] = []
        for variant, line in zip(parts, numbers[:count].reshape(len(parts), -1), strict=True):
            mine = dict(zip((p.name for p in own), line.tolist(), strict=True))
            told = {table.option: option, "parameters": len(own) + (0 if found else len(shared))}
            found.append(_build(table, variant, mine | common | told))
        return found

    def times(option: float, numbers: Array) -> Array:
        both = zip(parts, fits(option, numbers), strict=True)
        together = np.concatenate([table.times(calls[variant], fit, system) for variant, fit in both])
        return np.asarray(together[weighed])

    free = own * len(parts) + shared
    tried = [(option, fit_logarithm(partial(times, option), target[weighed], free)) for option in table.options]
    losses = [mean_loss(times(*pair), target[weighed]) for pair in tried]
    best = int(np.argmin(losses))
    return losses[best], fits(*tried[best])


def _by_variant(rows: pd.DataFrame, compute_column: str) -> list[tuple[Variant, pd.DataFrame]]:
    """Rows of each variant, in the order of their names; the kernel is named where a library has several."""
    several = len(rows["kernel_source"].unique()) > 1
    groups = rows.groupby([rows["kernel_source"], rows[compute_column], rows["kv_dtype"]], sort=True)
    return [
        ((str(kernel) if several else "", TYPES[compute][1], TYPES[cache][1]), part)
        for (kernel, compute, cache), part in groups
        if compute in TYPES and cache in TYPES
    ]


def _predict(
    table: _Table[AttentionFit], rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AttentionFit]
) -> Array:
    result = np.full(len(rows), np.nan)
    named = {word: name for word, (_, name) in TYPES.items()}
    compute, cache = rows[table.compute_column].map(named), rows["kv_dtype"].map(named)
    for fit in (fit for fit in fits if fit.kind == table.kind):
        mine = (rows["framework"] == fit.engine) & (cache == fit.cache)
        if isinstance(fit, PrefillAttentionFit):
            mine &= compute == fit.compute
        if fit.kernel:
            mine &= rows["kernel_source"] == fit.kernel
        if mine.any():
            result[mine.to_numpy()] = table.times(table.calls(rows[mine]), fit, system)
    return result
