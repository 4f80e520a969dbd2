"""Columns of a co-located search: every batch of a group with every number of prompts that its passes may take.

How free seats are filled depends on residents, ranks and how long answers are, so searches share it: cases that differ
in prompts, limits or systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.serving.colocation import ColocatedCase, Group
from disagg_sim.serving.slot_turnover import Refill, refill_passes, worth_room

#: Batch axes of which is kept what their batches have: those of all DP degrees of ten lengths of outputs. [1]
KEPT_AXES = 256


class _Axis(NamedTuple):
    """What decides how passes refill the columns of a batch axis."""

    dp: int  # [1]
    ending: float  # probability that a resident ends in a decode step [1]
    batch: tuple[int, ...]  # of each column [request]
    most: tuple[int, ...]  # prompts that a pass may take [request]
    steps: tuple[int, ...]  # that they are held back [1]


_kept_passes: dict[_Axis, Refill] = {}
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
    """Choose the prompts that passes of each group may take, (batches, options); 0 where one is not tried. [request]"""
    if (given := case.options.prefill_batch) is not None:
        return [np.where(np.array(given) <= group.batch[:, None], given, 0) for group in groups]
    sizes = {group.dp: _worth_trying(group.dp, _ending(case, groups), _key(group.batch)) for group in _longest(groups)}
    return [sizes[group.dp][: group.batch.size] for group in groups]


def pass_columns(case: ColocatedCase, groups: Sequence[Group]) -> list[PassColumns]:
    """Set up the columns of groups, and count their passes."""
    longest, ending = _longest(groups), _ending(case, groups)
    axes = {
        group.dp: _Axis(group.dp, ending, *map(_key, (group.batch[index], most, steps)))
        for group, (index, most, steps) in zip(longest, _tried(case, longest), strict=True)
    }
    _refill([axis for axis in axes.values() if axis not in _kept_passes], ending)
    _kept_passes.update({axis: _kept_passes.pop(axis) for axis in axes.values()})  # the newest last
    found = [
        _of(index, together, steps, _kept_passes[axes[group.dp]].of(slice(0, together.size)))
        for group, (index, together, steps) in zip(groups, _tried(case, groups), strict=True)
    ]
    while len(_kept_passes) > KEPT_AXES:
        del _kept_passes[next(iter(_kept_passes))]
    return found


def _refill(axes: Sequence[_Axis], ending: float) -> None:
    """Count together how passes refill the columns of some axes."""
    if not axes:
        return
    dp = np.repeat([axis.dp for axis in axes], [len(axis.batch) for axis in axes])
    columns = (chain.from_iterable(each) for each in zip(*(axis[2:] for axis in axes), strict=True))
    batch, most, steps = (np.array([*each], dtype=np.int64) for each in columns)
    filled, end = refill_passes(batch, dp, most, ending, steps), 0
    for axis in axes:
        start, end = end, end + len(axis.batch)
        _kept_passes[axis] = filled.of(slice(start, end))


def _longest(groups: Sequence[Group]) -> list[Group]:
    """The group of the longest batch axis of each DP degree: axes of the others are the beginning of it.

    What a batch has depends on no other batch, and lengths, mappings and limits decide the end of an axis alone.
    """
    return list({group.dp: group for group in sorted(groups, key=lambda each: each.batch.size)}.values())


def _key(numbers: Ints) -> tuple[int, ...]:
    return tuple(numbers.tolist())


@lru_cache(maxsize=KEPT_AXES)
def _worth_trying(dp: int, ending: float, batches: tuple[int, ...]) -> Ints:
    """Prompts that a pass may take at each batch of an axis, (batches, options), 0 where not tried. [request]"""
    batch = np.array(batches, dtype=np.int64)
    together = 2 ** np.arange(1, max(int((batch // dp).max(initial=1)), 1).bit_length())
    room = dp * together
    tried = worth_room(batch, np.full(batch.size, dp), together, ending) & (room <= batch[:, None])
    found = np.concatenate([np.minimum(dp, batch)[:, None], np.where(tried, room, 0)], axis=1)
    found.setflags(write=False)
    return found


def hold_steps(case: ColocatedCase, groups: Sequence[Group]) -> list[Ints]:
    """Choose how long prompts may be held back, of each group: (batches, options), 0 where an option is not tried. [1]

    A rank of n seats has a free one every 1/(n*q) steps. Where that is more than one step, all ranks have a seat, and
    no prompts of a pass are given, prompts may wait. Unless steps are given, for the powers of two next to a quarter of
    it, to it and to four times it: beyond, seats are empty for nothing, and between, throughput changes by few percent;
    and not at all where the engine cannot do so.
    """
    given, engine, found = case.options.hold_steps, case.at.overheads, []
    if given is None and engine is not None and not engine.holds_prompts:
        given = ()
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


def _ending(case: ColocatedCase, groups: Sequence[Group]) -> float:
    """Probability that a resident ends in a decode step. [1]"""
    return min(groups[0].accepted(case) / case.lengths.gaps, 1.0)
