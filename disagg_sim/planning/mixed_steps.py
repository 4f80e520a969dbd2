r"""Time the steps of a co-located instance, with and without prefill, and find how often it runs each kind.

A prompt lives on one attention rank and takes m steps with prefill, of T_mix each. At r requests/s and n sequences
:math:`k = r\,m\,T_{mix}(n)` prompts are under way on average. One rank computes them one after the other, so a share k
of the time goes to such steps. R ranks compute theirs in the same steps, and all wait for the slowest: projections take
as long as on the rank with the most tokens, scores and values as on the one with the most query-key pairs, experts as
long as all tokens. Of N pieces of prompts the largest has :math:`\int 1 - F^N`. Which one that is follows from the step
before (``planning.pieces``): the longer it is, the more prompts come. Steps with prefill end with one
that has no full piece and in which none comes, and those of decodes alone with one in which some do, or when prefill
delay says so (``techniques.prefill_delay``). Where prompts of several steps wait for a rank, as many more count as come
that a share :math:`\pi(k)` of steps alike is without prefill (M/M/R, ``prefill_delay.plan_queue``). An instance with
prefill is given s times the requests of one without (``planning.shared_instances``), so these come at the rates
:math:`r s/(1 - \varphi (1 - s))` and :math:`r/(1 - \varphi (1 - s))`.

Where a step has room for several prompts of a rank, those that come to it during a step share the next. So
:math:`r\,T` come on average, spread over the ranks one by one, and the fullest of R ranks has
:math:`E[\lceil A/R \rceil \mid A \ge 1]` of A, Poisson of that mean: the largest and some of the mean. Steps are timed
at a few sizes for all batches of an instance.

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
from disagg_sim.planning.pieces import DOUBLED, PromptLengths, PromptPieces, larger
from disagg_sim.planning.shared_instances import AT_RANDOM, Sent
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.step_mixing import step_rate, time_alone
from disagg_sim.techniques.prefill_delay.plan_queue import gathered, mixed_share

#: Prefill delays to try, as shares of the TTFT limit: the rest is for prefill and its queue. [1]
HELD_SHARES = (1 / 4, 1 / 2, 3 / 4)
#: Halvings of the range in which the highest rate of an instance lies.
HALVINGS = 20
#: Relative margin of an upper bound against rounding: far above a few times 2**-53. [1]
ROUNDED = 1e-12
#: Turns in which steps and what comes in them are found from each other, and most of the time with prefill. [1]
TURNS, MOST = 3, 1.0 - 1e-9
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
    kinds: Floats  # share of the steps with prefill by their largest piece, (kinds, batches) [1]


class Among(NamedTuple):
    """Prompts beside pieces of other ranks, arrays (prompts,)."""

    counts: Floats  # pieces [1]
    last: Floats  # tokens of the last one [token]
    full: Floats  # time of a step with a full one [s]
    pairs: Floats  # most query-key pairs of a rank in the step of the last one [1]
    none: float  # the same without the prompt [1]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedSteps:
    """Steps of an instance under one token budget; instances that differ in prefill delay share them."""

    ranks: int  # attention ranks, each with prompts of its own [1]
    budget: int  # tokens of a step, decodes and prefill, over all ranks [token]
    prompts: PromptLengths  # that the pieces are of
    each: float  # decode steps of a request, on average [1]
    waits: tuple[int, ...]  # most decode steps of each prefill delay; 0 = none [1]
    batch: Floats  # (batches,) ascending from 1 to the seats [request]
    verified: Floats  # (batches,) tokens of these sequences in a step, drafts included [token]
    step: Floats  # (batches,) time of a step of decodes alone [s]
    tokens: Floats  # (sizes,) tokens of a rank in a step, decodes and prefill, ascending from 0 [token]
    mixed: Floats  # (sizes, batches) time of a step with so many on every rank [s]
    single: Floats  # (sizes, batches) the same with so many on one rank alone [s]
    longer: Floats  # (sizes, batches) what a step takes longer for each token more behind those of its prompts [s]
    ahead: int = 0  # steps that are formed before the one under way has ended [1]

    def beside(self, sequences: float) -> MixedSteps:
        """The steps with so many sequences alone."""
        part = float(np.interp(sequences, self.batch, np.arange(self.batch.size)))
        low, names = min(int(part), self.batch.size - 2), ("batch", "verified", "step", "mixed", "single", "longer")
        if low < 0:
            return self
        both = {name: getattr(self, name)[..., low : low + 2] for name in names}
        return replace(self, **{name: each @ np.array([[low + 1 - part], [part - low]]) for name, each in both.items()})

    @cached_property
    def prompt(self) -> float:
        """New tokens of a prompt, on average. [token]"""
        return self.prompts.mean

    @cached_property
    def room(self) -> Floats:
        """Prefill tokens of a rank that fit beside the decodes, (batches,). [token]"""
        return np.maximum((self.budget - self.verified) / self.ranks, 1.0)

    @cached_property
    def pieces(self) -> PromptPieces:
        """Pieces that prompts are cut into."""
        return self.prompts.cut(self.room)

    @cached_property
    def count(self) -> Floats:
        """Pieces of a prompt, (batches,); of one rank, of a mean prompt. [1]"""
        return np.ceil(self.prompt / self.room) if self.ranks == 1 else self.pieces.each

    @cached_property
    def own(self) -> tuple[Floats, Floats]:
        """Prefill tokens of a rank in a step with prefill, and its time where no other has any. [token], [s]

        Of one rank the last piece of a prompt has a step of its own, or other prompts fill up its step: the case that
        delays decodes more counts.
        """
        prompt, room, decodes = self.prompt, self.room, self.verified / self.ranks
        if self.ranks > 1:
            return self.pieces.mean, _between(self.tokens, self.single, self.pieces.mean + decodes)
        last = prompt - (self.count - 1.0) * room
        full, rest = (_between(self.tokens, self.mixed, held + decodes) for held in (room, last))
        alone = (self.count - 1.0) * full + rest
        dearer = (self.count == 1.0) | (alone - self.count * self.step > prompt / room * (full - self.step))
        return np.where(dearer, prompt / self.count, np.minimum(prompt, room)), np.where(
            dearer, alone / self.count, full
        )

    @cached_property
    def full(self) -> Floats:
        """Time of a step whose budget is full, (batches,). [s]"""
        if self.ranks == 1:
            return _between(self.tokens, self.mixed, self.room + self.verified)
        each = self.room / self.pieces.mean  # pieces of a rank
        most = self._most_pairs(self.ranks * each, self.ranks * each * (1.0 - 1.0 / self.count), self.pieces)
        pairs = self.prompts.behind * self.pieces.mean * (each - 1.0) + most
        return self.lasting(self.room, self.ranks * self.room, pairs)

    @cached_property
    def _tables(self) -> Floats:
        """Times of a step with so many tokens on one rank, and what those of others add, (2, sizes, batches). [s]"""
        return np.stack([self.single, np.maximum(self.mixed - self.single, 0.0)])

    @cached_property
    def _pair(self) -> Floats:
        """What a step takes longer for each query-key pair more, (batches,). [s]"""
        return np.asarray(_between(self.tokens, self.longer, self.room + self.verified / self.ranks) / self.room)

    @cached_property
    def _known_pairs(self) -> Floats:
        """``PromptPieces.largest_pairs`` of the most room. [1]"""
        return self.prompts.largest_pairs(float(self.room[0]))

    def _most_pairs(self, pieces: Floats, full: Floats, law: PromptPieces) -> Floats:
        """Query-key pairs of the largest of some pieces, of which so many are full. [1]"""
        ends = pieces - full
        of_ends, of_full = (
            mean * np.interp(np.log2(np.maximum(count, 1.0)), DOUBLED, known)
            for mean, known, count in zip(law.means, self._known_pairs, (ends, full), strict=True)
        )
        return np.asarray(of_full + np.minimum(np.maximum(ends, 0.0), 1.0) * np.maximum(of_ends - of_full, 0.0))

    def lasting(
        self, tokens: Floats, every: Floats | float, pairs: Floats | None = None, columns: Ints | slice = EVERY
    ) -> Floats:
        """Time a step by the prompt tokens of its fullest rank, (..., batches), and of all ranks [token]. [s]

        Experts compute the pieces of all ranks; all else takes as long as on the rank with the most tokens, scores and
        values as on the one with the most query-key ``pairs``; None = as its tokens have on average.
        """
        one, all_ranks = self._apart(tokens, columns)
        further = 0.0 if pairs is None else self._pair[columns] * (pairs - tokens * self.prompts.behind)
        return np.asarray(one + all_ranks * self._others(tokens, every) + further)

    def _apart(self, tokens: Floats, columns: Ints | slice = EVERY) -> Floats:
        """Times of steps with so many tokens on one rank, and what those of others add, (2, ..., batches). [s]"""
        held, column = tokens + self.verified[columns] / self.ranks, np.arange(self.batch.size)[columns]
        place = np.minimum(np.maximum(self.tokens.searchsorted(held, side="right") - 1, 0), self.tokens.size - 2)
        low, first = self.tokens[place], self._tables[:, place, column]
        part = (held - low) / (self.tokens[place + 1] - low)
        return np.asarray(first + part * (self._tables[:, place + 1, column] - first))

    def _others(self, tokens: Floats, every: Floats | float) -> Floats:
        """Share of the other ranks that have as many tokens as the fullest, by those of all. [1]"""
        return np.minimum(np.maximum(every / tokens - 1.0, 0.0), self.ranks - 1.0) / (self.ranks - 1.0)

    @cached_property
    def _of_one(self) -> Floats:
        """As ``_apart``, of steps whose fullest rank has one piece, without the pairs of full ones."""
        found = self._apart(self.pieces.tokens)
        found[0] -= self._pair * self.prompts.behind * self.pieces.tokens
        found[0, :-1] += self._pair * self.pieces.ends
        return found

    def by_largest(
        self, some: Floats, fullest: Floats | None, most: Floats, law: PromptPieces, columns: Any = EVERY
    ) -> Floats:
        """Times of steps by their largest piece, (kinds, batches), for some of the batches. [s]

        Takes the pieces of a step and those of its fullest rank (None = one each) [request], the share of steps with a
        full one, and the pieces of these batches.
        """
        full = np.maximum(some * (1.0 - 1.0 / law.each) / np.maximum(most, LEAST), 1.0)
        every, pairs = some * law.mean, self._most_pairs(some, full, law)
        if fullest is None:
            one, all_ranks = self._of_one[..., columns]
            times = one + all_ranks * self._others(law.tokens, every)
            times[-1] += self._pair[columns] * pairs
            return np.asarray(times)
        more = (fullest - 1.0) * law.mean
        whole = law.tokens + more
        tokens = np.minimum(whole, law.tokens[-1])
        pairs = np.concatenate([law.ends, pairs[None]]) + self.prompts.behind * more
        return self.lasting(tokens, every, pairs * tokens / whole, columns)

    def among(self, others: float, prompts: PromptLengths) -> Among:
        """Prompts beside so many pieces of other ranks, by chance none (taken as the smallest), and one batch."""
        law, room = self.pieces, float(self.room[0])
        values, number = (np.concatenate(each) for each in zip(*self.prompts.pairs(room), strict=True))
        order = np.argsort(values)
        reached = np.exp(others * (np.minimum(np.cumsum(number[order]) / law.each[0], 1.0) - 1.0))
        counts, last, own, ends = prompts.pieces(room)
        most, ends = (larger(each, values[order], reached) for each in (own, np.append(ends, 0.0)))
        every = room + others * float(law.mean[0])
        full = self.lasting(np.full((last.size, 1), room), every, most.mean(axis=1)[:, None])[:, 0]
        return Among(counts, last, full, ends[:-1], float(ends[-1]))

    def added(self, mixing: Mixing, sequences: float, rate: float) -> Floats:
        """Find the time that prompts of each length add to the steps of others, at a rate [request/s]. [s]"""
        held, time, share = (float(np.interp(sequences, self.batch, each)) for each in mixing[:3])
        steps, others = self.beside(sequences), rate * max(self.prompt / held, 1.0) * time / share
        own, law = steps.among(others, self.prompts), steps.pieces
        last = np.append(own.last, 0.0)
        largest = larger(last, law.tokens[:, 0], np.exp(others * (law.below[:, 0] - 1.0)))
        every, pairs = last + others * float(law.mean[0]), np.append(own.pairs, own.none)
        ends = steps.lasting(largest[:, None], every[:, None], pairs[:, None])[:, 0]
        return np.asarray((own.counts - 1.0) * (own.full - ends[-1]) + ends[:-1] - ends[-1])

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
        return new * (1.0 + grown * (past + new / 2.0 - self.prompts.behind)) if grown else new

    def with_prompts(self, sequences: float) -> tuple[float, Callable[[Floats], Floats]]:
        """Prompt tokens of a full step of one rank beside some sequences [token]; the time of a step by its own [s]."""
        decodes, room, alone = (
            float(np.interp(sequences, self.batch, of)) for of in (self.verified, self.room, self.step)
        )
        times = [float(np.interp(sequences, self.batch, row)) for row in self.mixed]

        def step(tokens: Floats) -> Floats:
            return np.where(tokens > 0.0, np.interp(tokens + decodes, self.tokens, times), alone)

        return room, step

    def mixing(
        self, rate: float | Floats, hold_steps: Floats | int, columns: Ints | slice = EVERY, sent: Sent = AT_RANDOM
    ) -> Mixing:
        """Find how often an instance runs steps of each kind at a rate [request/s] and a prefill delay [step]."""
        if self.ranks > 1:
            return self._of_ranks(rate, hold_steps, columns, sent)
        prompt, room, step = self.prompt, self.room[columns], self.step[columns]
        held, time = (each[columns] for each in self.own)
        mixed, verified, found = self.mixed[:, columns], self.verified[columns], [time]
        for turn in range(3 if prompt < self.room[0] else 0):  # short prompts that came during a step share the next
            come = rate * prompt * (time if turn < 2 else _limit(*found))
            held = np.minimum(np.maximum(come, np.minimum(prompt, room)), room)
            time = _between(self.tokens, mixed, held + verified)
            found.append(time)
        share = mixed_share(rate * prompt / held * time, 1)
        used = rate * prompt / room * self.full[columns]
        return Mixing(held, time, share, step_rate(step, time, share), used, np.ones((1, 1)))

    def _of_ranks(self, rate: float | Floats, hold_steps: Floats | int, columns: Ints | slice, sent: Sent) -> Mixing:
        """See ``mixing``, of several ranks."""
        ranks, step, law, time = self.ranks, self.step[columns], self.pieces.at(columns), self.own[1][columns]
        room, held, several = law.tokens[-1], law.mean, self.prompt < self.room[0]
        further = gathered(rate * hold_steps * step, ranks) if np.any(hold_steps) else 0.0
        idle, pieces = np.maximum(rate * step, LEAST), rate * law.each
        share = mixed_share(pieces * time, ranks, further)
        kinds, follow = law.kinds, law.follow(idle, further)
        found = [time]
        for turn in range(TURNS):
            time = _limit(*found) if turn == TURNS - 1 else time
            under_way, slower = np.maximum(pieces * time, LEAST), sent.in_prefill(time / step)
            more = 1.0 / (1.0 - share * (1.0 - slower))  # than on average come to an instance without prefill
            come, busy = slower * more * rate * time, slower * more * under_way
            fullest = None
            some = np.maximum(under_way / np.maximum(share, LEAST), 1.0)
            if several:
                fullest = fullest_rank(under_way, ranks)
                held = np.minimum(np.maximum(law.mean * under_way / ranks, law.mean), room)
            else:
                some = np.minimum(some, ranks)
                come, busy = (
                    -np.log1p(-np.minimum(mixed_share(each, ranks, even=sent.even), MOST)) for each in (come, busy)
                )
            times = self.by_largest(some, fullest, kinds[-1], law, columns)
            kinds, left = follow(kinds, come * times / time, come, np.maximum(busy - come, LEAST))
            time = (kinds * times).sum(axis=0)
            found.append(time)
            alone = time_alone(step, -np.expm1(-more * idle), left)
            if self.ahead:
                alone = step * alone_ahead(left, np.exp(-more * idle), np.maximum(np.exp(-come), left))
            share = time / (time + alone)
            if np.any(hold_steps):
                held_back = mixed_share(pieces * time * law.mean / held, ranks, further)
                share = np.where(further > 0.0, held_back, share)
        used = rate * self.prompt / (room * ranks) * self.full[columns]
        return Mixing(held, time, share, step_rate(step, time, share), used, kinds)

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
    def _known(self) -> dict[float, Floats]:
        return {}

    def highest(self, slowest: float) -> Floats:
        """Find the highest rates that an instance keeps up with, by its ``waits``; 0 where it keeps none. [request/s]

        The rate n/slowest is the least at which n sequences are fast enough, where ``slowest`` is a time [s]. Batches
        that cannot have the highest rate any more are left out as the halvings go on.
        """
        if slowest in self._known:
            return self._known[slowest]
        best = np.zeros(len(self.waits))
        waits, count = np.array(self.waits, dtype=float), self.batch.size
        low, high = np.zeros((waits.size, count)), np.tile(self.batch / (self.step * self.each), (waits.size, 1))
        in_time = self.batch / slowest  # [request/s]
        wait, column = np.indices(low.shape).reshape(2, -1)
        for _ in range(HALVINGS):
            left = high[wait, column] >= np.maximum(best[wait], in_time[column])
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
        self._known[slowest] = best
        return best


def alone_ahead(left: Floats, none: Floats, later: Floats) -> Floats:
    r"""Count the steps of decodes alone for each with prefill, where a step is formed as the one before begins. [1]

    Takes the chances that a step with prefill is the last of its run, where none is formed ahead, and that no prompt
    comes in a step of decodes alone, :math:`p_0`, or in one with prefill, p, at least that of the last of a run. What
    comes in the last step of a run starts after one step of decodes alone. So there are as many, and those that it
    takes until a prompt comes, if none has. The second step with prefill has what came in the step of decodes alone
    before, a later one what came in one with prefill. Of H steps of a run, one after a start by chance,

    .. math:: \frac{1 + p/(1 - p_0)}{1 + H - p_0/p}

    which is what it is without for prompts of one piece, :math:`H = 1/p`:

    >>> alone_ahead(np.array([0.2]), np.array([0.9]), np.array([0.2])) * (1.0 - 0.9)
    array([0.2])
    """
    last, quiet = np.maximum(left, LEAST), np.maximum(later, LEAST)
    return np.asarray((1.0 + quiet / np.maximum(1.0 - none, LEAST)) / np.maximum(1.0 + 1.0 / last - none / quiet, 1.0))


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
    """List the prefill delays to try, in decode steps of ``step`` seconds, longest first; one rank has none. [1]"""
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
    """Time steps, (3, rows, sizes, batches): on every rank, on one [s]; ``longer`` [s/token]."""
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
        return np.stack([every, every, np.zeros_like(every)])
    longer = (step(mapping.dp_attn, 2.0 * prompt) - every) / (prompt / 2.0)  # half a prompt further
    return np.stack([every, every if one_rank else step(np.ones_like(mapping.dp_attn), prompt), longer])


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
