"""Time the draft passes of a decode step with speculation. Speculation page, "What is counted"."""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.cost import total_cost
from disagg_sim.physics.drafting import joining, of_drafter
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.experts import join_experts
from disagg_sim.physics.passes.layers import AttentionSide, LayerTimes, all_stages, attention_side
from disagg_sim.physics.roofline import AnySums, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, tabulate
from disagg_sim.physics.work import Numeric


def add_drafts(
    at: Setup,
    mapping: Sharding,
    times: LayerTimes,
    *,
    context: Numeric,
    rank: DistinctCounts,
    micro: Numeric,
    drafts: Numeric,
    form: str,
) -> LayerTimes:
    """Add the draft passes of a step to the end of its last stage.

    The passes are serial. The first takes in all 1 + k verified tokens of a sequence, whose cache the drafter needs,
    each of the other k - 1 the last draft; each ends in the head of one token of a sequence.

    Parameters
    ----------
    at, mapping
        Setup with speculation, and sharding of the instance. [1]
    times
        Of the verifying pass. [s]
    context
        Cached tokens of each sequence, the mean. [token]
    rank, micro
        Sequences of a micro-batch on the fullest rank, and on all ranks. [1]
    drafts
        k; none where 0. [token]
    form
        Of MLA.

    Returns
    -------
    LayerTimes
        With a longer head, and sums of all passes. [s]

    Examples
    --------
    A draft of DeepSeek-R1 adds queries to 61 layers and a pass of one more. Where the step reads more weights and
    latents than it multiplies, as with ideal kernels at 64 sequences a GPU, it takes a third longer for 1.8 tokens:

    >>> from disagg_sim.physics.passes.decode import decode_step
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.facts.speculation import stated_speculation
    >>> said = stated_speculation("mtp", (0.8, 0.6))
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal", speculation=said)
    >>> some = [Sharding(dp_attn=16, ep=16, draft_tokens=k) for k in (0, 1, 2)]
    >>> steps = [decode_step(at, each, batch=1024.0, context=4096.0) for each in some]
    >>> [f"{1e3 * step.time:.1f} ms, TTL {1e3 * step.ttl:.1f} ms" for step in steps]
    ['16.2 ms, TTL 16.2 ms', '21.4 ms, TTL 11.9 ms', '26.6 ms, TTL 11.1 ms']
    """
    first, first_sums = _pass(at, mapping, context, rank, micro, 1.0 + drafts, form, first=True)
    later, later_sums = _pass(at, mapping, context, rank, micro, 1.0, form, first=False)
    passes, drafting = np.maximum(drafts - 1.0, 0.0), np.where(np.asarray(drafts) > 0, 1.0, 0.0)
    head = times.head + drafting * (first + passes * later)
    sums = times.sums.plus(first_sums, drafting).plus(later_sums, passes)
    return times._replace(head=head, sums=sums)


def _pass(
    at: Setup,
    mapping: Sharding,
    context: Numeric,
    rank: DistinctCounts,
    micro: Numeric,
    new: Numeric,
    form: str,
    *,
    first: bool,
) -> tuple[Numeric, AnySums]:
    """One draft pass, to which every sequence brings ``new`` tokens."""
    own = of_drafter(at)

    def attention(
        tp: Numeric, queries: Numeric, sequences: Numeric, context: Numeric
    ) -> tuple[AttentionSide, Numeric, Sums]:
        tokens = Tokens(decodes=sequences, context=context, queries=queries, emitted=sequences)
        joined = total_cost(joining(at, tp, tokens.linear, first=first), at)
        return attention_side(own, tp, tokens, form, "decode"), joined.time, joined.sums

    layers, joined, sums = tabulate(attention, (mapping.tp_attn, new), rank, context)
    times = join_experts(
        own, mapping, layers, phase="decode", rank=rank.times(new), total=DistinctCounts(micro * new, alike=rank.alike)
    )
    return all_stages(own.model, times) + joined, times.sums.plus(sums)
