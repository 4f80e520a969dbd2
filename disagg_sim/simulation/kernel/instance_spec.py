"""State an instance of a fleet, and show the arrays of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, whole_number
from disagg_sim.simulation.kernel.layout import AdmissionRule, Mode, RankChoice, Scheduling
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
