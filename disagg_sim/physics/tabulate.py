"""Evaluate a function once per distinct (degrees, tokens) pair and gather the results.

A grid of mappings x batches repeats itself: an operator reads one or two sharding degrees and a
token count, and both take few distinct values. The gathered result equals direct evaluation bit
for bit, since it IS direct evaluation at the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.work import Numeric

Costs = TypeVar("Costs", bound=tuple[Cost, ...])


class Gather:
    """Positions of a grid's points in a table of distinct degrees x distinct token counts.

    ``degrees`` have shape (rows, 1), ``tokens`` (rows or 1, batches). With scalar input nothing is
    gathered and the function is called directly.
    """

    def __init__(self, degrees: tuple[Numeric, ...], tokens: Numeric) -> None:
        self.direct = all(np.ndim(d) == 0 for d in degrees) or np.ndim(tokens) != 2
        if self.direct:
            self.degrees, self.tokens = degrees, tokens
            return
        columns = np.stack([np.broadcast_to(d, (max(np.shape(x)[0] for x in degrees if np.ndim(x)), 1))[:, 0] for d in degrees])
        distinct, row = np.unique(columns, axis=1, return_inverse=True)
        values = np.unique(tokens)
        self.degrees = tuple(column[:, None] for column in distinct)
        self.tokens = values[None, :]
        self.index: NDArray[np.intp] = row.reshape(-1, 1) * values.size + np.searchsorted(values, tokens)
        self.shape = (distinct.shape[1], values.size)

    def spread(self, table: Numeric) -> Numeric:
        """One table of the distinct points, laid out over the grid."""
        if self.direct or np.ndim(table) == 0:
            return table
        return np.broadcast_to(table, self.shape).ravel().take(self.index)

    def cost(self, cost: Cost) -> Cost:
        """Every part of a cost, laid out over the grid."""
        return replace(cost, **{f.name: self.spread(getattr(cost, f.name)) for f in fields(Cost)})


def tabulate(function: Callable[..., Costs], degrees: tuple[Numeric, ...], tokens: Numeric) -> Costs:
    """``function(*degrees, tokens)`` at every point, computed once per distinct point."""
    gather = Gather(degrees, tokens)
    return tuple(gather.cost(cost) for cost in function(*gather.degrees, gather.tokens))  # type: ignore[return-value]
