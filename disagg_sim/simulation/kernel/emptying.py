"""Empty an instance (its queues, its run, the counts of what it has at work; say what it gave); forget old segments.

Segments that are over are forgotten, so that the records of a long run do not fill the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.simulation.kernel.layout import IDLE

#: What an instance has and does: nothing of it is left when it dies.
HELD_AT_WORK = (
    "active",
    "draining",
    "stalled",
    "running_requests",
    "running_tokens",
    "queued_requests",
    "queued_prompt_tokens",
    "queued_context_tokens",
    "admitted",
    "run_steps",
    "pieces",
    "groups",
    "closed",
    "residue",
    "growing",
    "promised",
    "requests",
    "request_tokens",
)


def let_idle(row: np.void) -> None:
    """Empty the queues of an instance and end its run."""
    row["first"] = row["last"] = row["last_admitted"] = -1
    row["next_s"] = row["run_end_s"] = row["leave_s"] = np.inf
    row["run_kind"] = IDLE


def settle_emitted(inst: Any, seg: Any, running: Ints) -> None:
    """Write the steps of running segments into their records."""
    rows = inst[inst["rank_at"][seg["instance"][running]] + seg["rank"][running]]
    steps = rows["counter"] - seg["joined"][running]
    seg["late_gaps"][running] += rows["late_steps"] - seg["late_from"][running]
    seg["emitted"][running] += np.where(rows["table"]["drafts"] > 0, 0, steps)
    stepped = running[steps > 0]
    seg["last_s"][stepped] = rows["last_step_s"][steps > 0]


def given(seg: Any, requests: Ints) -> tuple[Ints, Floats]:
    """See ``Fleet.given``, of all segments so far."""
    seg = seg[np.isin(seg["request"], requests) & (seg["emitted"] > 0) & ~np.isnan(seg["first_token_s"])]
    place = np.searchsorted(requests, seg["request"])
    last = np.full(requests.size, -np.inf)
    np.maximum.at(last, place, np.where(np.isnan(seg["finish_s"]), seg["last_s"], seg["finish_s"]))
    tokens = np.bincount(place, seg["emitted"], minlength=requests.size).astype(np.int64)
    return tokens, np.where(tokens > 0, last, np.nan)


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
    for record, names in ((seg[:stay], ("next", "feeds")), (inst, ("first", "last", "last_admitted"))):
        for name in names:
            column = record[name]
            record[name] = np.where(column < 0, -1, number[column])
    place, own = np.arange(sets.shape[2]), (inst["ranks"] == 1)[:, None]  # those of several ranks are in their rows
    running, joined = (own & (place < inst[name][:, None]) for name in ("running_requests", "groups"))
    keys = sets[0][running]
    sets[0][running] = keys - (keys & SEGMENT) + number[keys & SEGMENT]
    sets[1][joined] = number[sets[1][joined]]
    return number
