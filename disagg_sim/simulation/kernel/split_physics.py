r"""Time the steps of an instance whose feed-forward part stands on GPUs of its own, for its step table.

An attention rank deals its q sequences out to :math:`\min(m, q)` micro-batches. The step is that of
``physics.passes.attention_ffn``, linear in q between numbers that all micro-batches share evenly: each half takes them
one after the other. Tokens of a prompt that is computed again after a preemption pass both halves as those of decodes
do, and their scores come on top.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.attention_ffn import Split, split_step
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.instance_variants import FfnPool, bare, split_of
from disagg_sim.simulation.kernel.step_physics import StepPhysics


class SplitPhysics(StepPhysics):
    """As ``StepPhysics``, of attention ranks with a feed-forward pool."""

    def __init__(self, at: Setup, mapping: Sharding, ffn: FfnPool, mla_form: str = "auto") -> None:
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
            few, more = (self._ttl(split, sizes[own], context) for sizes in (low, low + 1.0))
            times[own] = few + (each - low)[own] * (more - few)
        return np.asarray(times[place].reshape(np.shape(held)))

    def _ttl(self, split: Split, sequences: Floats, context: float) -> Floats:
        step = split_step(self._at, self._at_ffn, split, sequences=sequences, context=context, mla_form=self._form)
        return np.broadcast_to(np.asarray(step.ttl, dtype=float), sequences.shape)
