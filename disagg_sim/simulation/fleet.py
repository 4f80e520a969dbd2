"""The Python face of the compiled kernel: instances that work on segments of requests.

A *segment* is the part of a request that one instance does: ``context`` tokens that are already cached there,
``prompt`` tokens to prefill and ``generate`` tokens to emit. A prefill that completes emits a token, so a
co-located request is (0, P, D), plain disaggregation (0, P, 1) and then (P, 0, D - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg_sim.simulation.state import Mode
from disagg_sim.simulation.step_times import StepTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One instance of a fleet, as it starts."""

    table: StepTable  # its step times; instances that share the object share the memory
    blocks: int  # KV blocks over all DP ranks, see ``kv_blocks`` [block]
    mode: Mode = Mode.CHUNKED
    token_budget: int = 2048  # decodes and prefill of one step; of a pass in PREFILL_FIRST [token]
    max_sequences: int = 256  # running and in prefill together [1]
    max_prompts: int = 2**31  # prompts of one pass [1]
    step_limit_s: float = np.inf  # of a SLO_AWARE step [s]
    active: bool = True


@dataclass(frozen=True, slots=True)
class Segments:
    """Columns of all segments submitted so far, in the order of submission; views, not copies."""

    request: Ints
    instance: Ints
    context: Ints  # [token]
    prompt: Ints  # [token]
    generate: Ints  # [token]
    status: Ints  # ``SegmentStatus``
    preemptions: Ints
    cached: Ints  # prompt tokens found in the prefix cache [token]
    submit_s: Floats
    start_s: Floats  # first step or pass that worked on it; nan = never [s]
    first_token_s: Floats  # nan = none [s]
    finish_s: Floats  # nan = not finished [s]


class Fleet:
    """Instances and their segments.

    Attributes (arrays over instances, int64 unless said; views, always current up to each instance's last event):
    ``queued_requests, queued_prompt_tokens, running_requests, running_tokens, free_blocks, total_blocks,
    decode_steps, decode_time (float, s), busy_time (float, s), prefill_tokens, decode_tokens, first_tokens,
    preemptions, passes, active, next_event (float, s)``. ``refresh(now)`` brings running_tokens, counters and free_blocks up to
    ``now`` (it changes nothing in what follows). ``itl_counts`` [bins], ``itl_edges`` [bins + 1, s].
    """

    def __init__(
        self, instances: Sequence[InstanceSpec], *, step_by_step: bool = False, capacity: int = 4096,
        watermark: float = 0.01,
    ) -> None:  # fmt: skip
        ...

    def submit(
        self, instance: int, request: int, context: int, prompt: int, generate: int, now: float,
        notify: bool = False, hold: bool = False, last_token_s: float = np.nan, closes: bool = True,
    ) -> int:  # fmt: skip
        """Queue a segment and return its number (0, 1, 2, ...). All arguments may be given by position.

        ``notify``: ``run_until`` returns when it has finished. ``hold``: its blocks stay until ``release``.
        ``last_token_s``: when the request's previous token was emitted elsewhere (for the first gap, ITL).
        ``closes``: manual mode: last of its batch (submit a batch as closes=False, ..., closes=True).
        """
        ...

    def run_until(self, limit: float) -> tuple[int, float]:
        """Work up to ``limit`` [s], at most to the first notice: (segment, time).

        (-1, limit): nothing to report. (-2 - instance, time): a draining instance is empty now (and inactive).
        Events at ``limit`` itself are included. Call again with the same limit after handling a notice.
        """
        ...

    def next_time(self) -> float:
        """Time of the next event of any instance; inf if none. [s]"""
        ...

    def release(self, segment: int, now: float) -> None:
        """Free the blocks of a finished segment that was submitted with ``hold``."""
        ...

    def withdraw(self, segment: int, now: float) -> bool:
        """Take a queued segment back if it holds no blocks yet; whether it was."""
        ...

    def set_limits(
        self, instance: int, now: float, *, token_budget: int | None = None, step_limit_s: float | None = None,
        max_sequences: int | None = None, max_prompts: int | None = None, mode: Mode | None = None,
    ) -> None:  # fmt: skip
        """Change how an instance forms its steps, from its next step on."""
        ...

    def start(self, instance: int, now: float) -> None:
        """Let an inactive instance form steps from ``now`` on (ends a drain)."""
        ...

    def stop(self, instance: int, now: float) -> None:
        """Make an empty instance inactive; ``InputError`` if it has work (drain it first)."""
        ...

    def drain(self, instance: int, now: float) -> None:
        """Let an instance finish what it has; ``run_until`` reports when it is empty (held blocks included)."""
        ...

    def refresh(self, now: float) -> None:
        """Count the steps that ended by ``now`` in running_tokens, free_blocks and all counters."""
        ...

    def step_end(self, instance: int, now: float) -> float:
        """When the step in progress ends; ``now`` if the instance is idle. [s]"""
        ...

    def fits(self, instance: int, tokens: int) -> bool:
        """Whether a segment of ``tokens`` (context + prompt + generate) can ever be held by the instance."""
        ...

    def flops(self) -> Floats:
        """Work done so far by each instance (whole instance, all GPUs). [FLOP]"""
        ...

    @property
    def segments(self) -> Segments:
        """All segments submitted so far."""
        ...
