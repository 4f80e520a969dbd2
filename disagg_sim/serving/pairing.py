"""Find instance counts that balance the rates of prefill and decode, or of more pools."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats

TIE = 1e-12  # two rates per cost closer than this, relatively, are a tie [1]
PAPER_TOLERANCE = 0.03  # rounding of the rate ratio in Algorithm 2 of arXiv 2506.05508, appendix B [1]


def rate_per_cost(
    n_p: Floats, n_d: Floats, *, p: float, gpus_p: int, r: Floats, gpus_d: Floats, weight: float = 1.0
) -> Floats:
    """Matched rate of ``n_p`` prefill and ``n_d`` decode instances over their cost in decode GPUs. [request/s]"""
    return np.minimum(n_p * p, n_d * r) / (n_p * (gpus_p * weight) + n_d * gpus_d)


def best_counts(
    p: float, gpus_p: int, r: Floats, gpus_d: Floats, gpu_cap: int, weight: float = 1.0
) -> tuple[Floats, Floats]:
    r"""Instance counts of the highest rate per cost within ``gpu_cap``, exactly, for many decode configurations.

    Maximises :math:`\min(n_p p, n_d r)/(n_p G_p w + n_d G_d)` over integers :math:`n_p, n_d \ge 1` with
    :math:`n_p G_p + n_d G_d \le cap` (paper, appendix B, corrected; there w = 1). Numerator and
    cost are both proportional to the counts, so the objective depends on the fraction :math:`n_p/n_d` alone:
    for any w > 0 it rises up to :math:`\rho = r/p` and falls beyond. So only the nearest fraction on either
    side of :math:`\rho` can win, in lowest terms, and w matters only where the two are compared. The walk
    down the Stern-Brocot tree finds both: a fraction between two neighbours of the tree weighs (in GPUs,
    which the cap counts) at least as much as the two together, hence once their sum exceeds the cap nothing
    lies between. Runs of equal turns are taken in one step, as in Euclid's algorithm: some 13 steps at most
    for a cap of 576.

    Parameters
    ----------
    p, gpus_p : float, int
        Rate [request/s] and GPUs [1] of a prefill instance.
    r, gpus_d : arrays, shape (n,)
        Rate [request/s] and GPUs [1] of a decode instance; gpus_p + gpus_d <= gpu_cap.
    gpu_cap : int
        Most GPUs of the two pools together. [1]
    weight : float
        Cost of a prefill GPU in decode GPUs: 1 counts GPUs. [1]

    Returns
    -------
    n_p, n_d : arrays, shape (n,)
        Whole numbers; a tie goes to fewer GPUs.
    """
    ratio = r / p
    low_p, low_d = np.zeros_like(ratio), np.ones_like(ratio)  # 0/1 <= ratio
    high_p, high_d = np.ones_like(ratio), np.zeros_like(ratio)  # 1/0 >= ratio
    moved = True
    while moved:
        below, above = ratio * low_d - low_p, high_p - ratio * high_d
        low_gpus, high_gpus = low_p * gpus_p + low_d * gpus_d, high_p * gpus_p + high_d * gpus_d
        up = _turns(below, above, (gpu_cap - low_gpus) / high_gpus)
        low_p, low_d = low_p + up * high_p, low_d + up * high_d
        below, low_gpus = ratio * low_d - low_p, low_gpus + up * high_gpus
        down = _turns(above, below, (gpu_cap - high_gpus) / low_gpus)
        high_p, high_d = high_p + down * low_p, high_d + down * low_d
        moved = bool(up.any() or down.any())
    pair: dict[str, Any] = {"p": p, "gpus_p": gpus_p, "r": r, "gpus_d": gpus_d, "weight": weight}
    low = np.where(low_p > 0, rate_per_cost(low_p, low_d, **pair), -1.0)
    high = np.where(high_d > 0, rate_per_cost(high_p, high_d, **pair), -1.0)
    lighter = high_p * gpus_p + high_d * gpus_d < low_p * gpus_p + low_d * gpus_d
    take_high = (high > low * (1 + TIE)) | ((high >= low * (1 - TIE)) & lighter)
    return np.where(take_high, high_p, low_p), np.where(take_high, high_d, low_d)


#: Counts that are tried at once, to limit memory. [1]
TRIED = 1_000_000


def best_counts_of_pools(
    rates: Sequence[Floats], gpus: Sequence[Floats], gpu_cap: int, prices: Sequence[Floats] | None = None
) -> tuple[Floats, ...]:
    r"""Instance counts of the highest rate per GPU, or per cost, of any number of pools, by enumeration.

    In a best answer some pool b sets the rate, :math:`X = n_b r_b`, and every other has no more instances than it
    needs, :math:`\lceil X/r_s \rceil`: fewer would lower X, more would cost GPUs. So the counts of one pool after the
    other are tried up to the cap. With two pools the rate per GPU is that of ``best_counts``.

    Parameters
    ----------
    rates, gpus : sequences of arrays, shape (n,)
        Rate [request/s] and GPUs [1] of an instance of each pool.
    gpu_cap : int
        Most GPUs of all pools together. [1]
    prices : sequence of arrays, shape (n,), optional
        Of a GPU of each pool, above 0; None = GPUs are counted.

    Returns
    -------
    tuple of arrays, shape (n,)
        Whole numbers; a tie goes to fewer GPUs, 0 everywhere where the smallest instances exceed the cap.

    Examples
    --------
    Rates of 4, 2 and 1 requests/s, one GPU each, keep pace as one, two and four:

    >>> one = np.ones(1)
    >>> [counts.tolist() for counts in best_counts_of_pools([4 * one, 2 * one, one], [one, one, one], 100)]
    [[1.0], [2.0], [4.0]]
    """
    pools, n = len(rates), rates[0].size
    best, total = np.zeros(n), np.full(n, np.inf)
    found = np.zeros((pools, n))
    for setter in range(pools):
        most = int(gpu_cap // gpus[setter].min())
        if not most:
            continue
        for first in range(0, n, step := max(1, TRIED // max(most, 1))):
            at = slice(first, first + step)
            rate = np.arange(1.0, most + 1) * rates[setter][at, None]
            counts = np.stack([np.ceil(rate / r[at, None] * (1 - TIE)) for r in rates])
            sizes = [count * g[at, None] for count, g in zip(counts, gpus, strict=True)]
            size = sum(sizes)
            if prices is not None:
                cost = sum(own * price[at, None] for own, price in zip(sizes, prices, strict=True))
            else:
                cost = size
            value = np.where(size <= gpu_cap, rate / cost, 0.0)
            top = value.max(axis=1, keepdims=True)
            size = np.where(value >= top * (1 - TIE), size, np.inf)
            column = size.argmin(axis=1)
            row = np.arange(column.size)
            value, size = value[row, column], size[row, column]
            better = (value > best[at] * (1 + TIE)) | (
                (value > 0) & (value >= best[at] * (1 - TIE)) & (size < total[at])
            )
            best[at] = np.where(better, value, best[at])
            total[at] = np.where(better, size, total[at])
            found[:, at] = np.where(better, counts[:, row, column], found[:, at])
    return tuple(found)


def counts_at_ratio(gpus_p: int, gpus_d: Floats, gpu_cap: int, ratio: Fraction) -> tuple[Floats, Floats]:
    r"""The fewest instances with :math:`n_p G_p = q\,n_d G_d` exactly, q = a/b; 0, 0 where they exceed the cap.

    :math:`n_p G_p b = n_d G_d a` has the solutions :math:`k\,(a G_d, b G_p)/\gcd(a G_d, b G_p)`. Throughput
    per GPU is the same for every whole k, so the smallest, k = 1, is the best that any cap allows.

    Parameters
    ----------
    gpus_p, gpus_d, gpu_cap
        As in ``best_counts``. [1]
    ratio : Fraction
        Prefill GPUs over decode GPUs, q. [1]

    Returns
    -------
    n_p, n_d : arrays, shape (n,)
        Whole numbers. [1]

    Examples
    --------
    Half as many GPUs for prefill, 4 an instance: one beside one decode instance of 8, or beside two of 4.

    >>> for cap in (12, 11):
    ...     [each.tolist() for each in counts_at_ratio(4, np.array([8.0, 4.0]), cap, Fraction(1, 2))]
    [[1.0, 1.0], [1.0, 2.0]]
    [[0.0, 0.0], [0.0, 0.0]]
    """
    left, right = ratio.numerator * gpus_d, np.full_like(gpus_d, ratio.denominator * gpus_p)
    common = np.gcd(left.astype(np.int64), right.astype(np.int64))
    n_p, n_d = left / common, right / common
    fits = n_p * gpus_p + n_d * gpus_d <= gpu_cap
    return np.where(fits, n_p, 0.0), np.where(fits, n_d, 0.0)


def _turns(gap: Floats, step: Floats, room: Floats) -> Floats:
    """Whole steps of size ``step`` that fit into ``gap`` and into ``room``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(np.floor(np.fmin(room, gap / step)), 0.0)


def paper_counts(p: float, gpus_p: int, r: Floats, gpus_d: Floats, gpu_cap: int) -> tuple[Floats, Floats]:
    r"""Instance counts of Algorithm 2 as the paper states it: the fewest GPUs that balance within 3 %.

    The smallest :math:`n_d` that has an :math:`n_p` with :math:`|n_p p/(n_d r) - 1| \le 0.03` also has
    the smallest such :math:`n_p`, because the least admissible :math:`n_p` never falls as :math:`n_d` grows.

    0, 0 where no pair within the cap balances.

    Parameters
    ----------
    p, gpus_p, r, gpus_d, gpu_cap
        As in ``best_counts``: rates [request/s], GPUs [1].

    Returns
    -------
    n_p, n_d : arrays, shape (n,)
        Whole numbers. [1]

    Examples
    --------
    Two prefill instances of 10 requests/s feed five decode instances of 4, three feed five of 6:

    >>> [each.tolist() for each in paper_counts(10.0, 4, np.array([4.0, 6.0]), np.array([8.0, 8.0]), 64)]
    [[2.0, 3.0], [5.0, 5.0]]
    """
    n_p, n_d = np.zeros_like(r), np.zeros_like(r)
    open_ = np.arange(r.size)
    for count in range(1, gpu_cap):
        open_ = open_[count * gpus_d[open_] + gpus_p <= gpu_cap]
        if open_.size == 0:
            break
        exact = count * r[open_] / p
        trial = np.maximum(np.ceil((1 - PAPER_TOLERANCE) * exact - 1e-9), 1.0)
        balanced = np.abs(trial / exact - 1) <= PAPER_TOLERANCE + TIE
        fits = trial * gpus_p + count * gpus_d[open_] <= gpu_cap
        done = open_[balanced & fits]
        n_p[done], n_d[done] = trial[balanced & fits], count
        open_ = open_[~balanced & fits]
    return n_p, n_d
