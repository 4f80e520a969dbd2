"""Forget segments that are over, so that the records of a long run do not fill the memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.arrays import Ints, Mask

#: Part of a key of the running set that is the segment.
SEGMENT = 2**32 - 1


def forget(inst: Any, seg: Any, sets: Ints, keep: Mask) -> Ints:
    """Drop segments that are over; those that stay are numbered anew, in their order.

    Parameters
    ----------
    inst, seg, sets
        Arrays of ``layout.State``, of all segments so far.
    keep
        Which segments stay. None of the others is in a queue, runs, or holds blocks.

    Returns
    -------
    array
        New number of each old one; -1 = dropped.

    Examples
    --------
    >>> from disagg_sim.simulation.kernel.fleet import Fleet
    >>> from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> fleet = Fleet([InstanceSpec(table=StepTable.affine(step=1.0), blocks=100)])
    >>> first, second = (fleet.submit(0, request, (0, 100, end), 0.0) for request, end in ((7, 1), (8, 3)))
    >>> _ = fleet.run_until(1.5)
    >>> fleet.forget(np.array([False, True])).tolist(), fleet.segments.request.tolist()
    ([-1, 0], [8])
    >>> fleet.run_until(np.inf), fleet.segments.finish_s.tolist()
    ((-1, inf), [3.0])
    """
    stay = int(keep.sum())
    number: Ints = np.where(keep, np.cumsum(keep) - 1, -1)
    if stay == keep.size:
        return number
    seg[:stay] = seg[keep]
    seg[stay:] = np.zeros(1, seg.dtype)
    for record, names in ((seg[:stay], ("next",)), (inst, ("first", "last", "last_admitted"))):
        for name in names:
            column = record[name]
            record[name] = np.where(column < 0, -1, number[column])
    place, own = np.arange(sets.shape[2]), (inst["ranks"] == 1)[:, None]  # those of several ranks are in their rows
    running, joined = (own & (place < inst[name][:, None]) for name in ("running_requests", "groups"))
    keys = sets[0][running]
    sets[0][running] = keys - (keys & SEGMENT) + number[keys & SEGMENT]
    sets[1][joined] = number[sets[1][joined]]
    return number
