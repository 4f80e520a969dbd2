"""Search the groups of a co-located mode; mappings that an equal search has met before are not searched again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import MAPPING_FIELDS, Sharding
from disagg_sim.serving.colocation import Chosen, ColocatedCase, Group, RowTallies, SearchTally, drafted_groups

#: Groups whose points are kept: those of the two modes of a case or two. [1]
KEPT_GROUPS = 128


@dataclass(frozen=True, eq=False)
class Best:
    """What a search finds of some mappings: the points chosen of each, one mapping after the other."""

    chosen: Chosen
    row: Ints  # (points,) rising, number of the mapping of each point [1]
    tallies: RowTallies  # of every mapping

    @classmethod
    def joined(cls, parts: Sequence[Best]) -> Best:
        """The mappings of several parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(part.tallies) for part in parts[:-1])])
        chosen = [part.chosen for part in parts]
        columns: dict[str, Any] = {
            f.name: np.concatenate([getattr(each, f.name) for each in chosen])
            for f in fields(Chosen)
            if f.name != "mapping"
        }
        return cls(
            Chosen(mapping=Sharding.joined([each.mapping for each in chosen]), **columns),
            np.concatenate([part.row + start for part, start in zip(parts, starts.tolist(), strict=True)]),
            RowTallies.joined([part.tallies for part in parts]),
        )

    def of(self, rows: Ints) -> Best:
        """Some of the mappings, in their order there."""
        if np.array_equal(rows, np.arange(len(self.tallies))):
            return self
        first, last = (self.row.searchsorted(rows, side) for side in ("left", "right"))
        count = last - first
        points = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        return Best(self.chosen.part(points), np.repeat(np.arange(rows.size), count), self.tallies.part(rows))


#: Scores groups of one number of draft tokens; of each the best points of the mappings, or None where there is nothing
#: to try.
Search = Callable[[ColocatedCase, Sequence[Group]], list[Best | None]]


class _Key(NamedTuple):
    """What the points of a mapping depend on beside its degrees."""

    search: Search
    case: ColocatedCase
    deep: bool
    batch: bytes


class _Kept(NamedTuple):
    """The mappings of a key that were searched."""

    number: dict[tuple[int, ...], int]  # by the degrees
    best: Best | None  # None where there is nothing to try


_kept: OrderedDict[_Key, _Kept] = OrderedDict()


def searched(
    search: Search, case: ColocatedCase, mappings: Sharding | list[Sharding]
) -> list[tuple[Chosen, SearchTally]]:
    """Search all groups of the mappings at once; a mapping that the same search met before is not searched again.

    Spaces that differ in the mappings alone, such as those with and without stages of one GPU, share most of them.
    """
    asked: list[tuple[_Key, list[tuple[int, ...]]]] = []
    new: dict[tuple[ColocatedCase, int], list[tuple[_Key, Group]]] = {}
    for own, group in drafted_groups(case, mappings):
        key, names = _Key(search, own, group.deep, group.batch.tobytes()), _names(group.table)
        known = _kept[key].number if key in _kept else {}
        missing = [place for place, name in enumerate(names) if name not in known]
        if missing:
            part = group if len(missing) == len(names) else replace(group, table=group.table[np.array(missing)])
            new.setdefault((own, group.drafts), []).append((key, part))
        asked.append((key, names))
    for (own, _), groups in new.items():
        of_groups = search(own, [group for _, group in groups])
        for (key, group), best in zip(groups, of_groups, strict=True):
            number, before = _kept.pop(key, _Kept({}, None))
            first = 0 if before is None else len(before.tallies)
            number |= {name: first + place for place, name in enumerate(_names(group.table))}
            _kept[key] = _Kept(number, best if before is None or best is None else Best.joined([before, best]))
    parts = []
    for key, names in asked:
        _kept.move_to_end(key)
        number, kept = _kept[key]
        if kept is not None:
            here = kept.of(np.array([number[name] for name in names]))
            parts.append((here.chosen, here.tallies.total))
    while len(_kept) > KEPT_GROUPS:
        _kept.popitem(last=False)
    return parts


def _names(table: Sharding) -> list[tuple[int, ...]]:
    """All degrees of each mapping."""
    rows = len(table)
    columns = (np.broadcast_to(getattr(table, name), (rows,)).tolist() for name in MAPPING_FIELDS)
    return list(zip(*columns, strict=True))


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
