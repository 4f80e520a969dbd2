"""Columns of a co-located search: every batch of a group with every number of prompts that its passes may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.serving.colocation import Case, Group
from disagg_sim.serving.freed_seats import Refill, refill, worth_room


class PassColumns(NamedTuple):
    """The columns of a group."""

    batch_index: Ints  # (columns,) place in the batch axis
    together: Ints  # (columns,) prompts that a pass may take [request]
    filled: Refill  # passes that fill free seats
    sizes: Ints  # (passes,) the numbers of prompts that are timed, over all ranks [request]
    lone: Ints  # (further passes,) and those on one rank [request]
    places: Ints  # (columns, knots) places in both of the passes of ``filled``; in those on one rank from -1 down
    longest: Ints  # (columns,) place in ``sizes`` of ``together``

    def mean(self, times: Floats) -> tuple[Floats, Floats]:
        """Find what a prompt costs, and what the pass takes that it is in.

        Parameters
        ----------
        times
            Of passes of ``sizes``, then from the end of ``lone``, (rows, passes). [s]

        Returns
        -------
        tuple of ndarray
            (rows, columns). [s]
        """
        each: Any = 0.0
        own: Any = 0.0
        for knot, places in enumerate(self.places.T):
            time = times[:, places]
            each, own = each + self.filled.each[:, knot] * time, own + self.filled.own[:, knot] * time
        return each, own


def pass_sizes(case: Case, groups: Sequence[Group]) -> list[Ints]:
    """Choose the prompts that a pass may take, those worth trying unless they are given.

    Parameters
    ----------
    case, groups
        Search, and groups of its mappings with one number of draft tokens.

    Returns
    -------
    list of ndarray
        Of each group, (batches, options), 0 where an option is not tried. Ranks with a free seat go together, so the
        least is one a rank, or all residents. [request]
    """
    if (given := case.options.prefill_batch) is not None:
        return [np.where(np.array(given) <= group.batch[:, None], given, 0) for group in groups]
    batch, dp = _axes([group.batch for group in groups], groups)
    together = 2 ** np.arange(1, max(int((batch // dp).max(initial=1)), 1).bit_length())
    room = dp[:, None] * together
    tried = worth_room(batch, dp, together, _ending(case, groups)) & (room <= batch[:, None])
    found = np.concatenate([np.minimum(dp, batch)[:, None], np.where(tried, room, 0)], axis=1)
    return np.split(found, np.cumsum([group.batch.size for group in groups])[:-1])


def pass_columns(case: Case, groups: Sequence[Group]) -> list[PassColumns]:
    """Set up the columns of groups, and count their passes.

    Parameters
    ----------
    case, groups
        As in ``pass_sizes``.

    Returns
    -------
    list of PassColumns
        Of each group.
    """
    options = pass_sizes(case, groups)
    index = [np.nonzero(prompts)[0] for prompts in options]
    most = [prompts[prompts > 0] for prompts in options]
    batch, dp = _axes([group.batch[rows] for group, rows in zip(groups, index, strict=True)], groups)
    filled = refill(batch, dp, np.concatenate(most), _ending(case, groups))
    ends = np.cumsum([rows.size for rows in index]).tolist()
    slices = [slice(end - rows.size, end) for end, rows in zip(ends, index, strict=True)]
    return [_of(rows, own, filled.of(part)) for rows, own, part in zip(index, most, slices, strict=True)]


def _of(batch_index: Ints, together: Ints, filled: Refill) -> PassColumns:
    spread = np.concatenate([filled.prompts[:, ~filled.lone], together[:, None]], axis=1)
    on_one = filled.prompts[:, filled.lone]
    sizes, which = np.unique(spread, return_inverse=True)
    lone, place = np.unique(on_one, return_inverse=True)
    which, places = which.reshape(spread.shape), np.empty_like(filled.prompts)
    places[:, ~filled.lone], places[:, filled.lone] = which[:, :-1], -1 - place.reshape(on_one.shape)
    return PassColumns(batch_index, together, filled, sizes, lone, places, which[:, -1])


def _axes(batches: Sequence[Ints], groups: Sequence[Group]) -> tuple[Ints, Ints]:
    """Residents and ranks of the columns of all groups."""
    return np.concatenate(batches), np.repeat([group.dp for group in groups], [each.size for each in batches])


def _ending(case: Case, groups: Sequence[Group]) -> float:
    """Probability that a resident ends in a decode step. [1]"""
    return min(groups[0].accepted(case) / case.lengths.gaps, 1.0)
