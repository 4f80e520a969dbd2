"""Predict whole MLA modules from the operators of a layer, to compare with measured modules.

Nothing is fitted here. A measured block is input norms, projections, attention and output projection of a DeepSeek
layer; the prediction is the sum of the layer's matrix multiplies and of its attention by their fits, as a pass adds
them up. Norms, rotary embedding and cache write between them are not in the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import DecodeAttentionFit, Fit, GemmFit, PrefillAttentionFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.facts.precision import BF16, FORMATS, Precision
from disagg_sim.physics.attention import decode_attention_cost, prefill_attention_cost
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.blocks.mla import absorbed_product
from disagg_sim.physics.gemm import gemm_cost
from disagg_sim.physics.rates import decode_attention_rate, gemm_rate, prefill_attention_rate
from disagg_sim.physics.work import Operator, Tokens
from lab.calibration.kernels.gemm import FORMAT_OF
from lab.calibration.kernels.limits import MLA_NOPE, MLA_RANK, TYPES

Array = NDArray[np.float64]
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
