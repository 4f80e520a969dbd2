"""Time a decode step, draft passes included: a mixed step without a chunk.

Physics page, section 7, and speculation page, "What is counted". Degrees and batches are numbers or arrays that
broadcast; grids pass degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.mixed import Chunk, mixed_step_by_form
from disagg_sim.physics.roofline import AnySums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


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

    >>> from disagg_sim.facts.speculation import stated_speculation
    >>> mtp = stated_speculation("mtp", (0.8, 0.6))
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal", speculation=mtp)
    >>> shardings = [Sharding(dp_attn=16, ep=16, draft_tokens=k) for k in (0, 1, 2)]
    >>> steps = [decode_step(at, each, batch=1024.0, context=4096.0) for each in shardings]
    >>> [f"{1e3 * step.time:.1f} ms, TTL {1e3 * step.ttl:.1f} ms" for step in steps]
    ['16.2 ms, TTL 16.2 ms', '21.4 ms, TTL 11.9 ms', '26.6 ms, TTL 11.1 ms']
    """
    step, *_ = mixed_step_by_form(
        at,
        mapping,
        batch=batch,
        context=context,
        chunk=Chunk(tokens=0.0, isl=1.0),
        decode_form=mla_form,
        rank_batch=rank_batch,
    )
    ttl = step.time if at.speculation is None else step.time / at.accepted_length(at.drafts(mapping))
    return DecodeStep(ttl, np.minimum(mapping.pp, batch), step.sums, step.time)
