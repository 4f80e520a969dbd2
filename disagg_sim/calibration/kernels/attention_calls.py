"""Rows of attention tables as calls of a kernel: counts and sizes, by the functions that a model's layer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.calibration.kernels.limits import MLA_NOPE, MLA_RANK, MLA_ROPE, MLA_VALUE, TYPES
from disagg_sim.physics.layer import absorbed_shape, expanded_shape
from disagg_sim.physics.work import (
    AttentionShape,
    MlaDims,
    Work,
    causal_pairs,
    gqa_decode_work,
    gqa_prefill_work,
    mla_work,
)

if TYPE_CHECKING:
    import pandas as pd


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
