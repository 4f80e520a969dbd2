r"""Energy of one GPU of further pools: of attention and feed-forward ranks in a decode step over both, and of encoders.

.. math:: E = m\,\sum_o P_o\,t_o + P_0\,\Big(T - m\,\sum_o t_o\Big)

with the operators o of a micro-batch in the half of the GPU's pool and in its crossings, which keep GPUs of both pools
at work; m micro-batches, the time T of the step, and the power :math:`P_0` of a GPU that waits. Crossings run beside
the halves of other micro-batches, so the second term may be below 0; the limit of the GPU is the most.
Encoders draw what the kernels of the tower draw. Source: ``certainty.pass_energy``, ``physics.passes.attention_ffn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from disagg_sim.certainty.contributions import STEP, adjusted
from disagg_sim.certainty.energy import GpuEnergy
from disagg_sim.physics.cost import kernel_cost
from disagg_sim.physics.encoder import EncodeStep
from disagg_sim.physics.passes.attention_ffn import Split, halves, split_step
from disagg_sim.physics.power import power_at, watts_of
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric, Operator
from disagg_sim.workload.lengths import Lengths


def split_spent(
    at: Setup, ffn: Setup, split: Split, lengths: Lengths, sequences: Numeric
) -> tuple[GpuEnergy, GpuEnergy]:
    """Find what one GPU of each pool spends on a decode step.

    Returns joules and seconds of the step, of an attention and of a feed-forward GPU [J], [s].
    """
    context, counts = lengths.context, at.model.kind_counts
    step = split_step(at, ffn, split, sequences=sequences, context=context)

    def carried(quantity: Callable[[Setup], _Quantity]) -> tuple[Numeric, Numeric]:
        """A quantity of the operators times their time, of a GPU of each pool in all micro-batches."""
        marked = _marked(at, quantity(at)), _marked(ffn, quantity(ffn))
        found = halves(marked[0], marked[1], split, sequences=sequences, context=context)
        crossing = _sum(counts, found.crossing)
        own = _sum(counts, found.attention) + np.imag(found.ends) / STEP, _sum(counts, found.ffn)
        return split.microbatches * (own[0] + crossing), split.microbatches * (own[1] + crossing)

    joules, seconds = carried(watts_of), carried(lambda _: lambda *_: 1.0)
    attention, theirs = (_of(*each, step.ttl) for each in zip((at, ffn), joules, seconds, strict=True))
    return attention, theirs


def encode_spent(step: EncodeStep) -> GpuEnergy:
    """Find what one GPU spends on the images of a request, of which none is kept.

    Returns [J], [s].
    """
    at, watts = step.setup, watts_of(step.setup)
    costs = [(op, kernel_cost(op, at), runs) for op, runs in step.operators]
    image = sum(float(watts(op, cost) * cost.time) * runs for op, cost, runs in costs)
    return GpuEnergy(image * step.images, step.time)


_Quantity = Callable[[Operator, Cost], Numeric]


def _marked(at: Setup, quantity: _Quantity) -> Setup:
    """The setup whose times carry a quantity of their operators as imaginary part."""

    def marked(op: Operator, cost: Cost) -> Cost:
        return replace(cost, time=cost.time * (1.0 + STEP * 1j * quantity(op, cost)))

    return adjusted(at, marked)


def _sum(counts: Sequence[int], times: Sequence[Numeric]) -> Numeric:
    """What the times of the layers of all kinds carry."""
    return sum(count * np.imag(time) for count, time in zip(counts, times, strict=True)) / STEP


def _of(at: Setup, joules: Numeric, busy: Numeric, ttl: Numeric) -> GpuEnergy:
    """With the rest of the step, and no more than a GPU may draw."""
    power = power_at(at)
    return GpuEnergy(np.minimum(joules + power.idle * (ttl - busy), power.limit * ttl), ttl)
