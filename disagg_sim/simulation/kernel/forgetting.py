"""Forget segments that are over, so that the records of a long run do not fill the memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.arrays import Ints, Mask

#: Part of a key of the running set that is the segment.
SEGMENT = 2**32 - 1


def forget(inst: Any, seg: Any, sets: Ints, keep: Mask) -> Ints:
    """Drop segments that are over; those that stay are numbered anew, in their order.

    Returns new number of each old one; -1 = dropped.
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
