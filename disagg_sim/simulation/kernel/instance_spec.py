"""State an instance of a fleet, empty it, and forget its old segments, so that a long run does not fill the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.errors import InputError, whole_number
from disagg_sim.simulation.kernel.layout import IDLE, AdmissionRule, Mode, RankChoice, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One instance of a fleet, as it starts; its attention ranks share its blocks and limits evenly."""

    table: StepTable  # its step times; instances that share the object share the memory
    blocks: int  # KV blocks over all attention ranks, each of which has its part, see ``kv_blocks`` [block]
    mode: Mode = Mode.CHUNKED
    token_budget: int = 2048  # decodes and prefill of one step; prompts of one pass in PREFILL_FIRST [token]
    max_sequences: int = 256  # running and in prefill together [1]
    max_prompts: int = 2**31  # prompts of one pass [1]
    hold_steps: int = 0  # most decode steps that prompts wait until every attention rank can take one; 0 = none [1]
    step_limit_s: float = np.inf  # of a SLO_AWARE step [s]
    least_prefill: int = 1  # of a SLO_AWARE step after a past so long that it exceeds the limit by itself [token]
    admission: AdmissionRule = AdmissionRule.PROMPT
    watermark: float = 0.01  # share of the blocks that an admission leaves free for the growth of what runs [1]
    scheduling: Scheduling = Scheduling.FCFS  # the order of what waits, and what gives way where blocks lack
    keeps_preempted: bool = False  # blocks of a preempted segment stay cached until others take them
    swap_block_s: float = -1.0  # a block to the host's memory or back; below 0: what is preempted is computed again [s]
    swap_first_s: float = 0.0  # before the first block of a sequence that is swapped [s]
    finds_computed: bool = False  # prompts find what others have computed, else what they have blocks for
    steps_ahead: int = 0  # 1 = a step is formed as the one before it begins, of what is there [1]
    rank_choice: RankChoice = RankChoice.LEAST_WAITING  # which attention rank takes a request
    active: bool = True

    def __post_init__(self) -> None:
        """``InputError`` where a limit leaves no room for work or goes beyond the step table."""
        for name in ("blocks", "token_budget", "max_sequences", "max_prompts", "least_prefill"):
            whole_number(name, getattr(self, name))
        whole_number("hold_steps", self.hold_steps, 0)
        if self.max_sequences > self.table.max_sequences:
            raise InputError(
                f"max_sequences {self.max_sequences} is beyond the step table; allowed: up to "
                f"{self.table.max_sequences}"
            )
        if self.swap_block_s >= 0.0 and self.table.ranks > 1:
            raise InputError(f"{self.table.ranks} attention ranks with preemption by swap; allowed: one rank")


#: Rows of records; columns by name, as attributes.
Columns = Any


class Arrays(NamedTuple):
    """The kernel's own arrays, not copies: those of ``layout.FleetState`` that a predictor looks at."""

    inst: Columns
    seg: Columns
    sets: Ints
    values: Floats
    submitted: int  # segments so far [1]


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
    "leaves_s",
)


def let_idle(row: np.void) -> None:
    """Empty the queues of an instance and end its run."""
    row["first"] = row["last"] = row["last_admitted"] = -1
    row["next_s"] = row["run_end_s"] = row["leave_s"] = row["seen_s"] = np.inf
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
    """Drop segments that are over and number those that stay anew; new numbers of the old ones, -1 = dropped."""
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
