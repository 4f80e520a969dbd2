"""Break down the times of further pools: a decode step over attention and FFN ranks, and the encoding of images.

Half a layer is a sum of operators. The contributions :math:`t_o\\,\\partial TTL/\\partial t_o` of operators to a step
(``certainty.contributions``) leave out the time that the other half hides.

Energy of one GPU of either pool, and of encoders:

.. math:: E = m\\,\\sum_o P_o\\,t_o + P_0\\,\\Big(T - m\\,\\sum_o t_o\\Big)

with the operators o of a micro-batch in the half of the GPU's pool and in its crossings, which keep GPUs of both pools
at work; m micro-batches, the time T of the step, and the power :math:`P_0` of a GPU that waits. Crossings run beside
the halves of other micro-batches, so the second term may be below 0; the limit of the GPU is the most.
Encoders draw what the kernels of the tower draw. Source: ``certainty.energy``, ``techniques.split.physics``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from disagg_sim.certainty.contributions import Contribution, adjusted, carries, contributions_in, derivative_of
from disagg_sim.certainty.designs import Times
from disagg_sim.certainty.energy import GpuEnergy
from disagg_sim.certainty.trust import labels_of
from disagg_sim.errors import InputError
from disagg_sim.facts.provenance import place_of_fit, place_of_key
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import kernel_cost, total_cost
from disagg_sim.physics.passes.engine_time import host_time
from disagg_sim.physics.power import power_at, watts_of
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric, Operator
from disagg_sim.techniques.encode.physics import EncodeStep, encoder_operators
from disagg_sim.techniques.split.physics import Halves, Split, SplitStep, halves, split_bytes, split_step
from disagg_sim.workload.lengths import Lengths

#: Columns of the parts: ``waited`` is the time that the step waits for the part; the other half hides the rest.
PART_COLUMNS = ("pool", "operator", "kind", "seconds", "waited", "share", "trust", "source")


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitParts:
    """A decode step over two pools, part by part."""

    step: SplitStep
    #: A row a kind of layer: ``kind``, ``layers`` [1], and of one micro-batch ``attention``, ``ffn``, ``crossings``;
    #: ``period`` is what a layer of all micro-batches adds to the step. [s]
    layers: pd.DataFrame
    #: Operators of one micro-batch through all layers, ``PART_COLUMNS``: ``seconds`` of a GPU of the pool, ``waited``
    #: of the whole step, which with host and links adds up to TTL, ``share`` of TTL. [s], [1]
    parts: pd.DataFrame
    host: float  # of a step [s]
    links: float  # copies of tokens between the pools and their latency, as far as the step waits for them [s]
    memory: tuple[tuple[float, float], tuple[float, float]]  # held and limit of an attention and an FFN GPU [B]


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodeParts:
    """The encoding of the images of a request, part by part."""

    step: EncodeStep
    parts: pd.DataFrame  # ``PART_COLUMNS``, of all images of a request; share of what encoding adds to the FTL


def split_parts(at: Setup, split: Split, lengths: Lengths, sequences: float, ffn: Setup | None = None) -> SplitParts:
    """Take a decode step over attention and feed-forward ranks apart: times of halves and operators [s], memory [B]."""
    theirs, context = at if ffn is None else ffn, lengths.context

    def both(adjusted: Setup, *, own: bool) -> tuple[Setup, Setup]:
        return (adjusted, theirs) if own else (at, adjusted)

    def step_of(one: Setup, other: Setup) -> SplitStep:
        return split_step(one, other, split, sequences=sequences, context=context)

    def halves_of(one: Setup, other: Setup) -> Halves:
        return halves(one, other, split, sequences=sequences, context=context)

    step, times, counts = step_of(at, theirs), halves_of(at, theirs), at.model.kind_counts
    rows: list[dict[str, object]] = []
    for own, pool in ((True, "attention"), (False, "ffn")):
        mine = at if own else theirs

        def waited(adjusted: Setup, own: bool = own) -> Numeric:
            return step_of(*both(adjusted, own=own)).ttl

        def alone(adjusted: Setup, own: bool = own) -> Numeric:
            found = halves_of(*both(adjusted, own=own))
            mine = _sum(counts, found.attention if own else found.ffn)
            return mine + found.ends if own else mine

        def crossing(adjusted: Setup) -> Numeric:
            return _sum(counts, halves_of(adjusted, theirs).crossing)

        counted = _parts(mine, waited)
        rows += _rows(pool, mine, _parts(mine, alone), counted, float(step.ttl))
        if own:
            rows += _rows("crossing", mine, _parts(mine, crossing), counted, float(step.ttl))
    host = float(host_time(at, split.attention, sequences * split.attention.dp_attn * split.microbatches))
    parts = pd.DataFrame(rows, columns=list(PART_COLUMNS))
    links = float(step.ttl) - host - float(parts["waited"].sum())
    m, kinds = split.microbatches, layers_of(at.model)
    table = pd.DataFrame(
        {
            "kind": [f"{layer.kind.attention.kind} + {layer.kind.ffn.kind}" for layer, _ in kinds],
            "layers": counts,
            "attention": [float(each) for each in times.attention],
            "ffn": [float(each) for each in times.ffn],
            "crossings": [float(each) for each in times.crossing],
        }
    )
    through = table["attention"] + table["ffn"] + table["crossings"]
    table["period"] = np.maximum(m * np.maximum(table["attention"], table["ffn"]), through)
    held = split_bytes(at, theirs, split, sequences=sequences, cached=lengths.resident)
    limits = at.memory_limit, theirs.memory_limit
    memory = (float(held[0]), limits[0]), (float(held[1]), limits[1])
    return SplitParts(step=step, layers=table, parts=parts, host=host, links=links, memory=memory)


def _sum(counts: Sequence[int], times: Sequence[Numeric]) -> Numeric:
    """Add up the times of the layers of all kinds. [s]"""
    total: Numeric = 0.0
    for count, time in zip(counts, times, strict=True):
        total = total + count * time
    return total


def _parts(at: Setup, timed: Callable[[Setup], Numeric]) -> list[Contribution]:
    """List the operators of a time, with their contributions to it."""
    return contributions_in("decode", at, lambda adjusted: Times(np.atleast_1d(timed(adjusted)), 0.0, 0.0))


def _rows(
    pool: str, at: Setup, alone: list[Contribution], waited: list[Contribution], ttl: float
) -> list[dict[str, object]]:
    """Make a row for each operator of a pool, with the time that the step waits for it."""
    counted = {each.key: float(each.seconds.step[0]) for each in waited}
    found = []
    for each in alone:
        part = counted.get(each.key, 0.0)
        values = (pool, each.name, each.kind, float(each.seconds.step[0]), part, part / ttl)
        found.append(dict(zip(PART_COLUMNS, (*values, str(labels_of(each)[0]), _source(each, at)), strict=True)))
    return found


def _source(each: Contribution, at: Setup) -> str:
    if each.fits:
        return str(place_of_fit(each.fits[0], at.system.name))
    key = "elementwise_efficiency" if each.kind in ("elementwise", "copy") else "gemm_efficiency"
    return str(place_of_key("profile", at.profile.name, key))


def encode_parts(step: EncodeStep, height: int, width: int) -> EncodeParts:
    """Take the encoding of a request's images, ``height`` x ``width`` pixels, apart by operators. [s]"""
    at, encoder = step.setup, step.setup.model.encoder
    if encoder is None or step.images * encoder.tokens(height, width) != step.tokens:
        raise InputError(f"images of {height} x {width} are not those of the step, which has {step.tokens} tokens")

    def timed(adjusted: Setup) -> Numeric:
        operators = encoder_operators(encoder, at.model.hidden, encoder.patches(height, width))
        return step.images * sum(total_cost([op], adjusted).time * runs for op, runs in operators)

    found = _parts(at, timed)
    return EncodeParts(step=step, parts=pd.DataFrame(_rows("encode", at, found, found, step.latency)))


def split_spent(
    at: Setup, ffn: Setup, split: Split, lengths: Lengths, sequences: Numeric
) -> tuple[GpuEnergy, GpuEnergy]:
    """Find what an attention and a feed-forward GPU spend on a decode step. [J], [s]"""
    context, counts = lengths.context, at.model.kind_counts
    step = split_step(at, ffn, split, sequences=sequences, context=context)

    def carried(quantity: Callable[[Setup], _Quantity]) -> tuple[Numeric, Numeric]:
        """Add up a quantity of the operators times their time, for a GPU of each pool and all micro-batches."""
        marked = [adjusted(each, carries(quantity(each))) for each in (at, ffn)]
        found = halves(marked[0], marked[1], split, sequences=sequences, context=context)
        crossing = derivative_of(_sum(counts, found.crossing))
        of_attention = derivative_of(_sum(counts, found.attention)) + derivative_of(found.ends)
        own = of_attention, derivative_of(_sum(counts, found.ffn))
        return split.microbatches * (own[0] + crossing), split.microbatches * (own[1] + crossing)

    joules, seconds = carried(watts_of), carried(lambda _: lambda *_: 1.0)
    attention, theirs = (_of(*each, step.ttl) for each in zip((at, ffn), joules, seconds, strict=True))
    return attention, theirs


def encode_spent(step: EncodeStep) -> GpuEnergy:
    """Find what one GPU spends on the images of a request, of which none is kept. [J], [s]"""
    at, watts = step.setup, watts_of(step.setup)
    costs = [(op, kernel_cost(op, at), runs) for op, runs in step.operators]
    image = sum(float(watts(op, cost) * cost.time) * runs for op, cost, runs in costs)
    return GpuEnergy(image * step.images, step.time)


_Quantity = Callable[[Operator, Cost], Numeric]


def _of(at: Setup, joules: Numeric, busy: Numeric, ttl: Numeric) -> GpuEnergy:
    """Add idle power for the rest of the step; the limit of the GPU is the most."""
    power = power_at(at)
    return GpuEnergy(np.minimum(joules + power.idle * (ttl - busy), power.limit * ttl), ttl)
