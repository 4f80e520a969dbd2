r"""Time the steps of an instance of both phases, and find how often it makes them: decodes alone, and with prompts.

A prompt lives on one attention rank and takes m steps with prefill, of T_mix each. At r requests/s and n sequences
:math:`k = r\,m\,T_{mix}(n)` prompts are under way on average. One rank computes them one after the other, so that a
share k of the time goes to such steps; R ranks compute theirs in the same steps, and all of the time does but for that
in which R servers of one queue are idle, less where prompts are held back (``planning.prefill_delay_queue``). All
ranks wait for the one with the largest piece: where the last of m pieces is short, none of j ranks has a full one with
the probability :math:`m^{-j}`. Scores and values take as long as on the rank whose prompt has come furthest, of j
ranks on average j/(j+1) of it. Steps are timed at a few sizes for all batches of an instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.memory import colocated_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.residents import prefilling_in_pieces
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.prefill_delay_queue import gathered, mixed_share
from disagg_sim.search.phase_grid import PhaseGrid

#: Shares of the TTFT limit that prompts may be held back: the rest is for prefill and its queue. [1]
HELD_SHARES = (1 / 4, 1 / 2, 3 / 4)
#: Halvings of the range in which the highest rate of an instance lies.
HALVINGS = 20
#: What a rate that is in time may exceed its bound by, as sums are rounded: far above a few of 2**-53. [1]
ROUNDED = 1e-12
#: Prompts under way that stand for none. [request]
LEAST = 1e-9


class Mixing(NamedTuple):
    """Steps of an instance of both phases by its sequences; arrays of shape (..., batches)."""

    held: Floats  # prefill tokens of a rank in a step that has some [token]
    time: Floats  # of such a step [s]
    share: Floats  # of the time in such steps [1]
    steps: Floats  # a second, of both kinds [1/s]
    used: Floats  # prefill work over what steps with full budgets could do [1]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedSteps:
    """Steps of an instance under one budget; instances that differ in how long prompts are held back share them."""

    ranks: int  # attention ranks, each with prompts of its own [1]
    budget: int  # tokens of a step, decodes and prefill, over all ranks [token]
    prompt: float  # new tokens of a prompt, on average [token]
    each: float  # decode steps of a request, on average [1]
    waits: tuple[int, ...]  # decode steps that prompts may be held back at most; 0 = none [1]
    batch: Floats  # (batches,) ascending from 1 to the seats [request]
    verified: Floats  # (batches,) tokens that these bring to a step, drafts with them [token]
    step: Floats  # (batches,) of decodes alone [s]
    tokens: Floats  # (sizes,) tokens of a rank in a step, decodes and prefill, ascending from 0 [token]
    mixed: Floats  # (sizes, batches) steps with so many on every rank [s]
    single: Floats  # (sizes, batches) steps with so many on one rank [s]
    late: Floats  # (sizes, batches) steps with so many on every rank, where prompts end [s]

    @property
    def first(self) -> MixedSteps:
        """Those with one sequence."""
        columns = {name: getattr(self, name)[..., :1] for name in ("batch", "verified", "step")}
        return replace(self, **columns, **{name: getattr(self, name)[:, :1] for name in ("mixed", "single", "late")})

    @cached_property
    def room(self) -> Floats:
        """Prefill tokens of a rank that fit beside the decodes, (batches,). [token]"""
        return np.maximum((self.budget - self.verified) / self.ranks, 1.0)

    @cached_property
    def own(self) -> tuple[Floats, tuple[Floats, Floats, Floats, Floats]]:
        """Tokens of a step with a piece of a prompt, (batches,), and its time in each table: what delays decodes more.

        Either the last piece of a prompt is a step of its own, or other prompts fill that up. Behind the times, how
        much longer a step with a full piece takes than one with the last. [token], [s]
        """
        prompt, room, decodes = self.prompt, self.room, self.verified / self.ranks
        pieces = np.ceil(prompt / room)
        last = prompt - (pieces - 1.0) * room
        tables = (self.single, self.mixed, self.late)
        full, rest = ([_between(self.tokens, each, held + decodes) for each in tables] for held in (room, last))
        alone = [(pieces - 1.0) * a + b for a, b in zip(full, rest, strict=True)]  # nothing fills up its last piece
        slower = np.maximum(full[0], full[1]), np.maximum(alone[0], alone[1])
        dearer = (pieces == 1.0) | (slower[1] - pieces * self.step > prompt / room * (slower[0] - self.step))
        one, every, late = (np.where(dearer, b / pieces, a) for a, b in zip(full, alone, strict=True))
        longer = np.where(dearer & (pieces > 1.0), full[0] - rest[0], 0.0)
        return np.where(dearer, prompt / pieces, np.minimum(prompt, room)), (one, every, late, longer)

    @cached_property
    def full(self) -> Floats:
        """Time of a step whose budget is full, (batches,). [s]"""
        held, tables = self.room + self.verified / self.ranks, (self.single, self.mixed, self.late)
        one, every, late = (_between(self.tokens, each, held) for each in tables)
        return self.beside((one, every, late, np.zeros_like(one)), float(self.ranks))

    def beside(self, times: tuple[Floats, Floats, Floats, Floats], prompts: Floats | float) -> Floats:
        """Time of a step in which so many ranks have a piece.

        The experts have those of all, the largest piece and the furthest count.
        """
        one, every, late, longer = times
        if self.ranks == 1:
            return one
        last = 1.0 / np.ceil(self.prompt / self.room)  # share of the pieces
        largest = one + longer * (last - last**prompts)
        others = np.maximum(every - one, 0.0) * (prompts - 1.0) / (self.ranks - 1.0)
        return np.asarray(largest + others + (late - every) * (prompts - 1.0) / (prompts + 1.0))

    def mixing(self, rate: float | Floats, hold_steps: Floats | int) -> Mixing:
        """Find how often an instance makes steps of each kind.

        Takes ``rate`` [request/s].
        """
        prompt, ranks, room = self.prompt, self.ranks, self.room
        held, times = self.own
        time = times[0]
        if ranks == 1 and prompt < room[0]:  # short prompts that came during a step share the next
            for _ in range(3):
                held = np.clip(rate * prompt * time, np.minimum(prompt, room), room)
                time = _between(self.tokens, self.mixed, held + self.verified)
        under_way = rate * prompt / held * time
        further = gathered(rate * hold_steps * self.step, ranks) if np.any(hold_steps) else 0.0
        for _ in range(2 if ranks > 1 else 0):
            under_way = np.maximum(under_way, LEAST)
            some = under_way / mixed_share(under_way, ranks, further)  # ranks with a prompt, where there is one
            time = self.beside(times, np.clip(some, 1.0, ranks))
            under_way = rate * prompt / held * time
        share = mixed_share(under_way, ranks, further)
        used = rate * prompt / (room * ranks) * self.full
        return Mixing(held, time, share, share / time + (1.0 - share) / self.step, used)

    @cached_property
    def bounds(self) -> Floats:
        r"""Rates that no instance exceeds whose steps are in time, (batches,). [request/s]

        .. math:: \min\left(\frac{n}{g\,T_d(n)},\ \frac{R\,c(n)}{p\,T_{full}(n)}\right)

        of n sequences that take g steps each, if all were decodes alone, and of prompts of p tokens, if all steps had c
        of them on each of the R ranks.
        """
        decodes = self.batch / (self.step * self.each)
        return np.asarray(np.minimum(decodes, self.room * self.ranks / (self.prompt * self.full)) * (1.0 + ROUNDED))

    @cached_property
    def rates(self) -> Floats:
        """Highest rates at which steps are in time, (waits, batches), below ``bounds``. [request/s]"""
        waits = np.array(self.waits, dtype=float)[:, None]
        low, high = np.zeros((waits.size, self.batch.size)), self.batch / (self.step * self.each)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            mixing = self.mixing(middle, waits)
            kept = (mixing.steps * self.batch >= middle * self.each) & (mixing.used < 1.0)
            low, high = np.where(kept, middle, low), np.where(kept, high, middle)
        return low


def waits_of(at: Setup, work: Demand, ranks: int, step: float) -> list[int]:
    """Decode steps, of some time [s], that prompts may be held back at most, longest first. [1]

    None where there is one rank, or the engine cannot.
    """
    engine, given = at.overheads, work.hold_steps
    if ranks == 1 or not (engine is None or engine.holds_prompts):
        return []
    if given is not None:
        return list(given)
    longest = work.ttft.seconds / step
    return sorted({max(2 ** round(math.log2(share * longest)), 1) for share in HELD_SHARES}, reverse=True)


def _between(tokens: Floats, times: Floats, held: Floats) -> Floats:
    """Times of steps with ``held`` tokens on a rank, (..., batches), in a straight line between sizes. [s]"""
    place = np.clip(np.searchsorted(tokens, held, side="right") - 1, 0, tokens.size - 2)
    column = np.arange(held.shape[-1])
    part = (held - tokens[place]) / (tokens[place + 1] - tokens[place])
    return np.asarray((1.0 - part) * times[place, column] + part * times[place + 1, column])


#: Tokens of one rank, decodes and prefill, at which steps with prefill are timed. [token]
SIZES = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Budgets of a step of one attention rank that are tried: what engines are started with. [token]
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def mixed_tables(grid: PhaseGrid, work: Demand, rows: Ints, mapping: Sharding, last: int) -> Floats:
    """Times of steps with prefill on every rank, on one, and where prompts end, (3, rows, sizes, batches). [s]"""
    at, lengths = grid.setup, work.lengths
    nodes = lengths.prompt_nodes()
    new, weights = nodes.new, nodes.weight
    prompt = float(weights @ new**2) / lengths.mean_new  # that a token of prefill is of, on average
    past = float(weights @ (new * nodes.past)) / lengths.mean_new  # before it
    batch = grid.batch[:last].astype(float)
    sizes = np.array(SIZES[1:], dtype=float)
    shape = (rows.size, sizes.size, batch.size)
    decodes = np.broadcast_to(batch, (sizes.size, batch.size)).reshape(1, -1)
    verified = decodes * (1.0 + mapping.draft_tokens)
    tokens = np.maximum(np.repeat(sizes, batch.size)[None, :] - verified / mapping.dp_attn, 1.0)
    held = lengths.on_ranks(decodes, mapping.dp_attn)
    alone = grid.latency[rows, :last]
    if at.speculation is not None:  # an instance has one number of drafts, whatever its batch is
        load = lengths.on_ranks(batch[None, :], mapping.dp_attn)
        alone = decode_step(at, mapping, batch=batch[None, :], context=load.context, rank_batch=load.batch).time

    def step(ranks: Any, prompt: float) -> Floats:
        chunk = Chunk(tokens * ranks, prompt + past, ranks, past)
        time = mixed_step(at, mapping, batch=decodes, context=held.context, chunk=chunk, rank_batch=held.batch).time
        table = np.broadcast_to(time, (shape[0], tokens.shape[1])).reshape(shape)
        return np.concatenate([alone[:, None], table], axis=1)

    every = step(mapping.dp_attn, prompt)
    if np.all(mapping.dp_attn == 1):
        return np.stack([every, every, every])
    later = step(mapping.dp_attn, 2.0 * prompt) - every  # half a prompt further
    before = np.maximum(1.0 - tokens / prompt, 0.0).reshape(shape)  # share of a prompt that is before its last piece
    before = np.concatenate([np.zeros((shape[0], 1, shape[2])), before], axis=1)
    return np.stack([every, step(np.ones_like(mapping.dp_attn), prompt), every + later * before])


def mixed_bytes(
    grid: PhaseGrid, work: Demand, mapping: Sharding, last: int, budgets: Sequence[float] = BUDGETS
) -> Floats:
    """Memory on the fullest GPU under each budget of a rank [token], (rows, budgets, batches). [B]"""
    ranks, lengths, batch = mapping.dp_attn, work.lengths, grid.batch[:last].astype(float)
    decodes = np.tile(batch, len(budgets))[None, :]
    budget = ranks * np.repeat(np.array(budgets, dtype=float), last)
    prompts = ranks * np.maximum(np.ceil(budget / (ranks * lengths.mean_new)), 1.0)
    prefilling = prefilling_in_pieces(mapping, prompts, lengths.prompt, budget, decodes)
    memory = colocated_bytes(grid.setup, mapping, decodes, cached=lengths.resident, prefilling=prefilling)
    return np.broadcast_to(memory, budget.shape).reshape(-1, len(budgets), last)
