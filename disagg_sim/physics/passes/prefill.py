"""Time a prefill pass of whole prompts, also in two halves: one exchanges tokens while the other computes.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids pass
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.passes.engine_time import (
    LayerTimes,
    all_stages,
    host_time,
    launch_time,
    prefill_host,
    prefill_stretch,
    slowest_stage,
    without_host,
)
from disagg_sim.physics.passes.layers import (
    AttentionSide,
    attention_side,
    join_experts,
    stretched,
    with_draft_model,
    with_host_and_hops,
)
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.roofline import AnySums, at_columns, chosen_sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, alike_rows, tabulate
from disagg_sim.physics.work import Numeric, Tokens


class PromptLoad(NamedTuple):
    """Equal prompts that stand for those of the slowest ranks of a pass."""

    prompts: Numeric  # as many tokens as the rank with the most, with the prompts' length [1]
    new: Numeric  # length with which they have the query-key pairs of the rank with the most [token]
    past: Numeric | None = None  # tokens before them whose cache is there already; None = as of all prompts [token]


class PrefillPass(NamedTuple):
    """One pass of a batch of prompts through an instance."""

    ftl: Numeric  # first-token latency, no queue [s]
    busy: Numeric  # time of the slowest stage [s]
    sums: AnySums  # by resource, over the whole pass [s]
    load: Numeric = 0.0  # to load cached tokens into HBM; hidden behind the previous pass, so not in ``busy`` [s]
    stall: Numeric = 0.0  # for which the slowest stage waits, as a pipeline holds no more chunks than stages [s]

    @property
    def interval(self) -> Numeric:
        """Time from the start of a pass to that of the next one in a full queue. [s]"""
        return self.busy + self.stall

    def columns(self, first: int, count: int) -> PrefillPass:
        """Take ``count`` columns of a grid, from column ``first`` on."""
        place = np.arange(first, first + count)
        ftl, busy, stall = (
            np.take(each, place, axis=1) if np.ndim(each) else each for each in (self.ftl, self.busy, self.stall)
        )
        return PrefillPass(ftl, busy, at_columns(self.sums, place), self.load, stall)

    def where(self, take: Numeric, other: PrefillPass) -> PrefillPass:
        """Take this pass at the points of ``take`` and the ``other`` at the rest."""
        ftl, busy, load, stall = (
            np.where(take, getattr(self, name), getattr(other, name)) for name in ("ftl", "busy", "load", "stall")
        )
        return PrefillPass(ftl, busy, chosen_sums(take, self.sums, other.sums), load, stall)


def prefill_pass(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    isl: Numeric,
    past: Numeric = 0.0,
    mla_form: str = "auto",
    slowest: PromptLoad | None = None,
) -> PrefillPass:
    """Time the prefill of ``batch`` prompts of ``isl`` tokens, unchunked.

    With pp stages the prompts of a rank form m = min(pp, prompts) micro-batches:
    ``FTL = host + sum_s t_s + (m-1)*max_s t_s + (p-1)*hop``, the makespan of m equal jobs in a flow
    shop; at pp = 1 it is the pass time. Prompts also pass draft layers of the model; a separate draft model runs
    after the last stage. With an engine each micro-batch has its own host time, kernels take ``prefill_stretch``
    times as long, and a stage takes at least the time to launch its kernels. Source: physics page, section 7; for
    cached tokens section 8.

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Prompts of a pass over all DP ranks, a number or of shape (1, batches). [request]
    isl
        Length of each prompt. [token]
    past
        Cached tokens of each prompt; the other ``isl - past`` are computed and attend to all ``isl``. [token]
    mla_form
        ``auto`` (up-projected; after cached tokens the faster of up-projected and latent), or the form to time; ignored
        without MLA.
    slowest
        Equal prompts that take as long as those of the slowest ranks, of shape (rows, batches); ``isl`` is then the
        mean length. None = all ranks have an even share of the prompts, rounded up, of length ``isl``.

    Returns
    -------
    PrefillPass
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    Four pipeline stages start passes four times as often, but one prompt takes about as long:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> one, four = (prefill_pass(at, Sharding(tp_attn=8, tp_ffn=8, pp=p), batch=1, isl=8192) for p in (1, 4))
    >>> f"busy {one.busy / four.busy:.1f}, FTL {one.ftl / four.ftl:.2f}"
    'busy 4.0, FTL 0.95'

    With 90 % of a prompt cached, 10 % of the matrix multiplies and 19 % of the query-key pairs are left:

    >>> whole, rest = (prefill_pass(at, Sharding(tp_attn=8, tp_ffn=8), batch=1, isl=65536, past=p) for p in (0, 58976))
    >>> f"{rest.ftl / whole.ftl:.3f}"
    '0.121'
    """
    at, own, pp, new = at.with_draft_layers, at.draft_model, mapping.pp, 1.0 * (isl - past)
    per_rank = np.ceil(batch / mapping.dp_attn)
    microbatches = np.minimum(pp, per_rank)
    prompts = np.ceil(per_rank / microbatches)
    dcp, pcp = mapping.shares
    alike, alike_prompts = (alike_rows((pp, mapping.dp_attn, *more), batch) for more in ((pcp, new), ()))
    total = DistinctCounts(np.minimum(prompts * mapping.dp_attn, batch) * new, alike=alike)
    new_each, past_each = new, past
    if slowest is not None:
        prompts, new_each, alike, alike_prompts = slowest.prompts / microbatches, slowest.new, None, None
        past_each = past if slowest.past is None else slowest.past

    def layers(of: Setup) -> LayerTimes:
        def attention(
            tp: Numeric, dcp: Numeric, pcp: Numeric, sequences: Numeric, new: Numeric, past: Numeric
        ) -> AttentionSide:
            tokens = Tokens(prompts=sequences, new=new, past=past, latent=past, emitted=sequences, dcp=dcp, pcp=pcp)
            return attention_side(of, tp, tokens, mla_form, "prefill")

        counts = DistinctCounts(prompts, alike=alike_prompts)
        side = tabulate(attention, (mapping.tp_attn, dcp, pcp), counts, new_each, past_each)
        rank = DistinctCounts(prompts * new_each / pcp, alike=alike)
        times = join_experts(of, mapping, side, phase="prefill", rank=rank, total=total)
        return stretched(times, prefill_stretch(of))

    times = layers(at)
    if own is not None:
        times = with_draft_model(times, own.model, layers(own))
    stage, whole = slowest_stage(at, pp, times), all_stages(at.model, times)
    hop = hop_cost(prompts * new_each / pcp, mapping.gpus, at) * (pp - 1)
    launch = launch_time(at, mapping)
    stage, whole = np.maximum(stage, launch), np.maximum(whole, launch * pp)
    busy = microbatches * stage + prefill_host(at, mapping, microbatches)
    ftl = busy + (whole - stage) + hop.time
    if overlaps(at, mapping):
        ranks = np.minimum(batch, mapping.dp_attn)
        halves = overlapped_prefill(at, mapping, tokens=batch * new, ranks=ranks, isl=isl, past=past)
        wide = crosses_domains(at, mapping)
        ftl, busy = np.where(wide, halves, ftl), np.where(wide, halves, busy)
    return PrefillPass(ftl, busy, with_host_and_hops(times.sums, hop, host_time(at, mapping, 0.0)))


def crosses_domains(at: Setup, mapping: Sharding) -> Numeric:
    """Tell whether experts under attention DP span NVLink domains; engines overlap two halves only then."""
    return (mapping.dp_attn > at.system.nvlink_domain) & (mapping.tp_attn == 1) & (mapping.pp == 1) & (mapping.pcp == 1)


def overlaps(at: Setup, mapping: Sharding) -> bool:
    """Tell whether the engine of ``at`` overlaps the halves of a prefill pass on any of the mappings."""
    engine = at.overheads
    if engine is None or not (engine.two_batch_overlap and at.model.is_moe):
        return False
    return bool(np.any(crosses_domains(at, mapping)))


def overlapped_prefill(
    at: Setup, mapping: Sharding, *, tokens: Numeric, ranks: Numeric, isl: Numeric, past: Numeric = 0.0
) -> Numeric:
    """Time a pass of ``tokens`` new tokens in two halves, each the longer of its work and its exchange. [s]

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance. [1]
    tokens
        New tokens over all DP ranks. [token]
    ranks
        DP ranks that share them. [1]
    isl, past
        Length and cached tokens of each prompt. [token]

    Returns
    -------
    numeric
        FTL and time between passes, of the broadcast shape. [s]

    Notes
    -----
    ``t = 2*max(c, m)`` with work c and exchange m of one half, plus host time once (physics page, section 7).

    Examples
    --------
    The longer of work and exchange hides the other, so two halves take 0.5 to 1 times the plain pass:

    >>> from disagg_sim.physics.passes.prefill import prefill_pass
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=32, ep=32)
    >>> halves = overlapped_prefill(at, wide, tokens=32 * 8192.0, ranks=32, isl=8192)
    >>> f"{halves / prefill_pass(at, wide, batch=32, isl=8192).ftl:.1f}"
    '0.6'
    """
    prompts = replace(mapping, draft_tokens=0)  # only decode steps have drafts
    half = mixed_step(half_pass_setup(at), prompts, batch=0.0, context=isl, chunk=Chunk(tokens / 2, isl, ranks, past))
    return two_halves_time(at, mapping, half.time, half.sums.communication)


@lru_cache(maxsize=64)
def half_pass_setup(at: Setup) -> Setup:
    """Make the setup of one half: host and launch times are 0 s, the shared expert never overlaps dispatch."""
    bare = without_host(at)
    return replace(bare, profile=replace(bare.profile, shared_expert_overlaps_dispatch=False))


def two_halves_time(at: Setup, mapping: Sharding, half: Numeric, exchange: Numeric) -> Numeric:
    """Time both halves: twice the longer of work and exchange of one, at least the launches, plus host time once. [s]

    ``half`` includes its exchange and the ``prefill_stretch`` of the engine; ``exchange`` has no stretch. [s]

    Halves of 10 ms: an exchange of 4 ms hides behind 6 ms of work; one of 8 ms hides 2 ms of work.

    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=32, ep=32)
    >>> [f"{1e3 * two_halves_time(at, wide, 10e-3, exchange):.0f} ms" for exchange in (4e-3, 8e-3)]
    ['12 ms', '16 ms']
    """
    exchange = prefill_stretch(at) * exchange
    kernels = 2.0 * np.maximum(half - exchange, exchange)
    return np.maximum(kernels, launch_time(at, mapping)) + host_time(at, mapping, 0.0)
