"""Empty an instance: its queues, its run, and the counts of what it has at work."""

from __future__ import annotations

import numpy as np

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
