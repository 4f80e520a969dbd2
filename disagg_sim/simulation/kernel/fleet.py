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

from disagg_sim.errors import InputError, whole_number
from disagg_sim.simulation.kernel import entry as kernel
from disagg_sim.simulation.kernel import layout as state
from disagg_sim.simulation.kernel.fleet_views import Arrays, Segments, Views
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode, SegmentStatus
from disagg_sim.simulation.kernel.step_table import StepTable, pack_tables

#: Looked up once: an enum's members are slow to find.
HELD, RESERVED = SegmentStatus.HELD, SegmentStatus.RESERVED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Share of an instance's blocks that an admission leaves free for the growth of what runs; vLLM's default. [1]
WATERMARK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One instance of a fleet, as it starts."""

    table: StepTable  # its step times; instances that share the object share the memory
    blocks: int  # KV blocks over all DP ranks, see ``kv_blocks`` [block]
    mode: Mode = Mode.CHUNKED
    token_budget: int = 2048  # decodes and prefill of one step; prompts of one pass in PREFILL_FIRST [token]
    max_sequences: int = 256  # running and in prefill together [1]
    max_prompts: int = 2**31  # prompts of one pass [1]
    step_limit_s: float = np.inf  # of a SLO_AWARE step [s]
    active: bool = True

    def __post_init__(self) -> None:
        """``InputError`` where a limit leaves no room for work or goes beyond the step table."""
        for name in ("blocks", "token_budget", "max_sequences", "max_prompts"):
            whole_number(name, getattr(self, name))
        if self.max_sequences > self.table.max_sequences:
            raise InputError(
                f"max_sequences {self.max_sequences} is beyond the step table; allowed: up to "
                f"{self.table.max_sequences}"
            )


class Fleet:
    """Instances and their segments.

    Parameters
    ----------
    instances
        One or more; ``add`` brings more later.
    step_by_step
        Make every decode step an event of its own: slow, for tests of the closed form.
    capacity
        Segments to make room for at first. [1]

    Attributes
    ----------
    views
        ``Views`` of the instances; a new object after ``add``.
    itl_counts, itl_edges
        Histogram of the gaps between the tokens of a request: tokens a bin, and the bins + 1 edges [s].
    """

    def __init__(self, instances: Sequence[InstanceSpec], *, step_by_step: bool = False, capacity: int = 4096) -> None:
        self._specs: list[InstanceSpec] = []
        self._count = 0
        self._ints: Ints = np.zeros((0, state.INST_INTS), dtype=np.int64)
        self._floats: Floats = np.full((1, state.INST_FLOATS), np.inf)
        self._floats[-1, state.NEXT_S] = 0.0
        self._seg: Ints = np.zeros((capacity, state.SEG_INTS), dtype=np.int64)
        self._seg_s: Floats = np.zeros((capacity, state.SEG_FLOATS))
        self._sets: Ints = np.zeros((2, 0, 1), dtype=np.int64)
        self._world: Ints = np.zeros(state.WORLD, dtype=np.int64)
        self._world[state.PENDING_HEAD] = -1
        self._world[state.STEP_BY_STEP] = step_by_step
        edges = state.ITL_LEAST_S * 2.0 ** (np.arange(state.ITL_BINS - 1) / state.ITL_PER_OCTAVE)
        self.itl_edges: Floats = np.concatenate([[0.0], edges, [np.inf]])
        self._itl: Floats = np.stack([np.zeros(state.ITL_BINS), self.itl_edges[:-1]])
        self._enlarge(list(instances), 0.0)

    def __len__(self) -> int:
        """Instances, active or not. [1]"""
        return len(self._specs)

    @property
    def itl_counts(self) -> Ints:
        """Gaps between tokens a bin of ``itl_edges``. [token]"""
        counts: Ints = self._itl[0].astype(np.int64)
        return counts

    @property
    def arrays(self) -> Arrays:
        """The kernel's own arrays, for compiled predictors; see ``state`` for their columns."""
        ints, floats, seg, _, sets, heads, values, _, _ = self._arrays
        return Arrays(ints, floats, seg, sets, heads, values, self._count)

    @property
    def segments(self) -> Segments:
        """All segments submitted so far."""
        return Segments.of(self._seg[: self._count], self._seg_s[: self._count])

    def status_of(self, segment: int) -> SegmentStatus:
        """Where a segment is in its life."""
        return SegmentStatus(int(self._seg[segment, state.STATUS]))

    def spec(self, instance: int) -> InstanceSpec:
        """What an instance was started as."""
        return self._specs[instance]

    def fits(self, instance: int, tokens: int) -> bool:
        """Whether an instance can ever hold a segment of so many tokens, context, prompt and output together."""
        return tokens <= int(self._ints[instance, state.TOTAL_BLOCKS]) * BLOCK_TOKENS

    def submit(
        self,
        instance: int,
        request: int,
        context: int,
        prompt: int,
        generate: int,
        now: float,
        notify: bool = False,
        hold: bool = False,
        last_token_s: float = np.nan,
        closes: bool = True,
        ready: bool = True,
        cached: int = 0,
    ) -> int:
        """Queue a segment and return its number (0, 1, 2, ...).

        Parameters
        ----------
        instance, request
            Where, and a number that comes back in ``segments``.
        context, prompt, generate
            Tokens already cached there, to prefill, to emit. [token]
        now
            The time up to which ``run_until`` was called. [s]
        notify
            ``run_until`` returns when it has finished.
        hold
            Its blocks stay taken until ``release``.
        last_token_s
            When the request's previous token was emitted elsewhere; nan = this one emits the first. [s]
        closes
            Manual mode: the last of its batch.
        ready
            False reserves blocks first: ``run_until`` returns the segment when it has them (``RESERVED``), its
            context may be transferred then, and ``ready`` lets it start.
        cached
            Tokens of the prompt found in the prefix cache, fewer than the prompt. [token]

        Raises
        ------
        InputError
            The instance can never hold it, or its lengths are impossible.
        """
        segment = self._count
        if segment == self._seg.shape[0]:
            self._seg = np.concatenate([self._seg, np.zeros_like(self._seg)])
            self._seg_s = np.concatenate([self._seg_s, np.zeros_like(self._seg_s)])
            self._bind()
        error = kernel.submit(
            *self._arrays,
            segment,
            instance,
            request,
            context,
            prompt,
            generate,
            float(now),
            notify,
            hold,
            last_token_s,
            closes,
            ready,
            cached,
        )
        if error == kernel.LATE:
            raise InputError(f"submit at {now:g} s, but instance {instance} has events before; call run_until first")
        if error:
            most = int(self._ints[instance, state.TOTAL_BLOCKS]) * BLOCK_TOKENS
            raise InputError(
                f"request {request}: context {context}, prompt {prompt} ({cached} cached) and output {generate} tokens "
                f"cannot be served by instance {instance}; allowed: something to do, at most {most} tokens in all"
            )
        self._count = segment + 1
        return segment

    def run_until(self, limit: float) -> tuple[int, float]:
        """Work up to ``limit`` [s], that instant included, or to the first notice: (segment, time).

        (-1, limit): nothing to report. (-2 - instance, time): a draining instance is empty and now inactive. A
        segment is reported when it has finished (``notify``) or has got its blocks (``ready`` was False), see
        ``status_of``. Call again with the same limit after a notice.
        """
        found: tuple[int, float] = kernel.run_until(*self._arrays, float(limit))
        return found

    def next_time(self) -> float:
        """Time of the next event of any instance; inf = none. [s]"""
        return float(self.views.next_event.min())

    def ready(self, segment: int, now: float) -> None:
        """Let a segment with reserved blocks start: its context has come."""
        self._check(segment, RESERVED, "ready")
        self._control(kernel.ALLOW, segment, self._seg.item(segment, state.INSTANCE), now)

    def release(self, segment: int, now: float) -> None:
        """Free the blocks of a finished segment that was submitted with ``hold``."""
        self._check(segment, HELD, "release")
        self._control(kernel.RELEASE, segment, self._seg.item(segment, state.INSTANCE), now)

    def withdraw(self, segment: int, now: float) -> bool:
        """Take a waiting segment back if it holds no blocks yet; whether it was."""
        return self._control(kernel.WITHDRAW, segment, self._seg.item(segment, state.INSTANCE), now) > 0

    def waiting(self, instance: int) -> Ints:
        """Segments of whole prompts that wait on an instance, the next first, nothing of them computed yet."""
        found = np.empty(self._ints.item(instance, state.QUEUED), np.int64)
        return found[: kernel.waiting(self._ints, self._seg, self._seg_s, instance, found)]

    def set_limits(
        self,
        instance: int,
        now: float,
        *,
        token_budget: int | None = None,
        step_limit_s: float | None = None,
        max_sequences: int | None = None,
        max_prompts: int | None = None,
        mode: Mode | None = None,
    ) -> None:
        """Change how an instance forms its steps, from its next step on; None leaves a limit as it is.

        Raises
        ------
        InputError
            A limit below 1, or ``max_sequences`` above what the instance started with.
        """
        row = self._ints[instance]
        if max_sequences is not None and max_sequences > self._specs[instance].max_sequences:
            most = self._specs[instance].max_sequences
            raise InputError(f"max_sequences {max_sequences} of instance {instance}; allowed: up to {most}")
        for name, column, value in (
            ("token_budget", state.TOKEN_BUDGET, token_budget),
            ("max_sequences", state.MAX_SEQUENCES, max_sequences),
            ("max_prompts", state.MAX_PROMPTS, max_prompts),
        ):
            if value is not None:
                row[column] = whole_number(name, value)
        if mode is not None:
            row[state.MODE] = mode
        if step_limit_s is not None:
            self._floats[instance, state.STEP_LIMIT_S] = step_limit_s
        self._control(kernel.WAKE, -1, instance, now)

    def start(self, instance: int, now: float) -> None:
        """Let an instance form steps from ``now`` on; ends a drain."""
        if self._ints[instance, state.DRAINING] == 2:
            self._world[state.DRAINED] -= 1
        self._ints[instance, [state.ACTIVE, state.DRAINING]] = 1, 0
        self._control(kernel.WAKE, -1, instance, now)

    def drain(self, instance: int, now: float) -> None:
        """Let an instance finish what it has; ``run_until`` reports it when nothing is left, held blocks included."""
        if self._ints[instance, state.ACTIVE] == 1 and self._ints[instance, state.DRAINING] == 0:
            self._ints[instance, state.DRAINING] = 1
            self._control(kernel.WAKE, -1, instance, now)

    def abort(self, instance: int, now: float) -> Ints:
        """Let an instance die at ``now``: its unfinished segments, returned, are lost and its memory is free."""
        self.refresh(now)
        mine, status = self._seg[: self._count, state.INSTANCE] == instance, self._seg[: self._count, state.STATUS]
        over = (SegmentStatus.DONE, SegmentStatus.WITHDRAWN, SegmentStatus.LOST)
        lost = np.flatnonzero(mine & ~np.isin(status, over))
        self._seg[lost, state.STATUS] = SegmentStatus.LOST
        row = self._ints[instance]
        row[[state.ACTIVE, state.DRAINING, state.RUNNING, state.RUNNING_TOKENS, state.QUEUED, state.QUEUED_TOKENS]] = 0
        row[state.QUEUED_CONTEXT] = 0
        row[[state.ADMITTED, state.RUN_KIND, state.RUN_STEPS, state.PIECES, state.GROUPS, state.CLOSED]] = 0
        row[state.RESIDUE :] = 0
        row[list(_ENDS)] = -1
        row[state.FREE_BLOCKS] = row[state.TOTAL_BLOCKS]
        self._floats[instance, [state.NEXT_S, state.RUN_END_S, state.LEAVE_S]] = np.inf
        return lost

    def add(self, spec: InstanceSpec, now: float) -> int:
        """Bring a new instance and return its number; ``views`` is a new object from here on."""
        self._enlarge([spec], now)
        return len(self._specs) - 1

    def refresh(self, now: float) -> None:
        """Count the decode steps that ended by ``now`` in all views; changes nothing in what follows."""
        self._control(kernel.REFRESH, -1, 0, now)

    def step_end(self, instance: int, now: float) -> float:
        """When the step in progress ends; ``now`` if the instance is idle. [s]"""
        return self._control(kernel.STEP_END, -1, instance, now)

    def flops(self) -> Floats:
        """Work that the model needed so far on each instance, all its GPUs together. [FLOP]

        Attention counts as if no layer had a sliding window.
        """
        ints, floats = self._ints, self._floats[:-1]
        works = [spec.table.work for spec in self._specs]
        work = np.array([[each.per_token, each.per_pair, each.per_emitted] for each in works])
        emitted = ints[:, state.DECODE_TOKENS] + ints[:, state.FIRST_TOKENS]
        tokens = ints[:, state.PREFILL_TOKENS] + ints[:, state.DECODE_TOKENS]
        pairs = floats[:, state.PREFILL_PAIRS] + floats[:, state.DECODE_CONTEXT]
        done: Floats = tokens * work[:, 0] + pairs * work[:, 1] + emitted * work[:, 2]
        return done

    def _control(self, action: int, segment: int, instance: int, now: float) -> float:
        found: float = kernel.control(*self._arrays, action, segment, instance, float(now))
        return found

    def _check(self, segment: int, status: SegmentStatus, action: str) -> None:
        if self._seg.item(segment, state.STATUS) != status:
            found = self.status_of(segment).name.lower()
            raise InputError(f"{action} of segment {segment}, which is {found}; allowed: {status.name.lower()}")

    def _enlarge(self, specs: list[InstanceSpec], now: float) -> None:
        """Make room for more instances, and start them."""
        self._specs.extend(specs)
        tables = list({id(spec.table): spec.table for spec in self._specs}.values())
        place = {id(table): index for index, table in enumerate(tables)}
        self._heads, self._values = pack_tables(tables)
        old, width = self._sets, max(spec.max_sequences for spec in self._specs)
        self._sets = np.zeros((2, len(self._specs), width), dtype=np.int64)
        self._sets[:, : old.shape[1], : old.shape[2]] = old
        clock, rows, times = self._floats[-1:], [self._ints], [self._floats[:-1]]
        for spec in specs:
            row = np.zeros((1, state.INST_INTS), dtype=np.int64)
            row[0, list(_ENDS)] = -1
            row[0, [state.ACTIVE, state.MODE, state.TABLE]] = spec.active, spec.mode, place[id(spec.table)]
            row[0, [state.TOKEN_BUDGET, state.MAX_SEQUENCES]] = spec.token_budget, spec.max_sequences
            row[0, state.MAX_PROMPTS] = spec.max_prompts
            row[0, [state.TOTAL_BLOCKS, state.FREE_BLOCKS]] = spec.blocks
            row[0, state.WATERMARK] = int(WATERMARK * spec.blocks)
            rows.append(row)
            time = np.zeros((1, state.INST_FLOATS))
            time[0, [state.NEXT_S, state.RUN_END_S, state.LEAVE_S]] = np.inf
            time[0, state.STEP_LIMIT_S] = spec.step_limit_s
            time[0, state.RUN_START_S] = now
            times.append(time)
        self._ints, self._floats = np.concatenate(rows), np.concatenate([*times, clock])
        self._bind()

    def _bind(self) -> None:
        """Hand the arrays, which may be new ones, to the kernel and to the views."""
        self._arrays = (
            self._ints,
            self._floats,
            self._seg,
            self._seg_s,
            self._sets,
            self._heads,
            self._values,
            self._itl,
            self._world,
        )
        self.views = Views.of(self._ints, self._floats)


#: Ends of the queues of an instance: -1 = empty.
_ENDS = (
    state.HEAD,
    state.TAIL,
    state.LAST_ADMITTED,
    state.COMING_HEAD,
    state.COMING_TAIL,
    state.LEAVE_HEAD,
    state.LEAVE_TAIL,
)
