"""Time the parts of a step of one instance, which a step table adds up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Mapping
from disagg_sim.physics.blocks import forms_of, layers_of
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.layers import (
    LayerTimes,
    all_stages,
    attention_cost,
    attention_side,
    join_experts,
    slowest_stage,
)
from disagg_sim.physics.roofline import NO_SUMS
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Levels
from disagg_sim.physics.work import Numeric


class StepPhysics:
    """Steps of one instance: ``max(m*max_s t_s, sum_s t_s) + host + hops`` over m micro-batches, part by part."""

    def __init__(self, at: Setup, mapping: Mapping, mla_form: str = "auto") -> None:
        self._at, self._model, self._mapping, self._form = at, at.model, mapping, mla_form
        self.stages, self.ranks = int(np.max(mapping.pp)), int(np.max(mapping.dp_attn))
        self.host: float = at.profile.host

    @property
    def windows(self) -> tuple[int, ...]:
        """Window sizes of the model's attention: kinks of its step time. [token]"""
        return self._model.windows

    @property
    def switches(self) -> bool:
        """Whether forms of attention compete, so that the fastest changes hands between table points."""
        return len(forms_of(self._model)) > 1

    def decode(self, decodes: Floats, contexts: Floats) -> Floats:
        """Decode steps, shape (decodes, contexts). [s]"""
        step = decode_step(self._at, self._mapping, batch=decodes, context=contexts[:, None])
        return np.ascontiguousarray(np.broadcast_to(step.ttl, (contexts.size, decodes.size)).T)

    def linear(self, phase: str, decodes: Floats, prefill: Floats) -> Floats:
        """Everything but scores and values of steps in the kernels of ``phase``; ``prefill`` of all ranks. [s]"""
        micro = np.minimum(self.stages, np.maximum(decodes, 1.0))
        sequences = np.ceil(np.ceil(decodes / micro) / self.ranks)
        share = prefill / micro / self.ranks
        share = np.where(share > 0, np.maximum(share, 1.0), 0.0)
        times = self._linear_times(phase, sequences, share, np.ceil(decodes / micro) + prefill / micro)
        hops = np.where(decodes > 0, self.stages, self.stages - 1) if self.stages > 1 else 0.0
        hop = hop_cost(sequences + share, self._mapping.gpus, self._at) * hops
        time: Floats = self._through(times, micro) + self.host + hop.time
        return time

    def stage(self, prefill: Floats) -> Floats:
        """The slowest stage at one prompt a rank, without scores, values and host; ``prefill`` of all ranks. [s]"""
        times = self._linear_times("prefill", np.zeros_like(prefill), prefill / self.ranks, prefill)
        return np.asarray(slowest_stage(self._model, self._mapping.pp, times))

    def attention(self, lengths: Floats, pasts: Floats, prompts: Floats) -> Floats:
        """Scores and values of a token of prefill, shape (stages + 1, prompts, lengths, pasts). [s]

        Row m - 1 belongs to a step of m micro-batches; the last one, of pipelines alone, is the slowest stage.
        """
        shape = (prompts.size, lengths.size, pasts.size)
        tokens = Tokens(prompts=prompts[:, None, None], new=lengths[:, None], past=pasts)
        tp = self._mapping.tp_attn
        cores = tuple(
            np.broadcast_to(attention_cost(layer.attention, self._at, tp, tokens, self._form).time, shape)
            for layer, _ in layers_of(self._model)
        )
        times = LayerTimes(cores, 0.0, 0.0, NO_SUMS)
        rows = [self._through(times, micro) for micro in range(1, self.stages + 1)]
        if self.stages > 1:
            rows.append(np.asarray(slowest_stage(self._model, self._mapping.pp, times)))
        return np.stack(rows) / (prompts[:, None, None] * lengths[:, None])

    def _linear_times(self, phase: str, sequences: Floats, share: Floats, total: Floats) -> LayerTimes:
        """Layers without scores and values, for what the fullest rank and all ranks of a micro-batch hold. [s]"""
        prompts = np.where(share > 0, 1.0, 0.0)
        tokens = Tokens(prompts=prompts, new=share, decodes=sequences, emitted=sequences + prompts)
        side = attention_side(self._at, self._mapping.tp_attn, tokens, self._form, phase, core=False)
        return join_experts(
            self._at, self._mapping, side, phase=phase, rank=Levels(sequences + share), total=Levels(total)
        )

    def _through(self, times: LayerTimes, micro: Numeric) -> Floats:
        """Time of ``micro`` micro-batches through all stages, without host and hops. [s]"""
        slowest = slowest_stage(self._model, self._mapping.pp, times)
        return np.asarray(np.maximum(micro * slowest, all_stages(self._model, times)))


Linear = Callable[[str, Floats, Floats], Floats]
