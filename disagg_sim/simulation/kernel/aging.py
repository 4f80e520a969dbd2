"""Placements of experts that age while an instance works, and moves of their copies, in which it does nothing else.

The law of age is that of ``physics.rebalance``: after a time t a step takes :math:`1 - e^{-t/\\tau}` of what it would
take more with copies anywhere. A move falls due after a period of work, as engines count passes: what idles ages, too,
but moves nothing.
"""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import State, Table

#: Decode steps that are computed together have one age: they last such a part of the drift, or of the period. [1]
PARTS = 256
#: Instances start at ages this far apart, of a period, so that any number of them is spread evenly. [1]
GOLDEN = (5.0**0.5 - 1.0) / 2.0


def place(row: Any, share: float, now: float) -> None:
    """Let a share of the period have gone by since copies were placed; where they never move, they lie anywhere.

    Parameters
    ----------
    row
        Of an instance, which is written.
    share
        Of its period. [1]
    now
        Time. [s]

    Returns
    -------
    None

    Examples
    --------
    >>> import numpy as np
    >>> from disagg_sim.simulation.kernel.home import INSTANCE
    >>> rows = np.zeros(1, INSTANCE)
    >>> rows["table"]["period_s"] = 100.0
    >>> place(rows[0], 0.5, 20.0)
    >>> float(rows["placed_s"][0]), float(rows["worked_s"][0])
    (-30.0, -50.0)
    """
    period = float(row["table"]["period_s"])
    never = math.isinf(period)
    row["placed_s"] = -math.inf if never else now - share * period
    row["worked_s"] = row["busy_s"] - (0.0 if never else share * period)


@inner
def move_due(st: State, i: int, now: float) -> bool:
    """Whether copies of an instance move now; else the next run has the age that their placement has now."""
    inst = st.inst[i]
    head = inst.table
    if head.drift_s == math.inf:
        return False
    if inst.busy_s - inst.worked_s >= head.period_s:
        return True
    head.stale = -math.expm1((inst.placed_s - now) / head.drift_s)
    return False


@inner
def end_move(st: State, i: int, now: float) -> None:
    """Copies of an instance have just been placed."""
    inst = st.inst[i]
    inst.placed_s = now
    inst.worked_s = inst.busy_s


@inner
def age_step(head: Table) -> float:
    """For how long decode steps may be computed with one age. [s]"""
    return min(head.drift_s, head.period_s) / PARTS
