"""Time the parts of a step of one instance, which a step table adds up, and choose the axes of the table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import forms_of, layers_of
from disagg_sim.physics.cost import hop_cost, total_cost
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.engine_time import (
    LayerTimes,
    all_stages,
    host_time,
    launch_time,
    prefill_stretch,
    slowest_stage,
    step_time,
)
from disagg_sim.physics.passes.layers import (
    attention_cost,
    attention_side,
    join_experts,
    stretched,
    with_draft_model,
    with_prefill,
)
from disagg_sim.physics.passes.prefill import half_pass_setup, overlaps, two_halves_time
from disagg_sim.physics.roofline import NO_SUMS
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts
from disagg_sim.physics.work import Numeric, Tokens
from disagg_sim.simulation.instance_variants import FfnPool, bare, split_of
from disagg_sim.simulation.kernel import times as k
from disagg_sim.techniques.speculation.physics import joining, of_drafter
from disagg_sim.techniques.split.physics import split_step


class StepPhysics:
    """Steps of one instance over m micro-batches, part by part: see ``physics.passes.engine_time.step_time``."""

    def __init__(self, at: Setup, mapping: Sharding, mla_form: str = "auto") -> None:
        self._at, self._mapping, self._form = at, mapping, mla_form
        self._prefilled = at.with_draft_layers  # prompts pass the layers of a drafter as any others
        self._own = at.draft_model  # which follows on the last stage
        self.queries = 1 + int(np.max(mapping.draft_tokens))
        self.stages, self.ranks = int(np.max(mapping.pp)), int(np.max(mapping.dp_attn))
        self._dcp, self._pcp = mapping.shares
        engine = at.overheads
        host, self.launch = float(host_time(at, mapping, 0.0)), float(np.max(launch_time(at, mapping)))
        self.host_once, self.host_each = (host, 0.0) if engine is None else (0.0, host)
        self._stretch, self.overlaps = prefill_stretch(at), overlaps(at, mapping)

    @property
    def kinks(self) -> tuple[int, ...]:
        """Windows and chosen tokens of the model's attention: kinks of its step time. [token]"""
        return self._at.cached_layers.kinks

    @property
    def switches(self) -> bool:
        """Whether forms of attention compete, so that the fastest changes hands between table points."""
        return len(forms_of(self._at.model)) > 1

    def decode(self, decodes: Floats, contexts: Floats) -> Floats:
        """Decode steps, shape (decodes, contexts). [s]"""
        step = decode_step(self._at, self._mapping, batch=decodes, context=contexts[:, None])
        return np.ascontiguousarray(np.broadcast_to(step.time, (contexts.size, decodes.size)).T)

    def linear(self, phase: str, decodes: Floats, prefill: Floats) -> Floats:
        """Everything but scores and values of steps in the kernels of ``phase``; ``prefill`` of all ranks. [s]

        With an engine, what the prefill adds to the decodes alone is stretched.
        """
        micro = np.minimum(self.stages, np.maximum(decodes, 1.0))
        sequences = np.ceil(np.ceil(decodes / micro) / self.ranks)
        share = prefill / micro / self.ranks
        share = np.where(share > 0, np.maximum(share, 1.0), 0.0)
        at = self._at if np.any(decodes > 0) else self._prefilled
        totals = np.ceil(decodes / micro), prefill / micro
        times = self._linear_times(phase, sequences, share, totals, at)
        hops = np.where(decodes > 0, self.stages, self.stages - 1) if self.stages > 1 else 0.0
        hop = hop_cost(sequences * self.queries + share / self._pcp, self._mapping.gpus, self._at) * hops
        stage, whole = self._slowest(times, at), np.asarray(all_stages(at.model, times))
        if self._at.overheads is not None:
            some = np.where(decodes > 0, 1.0, 0.0)
            same, own = (
                stretched(self._linear_times(name, sequences, np.zeros_like(share), (totals[0], 0.0), at), some)
                for name in (phase, "decode")
            )
            both = with_prefill(own, same, times, self._stretch)
            stage = np.where(prefill > 0, self._slowest(both, at), stage)
            whole = np.where(prefill > 0, all_stages(at.model, both), whole)
        time = self._step(micro, stage, whole, decodes / micro, graphs=True) + hop.time
        if self.overlaps:
            halves = self._in_halves(phase, share / 2, prefill / 2)
            time = np.where((decodes == 0) & (prefill > 0), halves, time)
        return np.asarray(time)

    def experts(self, phase: str, tokens: Floats) -> Floats:
        """Routed experts on ``tokens`` of all ranks in the kernels of ``phase``, but for a constant. [s]

        What a step takes less where its ranks hold fewer tokens than the fullest of them times their number. Zeros
        where there are no routed experts, and for the steps of a pipeline: there all ranks count as full as the
        fullest.
        """
        if self.stages > 1 or self.ranks == 1:
            return np.zeros_like(tokens)
        one = np.ones_like(tokens)
        times = self._linear_times(phase, one, np.zeros_like(tokens), (0.0, tokens), self._at)
        stretch = self._stretch if phase == "prefill" else 1.0
        return np.asarray(stretch * all_stages(self._at.model, times))

    def passed_experts(self, tokens: Floats) -> Floats:
        """The same of a pass of prompts: in the slowest stage of a pipeline, and in all of them, (2, tokens). [s]"""
        if self.stages == 1 or self.ranks == 1:
            return np.zeros((2, 0))
        at, one = self._prefilled, np.ones_like(tokens)
        times = stretched(self._linear_times("prefill", np.zeros_like(tokens), one, (0.0, tokens), at), self._stretch)
        return np.stack([self._slowest(times, at), all_stages(at.model, times)])

    def _in_halves(self, phase: str, share: Floats, total: Floats) -> Numeric:
        """Prefill in two halves that overlap, without scores and values: these hide no exchange in a table. [s]"""
        at = half_pass_setup(self._prefilled)
        times = self._linear_times(phase, np.zeros_like(share), share, (0.0, total), at)
        half = self._slowest(stretched(times, self._stretch), at)
        return two_halves_time(self._at, self._mapping, half, times.sums.communication)

    def launches(self, decodes: Floats) -> Floats:
        """Least time of steps with prefill, whose kernels the host launches one by one, host included. [s]"""
        micro = np.minimum(self.stages, np.maximum(decodes, 1.0))
        none = np.zeros_like(decodes)
        return np.asarray(self._step(micro, none, none, decodes / micro, graphs=False))

    def stage(self, prefill: Floats) -> Floats:
        """The slowest stage at one prompt a rank, without scores, values and host; ``prefill`` of all ranks. [s]"""
        at, none = self._prefilled, np.zeros_like(prefill)
        times = self._linear_times("prefill", none, prefill / self.ranks, (0.0, prefill), at)
        return self._slowest(stretched(times, self._stretch), at)

    def attention(self, lengths: Floats, pasts: Floats, prompts: Floats) -> Floats:
        """Scores and values of a token of prefill, shape (stages + 1, prompts, lengths, pasts). [s]

        Row m - 1 belongs to a step of m micro-batches; the last one, of pipelines alone, is the slowest stage.
        """
        shape = (prompts.size, lengths.size, pasts.size)
        tokens = Tokens(prompts=prompts[:, None, None], new=lengths[:, None], past=pasts, dcp=self._dcp, pcp=self._pcp)
        tp, at = self._mapping.tp_attn, self._prefilled

        def scores(of: Setup) -> LayerTimes:
            cores = tuple(
                np.broadcast_to(attention_cost(layer.attention, of, tp, tokens, self._form).time, shape)
                for layer, _ in layers_of(of.model)
            )
            return LayerTimes(tuple(0.0 for _ in cores), cores, 0.0, 0.0, NO_SUMS)

        times = scores(at)
        if self._own is not None:
            times = with_draft_model(times, self._own.model, scores(self._own))
        slowest, whole = self._slowest(times, at), all_stages(at.model, times)  # without host and hops
        rows = [np.maximum(micro * slowest, whole) for micro in range(1, self.stages + 1)]
        if self.stages > 1:
            rows.append(slowest)
        return np.stack(rows) / (prompts[:, None, None] * lengths[:, None])

    def _linear_times(
        self, phase: str, sequences: Floats, share: Floats, totals: tuple[Numeric, Numeric], at: Setup
    ) -> LayerTimes:
        """Layers without scores and values, for what the fullest rank holds in decode and in prefill.

        ``totals``: sequences in decode and tokens of prefill of all ranks in a micro-batch. Draft passes follow in the
        head, as in ``physics.passes.mixed``.
        """
        times = self._one_pass(phase, sequences, share, totals, at, queries=self.queries)
        if self.queries == 1 or not np.any(sequences):
            if self._own is None or not np.any(share):
                return times
            alone = self._one_pass(phase, np.zeros_like(sequences), share, (0.0, totals[1]), self._own, queries=1)
            return with_draft_model(times, self._own.model, alone)

        def draft(share: Numeric, prefill: Numeric, queries: int) -> Numeric:
            own, first = of_drafter(at), queries > 1
            each = self._one_pass(phase, sequences, share, (totals[0], prefill), own, queries=queries, sampled=1)
            joined = joining(at, self._mapping.tp_attn, sequences * queries + share, first=first)
            return all_stages(own.model, each) + total_cost(joined, at).time

        passes = draft(share, totals[1], self.queries)
        if self.queries > 2:
            passes = passes + (self.queries - 2) * draft(np.zeros_like(share), 0.0, 1)
        return times._replace(head=times.head + passes)

    def _one_pass(
        self,
        phase: str,
        sequences: Floats,
        share: Numeric,
        totals: tuple[Numeric, Numeric],
        at: Setup,
        *,
        queries: int,
        sampled: int | None = None,
    ) -> LayerTimes:
        """One pass of the layers of ``at``, of so many tokens of a sequence, of which ``sampled`` pass the head."""
        prompts = np.where(np.asarray(share) > 0, 1.0, 0.0)
        tokens = Tokens(
            prompts=prompts,
            new=share,
            decodes=sequences,
            queries=float(queries),
            emitted=sequences * (sampled or queries) + prompts,
            dcp=self._dcp,
            pcp=self._pcp,
        )
        side = attention_side(at, self._mapping.tp_attn, tokens, self._form, phase, core=False)
        rank = DistinctCounts(sequences * queries + share / self._pcp)
        total = DistinctCounts(totals[0] * queries + totals[1])
        return join_experts(at, self._mapping, side, phase=phase, rank=rank, total=total)

    def _slowest(self, times: LayerTimes, at: Setup) -> Floats:
        """The slowest stage for one micro-batch, without host. [s]"""
        return np.asarray(slowest_stage(at, self._mapping.pp, times))

    def _step(self, micro: Floats, stage: Numeric, whole: Numeric, decodes: Floats, *, graphs: bool) -> Numeric:
        """Host included. [s]"""
        return step_time(self._at, self._mapping, micro, stage, whole, decodes=decodes, graphs=graphs)


Linear = Callable[[str, Floats, Floats], Floats]


#: Least stair of its time that gets points of its own. [1]
LEAST_STAIR = 0.004


def stair_axis(physics: StepPhysics, most: int, past: int) -> Floats:
    """Both sides of the lengths at which prefill attention, after none or a long past, begins another round. [token]

    Tiles end at multiples of ``STAIR`` tokens; rounds of less than ``LEAST_STAIR`` of the time are left to the axis.
    """
    ends = np.arange(k.STAIR, most, k.STAIR, dtype=float)
    sides = np.stack([ends, ends + 1.0])
    each = physics.attention(sides.ravel(), np.array([0.0, float(past)]), np.ones(1))[0, 0]
    before, after = (each * sides.ravel()[:, None]).reshape(2, ends.size, 2)
    stair = np.any(np.abs(after - before) > LEAST_STAIR * before, axis=1)
    return sides[:, stair].T.ravel()


def token_axis(most: int) -> Floats:
    """Every number up to ``EXACT``, the first and last number of every tile, and a far one. [token]"""
    fine = np.arange(k.EXACT, k.FINE_END, k.FINE_TILE)
    coarse = np.arange(k.FINE_END, max(most, k.FINE_END + k.COARSE_TILE), k.COARSE_TILE)
    tiles = [
        np.stack([start + 1, start + width], axis=1).ravel()
        for start, width in ((fine, k.FINE_TILE), (coarse, k.COARSE_TILE))
    ]
    return np.concatenate([np.arange(1.0, k.EXACT + 1), *tiles, [k.FAR * float(coarse[-1] + k.COARSE_TILE)]])


class SplitPhysics(StepPhysics):
    r"""As ``StepPhysics``, of attention ranks whose feed-forward part stands on GPUs of its own.

    An attention rank deals its q sequences out to :math:`\min(m, q)` micro-batches. The step is that of
    ``techniques.split.physics``, linear in q between numbers that all micro-batches share evenly: each half takes
    them one after the other. Tokens of a prompt that is computed again after a preemption pass both halves as those of
    decodes do, and their scores come on top.
    """

    def __init__(self, at: Setup, mapping: Sharding, ffn: FfnPool, mla_form: str) -> None:
        super().__init__(at, bare(mapping), mla_form)
        self._split, self._at_ffn = split_of(mapping, ffn), ffn.setup or at

    def decode(self, decodes: Floats, contexts: Floats) -> Floats:
        """Decode steps, shape (decodes, contexts). [s]"""
        held = np.ceil(decodes / self.ranks)
        return np.stack([self._steps(held, float(context)) for context in contexts], axis=1)

    def linear(self, _phase: str, decodes: Floats, prefill: Floats) -> Floats:
        """Everything but scores and values of steps; ``prefill`` of all ranks. [s]"""
        held = np.ceil(decodes / self.ranks) + prefill / self.ranks
        return self._steps(np.broadcast_to(held, np.broadcast_shapes(np.shape(decodes), np.shape(prefill))), 0.0)

    def experts(self, _phase: str, tokens: Floats) -> Floats:
        """Zeros: all ranks count as full as the fullest."""
        return np.zeros_like(tokens)

    def _steps(self, held: Floats, context: float) -> Floats:
        """Steps of ranks that hold so many sequences or tokens each, at a mean context [token]. [s]"""
        rows, place = np.unique(held, return_inverse=True)
        most = int(self._split.microbatches)
        micro = np.clip(np.ceil(rows), 1, most)
        each = np.maximum(rows / micro, 1.0)
        low, times = np.floor(each), np.empty_like(rows)
        for count in np.unique(micro):
            own = micro == count
            split = self._split._replace(microbatches=float(count))
            few, more = (
                split_step(
                    self._at, self._at_ffn, split, sequences=sizes[own], context=context, mla_form=self._form
                ).ttl
                for sizes in (low, low + 1.0)
            )
            times[own] = few + (each - low)[own] * (more - few)
        return np.asarray(times[place].reshape(np.shape(held)))
