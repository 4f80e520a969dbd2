"""Count values in bins of equal ratio, so that percentiles have a bounded relative error and counts can be added.

C. Masson, J. E. Rim and H. K. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019. Bin i holds values in (g^(i-1), g^i], g = (1 + a)/(1 - a), and stands for 2 g^i/(g + 1): no
value in it is further away than a share a of itself. Here the bins are fixed, so that a sketch is an array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from disagg_sim.arrays import Floats, Ints

#: Largest distance of a percentile from the one of the values themselves, as a share of it. [1]
RELATIVE_ERROR = 0.005
#: Range within which it holds; values below the first count as 0, those above the last as the last.
LEAST, MOST = 1e-6, 1e7
_RATIO = (1.0 + RELATIVE_ERROR) / (1.0 - RELATIVE_ERROR)
_BINS = math.ceil(math.log(MOST / LEAST) / math.log(_RATIO)) + 1


def _none() -> Ints:
    return np.zeros(_BINS, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Values counted in bins; two are added bin by bin, in any order."""

    counts: Ints = field(default_factory=_none)  # of each bin; the first has all below ``LEAST`` [1]

    def __add__(self, other: Sketch) -> Sketch:
        """Both together."""
        return Sketch(self.counts + other.counts)

    def counted(self, values: Floats) -> Sketch:
        """With more values; shape (values,)."""
        with np.errstate(divide="ignore"):
            places = np.ceil(np.log(np.maximum(values, 0.0) / LEAST) / math.log(_RATIO))
        bins = np.clip(places, 0, _BINS - 1).astype(np.int64)
        return Sketch(self.counts + np.bincount(bins, minlength=_BINS))

    def percentile(self, share: float) -> float:
        """The value below which ``share`` [1] of all lies, in proportion between two ranks; NaN of no values."""
        below = np.cumsum(self.counts)
        if not below[-1]:
            return math.nan
        rank = share * (int(below[-1]) - 1)
        first = math.floor(rank)
        low, high = (_value(int(np.searchsorted(below, each, side="right"))) for each in (first, math.ceil(rank)))
        return low + (rank - first) * (high - low)


def _value(place: int) -> float:
    """What a bin stands for."""
    return LEAST * 2.0 * _RATIO**place / (_RATIO + 1.0) if place else 0.0
