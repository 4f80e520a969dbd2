"""Search the groups of a co-located mode together, and lay rows of several groups below one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.serving.colocation import Chosen, ColocatedCase, Group, SearchTally, drafted_groups

#: The points chosen of groups, each with the place of its group, the rows of a group in order; what was looked at.
Found = tuple[list[tuple[int, Chosen]], SearchTally]


def searched(
    search: Callable[[ColocatedCase, Sequence[Group]], Found], case: ColocatedCase, mappings: Sharding | list[Sharding]
) -> tuple[list[Chosen], SearchTally]:
    """Search groups of mappings, those of one number of draft tokens together; points in the order of the groups."""
    asked = list(drafted_groups(case, mappings))
    alike: dict[tuple[ColocatedCase, int], list[int]] = defaultdict(list)
    for place, (own, group) in enumerate(asked):
        alike[own, group.drafts].append(place)
    points: list[list[Chosen]] = [[] for _ in asked]
    tally = SearchTally()
    for (own, _), places in alike.items():
        found, seen = search(own, [asked[place][1] for place in places])
        tally = tally.plus(seen)
        for place, chosen in found:
            points[places[place]].append(chosen)
    return [chosen for of_group in points for chosen in of_group], tally


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Rows of several groups that are timed together, over the longest of their batch axes."""

    members: tuple[tuple[int, slice], ...]  # place of a group in those of the search, and its rows
    table: Sharding
    batch: Ints  # (batches,) [request]
    batches: Ints  # (rows, 1) of these, those of the row's group, from the first [1]

    @classmethod
    def of(cls, groups: Sequence[Group], members: Sequence[tuple[int, slice]]) -> Rows:
        """Rows of groups, one group after the other."""
        tables = [groups[place].table[rows] for place, rows in members]
        counts = [groups[place].batch.size for place, _ in members]
        return cls(
            members=tuple(members),
            table=Sharding.joined(tables),
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
