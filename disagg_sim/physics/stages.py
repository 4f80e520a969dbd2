"""Split layers into pipeline stages and find the slowest ones, with embedding and head at the ends."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.work import Numeric


class Stage(NamedTuple):
    """What one pipeline stage holds."""

    layers: tuple[int, ...]  # of each kind of ``ModelSpec.kinds`` [1]
    first: int  # 1 if it holds the embedding
    last: int  # 1 if it holds the head

    def covers(self, other: Stage) -> bool:
        """Whether this stage holds at least everything that ``other`` does."""
        mine, theirs = (*self.layers, self.first, self.last), (*other.layers, other.first, other.last)
        return all(a >= b for a, b in zip(mine, theirs, strict=True))


@lru_cache(maxsize=512)
def stages_of(layers: tuple[int, ...], kinds: int, pp: int) -> tuple[Stage, ...]:
    """Distinct stages of an even split of ``layers`` (the kind of each layer), least first.

    The first ``L mod p`` stages hold ceil(L/p) layers, the others floor(L/p), so the stage with the
    head is never a longer one by choice. Stages that another one covers cannot be the slowest or
    the fullest and are left out. Source: physics page, section 3 (PP).
    """
    base, extra = divmod(len(layers), pp)
    found: list[Stage] = []
    start = 0
    for index in range(pp):
        end = start + base + (index < extra)
        counts = tuple(layers[start:end].count(kind) for kind in range(kinds))
        found.append(Stage(counts, int(index == 0), int(index == pp - 1)))
        start = end
    distinct = tuple(dict.fromkeys(found))
    return tuple(s for s in distinct if not any(o.covers(s) for o in distinct if o is not s))


class StageTable(NamedTuple):
    """Candidate slowest stages of every row, repeated where a row has fewer; a number is the same in all rows."""

    layers: tuple[tuple[Numeric, ...], ...]  # (candidates, kinds), each of the shape of the degrees [1]
    first: tuple[Numeric, ...]  # (candidates,), each of the same shape [1]
    last: tuple[Numeric, ...]  # (candidates,) [1]


def stage_table(model: ModelSpec, pp: Numeric) -> StageTable:
    """Candidate stages for pipeline degrees ``pp`` of any shape."""
    degrees = np.asarray(pp)
    return _table(model.pattern, len(model.kinds), tuple(degrees.ravel().tolist()), degrees.shape)


@lru_cache(maxsize=256)
def _table(layers: tuple[int, ...], kinds: int, pp: tuple[float, ...], shape: tuple[int, ...]) -> StageTable:
    """The table of ``stage_table``; what passes and memory of one grid ask for is the same."""
    values, inverse = np.unique(np.array(pp), return_inverse=True)
    plans = [stages_of(layers, kinds, int(value)) for value in values]
    depth = max(len(plan) for plan in plans)
    padded = [plan + (plan[-1],) * (depth - len(plan)) for plan in plans]
    where = inverse.reshape(shape)

    def of_rows(numbers: list[int]) -> Numeric:
        if len(set(numbers)) == 1:
            return float(numbers[0])
        column: Numeric = np.array(numbers, dtype=float)[where]
        column.setflags(write=False)
        return column

    candidates = [[plan[place] for plan in padded] for place in range(depth)]
    return StageTable(
        layers=tuple(tuple(of_rows([s.layers[kind] for s in some]) for kind in range(kinds)) for some in candidates),
        first=tuple(of_rows([s.first for s in some]) for some in candidates),
        last=tuple(of_rows([s.last for s in some]) for some in candidates),
    )
