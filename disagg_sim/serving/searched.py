"""Search the groups of a co-located mode, those that an equal search has met before once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import MAPPING_FIELDS, Mapping
from disagg_sim.physics.tabulate import Lookups, evaluate, side_by_side
from disagg_sim.serving.colocation import Case, Chosen, Group, Tally, drafted_groups

#: What a search finds of a group, in parts.
Parts = list[tuple[Chosen, Tally]]
#: Groups whose points are kept: those of the two modes of a case or two. [1]
KEPT_GROUPS = 128
#: A mode asks for what it needs to score some groups, all with the same number of draft tokens.
Search = Callable[[Case, Sequence[Group]], Lookups[list[Parts]]]
_kept: OrderedDict[tuple[Search, Case, Group], Parts] = OrderedDict()


def searched(search: Search, case: Case, mappings: Mapping | list[Mapping]) -> Parts:
    """Search all groups of the mappings at once; a group that the same search met before is not searched again.

    Spaces that differ in the mappings alone, such as those with and without stages of one GPU, share most groups.

    Parameters
    ----------
    search
        Of one mode.
    case, mappings
        Setup, lengths, limits and options; mappings to search.

    Returns
    -------
    list of (Chosen, Tally)
        Group by group.

    Examples
    --------
    One GPU alone and two in a pipeline are two groups, and each is scored once:

    >>> import disagg_sim as ds
    >>> from disagg_sim.serving.colocated import search_colocated
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> case = Case(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0)
    >>> both, one = (search_colocated(case, each).tally for each in ([Mapping(), Mapping(pp=2)], [Mapping()]))
    >>> both.design_points > one.design_points
    True
    """
    asked = [(search, own, group) for own, group in drafted_groups(case, mappings)]
    known = {key: parts for key in asked if (parts := _kept.pop(key, None)) is not None}
    new: dict[tuple[Case, int], list[Group]] = {}
    for _, own, group in asked:
        if (search, own, group) not in known:
            new.setdefault((own, group.drafts), []).append(group)
    found = evaluate(side_by_side([search(own, groups) for (own, _), groups in new.items()]))
    for ((own, _), groups), of_groups in zip(new.items(), found, strict=True):
        known |= {(search, own, group): parts for group, parts in zip(groups, of_groups, strict=True)}
    _kept.update(known)
    while len(_kept) > KEPT_GROUPS:
        _kept.popitem(last=False)
    return [part for key in asked for part in known[key]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Rows of several groups that are timed together, over the longest of their batch axes."""

    members: tuple[tuple[int, slice], ...]  # place of a group in those of the search, and its rows
    table: Mapping
    batch: Ints  # (batches,) [request]
    batches: Ints  # (rows, 1) of these, those of the row's group, from the first [1]

    @classmethod
    def of(cls, groups: Sequence[Group], members: Sequence[tuple[int, slice]]) -> Rows:
        """Rows of groups, one group after the other."""
        tables = [groups[place].table[rows] for place, rows in members]
        counts = [groups[place].batch.size for place, _ in members]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in MAPPING_FIELDS
            if np.ndim(getattr(tables[0], name))
        }
        return cls(
            members=tuple(members),
            table=replace(tables[0], **columns),
            batch=max((groups[place].batch for place, _ in members), key=len),
            batches=np.repeat(counts, [len(table) for table in tables])[:, None],
        )

    @property
    def places(self) -> list[tuple[int, slice]]:
        """Place of each group in those of the search, and its rows in these."""
        sizes = [rows.stop - rows.start for _, rows in self.members]
        stops = np.cumsum(sizes).tolist()
        return [
            (place, slice(stop - size, stop)) for (place, _), size, stop in zip(self.members, sizes, stops, strict=True)
        ]


def of_one_depth(groups: Sequence[Group]) -> list[list[int]]:
    """Places of the groups without a pipeline, and of those with one."""
    split = [[place for place, group in enumerate(groups) if group.deep == deep] for deep in (False, True)]
    return [places for places in split if places]
