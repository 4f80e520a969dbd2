"""Time a decode step, draft passes included.

Physics page, section 7, and speculation page, "What is counted". Degrees and batches are numbers or arrays that
broadcast; grids pass degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.cost import hop_cost, total_cost
from disagg_sim.physics.passes.engine_time import LayerTimes, all_stages, host_time, slowest_stage, step_time
from disagg_sim.physics.passes.layers import AttentionSide, attention_side, join_experts, with_host_and_hops
from disagg_sim.physics.roofline import AnySums, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, alike_rows, tabulate
from disagg_sim.physics.work import Numeric, Tokens
from disagg_sim.techniques.speculation.physics import joining, of_drafter


class DecodeStep(NamedTuple):
    """A decode step of a full batch."""

    ttl: Numeric  # token-to-token latency [s]
    microbatches: Numeric  # [1]
    sums: AnySums  # by resource, over the whole step; the largest is its bound [s]
    time: Numeric  # of the step: ``ttl`` times the accepted tokens of a sequence [s]


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
    micro-batches: either the slowest stage is always busy, or a token passes all stages one by one.
    The fullest rank has ceil(ceil(B/m)/dp) sequences. With an engine each micro-batch has its own host time
    (``engine_time.step_time``). The mean context ISL + OSL/2 gives the exact mean TTL if t is affine in the
    context. Source: physics page, section 7.

    With k draft tokens (``mapping.draft_tokens``) a step verifies 1 + k tokens of every sequence and drafts the next k,
    which lengthens its last stage; ``TTL = t/AL(k)``, the mean over the accepted tokens. The k draft passes are serial:
    the first reads all 1 + k verified tokens of a sequence, each later pass the last draft token, and each pass ends
    with the LM head for one token of a sequence. Source: speculation page, "What is counted".

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Sequences over all DP ranks, a number or of shape (1, batches). [request]
    context
        Mean cached tokens of a sequence on the slowest DP rank; a number or of shape (rows, batches). [token]
    mla_form
        ``auto`` (absorbed), or the form to time; ignored without MLA.
    rank_batch
        Sequences of the fullest DP rank, of the shape of ``context``; None = an even share, rounded up. [request]

    Returns
    -------
    DecodeStep
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    At batch 1 each of 8 GPUs reads 9 GB of fp8 weights at 4.8 TB/s. A batch of 64 shares these reads, so 64 times the
    tokens take only 1.5 times as long: what is added are their caches and all-reduces.

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> step = decode_step(at, Sharding(tp_attn=8, tp_ffn=8), batch=np.array([[1, 64, 256]]), context=1000.0)
    >>> [f"{1e3 * ttl:.1f} ms" for ttl in step.ttl[0]]
    ['1.9 ms', '2.8 ms', '5.8 ms']

    Each draft token of DeepSeek-R1 adds a query to 61 layers and a pass of one more layer. With ideal kernels and 64
    sequences per GPU it doubles the arithmetic, but reads few more weights: 1.3 times as long for 1.8 tokens:

    >>> from disagg_sim.techniques.speculation.facts import stated_speculation
    >>> mtp = stated_speculation("mtp", (0.8, 0.6))
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal", speculation=mtp)
    >>> shardings = [Sharding(dp_attn=16, ep=16, draft_tokens=k) for k in (0, 1, 2)]
    >>> steps = [decode_step(at, each, batch=1024.0, context=4096.0) for each in shardings]
    >>> [f"{1e3 * step.time:.1f} ms, TTL {1e3 * step.ttl:.1f} ms" for step in steps]
    ['16.2 ms, TTL 16.2 ms', '21.4 ms, TTL 11.9 ms', '26.6 ms, TTL 11.1 ms']
    """
    pp, drafts, (dcp, _) = mapping.pp, at.drafts(mapping), mapping.shares
    queries = 1.0 + drafts
    microbatches = np.minimum(pp, batch)
    micro = np.ceil(batch / microbatches)
    alike = None if rank_batch is not None else alike_rows((pp, mapping.dp_attn, queries), batch)
    even = np.ceil(micro / mapping.dp_attn)  # fewest that the fullest rank can have, however requests are routed
    rank = DistinctCounts(even if rank_batch is None else np.maximum(rank_batch / microbatches, even), alike=alike)

    def one_pass(of: Setup, new: Numeric, attention: Callable[..., Any], dcp: Numeric = 1.0) -> tuple[LayerTimes, Any]:
        """Time the layers for ``new`` tokens of each sequence; also return the other results of ``attention``."""
        side, *others = tabulate(attention, (mapping.tp_attn, dcp, new), rank, context)
        tokens, total = rank.times(new), DistinctCounts(micro * new, alike=alike)
        return join_experts(of, mapping, side, phase="decode", rank=tokens, total=total), others

    def verified(tp: Numeric, dcp: Numeric, new: Numeric, sequences: Numeric, context: Numeric) -> tuple[AttentionSide]:
        tokens = Tokens(decodes=sequences, context=context, queries=new, emitted=sequences * new, dcp=dcp)
        return (attention_side(at, tp, tokens, mla_form, "decode"),)

    times, _ = one_pass(at, queries, verified, dcp)
    if np.ndim(drafts) or drafts:
        own = of_drafter(at)

        def draft(new: Numeric, *, first: bool) -> tuple[Numeric, AnySums]:
            """Time a draft pass: the first reads and caches all verified tokens, a later one the last draft."""

            def drafted(
                tp: Numeric, dcp: Numeric, new: Numeric, sequences: Numeric, context: Numeric
            ) -> tuple[AttentionSide, Numeric, Sums]:
                tokens = Tokens(decodes=sequences, context=context, queries=new, emitted=sequences, dcp=dcp)
                joined = total_cost(joining(at, tp, tokens.linear, first=first), at)
                return attention_side(own, tp, tokens, mla_form, "decode"), joined.time, joined.sums

            layers, (joined, sums) = one_pass(own, new, drafted)
            return all_stages(own.model, layers) + joined, layers.sums.plus(sums)

        (first, first_sums), (later, later_sums) = draft(queries, first=True), draft(1.0, first=False)
        passes, drafting = np.maximum(drafts - 1.0, 0.0), np.where(np.asarray(drafts) > 0, 1.0, 0.0)
        sums = times.sums.plus(first_sums, drafting).plus(later_sums, passes)
        times = times._replace(head=times.head + drafting * (first + passes * later), sums=sums)
    stage, whole = slowest_stage(at.model, pp, times), all_stages(at.model, times)
    hop = hop_cost(rank.arguments[0] * queries, mapping.gpus, at) * np.where(np.asarray(pp) > 1, pp, 0.0)
    mean = batch / microbatches
    time = step_time(at, mapping, microbatches, stage, whole, decodes=mean, graphs=True) + hop.time
    time = at.lengthened(time, batch)
    ttl = time if at.speculation is None else time / at.accepted_length(drafts)
    return DecodeStep(ttl, microbatches, with_host_and_hops(times.sums, hop, host_time(at, mapping, mean)), time)
