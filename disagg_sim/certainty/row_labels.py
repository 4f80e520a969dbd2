"""Say of designs what their throughput rests on and where they leave the range of their fits, timing them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from disagg_sim.certainty.contributions import Adjust, Contribution, timed_contributions
from disagg_sim.certainty.designs import Designs, Times
from disagg_sim.certainty.extrapolation import doubtful, words_outside
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of
from disagg_sim.certainty.trust import shares_of_each, words_of_shares
from disagg_sim.physics.setup import Setup


def label_rows(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> pd.DataFrame:
    """Say of every row of a table what ``rests_on`` and ``outside_calibration`` say.

    Derivatives by labels are imaginary parts of times, of which ``outside_calibration`` needs the real ones. Returns
    columns ``rests_on`` and ``outside_calibration``, index of ``points``.
    """
    every = list(designs_of(points, replace(origin, exact=False)))
    found: dict[int, tuple[Times, Sequence[Contribution]]] = {}

    def timed(designs: Sequence[Designs], marks: Callable[[Setup], Adjust]) -> list[Times]:
        told = timed_contributions(designs, doubtful, marks)
        found.update((id(one), (_plain(times), parts)) for one, (times, parts) in zip(designs, told, strict=True))
        return [times for times, _ in told]

    trust = words_of_shares(points, every, shares_of_each(every, timed))
    return pd.concat([trust, words_outside(points, every, [found[id(one)] for one in every])], axis=1)


def _plain(times: Times) -> Times:
    """Times without marks: their real part, the same all along the leading axis. [s]"""
    return Times(*(np.real(part)[0] if np.ndim(part) > 1 else np.real(part) for part in times))
