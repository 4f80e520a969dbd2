"""Columns of a co-located search: every batch of a group with every number of prompts that its passes may take.

How free seats are filled depends on residents, ranks and how long answers are, so searches share it: cases that differ
in prompts, limits or systems.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.serving.colocation import ColocatedCase, Group
from disagg_sim.serving.slot_turnover import Refill, refill_passes, worth_room

T = TypeVar("T")
#: DP degree, probability that a resident ends in a decode step, and, where they are given, prompts that a pass may take
#: and steps that they are held back.
_Key = tuple[int, float, tuple[int, ...] | None, tuple[int, ...] | None]
#: Axes of which is kept what their batches have: those of all DP degrees of ten lengths of outputs. [1]
KEPT_AXES = 256
_kept_sizes: OrderedDict[_Key, tuple[Ints, Ints]] = OrderedDict()
_kept_passes: OrderedDict[_Key, tuple[Ints, Refill]] = OrderedDict()
#: Seats of a rank that become free while prompts are held back, of the waits that a search tries. [1]
_HELD = np.array([0.25, 1.0, 4.0])


class PassColumns(NamedTuple):
    """The columns of a group."""

    batch_index: Ints  # (columns,) place in the batch axis
    together: Ints  # (columns,) prompts that a pass may take [request]
    hold_steps: Ints  # (columns,) most decode steps that prompts wait until every rank has a free seat; 0 = none [1]
    passes: Floats  # (columns,) that a prompt costs, at most one [1]
    idle: Floats  # (columns,) seats over those that decode [1]
    left: Floats  # (columns,) seats that stay free after a pass [request]
    sizes: Ints  # (passes,) the numbers of prompts that are timed, over all ranks [request]
    lone: Ints  # (further passes,) and those on one rank [request]
    each: Floats  # weights that sum times of both to what a prompt costs, (all passes, columns) [1]
    own: Floats  # and to the pass that a prompt is in, on average, (all passes, columns) [1]
    longest: Ints  # (columns,) place in ``sizes`` of ``together``
    sized: Ints  # (columns,) number of the batch and prompts of a pass; those that differ in the wait alone share it

    def mean(self, times: Floats) -> tuple[Floats, Floats]:
        """What a prompt costs, and what the pass takes that it is in, (rows, columns). [s]"""
        alone = times[:, times.shape[1] - self.lone.size :][:, ::-1]
        times = np.concatenate([times[:, : self.sizes.size], alone], axis=1)
        # not by ``@``: the order in which BLAS sums, and so the last digit, depends on the number of its threads
        each, own = (np.einsum("rp,pc->rc", times, weights) for weights in (self.each, self.own))
        return each, own


def pass_sizes(case: ColocatedCase, groups: Sequence[Group]) -> list[Ints]:
    """Choose the prompts that a pass may take, those worth trying unless they are given.

    Returns an array (batches, options) for each group, 0 where an option is not tried [request].
    """
    if (given := case.options.prefill_batch) is not None:
        return [np.where(np.array(given) <= group.batch[:, None], given, 0) for group in groups]
    found = _of_longest(_kept_sizes, case, groups, _worth_trying, _joined_sizes)
    return [sizes[: group.batch.size] for sizes, group in zip(found, groups, strict=True)]


def pass_columns(case: ColocatedCase, groups: Sequence[Group]) -> list[PassColumns]:
    """Set up the columns of groups, and count their passes."""
    found = []
    filled = _of_longest(_kept_passes, case, groups, _refilled, Refill.then)
    for (index, together, steps), passes in zip(_tried(case, groups), filled, strict=True):
        found.append(_of(index, together, steps, passes.of(slice(0, together.size))))
    return found


def _worth_trying(case: ColocatedCase, groups: Sequence[Group], starts: Sequence[int]) -> list[Ints]:
    """Of the batches of each group from ``starts`` on."""
    batches = [group.batch[start:] for group, start in zip(groups, starts, strict=True)]
    batch, dp = _axes(batches, groups)
    together = 2 ** np.arange(1, max(int((batch // dp).max(initial=1)), 1).bit_length())
    room = dp[:, None] * together
    tried = worth_room(batch, dp, together, _ending(case, groups)) & (room <= batch[:, None])
    found = np.concatenate([np.minimum(dp, batch)[:, None], np.where(tried, room, 0)], axis=1)
    return np.split(found, np.cumsum([each.size for each in batches])[:-1])


def _refilled(case: ColocatedCase, groups: Sequence[Group], starts: Sequence[int]) -> list[Refill]:
    """Of the columns of the batches of each group from ``starts`` on."""
    columns = []
    for start, (rows, *options) in zip(starts, _tried(case, groups), strict=True):
        first = int(rows.searchsorted(start))
        columns.append((rows[first:], *(each[first:] for each in options)))
    batch, dp = _axes([group.batch[rows] for group, (rows, *_) in zip(groups, columns, strict=True)], groups)
    most, steps = (np.concatenate([each[k] for each in columns]) for k in (1, 2))
    filled = refill_passes(batch, dp, most, _ending(case, groups), steps)
    ends = np.cumsum([rows.size for rows, *_ in columns]).tolist()
    return [filled.of(slice(end - rows.size, end)) for end, (rows, *_) in zip(ends, columns, strict=True)]


def _joined_sizes(one: Ints, other: Ints) -> Ints:
    """Sizes of batches, and of those that follow."""
    wide = max(one.shape[1], other.shape[1])
    return np.concatenate([np.pad(each, ((0, 0), (0, wide - each.shape[1]))) for each in (one, other)])


def _of_longest(
    kept: OrderedDict[_Key, tuple[Ints, T]],
    case: ColocatedCase,
    groups: Sequence[Group],
    made: Callable[[ColocatedCase, Sequence[Group], Sequence[int]], list[T]],
    joined: Callable[[T, T], T],
) -> list[T]:
    """Find what is kept of batch axes that begin as those of the groups; make it for the batches that are new.

    What a batch has depends on no other batch, and lengths, mappings and limits decide the end of an axis alone.
    """
    options = case.options
    keys = [(group.dp, _ending(case, groups), options.prefill_batch, _steps_given(case)) for group in groups]
    new: dict[_Key, Group] = {}
    for key, group in zip(keys, groups, strict=True):
        known = kept[key][0] if key in kept else group.batch[:0]
        if not np.array_equal(known[: group.batch.size], group.batch):
            new[key] = max(group, new.get(key, group), key=lambda each: each.batch.size)
    if new:
        starts = [_begun(kept, key, group.batch) for key, group in new.items()]
        for (key, group), start, more in zip(new.items(), starts, made(case, [*new.values()], starts), strict=True):
            kept[key] = group.batch, joined(kept[key][1], more) if start else more
    found = []
    for key in keys:
        kept.move_to_end(key)
        found.append(kept[key][1])
    while len(kept) > KEPT_AXES:
        kept.popitem(last=False)
    return found


def _begun(kept: OrderedDict[_Key, tuple[Ints, T]], key: _Key, batch: Ints) -> int:
    """How many batches are kept already of an axis. [1]"""
    known = kept[key][0] if key in kept else batch[:0]
    return known.size if np.array_equal(known, batch[: known.size]) else 0


def hold_steps(case: ColocatedCase, groups: Sequence[Group]) -> list[Ints]:
    """Choose how long prompts may be held back, of each group: (batches, options), 0 where an option is not tried. [1]

    A rank of n seats has a free one every 1/(n*q) steps. Where that is more than one step, all ranks have a seat, and
    no prompts of a pass are given, prompts may wait. Unless steps are given, for the powers of two next to a quarter of
    it, to it and to four times it: beyond, seats are empty for nothing, and between, throughput changes by few percent;
    and not at all where the engine cannot do so.
    """
    given, found = _steps_given(case), []
    for group in groups:
        freed = group.batch[:, None] / group.dp * _ending(case, groups)  # seats of a rank in a step
        steps = 2.0 ** np.round(np.log2(_HELD / freed)) if given is None else np.array(given) * np.ones(freed.shape)
        tried = (group.dp > 1) & (group.batch[:, None] >= group.dp) & (freed < 1.0)
        found.append(np.where(tried & (case.options.prefill_batch is None), steps, 0.0).astype(np.int64))
    return found


def _tried(case: ColocatedCase, groups: Sequence[Group]) -> list[tuple[Ints, Ints, Ints]]:
    """Columns of each group, in the order of its batches: place in the batch axis, prompts that a pass may take, and
    steps that they are held back at most."""
    found = []
    for sizes, steps in zip(pass_sizes(case, groups), hold_steps(case, groups), strict=True):
        most = np.concatenate([sizes, np.where(steps > 0, sizes[:, :1], 0)], axis=1)
        held = np.concatenate([np.zeros_like(sizes), steps], axis=1)
        found.append((np.nonzero(most)[0], most[most > 0], held[most > 0]))
    return found


def _of(batch_index: Ints, together: Ints, steps: Ints, filled: Refill) -> PassColumns:
    spread = np.concatenate([filled.prompts[:, ~filled.lone], together[:, None]], axis=1)
    on_one = filled.prompts[:, filled.lone]
    sizes, which = np.unique(spread, return_inverse=True)
    lone, place = np.unique(on_one, return_inverse=True)
    which, places = which.reshape(spread.shape), np.empty_like(filled.prompts)
    places[:, ~filled.lone], places[:, filled.lone] = which[:, :-1], sizes.size + place.reshape(on_one.shape)

    def weights(of_knots: Floats) -> Floats:
        """Of the passes that the knots stand for; two knots may stand for one."""
        found = np.zeros((sizes.size + lone.size, together.size))
        for at, knot in zip(places.T, of_knots.T, strict=True):
            found[at, np.arange(together.size)] += knot
        return found

    return PassColumns(
        batch_index=batch_index,
        together=together,
        hold_steps=steps,
        passes=filled.passes,
        idle=filled.idle,
        left=filled.left,
        sizes=sizes,
        lone=lone,
        each=weights(filled.each),
        own=weights(filled.own),
        longest=which[:, -1],
        sized=np.unique((batch_index, together), axis=1, return_inverse=True)[1].ravel(),
    )


def _steps_given(case: ColocatedCase) -> tuple[int, ...] | None:
    """Steps that prompts may be held back; None = those worth trying."""
    given, engine = case.options.hold_steps, case.at.overheads
    return () if given is None and engine is not None and not engine.holds_prompts else given


def _axes(batches: Sequence[Ints], groups: Sequence[Group]) -> tuple[Ints, Ints]:
    """Residents and ranks of the columns of all groups."""
    return np.concatenate(batches), np.repeat([group.dp for group in groups], [each.size for each in batches])


def _ending(case: ColocatedCase, groups: Sequence[Group]) -> float:
    """Probability that a resident ends in a decode step. [1]"""
    return min(groups[0].accepted(case) / case.lengths.gaps, 1.0)
