"""Time designs again, also under other rates.

``times_of`` times the passes that a design is made of (arrays of shape (rows,), the physics of the grids without their
axes) and ``scores_of`` puts these together as its mode does. Under a distribution of lengths a pass of prefill is a
mean: it is timed at every length that stands for the distribution (``timed_prompts``), with the weights of the search
that found the design. What a search chose stays as chosen: nothing is made feasible or infeasible. ``certainty.rows``
reads designs from tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prompts import PromptPasses
from disagg_sim.physics.residents import RankLoad
from disagg_sim.physics.setup import Setup
from disagg_sim.search.passes import slowest_passes
from disagg_sim.search.phase_grid import PHASES
from disagg_sim.serving.slot_turnover import Refill, refill_passes
from disagg_sim.serving.step_mixing import MixedShares, longest_gap, mixed_steps, time_of_others, token_times
from disagg_sim.workload.lengths import Lengths

MODES = tuple(mode.value for mode in ServingMode)


class Times(NamedTuple):
    """Times of the passes of designs, arrays whose last axis is (rows,). [s]"""

    step: Any  # a decode step
    fill: Any  # to the first token: a pass of prefill, or the mixed steps that take in a prompt
    busy: Any  # of the slowest stage in a prefill pass; co-located the passes for one prompt, or a mixed step
    long: Any = 0.0  # a pass of long prompts, or a mixed step with a piece of one; 0 where no row's TTL is its gap
    load: Any = 0.0  # to load cached pasts into HBM before a pass
    stall: Any = 0.0  # between passes of prefill beyond ``busy``, for which the slowest stage of a pipeline waits
    own: Any = 0.0  # a mixed step with a piece on a request's own rank

    @property
    def interval(self) -> Any:
        """From the start of a pass of prefill to that of the next one. [s]"""
        return np.maximum(self.busy + self.stall, self.load)


class Prompt(NamedTuple):
    """Prompts whose pass is timed, of a row of one length, and how often it counts: numbers or arrays (rows,)."""

    isl: Any  # [token]
    past: Any = 0.0  # tokens of it that are cached [token]
    fill: Any = 1.0  # [1]
    busy: Any = 1.0  # [1]
    long: Any = 0.0  # [1]
    load: Any = 0.0  # [1]
    tier: str = HBM  # where its past lies
    waits: bool = False  # whether it stands for the prompts that DP ranks wait for
    batch: Any = None  # prompts of a co-located pass, which decode waits for; None = as the design says [request]
    lone: bool = False  # whether these are all on one rank; in piggyback whether one rank has a piece
    own: Any = 0.0  # in piggyback, of the steps with a piece on a request's own rank [1]


class Scores(NamedTuple):
    """Latencies and throughput of designs; arrays of the shape of the times."""

    ftl: Any  # [s]
    ttl: Any  # as the row means it, of ``serving.colocation.TTL_MEASURES`` [s]
    throughput: Any  # output tokens per second over all GPUs; of prefill alone prompt tokens [token/s]


@dataclass(frozen=True, eq=False, kw_only=True)
class Designs:
    """Rows of a table that share mode, settings, lengths and kind of prefill; arrays have shape (rows,)."""

    mode: str  # of ``MODES``, or of ``PHASES`` where an instance of one phase stands for itself
    lengths: Lengths
    at: Setup  # of decode, and of instances that do both phases
    prefill_at: Setup
    rows: Ints  # places in the table
    mapping: Sharding  # of decode
    prefill_mapping: Sharding
    batch: Floats  # of a decode instance [request]
    prefill_batch: Floats  # prompts of a pass; co-located the most that it may take [request]
    chunk_tokens: Floats  # CPP, in all rows or in none, one size where lengths vary; 0 = whole prompts [token]
    instances: Floats  # of decode [1]
    prefill_instances: Floats  # [1]
    total_gpus: Floats  # [1]
    mixed_chunk: Floats  # prefill tokens of a mixed step, over all DP ranks [token]
    mixed_share: Floats  # [1]
    hold_steps: Floats  # that prompts are held back at most [1]
    rounding: Floats  # matched rate over that of real-valued counts, 1 where one instance does both phases [1]
    by_gap: NDArray[np.bool_]  # whether the row's TTL is the largest gap
    by_tpot: NDArray[np.bool_]  # whether it leaves out the prefill of the request's own prompt; else it is the mean
    form: str  # of MLA in prefill
    prompts: tuple[Prompt, ...] = ()  # of ``timed_prompts``, or some of them
    held: RankLoad | None = None  # what the DP ranks hold that a decode step waits for; None = as the lengths say

    @property
    def shared(self) -> bool:
        """Whether one instance does both phases."""
        return self.mode in MODES[1:]

    @cached_property
    def load(self) -> RankLoad:
        """What the DP ranks hold that a decode step waits for."""
        return self.held or self.lengths.on_ranks(self.batch, self.mapping.dp_attn)

    @cached_property
    def filled(self) -> Refill:
        """Passes that fill the free seats of co-located instances, (rows,) or (rows, knots)."""
        accepted = self.at.accepted_length(self.mapping.draft_tokens)
        counts = self.batch, self.mapping.dp_attn, self.prefill_batch, self.hold_steps
        batch, ranks, most, steps = (each.astype(np.int64) for each in counts)
        return refill_passes(batch, ranks, most, np.minimum(accepted / self.lengths.gaps, 1.0), steps)

    @property
    def steps(self) -> MixedShares:
        """Kinds of steps of piggybacked instances, (rows,). [1]"""
        return mixed_steps(self.mixed_share, self.mapping.dp_attn)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that the designs do."""
        return (self.mode,) if self.mode in PHASES else ("prefill", "decode")

    def under(self, *, decode: Setup | None = None, prefill: Setup | None = None) -> Designs:
        """The same designs with other settings."""
        return replace(self, at=decode or self.at, prefill_at=prefill or self.prefill_at)

    def of_prompts(self, *prompts: Prompt) -> Designs:
        """The same designs, passes of prefill timed at these prompts alone."""
        found = replace(self, prompts=prompts)
        vars(found).update({name: value for name, value in vars(self).items() if name in ("load", "filled")})
        return found


def timed_prompts(designs: Designs, ftl_quantile: float | None = None) -> tuple[Prompt, ...]:
    """Prompts whose passes, weighted, give the means that the search of a mode takes over the lengths.

    One where the input has one length. In a prefill pool, and in co-located passes, a pass counts with the share of its
    prompts; where a row's TTL is its largest gap, a long prompt (``Lengths.long_prompt``) follows.

    A third of the prompts has 1000 tokens, and 1000 of every 5000 tokens are theirs:

    >>> import disagg_sim as ds
    >>> from disagg_sim.certainty.rows import Origin, designs_of
    >>> lengths = ds.lengths([1000, 2000, 2000], [101, 101, 101])
    >>> at, options = ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ds.Colocation(batch=(8,), every_step_mixed=True)
    >>> points = ds.piggyback(at, ds.Sharding(), lengths, options=options)
    >>> (one,) = designs_of(points, Origin(lengths=lengths))
    >>> [(round(prompt.isl), f"{prompt.busy.item():.3f}") for prompt in timed_prompts(one)]
    [(1000, '0.200'), (2000, '0.800')]
    """
    lengths = designs.lengths
    nodes = lengths.prompt_nodes(float(designs.chunk_tokens[0]))
    new, weights = nodes.new, nodes.weight
    if designs.mode == "piggyback":
        pieces = [np.maximum(designs.mapping.dp_attn * each / designs.mixed_chunk, 1.0) for each in new.tolist()]
        counted = zip(weights.tolist(), pieces, strict=True)
        in_ftl, shares = [weight * each for weight, each in counted], weights * new / (weights @ new)
    else:
        in_ftl, shares = weights.tolist(), weights
    counts = zip(nodes.each(), in_ftl, shares.tolist(), strict=True)
    found = [Prompt(isl, past, fill, busy, load=weight, tier=tier) for (isl, past, weight, tier), fill, busy in counts]
    even = found
    if _unequal(designs):
        alone = np.asarray(designs.prefill_mapping.dp_attn == 1, dtype=float)
        found = [one._replace(fill=one.fill * alone, busy=one.busy * alone, load=one.load * alone) for one in found]
        several = 1.0 - alone
        found.append(Prompt(lengths.mean_isl, fill=several, busy=several, load=several, waits=True))
    if designs.mode == "piggyback" and (loads := lengths.pieces_on_ranks) is not None:
        ranks = designs.mapping.dp_attn
        further = loads.further(np.maximum(designs.mixed_chunk / ranks, 1.0), designs.mixed_share, ranks)
        for isl, sign in zip(loads.ends, (-further, further), strict=True):
            found.append(Prompt(isl, fill=sign * sum(in_ftl), busy=sign))
    if designs.mode == "piggyback":
        found = [kind for one in found for kind in _in_steps(one, designs)]
    if designs.mode == "colocated":
        of_knots = [even if lone else found for lone in designs.filled.lone]  # a rank alone waits for no other
        found = [_at_knot(one, designs.filled, knot) for knot, prompts in enumerate(of_knots) for one in prompts]
    if ftl_quantile is not None and not designs.shared:
        found = [prompt._replace(fill=0.0) for prompt in found]
        found.append(Prompt(*lengths.prompt_quantile(ftl_quantile), fill=1.0, busy=0.0))
    if designs.shared and designs.by_gap.any():
        found.append(Prompt(*lengths.long_prompt, fill=0.0, busy=0.0, long=1.0))
    return tuple(found)


def _in_steps(prompt: Prompt, designs: Designs) -> list[Prompt]:
    """The prompt in steps with a piece on every rank, and on one; its own rank has a piece in all that it waits for."""
    steps, busy = designs.steps, np.where(designs.mapping.dp_attn > 1, designs.mixed_share, 1.0)
    full = prompt._replace(fill=prompt.fill * busy, busy=prompt.busy * steps.full, own=prompt.busy * busy)
    if not np.any(steps.alone):
        return [full]
    alone = {"fill": prompt.fill * (1.0 - busy), "busy": prompt.busy * steps.alone, "own": prompt.busy * (1.0 - busy)}
    return [full, prompt._replace(**alone, load=0.0, lone=True)]


def _at_knot(prompt: Prompt, filled: Refill, knot: int) -> Prompt:
    """The prompt in passes of so many."""
    each, own = filled.each[:, knot], filled.own[:, knot]
    counts = {"fill": prompt.fill * own, "busy": prompt.busy * each, "load": prompt.load * own}
    return prompt._replace(**counts, batch=filled.prompts[:, knot].astype(float), lone=bool(filled.lone[knot]))


def _unequal(designs: Designs) -> bool:
    """Whether passes of prefill wait for the slowest of unequal DP ranks."""
    return designs.mode != "piggyback" and designs.lengths.prompts_on_ranks() is not None


def times_of(designs: Designs, *, step: bool = True, fill: bool = True) -> Times:
    """Time every pass of the designs under their settings, (rows,). [s]"""
    zero = np.zeros(designs.rows.size)
    decode, first, busy, long, load, stall, own = zero, zero, zero, zero, zero, zero, zero
    if step:
        held = designs.load
        decode = decode_step(
            designs.at, designs.mapping, batch=designs.batch, context=held.context, rank_batch=held.batch
        ).ttl
    for prompt in designs.prompts if fill else ():
        whole, often, loaded, stalls = _fill(designs, prompt)
        first, busy, long = first + prompt.fill * whole, busy + prompt.busy * often, long + prompt.long * whole
        load, stall, own = load + loaded, stall + prompt.busy * stalls, own + prompt.own * whole
    return Times(decode, first, busy, long, load, stall, own)


def _fill(designs: Designs, prompt: Prompt) -> tuple[Any, Any, Any, Any]:
    """Time of a pass of prefill, or of a mixed step, of its slowest stage, the weighted load, and the stall. [s]"""
    at, form, tier = designs.prefill_at, designs.form, designs.prefill_at.system.tier(prompt.tier)
    if designs.mode == "piggyback":
        ranks = designs.mapping.dp_attn
        load = load_time(at, designs.mapping, batch=ranks, past=prompt.past, tier=tier)
        chunk = Chunk(designs.mixed_chunk, prompt.isl, past=prompt.past)
        if prompt.lone:
            chunk = Chunk(np.maximum(designs.mixed_chunk / ranks, 1.0), prompt.isl, np.ones_like(ranks), prompt.past)
        step = mixed_step(
            at,
            designs.mapping,
            batch=designs.batch,
            context=designs.load.context,
            chunk=chunk,
            mla_form=form,
            rank_batch=designs.load.batch,
        )
        return step.time, step.time, prompt.load * load, 0.0
    mapping, batch = designs.prefill_mapping, designs.prefill_batch if prompt.batch is None else prompt.batch
    timed = PromptPasses(at, mapping, batch, designs.chunk_tokens, (form,), lone=prompt.lone)
    waits = slowest_passes(timed, designs.lengths) if prompt.waits else None
    (done,) = waits or timed.passes(prompt.isl, prompt.past, tier)
    busy, stall = (done.busy, done.stall) if prompt.batch is None else (done.ftl, 0.0)  # decode waits for all of it
    return done.ftl, busy, prompt.load * done.load, stall


def scores_of(designs: Designs, times: Times, *, rematch: bool = False) -> Scores:
    """Latencies and throughput from the times of the passes, as each mode puts them together.

    Source: physics page, section 8; ``serving.disaggregated``, ``serving.colocated``, ``serving.piggyback``.
    """
    lengths, rate_of = designs.lengths, designs.lengths.request_rate
    isl, osl, first = lengths.mean_isl, lengths.mean_osl, times.fill + times.load
    with np.errstate(divide="ignore", invalid="ignore"):  # times that were left out
        if designs.mode == "decode":
            rate = rate_of(designs.batch, times.step)
            return Scores(0.0 * times.step, times.step, rate * osl / designs.total_gpus)
        if designs.mode == "prefill":
            prompts = designs.prefill_batch / times.interval
            return Scores(first, 0.0 * times.fill, prompts * isl / designs.total_gpus)
        if not designs.shared:
            prefill = designs.prefill_batch / times.interval
            decode = rate_of(designs.batch, times.step)
            if rematch:
                needed = designs.prefill_mapping.gpus / prefill + designs.mapping.gpus / decode
                return Scores(first, times.step, designs.rounding * osl / needed)
            rate = np.minimum(designs.prefill_instances * prefill, designs.instances * decode)
            return Scores(first, times.step, rate * osl / designs.total_gpus)
        accepted = designs.at.accepted_length(designs.mapping.draft_tokens)
        if designs.mode == "colocated":
            filled, passes = designs.filled, designs.batch / lengths.gaps * designs.filled.passes
            slots = (designs.batch, lengths.gaps, filled.idle, filled.left)
            mean, tpot = token_times(times.step, times.busy, times.fill, *slots, fed=passes * times.load)
            gap = longest_gap(times.step, times.long, passes, accepted)
        else:
            mean = times.busy / accepted + designs.steps.plain * times.step
            ranks, fed = designs.mapping.dp_attn, designs.batch / (designs.mapping.dp_attn * lengths.gaps) * times.load
            tpot = time_of_others(mean, times.own / accepted, designs.mixed_share * ranks / designs.batch)
            mean, tpot = np.maximum(mean, fed), np.maximum(tpot, fed)
            gap = np.maximum(times.long, mean)
        rate = rate_of(designs.batch, mean)
        ttl = np.where(designs.by_gap, gap, np.where(designs.by_tpot, tpot, mean))
        return Scores(first, ttl, rate * osl / designs.total_gpus)
