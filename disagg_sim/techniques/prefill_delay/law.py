"""Prefill passes of an instance with prefill delay: prompts wait until every attention rank can start one.

Ranks step together, so a pass with a prompt of one rank lasts nearly as long as one with a prompt of every rank. SGLang
(``--enable-prefill-delayer``) and TensorRT-LLM (``attention_dp_config``) therefore delay prompts, while decode goes
on: a pass begins when every rank has a free sequence slot, or a number of decode steps after the first one had. Slots
are empty meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.faults import out_of_range

#: Most decode steps that prompts are delayed. [1]
MOST_DELAY = 10**6
#: Free slots of a rank after a pass are counted up to this number; if prompts wait for 1/(n*q) steps, less than a
#: hundredth of the passes leave more. [1]
_MOST_LEFT = 16
#: Gauss points between the first rank with a free slot and the end of the wait. [1]
_NODES = 8
#: Slots of a rank that would become free in the longest wait: by then all other ranks have had one. [1]
_LONGEST = 8.0
#: Steps of the secant method (or bisection) for the share of ranks without a free slot, and its tolerance. [1]
_ROUNDS, _EXACT = 10, 1e-7


def delays_to_try(value: object) -> tuple[int, ...] | None:
    """Read how many decode steps prompts may be delayed."""
    if value == "tuned":
        return None
    if value == "none":
        return ()
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{quoted(value)} is no whole number of steps; allowed, too: none, tuned")
    if not 1 <= value <= MOST_DELAY:
        raise ValueError(out_of_range(quoted(value), 1, MOST_DELAY))
    return (value,)


def parse_prefill_delay(text: str | int) -> tuple[int, ...] | None:
    """Read the option of a command for the most decode steps that prompts are delayed. [1]"""
    written = isinstance(text, str) and text.isdecimal() and text.isascii()
    try:
        return delays_to_try(int(text) if written else text)
    except ValueError as error:
        raise InputError(f"hold_prompts: {error}") from None


class DelayedPasses(NamedTuple):
    """Passes of delayed prompts, of shape (columns,); a rank takes at most one prompt into each."""

    prompts: Floats  # of a pass, on average [request]
    steps: Floats  # decode steps between two passes [1]
    left: Floats  # free slots of the instance after a pass [request]
    idle: Floats  # slots over those that decode, on average [1]


def delayed_passes(batch: Ints, ranks: Ints, ending: Floats, steps: Ints) -> DelayedPasses:
    r"""Count the prompts of passes that begin when every rank has a free slot, or ``steps`` steps after the first had.

    A rank of n = B/R slots has j free ones after a pass. Each of the others ends in a step with the probability q, so
    with x the share of ranks that have none, a rank has none s steps later with the probability
    :math:`u_s = x(1-q)^{ns}`, apart from the others. With F steps until the first rank has one, a pass begins after

    .. math:: T = \min(\max_r t_r,\ F + w),\qquad E[T] = \frac{x^R}{1-(1-q)^{nR}} + \sum_{s<w} P(T > F + s)

    Over the law of T, j becomes j + Binomial(n-j, 1-(1-q)^T), and one less where that is above zero. Its stationary law
    has the share x at zero, which closes the equations. Then

    .. math:: prompts = R\,P(k_T > 0),\qquad idle = \frac{B\,q\,E[T]}{prompts}

    of the mean pass. All arguments are (columns,): slots B [request] of an instance, at least one a rank, spread as
    evenly as can be over R attention DP ranks; q, below 1; and w, at least one.

    With 64 residents on 8 ranks and answers of 1024 tokens, waits of up to 128 steps gather 6.4 prompts; there are 1.2
    times as many slots as decode:

    >>> found = delayed_passes(np.array([64]), np.array([8]), np.array([1 / 1023]), np.array([128]))
    >>> [float(each.round(1)[0]) for each in found]
    [6.4, 120.5, 6.2, 1.2]
    """
    keys, which = np.unique(np.stack([batch / ranks, ending, steps]), axis=1, return_inverse=True)
    kinds, rank = np.unique(ranks, return_inverse=True)
    found = np.empty((3, keys.shape[1], kinds.size))
    bucket = np.minimum(2 ** np.ceil(np.log2(np.ceil(keys[0]))), _MOST_LEFT).astype(int)
    for size in np.unique(bucket).tolist():
        rows = np.flatnonzero(bucket == size)
        slots, often, most = keys[:, rows]
        found[:, rows] = _Waits.of(slots, often, most, size).solved(kinds.astype(float))
    prompts, between, left = found[:, which.ravel(), rank.ravel()]
    return DelayedPasses(prompts, between, left, np.maximum(batch * ending * between / prompts, 1.0))


class _Waits(NamedTuple):
    """What may happen on a rank while prompts wait; rows are (slots of a rank, probability to end, most steps)."""

    stay: Floats  # probability that none of a rank's residents ends in a step, (rows, 1) [1]
    most: Floats  # steps, (rows, 1)
    none: Floats  # probability that none has ended half a step before the nodes, and before the end, (rows, nodes + 1)
    weights: Floats  # of the nodes, (rows, nodes) [step]
    further: Floats  # probability that so many slots are free at the start of the wait, at the nodes and at the end,
    # where none was so before, (rows, nodes + 2, further) [1]
    beyond: Floats  # probability that so many further ones or more are, where ``left`` were so before, (rows,
    # nodes + 2, left, further) [1]

    @classmethod
    def of(cls, slots: Floats, ending: Floats, most: Floats, left: int) -> _Waits:
        """Up to ``left`` free slots after a pass."""
        node, weight = np.polynomial.legendre.leggauss(_NODES)
        shares = np.concatenate([[0.0], (node + 1) / 2, [1.0]])
        stays = np.log1p(-ending)[:, None]
        longest = np.minimum(most[:, None], _LONGEST / (-slots[:, None] * stays))
        times = longest * shares
        gone = -np.expm1(times * stays)[..., None]  # probability that a resident has ended
        rest = np.maximum(slots[:, None] - np.arange(left + 1), 0.0)[:, None, :]
        further = [(1.0 - gone) ** rest]
        for k in range(left + 1):
            further.append(further[-1] * np.maximum(rest - k, 0.0) / (k + 1) * gone / (1.0 - gone))
        laws = np.stack(further, axis=-1)
        laws[..., -1] += np.maximum(1.0 - laws.sum(axis=-1), 0.0)  # and more
        laws /= laws.sum(axis=-1, keepdims=True)
        beyond = laws[..., ::-1].cumsum(-1)[..., ::-1]
        none = np.exp(slots[:, None] * stays * np.maximum(times[:, 1:] - 0.5, 0.0))
        stay = np.exp(slots[:, None] * stays)
        return cls(stay, longest, none, longest * weight / 2, laws[:, :, 0], beyond)

    def solved(self, ranks: Floats) -> Floats:
        """Prompts and steps of a pass, and free slots after it, (3, rows, ranks)."""
        first = self._first(ranks)
        low, high = np.zeros(first.shape[:2]), np.ones(first.shape[:2])
        load = -np.log(self.stay) * self.most  # slots of a rank that become free while prompts wait
        share = np.broadcast_to((1.0 + load) * np.exp(-load), low.shape)
        before, missed = np.ones_like(low), np.full_like(low, -1.0)
        for _ in range(_ROUNDS):
            left, ready = self._after(share, first, ranks)
            wrong = left[..., 0] - share
            low, high = np.where(wrong > 0, share, low), np.where(wrong > 0, high, share)
            change = wrong - missed
            guess = share - wrong * (share - before) / np.where(change == 0.0, 1.0, change)
            fair = (guess > low) & (guess < high) & (np.abs(wrong) < 0.5 * np.abs(missed))
            guess = np.where(fair, guess, (low + high) / 2)
            before, missed = share, wrong
            share = np.where(np.abs(wrong) < _EXACT, share, guess)
        free = np.arange(left.shape[-1], dtype=float)
        kept = ranks * np.einsum("ijk,k->ij", left, free)  # not by ``@``: its order of sums depends on the shape
        return np.stack([ranks * ready, self._steps(share, ranks), kept])

    def _steps(self, share: Floats, ranks: Floats) -> Floats:
        """Decode steps between two passes, (rows, ranks)."""
        stay, none = self.stay, self.none[:, None, :]

        def waited(without: Floats) -> Floats:
            """Steps from the first rank with a free slot on, times the probability that some rank has one."""
            x, r = without[..., None], ranks[:, None]
            more = 1.0 - (1.0 - x * none) ** r - x**r * (1.0 - (1.0 - none) ** r)
            return np.asarray(np.einsum("ik,ijk->ij", self.weights, more[..., :-1]))

        some = 1.0 - stay**ranks
        after = waited(np.broadcast_to(stay, share.shape)) / some
        return np.asarray(waited(share) + share**ranks * (1.0 / some + after))

    def _all_free(self, without: Floats, others: Floats) -> tuple[Floats, Floats]:
        """When all of so many other ranks have a free slot: probability by the nodes and the end, and density there."""
        x, r, none = without[..., None], others[:, None], self.none[:, None, :]
        u, speed = x * none, -np.log(self.stay)[..., None]
        return (1.0 - u) ** r, r * (1.0 - u) ** (r - 1) * u * speed

    def _begun(self, without: Floats, ranks: Floats) -> Floats:
        """Further free slots at a pass, of a rank that has ``left`` at its start, (rows, ranks, left, further)."""
        ready, density = self._all_free(without, ranks - 1)
        at = np.concatenate(
            [
                (1.0 - without[..., None]) ** (ranks[:, None] - 1),
                density[..., :-1] * self.weights[:, None, :],
                1.0 - ready[..., -1:],
            ],
            axis=-1,
        )
        return self._over(at / at.sum(axis=-1, keepdims=True))

    def _over(self, at: Floats) -> Floats:
        """Laws of further slots under the probabilities of the moments, (rows, ranks, left, further)."""
        shape = self.beyond.shape
        mean = np.einsum("ijk,ikl->ijl", at, self.beyond.reshape(shape[0], shape[1], -1))
        return np.asarray(mean.reshape(*at.shape[:2], *shape[2:]))

    def _empty(self, without: Floats, ranks: Floats) -> Floats:
        """Free slots at a pass of a rank that has none at the start, where some other has, (rows, ranks, slots).

        They sum to the probability that some other has.
        """
        ready, density = self._all_free(without, ranks - 1)
        sure, dense = self._all_free(np.ones_like(without), ranks - 1)
        every = without[..., None] ** (ranks[:, None] - 1)
        by, at = ready - every * sure, (density - every * dense)[..., :-1] * self.weights[:, None, :]
        speed, end = -np.log(self.stay)[..., None], self.none[:, None, -1:]
        late = 1.0 - every - by[..., -1:]
        own = np.concatenate([np.zeros_like(late), at, late], axis=-1)
        law = np.einsum("ijk,ikl->ijl", own, self.further)
        law[..., 0] = (late * self.further[:, None, -1:, 0] + by[..., -1:] * end)[..., 0]
        law[..., 1] += np.einsum("ijk,ik->ij", by[..., :-1], self.weights * self.none[:, :-1] * speed[:, 0])
        total = 1.0 - every
        return np.asarray(law * total / np.maximum(law.sum(axis=-1, keepdims=True), 1e-300))

    def _first(self, ranks: Floats) -> Floats:
        """Free slots at a pass of a rank where none had one at the start, (rows, ranks, slots)."""
        stay = np.broadcast_to(self.stay, (self.stay.size, ranks.size))
        own = ((1.0 - stay) / (1.0 - stay**ranks))[..., None]  # it is among the first
        law = (1.0 - own) * self._empty(stay, ranks) / (1.0 - stay ** (ranks - 1))[..., None]
        law[..., 1:] -= own * np.diff(self._begun(stay, ranks)[..., 1, :], axis=-1)
        return law

    def _after(self, share: Floats, first: Floats, ranks: Floats) -> tuple[Floats, Floats]:
        """Law of the free slots of a rank after a pass where ``share`` of the others has none, (rows, ranks, left), and
        probability that it has a prompt in the pass, (rows, ranks)."""
        empty = self._empty(share, ranks) + (share ** (ranks - 1))[..., None] * first
        begun = self._begun(share, ranks)
        left = np.ones((*share.shape, begun.shape[2]))
        many = empty[..., ::-1].cumsum(-1)[..., ::-1]
        j = np.arange(left.shape[-1])
        for k in j[:-1]:
            up = many[..., k + 2] if k + 2 < many.shape[-1] else 0.0
            inner = j[1 : k + 1]
            rises = np.einsum("ijk,ijk->ij", left[..., inner], begun[:, :, inner, k - inner + 2])
            left[..., k + 1] = (left[..., 0] * up + rises) / (1.0 - begun[..., k + 1, 1])
        left /= left.sum(axis=-1, keepdims=True)
        return left, 1.0 - left[..., 0] * empty[..., 0]
