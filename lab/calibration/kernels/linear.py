"""Fit kernels of linear attention: the convolution and the chunked scan of prefill, their steps of decode.

One fit for each kind and part of the rows of one library and version; where it has several kernels of a part, of the
one with most rows. The form is ``physics.attention_parts``; FLOP and bytes are those of the blocks, whose sizes a row
tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import CONVOLUTION, CONVOLUTION_STEP, PROMPT_LENGTH, SCAN, STEP, AttentionPartFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.layers import ATTENTION_KINDS
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.physics.attention_parts import part_cost, part_rate
from disagg_sim.physics.blocks import ATTENTION
from disagg_sim.physics.work import Operator, Tokens
from disagg_sim.units import US
from lab.calibration.kernels.robust import Array, Parameter, by_fit, by_name, origin, solved

#: Positions of rows, and the operator that they ask for.
_Call = tuple[NDArray[np.intp], Operator]
#: Sizes of heads; formats of projections do not matter here, so those of any model do.
_HEADS = ("k_heads", "k_dim", "v_heads", "v_dim", "d_conv")
_ANY_MODEL = "llama_3_1_8b"
#: Phases of a table: a prompt, one token a sequence. Rows of several draft tokens a sequence have no form.
CONTEXT, GENERATION = "context", "generation"
#: Word in the name of a kernel that is a convolution.
_CONVOLUTION = "conv"
_FLOOR = Parameter("t0", 5 * US, 0.3 * US, 200 * US)
_COMPUTE, _MEMORY = Parameter("e_compute", 0.2, 1e-3, 2.0), Parameter("e_memory", 0.7, 1e-2, 2.0)
_WALK = Parameter("walk", 3e-8, 1e-10, 1e-6)
#: Part -> numbers that are fitted.
_NUMBERS = {
    SCAN: (_FLOOR, _COMPUTE, _MEMORY, _WALK),
    CONVOLUTION: (_FLOOR, _MEMORY),
    STEP: (_FLOOR, _MEMORY),
    CONVOLUTION_STEP: (_FLOOR, _MEMORY),
}


def fit_linear_attention(rows: pd.DataFrame, system: SystemSpec) -> list[AttentionPartFit]:
    """Fits of a linear_attention table, of rows of one (framework, version), ``latency`` in s."""
    found = []
    for labels, group in rows.groupby([rows["kind"], _part_of(rows)], sort=True):
        kind, part = (str(label) for label in labels)
        if part not in _NUMBERS:
            continue
        kernels = group["kernel_source"].value_counts()
        mine = group[group["kernel_source"] == min(kernels.index, key=lambda name: (-kernels[name], name))]
        found.append(_fit(mine, kind, part, system))
    return found


def _fit(rows: pd.DataFrame, kind: str, part: str, system: SystemSpec) -> AttentionPartFit:
    """The fit of the rows of one kernel."""
    numbers, calls = _NUMBERS[part], list(_calls(rows, kind, part))
    words = origin(rows, ("batch", PROMPT_LENGTH)) | {"kind": kind, "part": part, "parameters": len(numbers)}
    words["kernel"] = str(rows["kernel_source"].iloc[0])

    def build(values: Array) -> AttentionPartFit:
        return AttentionPartFit(**words, **by_name(numbers, values))

    measured = rows["latency"].to_numpy(dtype=float)
    return solved(build, lambda fit: _times(calls, fit, system), measured, numbers)[1]


def predict_linear_attention(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AttentionPartFit]) -> Array:
    """Time of each row of a linear_attention table by the fit of its library, kind, part and kernel, else NaN. [s]"""
    words = {"engine": rows["framework"], "version": rows["version"], "kind": rows["kind"]}
    words |= {"part": _part_of(rows), "kernel": rows["kernel_source"]}
    return by_fit(rows, fits, words, lambda table, fit: _times(list(_calls(table, fit.kind, fit.part)), fit, system))


def _part_of(rows: pd.DataFrame) -> pd.Series:
    """Part of each row, "" where it has no form."""
    convolves = rows["kernel_source"].str.contains(_CONVOLUTION)
    context = np.where(convolves, CONVOLUTION, SCAN)
    generation = np.where(convolves, CONVOLUTION_STEP, STEP)
    part = np.where(rows["phase"] == CONTEXT, context, np.where(rows["phase"] == GENERATION, generation, ""))
    return pd.Series(part, index=rows.index)


def _calls(rows: pd.DataFrame, kind: str, part: str) -> Iterator[_Call]:
    """Rows of one set of heads at a time, as an operator of a block of these heads."""
    precision = load_precision("bf16").resolve(load_model(_ANY_MODEL))
    heads: Any
    for heads, group in rows.groupby(list(_HEADS), sort=True):
        key_heads, key_dim, value_heads, value_dim, width = (int(size) for size in heads)
        sizes = {
            "gdn": {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim},
            "kda": {"heads": value_heads, "head_dim": value_dim},
            "mamba2": {"heads": value_heads, "head_dim": value_dim, "state_dim": key_dim, "groups": key_heads},
        }[kind]
        made: Any = ATTENTION[kind]
        spec: Any = ATTENTION_KINDS[kind]
        block = made(spec(**sizes, conv_width=width))
        batch, length = (group[name].to_numpy(dtype=float) for name in ("batch", PROMPT_LENGTH))
        if part in (SCAN, CONVOLUTION):
            operators = block.prefill(precision, 1.0, Tokens(prompts=batch, new=length), "auto")[0]
        else:
            operators = block.decode(precision, 1.0, Tokens(decodes=batch, context=length), "auto")[0]
        (mine,) = (op for op in operators if op.table == f"{kind} {part}")
        yield rows.index.get_indexer(group.index), mine


def _times(calls: list[_Call], fit: AttentionPartFit, system: SystemSpec) -> Array:
    rate = part_rate(fit, system)
    result = np.zeros(sum(len(where) for where, _ in calls))
    for where, op in calls:
        result[where] = part_cost(op.work, op.attention, rate).time
    return result
