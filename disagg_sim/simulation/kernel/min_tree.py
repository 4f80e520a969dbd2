"""Compiled: trees of least keys, so that neither a change nor the choice of the least walks over all instances.

A tree of ``n`` keys is one array: the least of all in row 1, those of the two halves in rows 2 and 3, and so on down to
the keys themselves, whose number is a power of two. Those that are not there have the key infinity.
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.simulation.kernel.compiled import inner


def least_tree(keys: Floats) -> Floats:
    """Make a tree of keys.

    Returns twice as many as the next power of two; row 0 is not used.

    >>> least_tree(np.array([3.0, 1.0, 2.0])).tolist()
    [inf, 1.0, 1.0, 2.0, 3.0, 1.0, 2.0, inf]
    """
    count = 1 << max(keys.size - 1, 0).bit_length()
    tree = np.full(2 * count, np.inf)
    tree[count : count + keys.size] = keys
    while count > 1:
        tree[count // 2 : count] = tree[count : 2 * count].reshape(-1, 2).min(axis=1)
        count //= 2
    return tree


@inner
def set_key(tree: Floats, i: int, key: float) -> None:
    """Change the key of ``i``."""
    at = len(tree) // 2 + i
    if tree[at] == key:
        return
    tree[at] = key
    while at > 1:
        key = min(key, tree[at ^ 1])
        at >>= 1
        if tree[at] == key:
            return
        tree[at] = key


@inner
def first_up_to(tree: Floats, most: float) -> int:
    """The first whose key is at most ``most``; -1 = none."""
    if not tree[1] <= most or tree[1] == math.inf:
        return -1
    at, keys = 1, len(tree) // 2
    while at < keys:
        at *= 2
        if not tree[at] <= most:
            at += 1
    return at - keys


@inner
def least_of(tree: Floats) -> int:
    """The one with the least key, the first of several; -1 = all are infinite."""
    return first_up_to(tree, tree[1])
