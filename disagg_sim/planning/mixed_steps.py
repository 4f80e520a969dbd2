r"""Time the steps of a co-located instance, with and without prefill, and find how often it runs each kind.

A prompt lives on one attention rank and takes m steps with prefill, of T_mix each. At r requests/s and n sequences
:math:`k = r\,m\,T_{mix}(n)` prompts are under way on average. One rank computes them one after the other, so a share k
of the time goes to such steps. R ranks compute theirs in the same steps, so these take all of the time except that in
which all R servers of one queue are idle, and less with prefill delay (``techniques.prefill_delay``). All ranks
wait for the one with the largest piece: where the last of the m pieces of a prompt is short, j ranks all have such a
last piece with probability :math:`m^{-j}`. Scores and values take as long as on the rank that has the largest part of
its prompt behind it, which is j/(j+1) on average over j ranks.

Where a step has room for several prompts of a rank, those that come to it during a step share the next. So
:math:`r\,T` come on average, spread over the ranks one by one, and the fullest of R ranks has
:math:`E[\lceil A/R \rceil \mid A \ge 1]` of A, Poisson of that mean. Steps are timed at a few sizes for all batches of
an instance.

Past 400 lines: what a step takes, and how often each kind runs, follow from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.step_mixing import own_step, step_rate
from disagg_sim.techniques.prefill_delay.plan_queue import gathered, mixed_share

#: Prefill delays to try, as shares of the TTFT limit: the rest is for prefill and its queue. [1]
HELD_SHARES = (1 / 4, 1 / 2, 3 / 4)
#: Halvings of the range in which the highest rate of an instance lies.
HALVINGS = 20
#: Relative margin of an upper bound against rounding: far above a few times 2**-53. [1]
ROUNDED = 1e-12
#: All batches of an instance.
EVERY = slice(None)
#: Least number of prompts under way, in place of 0. [request]
LEAST = 1e-9


class Mixing(NamedTuple):
    """Steps of an instance of both phases by its sequences; arrays of shape (..., batches)."""

    held: Floats  # prefill tokens of a rank in a step with prefill [token]
    time: Floats  # time of a step with prefill [s]
    share: Floats  # share of the time in steps with prefill [1]
    steps: Floats  # steps a second, of both kinds [1/s]
    used: Floats  # prefill rate over that of steps with full budgets [1]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedSteps:
    """Steps of an instance under one token budget; instances that differ in prefill delay share them."""

    ranks: int  # attention ranks, each with prompts of its own [1]
    budget: int  # tokens of a step, decodes and prefill, over all ranks [token]
    prompt: float  # new tokens of a prompt, on average [token]
    each: float  # decode steps of a request, on average [1]
    waits: tuple[int, ...]  # most decode steps of each prefill delay; 0 = none [1]
    batch: Floats  # (batches,) ascending from 1 to the seats [request]
    verified: Floats  # (batches,) tokens of these sequences in a step, drafts included [token]
    step: Floats  # (batches,) time of a step of decodes alone [s]
    tokens: Floats  # (sizes,) tokens of a rank in a step, decodes and prefill, ascending from 0 [token]
    mixed: Floats  # (sizes, batches) time of a step with so many on every rank [s]
    single: Floats  # (sizes, batches) the same with so many on one rank alone [s]
    late: Floats  # (sizes, batches) the same with so many on every rank, the last pieces of their prompts [s]
    longer: Floats  # (sizes, batches) what a step takes longer for each token more behind those of its prompts [s]
    behind: float  # tokens of its prompt, cached ones and earlier, behind a prompt token, on average [token]

    @property
    def first(self) -> MixedSteps:
        """The steps with one sequence."""
        names = ("batch", "verified", "step", "mixed", "single", "late", "longer")
        return replace(self, **{name: getattr(self, name)[..., :1] for name in names})

    @cached_property
    def room(self) -> Floats:
        """Prefill tokens of a rank that fit beside the decodes, (batches,). [token]"""
        return np.maximum((self.budget - self.verified) / self.ranks, 1.0)

    @cached_property
    def cut(self) -> tuple[Floats, list[Floats], list[Floats]]:
        """Pieces of a prompt, (batches,), and times of a step with a full and with the last one by table. [1], [s]"""
        pieces, decodes = np.ceil(self.prompt / self.room), self.verified / self.ranks
        last = self.prompt - (pieces - 1.0) * self.room
        tables = (self.single, self.mixed, self.late)
        full, rest = ([_between(self.tokens, each, held + decodes) for each in tables] for held in (self.room, last))
        return pieces, full, rest

    @cached_property
    def own(self) -> tuple[Floats, tuple[Floats, Floats, Floats, Floats]]:
        """Prefill tokens of a rank in a step with prefill, (batches,), and the times of such a step. [token], [s]

        Either the last piece of a prompt has a step of its own, or other prompts fill up its step: the case that delays
        decodes more counts. Times are by table (``single``, ``mixed``, ``late``), then how much longer a step with a
        full piece takes than one with the last piece.
        """
        prompt, room, (pieces, full, rest) = self.prompt, self.room, self.cut
        alone = [(pieces - 1.0) * a + b for a, b in zip(full, rest, strict=True)]  # its last piece has its own step
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

    @cached_property
    def _grown(self) -> Floats:
        """What a token more behind its prompt tokens adds to a full step, over its time, (batches,). [1/token]"""
        held = self.room + self.verified / self.ranks
        return np.asarray(_between(self.tokens, self.longer, held) / _between(self.tokens, self.mixed, held))

    def worth(self, sequences: float, new: Floats, past: Floats | float) -> Floats:
        r"""Tokens of mean prompts that fill as long a time in full steps as those of some prompts. [token]

        A prompt of N new tokens after C cached ones has C + N/2 behind each, on average, however it is cut. Scores grow
        with those, so that its steps take longer than the mean step T by its share of

        .. math:: N' = N \left(1 + \frac{T'}{T} \left(C + \frac{N}{2} - \frac{E[N (C + N/2)]}{E[N]}\right)\right)

        whose mean is that of N.
        """
        grown = float(np.interp(sequences, self.batch, self._grown))
        return new * (1.0 + grown * (past + new / 2.0 - self.behind)) if grown else new

    def with_prompts(self, sequences: float) -> tuple[float, Callable[[Floats], Floats]]:
        """Prompt tokens of a full step of one rank beside so many sequences, and the time of a step by its own.

        [token], [s]
        """
        decodes, room, alone = (
            float(np.interp(sequences, self.batch, of)) for of in (self.verified, self.room, self.step)
        )
        times = [float(np.interp(sequences, self.batch, row)) for row in self.mixed]

        def step(tokens: Floats) -> Floats:
            return np.where(tokens > 0.0, np.interp(tokens + decodes, self.tokens, times), alone)

        return room, step

    def beside(
        self, times: tuple[Floats, Floats, Floats, Floats], prompts: Floats | float, columns: Ints | slice = EVERY
    ) -> Floats:
        """Time a step in which so many ranks have a piece of a prompt, for some of the batches. [s]

        Experts compute the pieces of all ranks; attention takes as long as the largest piece and the furthest prompt.
        """
        one, every, late, longer = times
        if self.ranks == 1:
            return one
        last = 1.0 / np.ceil(self.prompt / self.room[columns])  # share of the pieces
        largest = longer * (last - last**prompts)
        return largest + with_others(one, every, late, prompts, self.ranks)

    def mixing(self, rate: float | Floats, hold_steps: Floats | int, columns: Ints | slice = EVERY) -> Mixing:
        """Find how often an instance runs steps of each kind, for some of the batches.

        Takes ``rate`` [request/s] and ``hold_steps`` (prefill delay in decode steps [1]).
        """
        prompt, ranks, room, step = self.prompt, self.ranks, self.room[columns], self.step[columns]
        held, every = self.own
        held, times = held[columns], (every[0][columns], every[1][columns], every[2][columns], every[3][columns])
        time = times[0]
        if ranks == 1 and prompt < self.room[0]:  # short prompts that came during a step share the next
            mixed, verified, found = self.mixed[:, columns], self.verified[columns], [time]
            for turn in range(3):
                come = rate * prompt * (time if turn < 2 else _limit(*found))
                held = np.minimum(np.maximum(come, np.minimum(prompt, room)), room)
                time = _between(self.tokens, mixed, held + verified)
                found.append(time)
        further = gathered(rate * hold_steps * step, ranks) if np.any(hold_steps) else 0.0
        fullest, before = held, [time]
        for turn in range(3 if ranks > 1 and prompt < self.room[0] else 2 if ranks > 1 else 0):
            if prompt < self.room[0]:
                held, fullest, times = self._shared(rate * (time if turn < 2 else _limit(*before)), columns)
            under_way = np.maximum(rate * prompt / held * time, LEAST)
            share = share_by_steps(under_way, ranks, further, (rate * time, rate * step))
            some = under_way / share  # ranks with a prompt, where there is one
            time = self.beside(times, np.minimum(np.maximum(some * held / fullest, 1.0), ranks), columns)
            before.append(time)
        share = share_by_steps(rate * prompt / held * time, ranks, further, (rate * time, rate * step))
        used = rate * prompt / (room * ranks) * self.full[columns]
        return Mixing(held, time, share, step_rate(step, time, share), used)

    def _shared(
        self, come: Floats, columns: Ints | slice
    ) -> tuple[Floats, Floats, tuple[Floats, Floats, Floats, Floats]]:
        """Prefill tokens of a rank, and of the fullest, in a step before which so many prompts came; times as ``own``.

        Where a step has no room for a whole prompt, these are as ``own``.
        """
        room, decodes = self.room[columns], self.verified[columns] / self.ranks
        held, times = self.own[0][columns], self.own[1]
        mean = np.minimum(np.maximum(self.prompt * come / self.ranks, held), np.maximum(room, held))
        fullest = np.minimum(np.maximum(self.prompt * fullest_rank(come, self.ranks), mean), np.maximum(room, held))
        tables = (self.single, self.mixed, self.late)
        new = [_between(self.tokens, each[:, columns], fullest + decodes) for each in tables]
        several = self.prompt < room
        one, every, late = (np.where(several, a, b[columns]) for a, b in zip(new, times[:3], strict=True))
        return np.where(several, mean, held), np.where(several, fullest, held), (one, every, late, times[3][columns])

    def shared(self, sequences: float, come: float) -> float:
        """Time a step that a whole prompt shares with so many others that came before it. [s]"""
        _, fullest, times = self._shared(np.full(self.batch.size, come), EVERY)
        one, every, late, _ = (float(np.interp(sequences, self.batch, each)) for each in times)
        pieces = (
            (1.0 + come * (1.0 - 1.0 / self.ranks)) * self.prompt / float(np.interp(sequences, self.batch, fullest))
        )
        return float(with_others(one, every, late, min(max(pieces, 1.0), self.ranks), self.ranks))

    @cached_property
    def bounds(self) -> Floats:
        r"""Upper bounds of the rate of an instance with n sequences, (batches,). [request/s]

        .. math:: \min\left(\frac{n}{g\,T_d(n)},\ \frac{R\,c(n)}{p\,T_{full}(n)}\right)

        The first is that of steps of decodes alone, g for each sequence; the second that of steps with c prefill tokens
        on each of R ranks, for prompts of p tokens.
        """
        decodes = self.batch / (self.step * self.each)
        return np.asarray(np.minimum(decodes, self.room * self.ranks / (self.prompt * self.full)) * (1.0 + ROUNDED))

    @cached_property
    def _known(self) -> dict[float, tuple[Floats, float]]:
        return {}

    def highest(self, slowest: float, least: float = 0.0) -> Floats:
        """Find the highest rates that an instance keeps up with, by its ``waits``; 0 where it keeps none. [request/s]

        The rate n/slowest is the least at which n sequences are fast enough, where ``slowest`` is a time [s]. Rates
        below ``least`` [request/s] may be too low. Batches that cannot have the highest rate any more are left out as
        the halvings go on.
        """
        best, known = self._known.get(slowest, (np.zeros(len(self.waits)), math.inf))
        if least >= known or (best >= known).all():
            return best
        waits, count = np.array(self.waits, dtype=float), self.batch.size
        low, high = np.zeros((waits.size, count)), np.tile(self.batch / (self.step * self.each), (waits.size, 1))
        in_time = self.batch / slowest  # [request/s]
        wait, column = np.indices(low.shape).reshape(2, -1)
        for _ in range(HALVINGS):
            left = high[wait, column] >= np.maximum(np.maximum(best, least)[wait], in_time[column])
            wait, column = wait[left], column[left]
            if not wait.size:
                break
            below, above, batch = low[wait, column], high[wait, column], self.batch[column]
            middle = (below + above) / 2
            mixing = self.mixing(middle, waits[wait], column)
            kept = (mixing.steps * batch >= middle * self.each) & (mixing.used < 1.0)
            low[wait, column], high[wait, column] = np.where(kept, middle, below), np.where(kept, above, middle)
            fast = kept & (middle >= in_time[column])
            np.maximum.at(best, wait[fast], middle[fast])
        self._known[slowest] = best, least
        return best


def share_by_steps(under_way: Floats, ranks: int, further: Floats | float, come: tuple[Floats, Floats]) -> Floats:
    r"""Find the share of the time in steps with prefill, where prompts start with a step.

    Takes the prompts that are under way, those that start with another (``prefill_delay``) and the prompts that
    ``come``: x in a step with prefill, y in one of decodes alone. [request] Several ranks are then idle for
    :math:`T_d/(1 - e^{-y})` in place of :math:`1/\lambda`, and busy until m steps in a row bring no prompt,
    :math:`T_{mix} (e^{mx} - 1)/(1 - e^{-x})` in place of :math:`(e^{mx} - 1)/\lambda`:

    .. math:: \frac{\varphi}{1 - \varphi} = \frac{\varphi_0}{1 - \varphi_0} \cdot \frac{x/(1 - e^{-x})}{y/(1 - e^{-y})}
    """
    share = mixed_share(under_way, ranks, further)
    if ranks == 1:
        return share
    mixed, alone = (np.maximum(each, LEAST) / -np.expm1(-np.maximum(each, LEAST)) for each in come)
    longer = np.where(further > 0.0, 1.0, mixed / alone)
    return np.asarray(share * longer / (1.0 - share + share * longer))


def with_others(
    one: Floats | float, every: Floats | float, late: Floats | float, prompts: Floats | float, ranks: int
) -> Floats:
    """Time a step with pieces of so many ranks, by its times as ``own``. [s]"""
    others = prompts - 1.0
    experts = own_step(one, np.maximum(every, one), others / (ranks - 1.0))
    return np.asarray(experts + (late - every) * others / (prompts + 1.0))


#: Share of the way left after a step above which a series is not continued. [1]
SLOWEST = 0.95
#: Mean prompts of a rank in a step up to which those of the fullest are tabulated, and rows of the table for each. [1]
TABULATED, ROWS = 8, 16


def _limit(first: Floats, second: Floats, third: Floats) -> Floats:
    """Find the value at which a series that nears it by the same share at each step ends (Aitken).

    >>> _limit(np.array([0.0]), np.array([1.0]), np.array([1.5])).tolist()
    [2.0]
    """
    last = third - second
    share = np.minimum(np.maximum(last / np.maximum(second - first, LEAST), 0.0), SLOWEST)
    return np.asarray(third + last * share / (1.0 - share))


def fullest_rank(come: Floats, ranks: int) -> Floats:
    """Count the prompts of the fullest rank in a step that has some. [request]

    Takes ``come``, the mean number of prompts that come in a step [request]: a Poisson number, spread over the ranks
    one by one. One of two ranks has two prompts if three or four come:

    >>> fullest_rank(np.array([1e-9, 1.0, 100.0]), 2).round(2).tolist()
    [1.0, 1.13, 50.25]
    """
    means, prompts = _fullest_rank(ranks)
    beyond = prompts[-1] + (come - means[-1]) / ranks
    return np.where(come < means[-1], np.interp(come, means, prompts), beyond)


@cache
def _fullest_rank(ranks: int) -> tuple[Floats, Floats]:
    """Table of ``fullest_rank``: means, and prompts. [request]"""
    means = np.arange(1, TABULATED * ROWS + 1) * (ranks / ROWS)
    number = np.arange(3 * TABULATED * ranks)  # more come with a probability below 1e-6
    logs = np.concatenate([[0.0], np.cumsum(np.log(number[1:]))])
    chances = np.exp(number * np.log(means[:, None]) - means[:, None] - logs)
    prompts = chances @ np.ceil(number / ranks) / -np.expm1(-means)
    return np.concatenate([[0.0], means]), np.concatenate([[1.0], prompts])


def waits_of(at: Setup, work: Demand, ranks: int, step: float) -> list[int]:
    """List the prefill delays to try, in decode steps of ``step`` seconds, longest first. [1]

    The list is empty with one rank, or where the engine has no prefill delay.
    """
    engine, given = at.overheads, work.hold_steps
    if ranks == 1 or not (engine is None or engine.holds_prompts):
        return []
    if given is not None:
        return list(given)
    longest = work.ttft.seconds / step
    return sorted({max(2 ** round(math.log2(share * longest)), 1) for share in HELD_SHARES}, reverse=True)


def _between(tokens: Floats, times: Floats, held: Floats) -> Floats:
    """Interpolate the times of steps with ``held`` tokens on a rank, (..., batches), between sizes. [s]"""
    place = np.minimum(np.maximum(np.searchsorted(tokens, held, side="right") - 1, 0), tokens.size - 2)
    column = np.arange(held.shape[-1])
    part = (held - tokens[place]) / (tokens[place + 1] - tokens[place])
    return np.asarray((1.0 - part) * times[place, column] + part * times[place + 1, column])


#: Tokens of one rank, decodes and prefill, at which steps with prefill are timed. [token]
SIZES = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Token budgets to try for a step of one attention rank: common values of ``max_num_batched_tokens``. [token]
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def mixed_tables(grid: PhaseGrid, work: Demand, rows: Ints, mapping: Sharding, last: int) -> Floats:
    """Time steps, (4, rows, sizes, batches): on every rank, on one, of last pieces [s]; ``longer`` [s/token]."""
    at, lengths = grid.setup, work.lengths
    nodes = lengths.prompt_nodes()
    new, weights = nodes.new, nodes.weight
    prompt = float(weights @ new**2) / lengths.mean_new  # new tokens of its prompt, on average over prefill tokens
    past = float(weights @ (new * nodes.past)) / lengths.mean_new  # cached tokens of its prompt, likewise
    batch = grid.batch[:last].astype(float)
    sizes = np.array(SIZES[1:], dtype=float)
    shape = (rows.size, sizes.size, batch.size)
    decodes = np.broadcast_to(batch, (sizes.size, batch.size)).reshape(1, -1)
    verified = decodes * (1.0 + mapping.draft_tokens)
    tokens = np.maximum(np.repeat(sizes, batch.size)[None, :] - verified / mapping.dp_attn, 1.0)
    held = lengths.on_ranks(decodes, mapping.dp_attn)
    alone = grid.latency[rows, :last]
    if at.speculation is not None:  # an instance has one number of draft tokens for all batches
        load = lengths.on_ranks(batch[None, :], mapping.dp_attn)
        alone = decode_step(at, mapping, batch=batch[None, :], context=load.context, rank_batch=load.batch).time

    def step(ranks: Any, prompt: float) -> Floats:
        chunk = Chunk(tokens * ranks, prompt + past, ranks, past)
        time = mixed_step(at, mapping, batch=decodes, context=held.context, chunk=chunk, rank_batch=held.batch).time
        table = np.broadcast_to(time, (shape[0], tokens.shape[1])).reshape(shape)
        return np.concatenate([alone[:, None], table], axis=1)

    every = step(mapping.dp_attn, prompt)
    one_rank = np.all(mapping.dp_attn == 1)
    if one_rank and weights.size == 1:
        return np.stack([every, every, every, np.zeros_like(every)])
    later = step(mapping.dp_attn, 2.0 * prompt) - every  # half a prompt further
    longer = later / (prompt / 2.0)
    if one_rank:
        return np.stack([every, every, every, longer])
    before = np.maximum(1.0 - tokens / prompt, 0.0).reshape(shape)  # share of a prompt before its last piece
    before = np.concatenate([np.zeros((shape[0], 1, shape[2])), before], axis=1)
    return np.stack([every, step(np.ones_like(mapping.dp_attn), prompt), every + later * before, longer])


def mixed_bytes(
    grid: PhaseGrid, work: Demand, mapping: Sharding, last: int, budgets: Sequence[float] = BUDGETS
) -> Floats:
    """Size the memory of the fullest GPU under each token budget of a rank, (rows, budgets, batches). [B]"""
    ranks, lengths, batch = mapping.dp_attn, work.lengths, grid.batch[:last].astype(float)
    decodes = np.tile(batch, len(budgets))[None, :]
    budget = ranks * np.repeat(np.array(budgets, dtype=float), last)
    prompts = ranks * np.maximum(np.ceil(budget / (ranks * lengths.mean_new)), 1.0)
    prefilling = prefilling_in_pieces(mapping, prompts, lengths.prompt, budget, decodes)
    memory = colocated_bytes(grid.setup, mapping, decodes, cached=lengths.resident, prefilling=prefilling)
    return np.broadcast_to(memory, budget.shape).reshape(-1, len(budgets), last)
