"""Choose the axes of a step table: contexts, numbers of decodes, tokens of a step and lengths of prompts."""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.simulation.kernel import times as k
from disagg_sim.simulation.kernel.step_physics import StepPhysics

#: Least stair of its time that gets points of its own. [1]
LEAST_STAIR = 0.004


def stair_axis(physics: StepPhysics, most: int, past: int) -> Floats:
    """Both sides of the lengths at which prefill attention, after none or a long past, begins another round. [token]

    Tiles end at multiples of ``STAIR`` tokens; rounds of less than ``LEAST_STAIR`` of the time are left to the axis.
    """
    ends = np.arange(k.STAIR, most, k.STAIR, dtype=float)
    sides = np.stack([ends, ends + 1.0])
    each = physics.attention(sides.ravel(), np.array([0.0, float(past)]), np.ones(1))[0, 0]
    before, after = (each * sides.ravel()[:, None]).reshape(2, ends.size, 2)
    stair = np.any(np.abs(after - before) > LEAST_STAIR * before, axis=1)
    return sides[:, stair].T.ravel()


def token_axis(most: int) -> Floats:
    """Every number up to ``EXACT``, the first and last number of every tile, and a far one. [token]"""
    fine = np.arange(k.EXACT, k.FINE_END, k.FINE_TILE)
    coarse = np.arange(k.FINE_END, max(most, k.FINE_END + k.COARSE_TILE), k.COARSE_TILE)
    tiles = [
        np.stack([start + 1, start + width], axis=1).ravel()
        for start, width in ((fine, k.FINE_TILE), (coarse, k.COARSE_TILE))
    ]
    return np.concatenate([np.arange(1.0, k.EXACT + 1), *tiles, [k.FAR * float(coarse[-1] + k.COARSE_TILE)]])


def knot_axis(most: int, windows: tuple[int, ...]) -> Floats:
    """Contexts of the decode axis: half powers of two, and the windows of the model. [token]"""
    powers = 2.0 ** (0.5 * np.arange(8, int(2 * np.ceil(np.log2(most))) + 1))
    return np.unique(np.concatenate([[1.0], powers, np.array(windows, dtype=float)]))


def row_axis(most: int, stages: int, ranks: int) -> Floats:
    """Numbers of decodes of the linear part: all below a full pipeline, then steps of a fifth. [1]"""
    steps = stages * ranks * np.round(1.2 ** np.arange(64))
    return np.unique(np.concatenate([np.arange(min(stages, most) + 1.0), steps[steps < most], [float(most)]]))
