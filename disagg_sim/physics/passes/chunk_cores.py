"""Time scores and values of all chunks of prompts, without those that a prompt has not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.passes.chunks import ChunkPlan, Chunks
from disagg_sim.physics.passes.layers import attention_cost
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import is_one
from disagg_sim.physics.work import Numeric


class ChunkCores(NamedTuple):
    """Scores and values of all chunks of one layer of each kind. [s]"""

    whole: tuple[Numeric, ...]  # summed over the chunks
    full: tuple[Numeric, ...]  # of the last chunk of full size
    last: tuple[Numeric, ...]  # of the last chunk
    sums: Sums  # of every chunk and layer


def chunk_cores(
    at: Setup, form: str, plan: ChunkPlan, others: tuple[Numeric, ...], most: Numeric | None = None
) -> ChunkCores:
    """Attention of all chunks, of as many rows at once as stay in cache; ``others`` and ``most`` as in ``Chunks``."""
    if at.rates.adjust is not None or max(map(np.ndim, (*plan, *others))) < 2:
        return _padded_cores(at, form, plan, others)
    chunks = Chunks(plan, others, most)
    found = [_cores_of(at, form, chunks, rows) for rows in chunks.blocks()]

    def joined(of_each: Iterable[tuple[Numeric, ...]]) -> tuple[Numeric, ...]:
        return tuple(chunks.joined(parts) for parts in zip(*of_each, strict=True))

    return ChunkCores(
        whole=joined(each.whole for each in found),
        full=joined(each.full for each in found),
        last=joined(each.last for each in found),
        sums=Sums(*joined(each.sums for each in found)),
    )


def _cores_of(at: Setup, form: str, chunks: Chunks, rows: slice) -> ChunkCores:
    """Attention of the chunks of some rows."""
    here = chunks.of(rows)
    times: list[list[Numeric]] = [[], [], []]
    sums = Sums()
    for layer, count in layers_of(at.model):
        cost = attention_cost(layer.attention, at, here.tp, here.tokens, form)
        times[0].append(here.summed(cost.time))
        for chosen, where in zip(times[1:], (here.full, here.last), strict=True):
            chosen.append(here.at(cost.time, where))
        sums = sums.plus(Sums(*map(here.summed, cost.sums)), count)
    return ChunkCores(tuple(times[0]), tuple(times[1]), tuple(times[2]), sums)


def _padded_cores(at: Setup, form: str, plan: ChunkPlan, others: tuple[Numeric, ...]) -> ChunkCores:
    """As ``chunk_cores`` of few designs, or where costs carry something along: chunks are an axis behind theirs."""
    tp, dcp, pcp, prompts, prefix = (each if is_one(each) else np.asarray(each)[..., None] for each in others)
    plan = ChunkPlan(*(np.asarray(x)[..., None] for x in plan))
    step = np.arange(int(np.max(plan.chunks)), dtype=float)
    live = step < plan.chunks
    last = (plan.chunks - 1).astype(int)
    tokens = Tokens(
        prompts=prompts,
        new=np.where(step < plan.chunks - 1, plan.size, plan.last),
        past=prefix + np.minimum(step, plan.chunks - 1) * plan.size,
        latent=np.where(step == 0, prefix, 0.0),
        dcp=dcp,
        pcp=pcp,
    )
    times: list[list[Numeric]] = [[], [], []]
    sums = Sums()
    for layer, count in layers_of(at.model):
        cost = attention_cost(layer.attention, at, tp, tokens, form)
        shape = np.broadcast_shapes(np.shape(cost.time), live.shape)
        every = np.broadcast_to(cost.time, shape)
        times[0].append(np.sum(every * live, axis=-1))
        for chosen, where in zip(times[1:], (np.maximum(last - 1, 0), last), strict=True):
            index = np.broadcast_to(where, (*shape[:-1], 1))
            chosen.append(np.take_along_axis(every, index, axis=-1)[..., 0])
        sums = sums.plus(Sums(*(np.sum(part * live, axis=-1) for part in cost.sums)), count)
    return ChunkCores(tuple(times[0]), tuple(times[1]), tuple(times[2]), sums)
