"""Cut grids into blocks of rows, name what binds a point, read axes of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError, whole_number
from disagg_sim.physics.roofline import AnySums

#: Design points scored at once: small enough for the cache, large enough to hide numpy's overhead.
BLOCK_POINTS = 32_768


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Cut rows into blocks of about ``BLOCK_POINTS`` points, which stay in cache.

    Returns one after the other over all rows; at least one row each.

    >>> [(block.start, block.stop) for block in row_blocks(rows=5, columns=BLOCK_POINTS // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, BLOCK_POINTS // max(columns, 1))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def bound_codes(sums: AnySums) -> Any:
    """Find the index of the largest of the four sums (order of ``BOUNDS``).

    Takes ``sums`` (time by resource, arrays that broadcast [s]). The result is of the broadcast shape; of equal sums
    the first [1].

    Memory binds the small batch and compute the large one:

    >>> from disagg_sim.domain import BOUNDS
    >>> from disagg_sim.physics.roofline import Sums
    >>> codes = bound_codes(Sums(compute=np.array([1e-3, 9e-3]), memory=2e-3, communication=1e-3, latency=0.0))
    >>> [BOUNDS[code] for code in codes]
    ['memory', 'compute']
    """
    parts = np.broadcast_arrays(*sums)
    best, value = np.zeros(parts[0].shape, dtype=np.int8), parts[0]
    for code, part in enumerate(parts[1:], start=1):
        best = np.where(part > value, np.int8(code), best)
        value = np.maximum(value, part)
    return best


#: Largest number that a search takes: more is a slip of the pen. [1]
MOST_SIZE = 10**9


def given_sizes(name: str, values: Any, least: int = 1) -> Ints:
    """Return the distinct numbers of an argument, rising.

    Returns distinct values, shape (n,).

    >>> given_sizes("batch", [64, 16, 64]).tolist()
    [16, 64]
    """
    if isinstance(values, np.ndarray) and values.dtype.kind == "i" and values.size:  # as a search made them
        known = np.unique(values)
        if known[0] >= least and known[-1] <= MOST_SIZE:
            return known.astype(np.int64)
    given = np.asarray(values, dtype=object).ravel().tolist()
    if not given:
        raise InputError(f"{name} is empty; allowed: one whole number or more")
    return np.array(sorted({whole_number(name, value, least, most=MOST_SIZE) for value in given}), dtype=np.int64)
