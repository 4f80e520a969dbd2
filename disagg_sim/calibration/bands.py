"""Bands around single predictions, and how many measurements lie inside."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg_sim.facts.uncertainty import EIGHTY

Floats = NDArray[np.float64]


def band(predicted: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    """10 % and 90 % quantiles of what is log-normal around ``predicted``, with s.d. ``sigma`` of the logarithm [1]."""
    width = np.exp(EIGHTY * sigma)
    return predicted / width, predicted * width
