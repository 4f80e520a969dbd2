"""Integrate over the distribution of a length with few points (Gauss quadrature).

Nodes are lengths whose weighted mean stands for the mean over the distribution.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from disagg_sim.arrays import Floats

#: Gauss points of a law: a smooth prefill pass integrates to 4e-4 over every shipped traffic, one with tiles to 2e-3,
#: as each point stands somewhere on the stair of its last tile.
NODES = 8
#: Gauss points of each of four strata under stairs: chunked passes integrate to 0.5 %, where four points left 0.7 %.
STAIR_NODES = 5
#: Less than this share of its mean, the spread of a law is rounding. [1]
NO_SPREAD = 1e-9


def nodes_of(lengths: Floats, weight: Floats, step: float = 0.0) -> tuple[Floats, Floats]:
    """Find few lengths that stand for a distribution.

    Of a smooth function (``step`` 0) by Gauss quadrature of the law of the logarithm with ``NODES`` points: exact for
    polynomials of degree 2*NODES - 1 in it. A function with stairs jumps or bends at the multiples of ``step``. Up to
    3*step each stair is a stratum of its own with ``STAIR_NODES`` Gauss points. Beyond, where the law spreads over many
    stairs, a point stands for its whole stair: it is shared between the two nearest mid-stair lengths, which keeps the
    mean and gives a stair its mean height. Takes ``lengths`` and ``weight`` (points of the distribution above 0, and
    their probabilities, sum 1; arrays of shape (points,) [token], [1]) and ``step`` [token] (0 = it has none). Returns
    lengths, rising, and weights, sum 1; one node where there is one length; shape (nodes,) [token], [1].

    >>> lengths, weights = nodes_of(np.array([1.0, 2.0, 4.0]), np.full(3, 1 / 3))
    >>> lengths.round(6).tolist(), weights.round(6).tolist()
    ([1.0, 2.0, 4.0], [0.333333, 0.333333, 0.333333])
    """
    if not step or lengths.size == 1:
        return gauss(lengths, weight, NODES)
    found, weights = [], []
    for low, high in pairwise((0.0, step, 2 * step, 3 * step, math.inf)):
        inside = (lengths > low) & (lengths <= high)
        share = float(weight[inside].sum())
        if not share > 0:
            continue
        some, part = lengths[inside], weight[inside] / share
        nodes, own = gauss(some, part, STAIR_NODES)
        if math.isinf(high) and float(part @ (some - part @ some) ** 2) > step**2:
            below = np.floor(nodes / step - 0.5) + 0.5  # mid-stair length, in steps
            above = nodes / step - below
            nodes = np.concatenate([below, below + 1]) * step
            own = np.concatenate([own * (1 - above), own * above])
        found.append(nodes)
        weights.append(own * share)
    nodes, place = np.unique(np.concatenate(found), return_inverse=True)
    return nodes, np.bincount(place, np.concatenate(weights)).astype(np.float64)


def gauss(lengths: Floats, weight: Floats, count: int, *, log: bool = True) -> tuple[Floats, Floats]:
    """Gauss quadrature of a discrete distribution of lengths (Stieltjes, Golub and Welsch).

    The recurrence of orthonormal polynomials stops early where fewer points carry the law. Takes ``lengths`` and
    ``weight`` (as in ``nodes_of`` [token], [1]). Returns lengths, rising, and weights, sum 1; shape (nodes,) [token],
    [1].

    >>> lengths, weight = np.arange(1.0, 101.0), np.full(100, 0.01)
    >>> nodes, weights = gauss(lengths, weight, 2, log=False)
    >>> nodes.size, f"{weights @ nodes**3 / (weight @ lengths**3):.6f}"
    (2, '1.000000')
    """
    at = np.log(lengths) if log else lengths
    centre = float(weight @ at)
    spread = math.sqrt(float(weight @ (at - centre) ** 2))
    if spread <= NO_SPREAD * (1.0 if log else centre):
        return lengths[:1], np.ones(1)  # as it is: a tile more or less may hang on its last digit
    x = (at - centre) / spread
    diagonal, side = [], []
    previous, current, norm = np.zeros_like(x), np.ones_like(x), 0.0
    for _ in range(count):
        diagonal.append(float(weight @ (x * current**2)))
        following = (x - diagonal[-1]) * current - norm * previous
        norm = math.sqrt(float(weight @ following**2))
        if norm <= NO_SPREAD:
            break
        side.append(norm)
        previous, current = current, following / norm
    jacobi = np.diag(diagonal) + np.diag(side[: len(diagonal) - 1], 1) + np.diag(side[: len(diagonal) - 1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    found = centre + spread * nodes
    return np.exp(found) if log else found, vectors[0] ** 2
