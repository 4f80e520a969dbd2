r"""Cut prompts of unlike lengths into the pieces of steps, and say how large the largest piece of several ranks is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints

#: A prompt that exceeds a room by less than this share of it is rounding. [1]
NO_TOKEN = 1e-9
#: In place of nothing. [1]
LEAST_BUSY = 1e-9
#: Places of a piece in its prompt that stand for all, and doublings of a number of pieces. [1]
PLACES, DOUBLED = (np.arange(16) + 0.5) / 16, np.arange(15.0)


class PromptPieces(NamedTuple):
    r"""Pieces that prompts are cut into by the room of a step, arrays (..., rooms): full ones, and one last of each.

    A step takes as long as its largest piece says, of s tokens. Prompts come at random, :math:`y_i` of them in a step
    whose largest is i, and with F of their first pieces the largest of these has

    .. math:: P(s' \le s) = e^{-y_i (1 - F(s))}

    where none is left of the prompts before. After a full piece one is: the prompt goes on, for the last time with the
    chance of all full pieces. A share a of the prompts has some. Where steps alike have prefill except for a share
    :math:`\pi(k)` of them, k prompts under way, no full piece is left with the chance :math:`q = \pi(k) / \pi(y)`, none
    but those that just came with :math:`q / \pi(y)^a`, so that after a step with some none goes on with

    .. math:: \frac{q\,\pi(y)^{-a} - q}{1 - q}, \qquad \pi(k) = e^{-k}\ \text{of many ranks}

    and, of prompts of one length, :math:`(1 - \pi(k)) / (\pi(k) (1 - \pi(y)))` steps with prefill follow each other.
    """

    each: Floats  # of a prompt, on average [1]
    mean: Floats  # tokens of a piece [token]
    tokens: Floats  # of last pieces, ascending, and of a full one [token]
    kinds: Floats  # chance that a piece has so many [1]
    below: Floats  # or fewer [1]
    first: Floats  # that a prompt has, in one piece [1]
    last: Floats  # that the last of several has [1]
    ends: Floats  # query-key pairs of last pieces [1]
    means: Floats  # the same of last pieces and of full ones, on average [1]

    def at(self, rooms: Ints | slice) -> PromptPieces:
        """Those of some rooms."""
        return PromptPieces(*(each[..., rooms] for each in self))

    def follow(
        self, idle: Floats, further: Floats | float
    ) -> Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Floats]]:
        r"""Find how often the largest piece of a step has so many tokens, (kinds, rooms), and how often none follows.

        Takes prompts that come in a step of decodes alone, and those that start with another (``prefill_delay``); then,
        again and again, how often it had in the step before, prompts that come in a step of each kind and of all, and
        how many have left full pieces, :math:`-\ln q`. [1]
        """
        beyond = self.first - 1.0
        start = 1.0 + np.expm1(idle * beyond) / -np.expm1(-idle)
        if np.any(further):
            start = np.where(further > 0.0, self.first ** (1.0 + further), start)
        start = start - 1.0

        def next_step(kinds: Floats, come: Floats, every: Floats, before: Floats) -> tuple[Floats, Floats]:
            some = kinds[:-1] / kinds[:-1].sum(axis=0)
            left = (some * np.exp(-come[:-1])).sum(axis=0)  # of steps without a full piece those that none follows
            new = (some[:, None] * np.exp(come[:-1, None] * beyond)).sum(axis=0) + left * start
            ends = np.minimum(np.expm1(-every * beyond[-1]) / np.expm1(before), 1.0) * self.last  # after a full piece
            stay = np.exp(come[-1] * beyond) * ends
            most = (1.0 - new[-1]) / np.maximum(1.0 - new[-1] + stay[-1], LEAST_BUSY)
            reached = new + most * (stay - new)
            found = np.concatenate([reached, np.ones_like(most)[None]])
            found[1:] -= reached
            return np.maximum(found, LEAST_BUSY), left * (1.0 - most)

        return next_step


def larger(than: Floats, values: Floats, below: Floats) -> Floats:
    """Find the mean of the larger of some numbers and a value by chance, of these in ascending order, 0 or more.

    Takes the chances that no larger one is drawn.

    >>> larger(np.array([0.0, 2.0]), np.array([1.0, 3.0]), np.array([0.5, 1.0])).tolist()
    [2.0, 2.5]
    """
    beyond = np.append((values * np.diff(below, prepend=0.0))[::-1].cumsum()[::-1], 0.0)
    place = values.searchsorted(than, side="right")
    return np.asarray(than * np.append(0.0, below)[place] + beyond[place])


@dataclass(frozen=True, eq=False)
class PromptLengths:
    """Lengths of prompts, arrays (prompts,)."""

    new: Floats  # tokens that prefill computes [token]
    past: Floats  # cached ones before them [token]
    weight: Floats  # probabilities [1]

    @cached_property
    def mean(self) -> float:
        """New tokens. [token]"""
        return float(self.weight @ self.new)

    @cached_property
    def behind(self) -> float:
        """Tokens of its prompt, cached ones and earlier, behind a new token, on average. [token]"""
        return float(self.weight @ (self.new * (self.past + self.new / 2.0))) / self.mean

    def counts(self, room: Floats) -> Floats:
        """Pieces of each prompt, (prompts, rooms). [1]"""
        return np.asarray(np.maximum(np.ceil(self.new[:, None] / room - NO_TOKEN), 1.0))

    def cut(self, room: Floats) -> PromptPieces:
        """Cut prompts into pieces of so much room, (rooms,). [token]"""
        counts = self.counts(room)
        last, each = self.new[:, None] - (counts - 1.0) * room, self.weight @ counts
        order = np.argsort(last, axis=0)
        own, whole = self.weight[order], np.take_along_axis(counts, order, axis=0) == 1.0
        ends = last * (self.past + self.new)[:, None] - last**2 / 2.0
        several, full = np.cumsum(own * ~whole, axis=0), counts - 1.0
        mean = self.weight @ (full * room * (self.past[:, None] + np.maximum(full, 1.0) * room / 2.0))
        return PromptPieces(
            each=each,
            mean=self.mean / each,
            tokens=np.concatenate([np.take_along_axis(last, order, axis=0), np.broadcast_to(room, (1, room.size))]),
            kinds=np.maximum(np.concatenate([own / each, 1.0 - 1.0 / each[None]]), LEAST_BUSY),
            below=np.concatenate([np.cumsum(own, axis=0) / each, np.ones((1, room.size))]),
            first=np.cumsum(own * whole, axis=0),
            last=several / np.maximum(several[-1], LEAST_BUSY),
            ends=np.take_along_axis(ends, order, axis=0),
            means=np.stack([self.weight @ ends, mean / np.maximum(each - 1.0, LEAST_BUSY)]),
        )

    def pieces(self, room: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Pieces of each prompt [1], tokens of the last [token], pairs of full ones at ``PLACES``, and of the last."""
        counts = self.counts(np.array([room]))[:, 0]
        last = self.new - (counts - 1.0) * room
        before = PLACES * np.maximum(counts - 2.0, 0.0)[:, None] * room  # tokens of its prompt
        every = room * (self.past[:, None] + before + room / 2.0)
        return counts, last, every, last * (self.past + self.new - last / 2.0)

    def pairs(self, room: float) -> list[tuple[Floats, Floats]]:
        """Query-key pairs of last pieces and of full ones, ascending, and how many a prompt has of each. [1]"""
        counts, _, every, ends = self.pieces(room)
        own = np.repeat(self.weight * (counts - 1.0) / PLACES.size, PLACES.size)
        both = (ends, self.weight), (every.ravel(), own)
        return [(values[order], counts[order]) for values, counts in both for order in [np.argsort(values)]]

    def largest_pairs(self, room: float) -> Floats:
        """Pairs of the largest of 1, 2, 4, ... last pieces, and full ones, over their means. [1]"""
        found = []
        for values, counts in self.pairs(room):
            reached = np.minimum(counts.cumsum() / max(counts.sum(), LEAST_BUSY), 1.0)
            largest = values @ np.diff(reached[:, None] ** 2.0**DOUBLED, axis=0, prepend=0.0)
            found.append(largest / max(largest[0], LEAST_BUSY))
        return np.array(found)
