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
from disagg_sim.physics.work import AttentionShape, Numeric, Work, causal_pairs
from disagg_sim.units import US
from lab.calibration.kernels.limits import MLA_NOPE, MLA_RANK, MLA_ROPE, MLA_VALUE, TYPES, column_of
from lab.calibration.kernels.residuals import SHORT
from lab.calibration.kernels.robust import Array, Parameter, by_fit, enough, joint_fits, origin

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


def context_attention(rows: pd.DataFrame, past: Numeric = 0.0, window: float = 0.0) -> Calls:
    """Prompts, grouped-query attention."""
    batch, new, heads = column_of(rows, "batch"), column_of(rows, "seq_len"), _heads(rows)
    work = gqa_prefill_work(sequences=batch, new=new, past=past, window=window, cache_bytes=_cache_bytes(rows), **heads)
    return Calls(work, AttentionShape(batch, new, past, **heads), 2.0 * causal_pairs(new) / new)


def generation_attention(rows: pd.DataFrame, window: float = 0.0) -> Calls:
    """One token a sequence, grouped-query attention."""
    batch, length, heads = column_of(rows, "batch"), column_of(rows, "kv_len"), _heads(rows)
    work = gqa_decode_work(sequences=batch, context=length, window=window, cache_bytes=_cache_bytes(rows), **heads)
    return Calls(work, AttentionShape(batch, 1.0, length - 1.0, **heads))


def mla_context(rows: pd.DataFrame) -> Calls:
    """Prompts without a past, latent attention with up-projected keys and values."""
    batch, new, dims = column_of(rows, "batch"), column_of(rows, "seq_len"), _mla_dims(rows)
    work = mla_work("cached", dims, sequences=batch, new=new, past=0.0)
    return Calls(work, expanded_shape(dims, batch, new, 0.0), new)


def mla_generation(rows: pd.DataFrame) -> Calls:
    """One token a sequence, absorbed latent attention."""
    batch, length, dims = column_of(rows, "batch"), column_of(rows, "kv_len"), _mla_dims(rows)
    work = mla_work("absorbed", dims, sequences=batch, new=1.0, past=length - 1.0)
    work = Work(work.flops, batch * length * (dims.latent * dims.cache_bytes))
    return Calls(work, absorbed_shape(dims, batch, 1.0, length - 1.0))


def _heads(rows: pd.DataFrame) -> dict[str, Any]:
    return {name: column_of(rows, name) for name in HEADS}


def _cache_bytes(rows: pd.DataFrame) -> Any:
    return np.array([TYPES[word][0] for word in rows["kv_dtype"]])


def _mla_dims(rows: pd.DataFrame) -> MlaDims:
    return MlaDims(column_of(rows, "heads"), MLA_RANK, MLA_NOPE, MLA_ROPE, MLA_VALUE, _cache_bytes(rows))


@dataclass(frozen=True)
class AttentionTable(Generic[AttentionFit]):
    """A form of table: how its rows become fits, and fits times."""

    kind: str
    compute_column: str  # where the arithmetic is told; decode and latent attention use that of their cache
    calls: Callable[[pd.DataFrame], Calls]
    numbers: tuple[Parameter, ...]  # all that are fitted
    own: tuple[tuple[str, ...], ...]  # which of them each variant may have to itself
    most: int  # numbers of all variants of a library together [1]
    option: str  # field that is chosen among
    options: tuple[float, ...]
    law: type[AttentionFit]
    times: Callable[[Calls, AttentionFit, SystemSpec], Array]

    def fit(self, rows: pd.DataFrame, system: SystemSpec) -> list[AttentionFit]:
        """One fit a variant, together, each with the fewest own parameters that do nearly as well as the most; numbers
        that they share count as parameters of the first.
        """
        parts = {v: part for v, part in _by_variant(rows, self.compute_column) if v[1] in system.peak_flops}
        return enough([self._fit_jointly(parts, system, own) for own in self.own], self.most) if parts else []

    def _fit_jointly(
        self, parts: Mapping[Variant, pd.DataFrame], system: SystemSpec, names: Sequence[str]
    ) -> tuple[float, list[AttentionFit]]:
        """Loss and fits where each variant has the numbers ``names`` to itself, under the option of least loss."""
        own = dict.fromkeys(parts, names)
        calls = {variant: self.calls(part) for variant, part in parts.items()}
        target = np.concatenate([part["latency"].to_numpy(dtype=float) for part in parts.values()])
        weighed = np.concatenate([np.arange(target.size), np.flatnonzero(target >= SHORT)])  # long kernels count twice

        def times(variant: Variant, fit: AttentionFit) -> Array:
            return self.times(calls[variant], fit, system)

        def build(option: float, variant: Variant, numbers: Mapping[str, Any]) -> AttentionFit:
            kernel, compute, cache = variant
            words: dict[str, Any] = {"kind": self.kind, "cache": cache, "kernel": kernel, self.option: option}
            words |= {"compute": compute} if issubclass(self.law, PrefillAttentionFit) else {}
            return self.law(**origin(parts[variant], _SIZES), **words, **numbers)

        tried = (joint_fits(parts, self.numbers, own, partial(build, each), times, weighed) for each in self.options)
        return min(tried, key=lambda pair: pair[0])

    def predict(self, rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AttentionFit]) -> Array:
        """Time of each row by the fit of its variant; NaN where there is none. [s]"""
        named = {word: name for word, (_, name) in TYPES.items()}
        words = {"engine": rows["framework"], "kernel": rows["kernel_source"], "cache": rows["kv_dtype"].map(named)}
        words |= {"compute": rows[self.compute_column].map(named)}
        own = [fit for fit in fits if fit.kind == self.kind]
        return by_fit(rows, own, words, lambda table, fit: self.times(self.calls(table), fit, system))


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
CONTEXT = AttentionTable(
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
MLA_CONTEXT = replace(CONTEXT, kind="mla", compute_column="kv_dtype", calls=mla_context)
GENERATION = AttentionTable(
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
MLA_GENERATION = replace(
    GENERATION,
    kind="mla",
    calls=mla_generation,
    numbers=(Parameter("e_compute", 0.6, 0.02, 2.0), *_DECODE),
    own=(("e_compute",),),
    options=(SPLIT_POWER, 1.0),
)


def _by_variant(rows: pd.DataFrame, compute_column: str) -> list[tuple[Variant, pd.DataFrame]]:
    """Rows of each variant, in the order of their names; the kernel is named where a library has several."""
    several = len(rows["kernel_source"].unique()) > 1
    groups = rows.groupby([rows["kernel_source"], rows[compute_column], rows["kv_dtype"]], sort=True)
    return [
        ((str(kernel) if several else "", TYPES[compute][1], TYPES[cache][1]), part)
        for (kernel, compute, cache), part in groups
        if compute in TYPES and cache in TYPES
    ]
