"""Time of a decode step.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.layers import (
    AttentionSide,
    all_stages,
    attention_side,
    join_experts,
    slowest_stage,
    with_ends,
)
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Levels, tabulate
from disagg_sim.physics.work import Numeric


class DecodeStep(NamedTuple):
    """A decode step of a full batch."""

    ttl: Numeric  # token-to-token latency [s]
    microbatches: Numeric  # [1]
    sums: Sums  # of the whole pass; the largest names its bound [s]


def decode_step(at: Setup, mapping: Mapping, *, batch: Numeric, context: Numeric, mla_form: str = "auto") -> DecodeStep:
    """One decode step of ``batch`` sequences (over all DP ranks) at mean length ``context``.

    ``TTL = max(m*max_s t_s, sum_s t_s) + host + p*hop`` over the stages s of m = min(pp, B)
    micro-batches: either the slowest stage is always busy, or a token has to walk through all of them.
    The fullest rank holds ceil(ceil(B/m)/dp) sequences. Host work of one micro-batch hides behind the
    others. The mean context ISL + OSL/2 gives the mean TTL exactly where t is affine in context.
    Source: physics page, section 7.
    """
    pp = mapping.pp
    microbatches = np.minimum(pp, batch)
    micro = np.ceil(batch / microbatches)
    rank = Levels(np.ceil(micro / mapping.dp_attn))

    def side(tp: Numeric, sequences: Numeric) -> AttentionSide:
        tokens = Tokens(decodes=sequences, context=context, emitted=sequences)
        return attention_side(at, tp, tokens, mla_form, "decode")

    times = join_experts(
        at, mapping, tabulate(side, (mapping.tp_attn,), rank), phase="decode", rank=rank, total=Levels(micro)
    )
    stage = slowest_stage(at.model, pp, times)
    hop = hop_cost(rank.tokens, mapping.gpus, at) * np.where(np.asarray(pp) > 1, pp, 0.0)
    ttl = np.maximum(microbatches * stage, all_stages(at.model, times)) + at.profile.host + hop.time
    return DecodeStep(ttl, microbatches, with_ends(at, times.sums, hop))
