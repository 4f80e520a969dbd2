"""Count the prefill passes of an instance that stops decode for whole prompts.

When a request ends, the next prompt takes its slot before decode goes on: after a step the engine runs passes until all
free slots are filled. A pass has as many prompts as requests ended in that step, up to the most of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.techniques.prefill_delay.law import delayed_passes

#: Requests of a rank that end in one step are counted up to the mean plus this many standard deviations plus ``_FEW``
#: requests: larger numbers have a probability below 1e-16.
_DEVIATIONS = 10.0
_FEW = 20
#: A larger pass is tried if more than this share of the steps that free a slot would fill over half of it. [1]
_WORTH = 0.01


class Refill(NamedTuple):
    """Passes that fill free slots, counted per prompt; arrays have shape (columns,), or (columns, knots).

    A weighted sum over knots is exact where the time of a pass is affine in the prompts of its fullest rank, between
    powers of two, and in those of all ranks.
    """

    prompts: Ints  # of the passes to time, (columns, knots) [request]
    lone: Mask  # whether all of them are on one rank, and not spread over all, (knots,)
    each: Floats  # weights that sum their times to the time of prefill that a prompt costs, (columns, knots) [1]
    own: Floats  # weights that sum their times to the mean time of the pass of a prompt, (columns, knots) [1]
    passes: Floats  # passes for each prompt, at most one [1]
    idle: Floats  # slots over the slots that decode: above 1 only with prefill delay [1]
    left: Floats  # slots that stay free after a pass [request]

    def of(self, columns: slice) -> Refill:
        """Take some columns, without the knots that have no weight there."""
        each, own = self.each[columns], self.own[columns]
        some = np.any((each != 0.0) | (own != 0.0), axis=0)
        prompts = self.prompts[columns][:, some]
        of_columns = self.passes[columns], self.idle[columns], self.left[columns]
        return Refill(prompts, self.lone[some], each[:, some], own[:, some], *of_columns)


def refill_passes(
    batch: Ints, ranks: Ints | int, most: Ints, ending: Floats | float, hold_steps: Ints | int = 0
) -> Refill:
    r"""Count the passes that fill free slots, and find what to time for their mean.

    Every resident ends in a step with the probability q, independently of the others: lengths differ, or requests
    arrived at different times. So the number k of free slots among the n of a rank is Binomial(n, q). A rank takes up
    to :math:`m = \max(\lfloor b/R \rfloor, 1)` prompts into a pass, all ranks run passes until the last slot is filled,
    and in pass i a rank has :math:`a_i = \min(\max(k - (i-1)m, 0), m)` prompts:

    .. math:: \Pr(\max a_i \ge a) = 1 - \prod_{ranks} \Pr(k < (i-1)m + a)

    With s prompts in all, a of them on the fullest rank, a pass lies between one with a prompts on that rank alone and
    one with a on all, as s does between a and R*a. Where b < R, the r ranks of pass i that have a prompt go in
    :math:`\lceil r/b \rceil` turns.

    Parameters
    ----------
    batch
        Residents of an instance B, spread over ranks as evenly as can be, (columns,). [request]
    ranks
        Attention DP ranks R, a number or (columns,). [1]
    most
        Prompts of a pass b, (columns,). [request]
    ending
        Probability q that a resident ends in a step, at most 1, a number or (columns,); 1/(E[OSL]-1) without drafts.
        [1]
    hold_steps
        Prefill delay: most decode steps that prompts wait until every rank has a free slot, a number or (columns,); 0 =
        none. With a delay a rank takes at most one prompt into a pass, and ``prefill_delay.delayed_passes`` counts s
        prompts in a pass on average. Its time lies (s-1)/(R-1) of the way from a pass with a prompt on one rank to one
        with a prompt on all; the pass of an average prompt lies s/R of it. [1]

    Returns
    -------
    Refill
        Passes to time, and their weights.

    Examples
    --------
    With 64 residents on 8 ranks and answers of 1024 tokens nearly every prompt is alone in its pass, although there is
    room for 8:

    >>> found = refill_passes(np.array([64]), 8, np.array([8]), 1 / 1023)
    >>> found.prompts.tolist(), found.each.round(3).tolist(), found.passes.round(3).tolist()
    ([[8, 1]], [[0.004, 0.969]], [0.973])

    Answers of two tokens all end together:

    >>> refill_passes(np.array([64]), 8, np.array([8]), 1.0).passes.tolist()
    [0.125]
    """
    ranks, ending, hold = (np.broadcast_to(each, batch.shape) for each in (ranks, ending, hold_steps))
    turns = np.where((most < ranks) & (most < batch), most, 0)
    room = np.maximum(most // ranks, 1)
    wide = int(room.max(initial=1)).bit_length() + 1
    prompts, passes = np.ones((batch.size, 2 * wide), np.int64), np.zeros(batch.size)
    each, own = np.zeros((2, batch.size, 2 * wide))
    idle, left = np.ones(batch.size), np.zeros(batch.size)
    if (waits := np.flatnonzero(hold)).size:
        found = delayed_passes(batch[waits], ranks[waits], ending[waits], hold[waits])
        full, spread = (found.prompts - 1.0) / (ranks[waits] - 1), found.prompts / ranks[waits]
        prompts[waits, 0], passes[waits] = ranks[waits], 1.0 / found.prompts
        each[waits, 0], each[waits, wide] = full / found.prompts, (1.0 - full) / found.prompts
        own[waits, 0], own[waits, wide] = spread, 1.0 - spread
        idle[waits], left[waits] = found.idle, found.left
    for rows in _alike(_reached(batch, ranks, ending), room, turns, np.where(turns > 0, ranks, 0), np.minimum(hold, 1)):
        if hold[rows[0]]:
            continue
        part = _of_room(batch[rows], ranks[rows], ending[rows], int(room[rows[0]]), int(turns[rows[0]]))
        knots = np.arange(part.lone.size // 2)
        places = np.concatenate([knots, wide + knots])
        prompts[rows[:, None], places], passes[rows] = part.prompts, part.passes
        each[rows[:, None], places], own[rows[:, None], places] = part.each, part.own
    return Refill(prompts, np.arange(2 * wide) > wide, each, own, passes, idle, left).of(slice(None))


def worth_room(batch: Ints, ranks: Ints | int, together: Ints, ending: Floats | float) -> Mask:
    """Tell where passes need room for several prompts of a rank, (columns, sizes): one step in a hundred does."""
    ranks, ending = np.broadcast_to(ranks, batch.shape), np.broadcast_to(ending, batch.shape)
    found = np.zeros((batch.size, together.size), dtype=bool)
    for rows in _alike(_reached(batch, ranks, ending)):
        slots = _FreeSlots.of(batch[rows], ranks[rows], ending[rows], 1)
        some = slots.more_than(0)
        for column, each in enumerate(together.tolist()):
            found[rows, column] = slots.more_than(each // 2) > _WORTH * some
    return found


def _alike(*keys: Ints) -> list[Ints]:
    """Places of the columns that share all keys."""
    _, which = np.unique(np.stack(keys), axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    return [] if not order.size else np.split(order, np.flatnonzero(np.diff(which.ravel()[order])) + 1)


def _reached(batch: Ints, ranks: Ints, ending: Floats) -> Ints:
    """Find the base-2 logarithm, rounded up, of the slots of a rank that may be free after a step."""
    slots = batch // ranks + 1
    mean = slots * ending
    return np.asarray(np.ceil(np.log2(np.minimum(mean + _DEVIATIONS * np.sqrt(mean) + _FEW, slots))), dtype=np.int64)


class _FreeSlots(NamedTuple):
    """Free slots of the ranks of some batches after a step: those with a slot more than the others come first.

    Arrays have shape (columns, kinds of ranks) or (columns, kinds of ranks, counts), counts from one on.
    """

    ranks: Ints  # of each kind [1]
    share: Floats  # probability of a count [1]
    reach: Floats  # of a count or more [1]

    @classmethod
    def of(cls, batch: Ints, ranks: Ints, ending: Floats, whole: int) -> _FreeSlots:
        """Counts up to a multiple of ``whole``."""
        slots = np.stack([batch // ranks + 1, batch // ranks], axis=1)
        counts = -(-(2 ** int(_reached(batch, ranks, ending).max())) // whole) * whole
        k, n, q = np.arange(1, counts + 1), slots[..., None], ending[:, None, None]
        fact = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(int(slots.max()), counts) + 1)))])
        with np.errstate(divide="ignore", invalid="ignore"):
            others = np.where(k >= n, 0.0, (n - k) * np.log1p(-q))  # more than all: see ``share``
            ways = fact[n] - fact[k] - fact[np.maximum(n - k, 0)]
            share = np.where(k <= n, np.exp(ways + k * np.log(q) + others), 0.0)
        reach = np.minimum(share[..., ::-1].cumsum(-1)[..., ::-1], 1.0)
        return cls(np.stack([batch % ranks, ranks - batch % ranks], axis=1), share, reach)

    def more_than(self, count: int) -> Floats:
        """Probability that some rank has more free slots, (columns,). [1]"""
        beyond = self.reach[..., count] if count < self.reach.shape[-1] else np.zeros(self.ranks.shape)
        return 1.0 - _none(beyond, self.ranks)


def _none(reach: Floats, ranks: Ints) -> Floats:
    """Find the probability that an event happens on no rank, by its ``reach`` on two kinds of ranks, (columns, ...)."""
    each = (1.0 - reach) ** ranks.reshape(*ranks.shape, *([1] * (reach.ndim - 2)))
    return np.asarray(each.prod(axis=1))


def _of_room(batch: Ints, ranks: Ints, ending: Floats, room: int, turns: int) -> Refill:
    """Passes with room for the same number of prompts of a rank, or of all ranks if they take turns."""
    slots = _FreeSlots.of(batch, ranks, ending, room)
    reach = slots.reach.reshape(batch.size, 2, -1, room)  # passes one after the other, prompts of a rank within
    passes, prompts, squares = _by_fullest(slots, reach)
    expected, most = prompts.sum(1), ranks
    if turns:
        filled = (slots.ranks[..., None] * reach.sum(-1)).sum(1) / ranks[:, None]
        passes, squares = (each.sum(1)[:, None] for each in _turns(filled, int(ranks[0]), turns))
        most = np.full_like(ranks, turns)
    knots = np.unique([*(2 ** np.arange(room.bit_length())).clip(max=room), room])
    places = np.minimum(most[:, None] * knots, batch[:, None])
    count = np.arange(1, room + 1)
    spread = np.stack([np.interp(count, knots, row) for row in np.eye(knots.size)], axis=1)
    whole = np.minimum(most[:, None] * count, batch[:, None])  # prompts of a pass in which all ranks are as full

    def weights(values: Floats, alike: Floats) -> Floats:
        full = np.where(whole > count, (alike - count * values) / np.maximum(whole - count, 1), values)
        parts = (np.einsum("ri,ik->rk", part, spread) for part in (full, values - full))  # in one order of sums
        return np.asarray(np.concatenate([*parts], axis=1) / expected[:, None])

    return Refill(
        prompts=np.concatenate([places, np.broadcast_to(knots, places.shape)], axis=1),
        lone=np.arange(2 * knots.size) > knots.size,
        each=weights(passes, prompts),
        own=weights(prompts, squares),
        passes=passes.sum(1) / expected,
        idle=np.ones(batch.size),
        left=np.zeros(batch.size),
    )


def _by_fullest(slots: _FreeSlots, reach: Floats) -> tuple[Floats, Floats, Floats]:
    """Passes, prompts in them and squares of these, by the prompts of the fullest rank, (columns, prompts). [1]"""
    count, on = np.arange(1, reach.shape[-1] + 1), slots.ranks
    more = np.zeros_like(reach)
    more[..., :-1] = reach[..., 1:]
    share = slots.share.reshape(reach.shape)
    share = np.concatenate([share[..., :-1], reach[..., -1:]], axis=-1)  # the last has all that is left
    first, second = (count * share).cumsum(-1), (count**2 * share).cumsum(-1)  # of ranks with at most as many

    def others(*but: int) -> Floats:
        """Probability that all other ranks have at most as many, times the ways to choose these."""
        left, ways = on.copy(), np.ones(len(on))
        for kind in but:
            ways, left[:, kind] = ways * np.maximum(left[:, kind], 0), left[:, kind] - 1
        return ways[:, None, None] * _none(more, np.maximum(left, 0))

    passes = 1.0 - _none(reach, on)  # that the fullest rank has as many or more
    passes[..., :-1] -= passes[..., 1:]
    prompts, squares = (np.asarray(sum(each[:, kind] * others(kind) for kind in (0, 1))) for each in (first, second))
    squares = squares + sum(first[:, k] * first[:, j] * others(k, j) for k in (0, 1) for j in (0, 1))
    prompts, squares = (np.diff(each, axis=-1, prepend=0.0) for each in (prompts, squares))
    return passes.sum(1), prompts.sum(1), squares.sum(1)


def _turns(filled: Floats, ranks: int, most: int) -> tuple[Floats, Floats]:
    """Passes of ranks that take turns, and squares of their prompts; ``filled`` is what each rank has, (columns, i)."""
    r = np.arange(ranks + 1)
    fact = np.concatenate([[0.0], np.cumsum(np.log(r[1:]))])
    with np.errstate(divide="ignore", invalid="ignore"):
        full = np.clip(filled, 0.0, 1.0)[..., None]
        logs = np.where(r == 0, 0.0, r * np.log(full)) + np.where(r == ranks, 0.0, (ranks - r) * np.log1p(-full))
    share = np.exp(fact[-1] - fact[r] - fact[ranks - r] + logs)
    passes, squares = (-(-r // most)).astype(float), (r // most * most**2 + (r % most) ** 2).astype(float)
    return np.einsum("rip,p->ri", share, passes), np.einsum("rip,p->ri", share, squares)
