"""Time of a decode step.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.distinct import alike_rows
from disagg_sim.physics.drafting import accepted_length, drafts_of
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.drafts import add_drafts
from disagg_sim.physics.passes.engine_time import host_time, step_time
from disagg_sim.physics.passes.experts import join_experts
from disagg_sim.physics.passes.layers import AttentionSide, all_stages, attention_side, slowest_stage, with_ends
from disagg_sim.physics.roofline import AnySums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, tabulate
from disagg_sim.physics.work import Numeric


class DecodeStep(NamedTuple):
    """A decode step of a full batch."""

    ttl: Numeric  # token-to-token latency [s]
    microbatches: Numeric  # [1]
    sums: AnySums  # of the whole pass; the largest names its bound [s]
    time: Numeric  # of the step, in which a sequence gets ``ttl`` times its accepted tokens [s]


def decode_step(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    context: Numeric,
    mla_form: str = "auto",
    rank_batch: Numeric | None = None,
) -> DecodeStep:
    """Time one decode step of ``batch`` sequences (over all DP ranks) at mean length ``context``.

    ``TTL = max(m*max_s t_s, sum_s t_s) + host + p*hop`` over the stages s of m = min(pp, B)
    micro-batches: either the slowest stage is always busy, or a token has to walk through all of them.
    The fullest rank holds ceil(ceil(B/m)/dp) sequences. With an engine every micro-batch has host time of its
    own (``engine_time.step_time``). The mean context ISL + OSL/2 gives the mean TTL exactly where t is affine in
    context. Source: physics page, section 7.

    With k draft tokens (``mapping.draft_tokens``) a step verifies 1 + k tokens of every sequence and drafts the next k,
    which lengthens its last stage; ``TTL = t/AL(k)``, the mean over the accepted tokens. Source: speculation
    page, "What is counted".

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Sequences over all DP ranks, a number or of shape (1, batches). [request]
    context
        Cached tokens of each, the mean, on the rank with the most; a number or of shape (rows, batches). [token]
    mla_form
        ``auto`` (absorbed), or one form forced; without effect where there is no MLA.
    rank_batch
        Sequences of the fullest DP rank, of the shape of ``context``; None = an even share, rounded up. [request]

    Returns
    -------
    DecodeStep
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    At batch 1 each of 8 GPUs reads its 9 GB of fp8 weights at 4.8 TB/s. 64 sequences share that reading, so 64 times
    the tokens cost half as much time again, for their caches and all-reduces:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> step = decode_step(at, Sharding(tp_attn=8, tp_ffn=8), batch=np.array([[1, 64, 256]]), context=1000.0)
    >>> [f"{1e3 * ttl:.1f} ms" for ttl in step.ttl[0]]
    ['1.9 ms', '2.8 ms', '5.8 ms']
    """
    pp, drafts = mapping.pp, drafts_of(at, mapping)
    queries = 1.0 + drafts
    microbatches = np.minimum(pp, batch)
    micro = np.ceil(batch / microbatches)
    alike = None if rank_batch is not None else alike_rows((pp, mapping.dp_attn, queries), batch)
    even = np.ceil(micro / mapping.dp_attn)  # which a micro-batch has on some rank, however requests are routed
    rank = DistinctCounts(even if rank_batch is None else np.maximum(rank_batch / microbatches, even), alike=alike)
    dcp, _ = mapping.shares

    def attention(tp: Numeric, dcp: Numeric, new: Numeric, sequences: Numeric, context: Numeric) -> AttentionSide:
        tokens = Tokens(decodes=sequences, context=context, queries=new, emitted=sequences * new, dcp=dcp)
        return attention_side(at, tp, tokens, mla_form, "decode")

    verified = tabulate(attention, (mapping.tp_attn, dcp, queries), rank, context)
    rows = rank.times(queries)
    total = DistinctCounts(micro * queries, alike=alike)
    times = join_experts(at, mapping, verified, phase="decode", rank=rows, total=total)
    if np.ndim(drafts) or drafts:
        times = add_drafts(at, mapping, times, context=context, rank=rank, micro=micro, drafts=drafts, form=mla_form)
    stage, whole = slowest_stage(at.model, pp, times), all_stages(at.model, times)
    hop = hop_cost(rows.arguments[0], mapping.gpus, at) * np.where(np.asarray(pp) > 1, pp, 0.0)
    mean = batch / microbatches
    time = step_time(at, mapping, microbatches, stage, whole, decodes=mean, graphs=True) + hop.time
    ttl = time if at.speculation is None else time / accepted_length(at.speculation, drafts)
    return DecodeStep(ttl, microbatches, with_ends(times.sums, hop, host_time(at, mapping, mean)), time)
