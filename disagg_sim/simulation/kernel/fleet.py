"""Python interface of the compiled kernel: instances that work on segments of requests.

A *segment* is the part of a request that one instance does: ``context`` tokens that are already cached there,
``prompt`` tokens to prefill and ``generate`` tokens to emit. A prefill that completes emits a token, so a
co-located request is (0, P, D), plain disaggregation (0, P, 1) and then (P, 0, D - 1).

Past 400 lines: one object has every call of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel import entry as kernel
from disagg_sim.simulation.kernel.addresses import INSTANCE, SEGMENT, WORLD, addresses_of
from disagg_sim.simulation.kernel.instance_spec import (
    HELD_AT_WORK,
    Arrays,
    Columns,
    InstanceSpec,
    forget,
    given,
    let_idle,
    settle_emitted,
)
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    CLOSES,
    ITL_BINS,
    ITL_LEAST_S,
    ITL_PER_OCTAVE,
    RESERVE,
    FleetState,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.links import Wires
from disagg_sim.simulation.kernel.ranking import RoutingQueue, least_tree
from disagg_sim.simulation.kernel.runs import itl_bin
from disagg_sim.simulation.kernel.shared_blocks import SharedBlocks, distinct_blocks
from disagg_sim.simulation.kernel.step_table import pack_tables
from disagg_sim.simulation.kernel.submission import LATE, NO_ROOM, Moving
from disagg_sim.simulation.kv_link import Spine

#: Python version of ``itl_bin``.
gap_bin: Callable[[float], int] = getattr(itl_bin, "py_func", itl_bin)
#: Looked up once: an enum's members are slow to find.
HELD = int(SegmentStatus.HELD)
COMES, ARRIVES = kernel.COMES, kernel.ARRIVES
#: Limits over all attention ranks of an instance, shared out evenly.
SHARED_LIMITS = ("token_budget", "max_sequences")


class Fleet:
    """Instances and their segments."""

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        *,
        step_by_step: bool = False,
        capacity: int = 4096,
        priority: Ints | None = None,
        stream: int = 0,
        gap_limit_s: float = np.inf,
        spine: Spine | None = None,
    ) -> None:
        self._specs: list[InstanceSpec] = []
        self._count = 0
        self._feed: RoutingQueue | None = None
        self.shared: SharedBlocks | None = None
        self._ranks: list[int] = []  # of each instance [1]
        self._inst: Columns = np.zeros(0, INSTANCE)
        self._seg: Columns = np.zeros(capacity, SEGMENT)
        self._sets: Ints = np.zeros((2, 0, 1), dtype=np.int64)
        self._world: Columns = np.zeros(1, WORLD)
        self._world["pending_head"] = -1
        self._world["soonest_s"] = -np.inf
        self._world["step_by_step"], self._world["stream"] = step_by_step, stream
        self._world["gap_limit_s"] = self.gap_limit_s = gap_limit_s
        self.wires = Wires(spine)
        self.home: Ints = np.zeros((len(FleetState._fields), 4), dtype=np.int64)
        edges = ITL_LEAST_S * 2.0 ** (np.arange(ITL_BINS - 1) / ITL_PER_OCTAVE)
        self.itl_edges: Floats = np.concatenate([[0.0], edges, [np.inf]])
        self._priority: Ints = np.array(() if priority is None else priority, dtype=np.int64)
        self._itl: Floats = np.stack([np.zeros(ITL_BINS), self.itl_edges[:-1]])
        self._enlarge(list(instances), 0.0)

    def __len__(self) -> int:
        """Instances, active or not. [1]"""
        return len(self._specs)

    @property
    def itl_counts(self) -> Ints:
        """Number of gaps between tokens in each bin of ``itl_edges``. [1]"""
        counts: Ints = self._itl[0].astype(np.int64)
        return counts

    @property
    def arrays(self) -> Arrays:
        """Read-only arrays of the kernel, for compiled predictors."""
        inst, seg, sets, values = self._seen
        return Arrays(inst, seg, sets, values, self._count)

    @property
    def segments(self) -> Columns:
        """All segments submitted so far, in order; columns by the names of ``layout.Segment``."""
        return self._seg[: self._count].view(np.recarray)

    def start_s(self, segment: int) -> float:
        """When the first step that worked on a segment began; nan = never. [s]"""
        return float(self._start_s[segment])

    def whose(self, segment: int) -> tuple[int, int]:
        """Request and instance of a segment."""
        return self._request.item(segment), self._instance.item(segment)

    def status_of(self, segment: int) -> SegmentStatus:
        """State of a segment."""
        return SegmentStatus(int(self._status[segment]))

    def submit(
        self,
        instance: int,
        request: int,
        lengths: tuple[int, int, int],
        now: float,
        *,
        flags: int = CLOSES,
        last_token_s: float = np.nan,
        cached: int = 0,
    ) -> int:
        """Queue a segment and return its number (0, 1, 2, ...).

        ``lengths``: context already cached there, prompt to prefill, output to emit [token]. ``last_token_s``: time of
        the last token on another instance, nan = none.
        """
        segment = self._place_of(request)
        context, prompt, generate = lengths
        wanted = (instance, request, context, prompt, generate, cached, flags)
        error = kernel.submit(self.home, segment, wanted, last_token_s, float(now))
        if error == LATE:
            raise InputError(f"submit at {now:g} s, but instance {instance} has events before; call run_until first")
        if error:
            most = int(self._inst["rank_blocks"][instance]) * BLOCK_TOKENS
            raise InputError(
                f"request {request}: context {context}, prompt {prompt} ({cached} cached) and output {generate} tokens "
                f"cannot be served by instance {instance}; allowed: something to do, at most {most} tokens in all"
            )
        self._count = segment + 1
        return segment

    def ask(
        self,
        instance: int,
        request: int,
        lengths: tuple[int, int, int],
        now: float,
        *,
        flags: int,
        last_token_s: float,
        cache: Moving,
    ) -> int:
        """Queue a segment that pulls its cache as soon as it has blocks, without reports; see ``submit``."""
        segment = self._place_of(request)
        wanted = (instance, request, *lengths, 0, flags | RESERVE)
        error = kernel.ask(self.home, segment, wanted, last_token_s, cache, now)
        if error == NO_ROOM:
            self.wires.grow()
            error = kernel.ask(self.home, segment, wanted, last_token_s, cache, now)
        assert error == 0, error
        self._count = segment + 1
        return segment

    def _place_of(self, request: int) -> int:
        """The next segment, of a request."""
        if self._count == len(self._seg):
            self._grow()
        if self.shared is not None:
            self.shared.expect(self.home, request, self._count)
        return self._count

    def move(self, instance: int, cache: Moving, now: float) -> int:
        """Begin a transfer to an instance; return its number, by which ``run_until`` reports its end."""
        number: int = kernel.move(self.home, instance, cache, now)
        if number < 0:
            self.wires.grow()
            number = kernel.move(self.home, instance, cache, now)
        return number

    def limit_link(self, instance: int, share: float, now: float) -> None:
        """Let the links of an instance have a share of their bandwidth [1]; at 0 what is on its way waits."""
        kernel.limit_link(self.home, instance, share * self.wires.whole[instance], float(now))

    def drop(self, transfer: int) -> None:
        """Drop the transfer of a segment of ``ask`` that waits for blocks."""
        kernel.drop(self.home, transfer)

    def run_until(self, limit: float) -> tuple[int, float]:
        """Process events up to and including ``limit`` [s], or to the first report: (report, time).

        Call again with the same limit after a report:

        * -1: none, at the limit;
        * segment: it has finished (``NOTIFY``), or its blocks are reserved (``RESERVE``);
        * -2 - instance: a draining instance is empty and now inactive;
        * -2 - instances - instance: work waits for memory, and nothing runs that frees memory;
        * ``COMES``: a request of the feed arrives at the limit, or is too large for some instance, so Python places it;
        * ``ARRIVES`` - transfer: the last byte of a transfer of ``move`` has arrived.
        """
        if self._soonest_s.item() > limit:
            return -1, limit
        found: tuple[int, float]
        feed = self._feed
        if feed is None:
            found = kernel.run_until(self.home, float(limit))
            return found
        while True:
            feed.begin(self._count)
            found = kernel.run_until(self.home, float(limit))
            self._count = feed.submitted
            full = self._count == len(self._seg)
            if found[0] != kernel.ROOM and not (found[0] == COMES and full):
                return found
            feed.reach()
            if full:
                self._grow()
            if self.wires.full:
                self.wires.grow()

    def take(self, feed: RoutingQueue) -> None:
        """Let the kernel place the requests of a feed, beside submitted ones."""
        self._feed = feed
        self._world["feed"] = feed.row.ctypes.data
        self._world["soonest_s"] = -np.inf

    def _grow(self) -> None:
        """Make room for more segments."""
        here = self._seg
        self._seg = np.zeros(2 * here.size, SEGMENT)
        self._seg[: here.size] = here
        self._bind()

    def next_time(self) -> float:
        """Time of the next event of any instance; inf = none. [s]"""
        return self._soon.item(1)

    def release(self, segment: int, now: float) -> None:
        """Free the blocks of a finished segment that was submitted with ``HOLD``."""
        if self._status[segment] != HELD:
            found = self.status_of(segment).name.lower()
            raise InputError(f"release of segment {segment}, which is {found}; allowed: held")
        self._control(kernel.RELEASE, segment, self._instance.item(segment), now)

    def withdraw(self, segment: int, now: float) -> bool:
        """Withdraw a waiting segment without blocks; return whether it was withdrawn."""
        return self._control(kernel.WITHDRAW, segment, self._instance.item(segment), now)

    def expect(self, instance: int, prompts: int, tokens: int) -> None:
        """Add prompts that load cached tokens, and the tokens left to compute, to the load of an instance."""
        kernel.expect(self.home, instance, prompts, tokens)

    def hand_over(self, held: int, segment: int, now: float) -> None:
        """Note that the cache of a kept segment has arrived in the blocks of another; free the blocks of the sender."""
        kernel.hand_over(self.home, held, segment, float(now))

    def arrived(self, held: int, tokens: int, exposed_s: float, transfer_s: float, blocked_s: float) -> None:
        """Record the transfer after the end of a segment; see ``layout.Segment``. [token], [s]"""
        self._seg[["moved", "exposed_s", "transfer_s", "blocked_s"]][held] = tokens, exposed_s, transfer_s, blocked_s

    def cancel(self, segment: int, now: float) -> None:
        """Cancel a segment that waits for blocks or for its cache."""
        self._control(kernel.CANCEL, segment, self._instance.item(segment), now)

    def sender_done(self, segment: int, now: float, last_token_s: float) -> None:
        """Note that the sender of an ``AHEAD`` segment is done, with its last token then; nan = none. [s]"""
        self._last_s[segment] = last_token_s
        self._control(kernel.SENDER_DONE, segment, self._instance.item(segment), now)

    def recompute(self, segment: int, now: float) -> None:
        """Let a segment that waits for blocks recompute its context, since its cache never arrives."""
        self._control(kernel.RECOMPUTE, segment, self._instance.item(segment), now)

    def drop_first_token(self, segment: int, before_s: float) -> None:
        """Drop the token of a finished prefill, which the next instance computes again and emits.

        Also drop the gap since ``before_s``, the last token of another instance, if any. [s]
        """
        if not math.isnan(before_s):
            gap = self._last_s.item(segment) - before_s
            self._itl[0, gap_bin(gap)] -= 1
            self._seg["late_gaps"][segment] -= gap > self.gap_limit_s
        self._first_token_s[segment] = np.nan

    def waiting(self, instance: int) -> Ints:
        """List waiting segments of whole prompts on an instance, in queue order, with nothing computed yet."""
        found = np.empty(int(self._inst["queued_requests"][instance]), np.int64)
        found = found[: kernel.waiting(self.home, instance, found)]
        return np.sort(found) if self._ranks[instance] > 1 else found

    def next_rank(self, instance: int) -> int:
        """Find the attention rank of an instance that takes the next request, from 0 on."""
        return kernel.next_rank(self.home, instance) if self._ranks[instance] > 1 else 0

    def set_limits(self, instance: int, now: float, limits: Mapping[str, float]) -> None:
        """Change limits of an ``InstanceSpec``, by name, from the next step of an instance on."""
        most = self._specs[instance].max_sequences
        if limits.get("max_sequences", most) > most:
            raise InputError(f"max_sequences {limits['max_sequences']} of instance {instance}; allowed: up to {most}")
        for name, value in limits.items():
            self._limit(instance, name, value)
        self._control(kernel.WAKE, -1, instance, now)

    def start(self, instance: int, now: float) -> None:
        """Let an instance form steps from ``now`` on; ends a drain."""
        row = self._inst[instance]
        self._world["pending_events"] -= int(row["draining"] == 2)
        row["active"], row["draining"] = 1, 0
        self._control(kernel.WAKE, -1, instance, now)

    def drain(self, instance: int, now: float) -> None:
        """Let an instance finish its work; ``run_until`` reports when nothing is left, including held blocks."""
        row = self._inst[instance]
        if row["active"] == 1 and row["draining"] == 0:
            row["draining"] = 1
            self._control(kernel.WAKE, -1, instance, now)

    def abort(self, instance: int, now: float) -> Ints:
        """Let an instance die at ``now``: its unfinished segments, returned, are lost and its memory is free.

        Their ``emitted`` and ``last_s`` say what they have emitted, and when the last of it.
        """
        self.refresh(now)
        mine, status = self._instance[: self._count] == instance, self._status[: self._count]
        over = (SegmentStatus.DONE, SegmentStatus.WITHDRAWN, SegmentStatus.LOST)
        lost = np.flatnonzero(mine & ~np.isin(status, over))
        settle_emitted(self._inst, self._seg, lost[status[lost] == SegmentStatus.RUNNING])
        status[lost] = SegmentStatus.LOST
        row = self._inst[instance]
        self._world["pending_events"] -= int(row["draining"] == 2) + int(row["stalled"])
        for each in (instance, *self._rows_of(instance)):
            row = self._inst[each]
            for name in HELD_AT_WORK:
                row[name] = 0
            let_idle(row)
            row["free_blocks"] = row["total_blocks"]
        self._bind()
        if self.shared is not None:
            self.shared.empty(self.home, instance, self._rows_of(instance))
        return lost

    def forget(self, keep: Mask) -> Ints:
        """Drop segments that are over; see ``instance_spec.forget``."""
        number = forget(self._inst, self._seg[: self._count], self._sets, keep)
        self.wires.renumber(number)
        self._count = int(keep.sum())
        return number

    def share_blocks(self, shared: SharedBlocks) -> None:
        """Segments whose prompts begin alike share blocks, as long as these are in the memory of their instance."""
        self.shared = shared
        self._bind()
        self._share(0)

    def _share(self, first: int) -> None:
        """The memories of instances from the ``first`` on are empty."""
        if self.shared is not None:
            for instance in range(first, len(self._specs)):
                blocks = int(self._inst["rank_blocks"][instance])
                self.shared.begin(self.home, instance, self._rows_of(instance), blocks)

    def take_by_chunk(self, tokens: int) -> None:
        """Segments whose sender is at work (``AHEAD``) take blocks as it computes chunks of so many tokens. [token]"""
        self._world["chunk_tokens"] = tokens

    def feed(self, sender: int, segment: int) -> None:
        """Note the segment that takes blocks as its sender computes chunks."""
        self._seg["feeds"][sender] = segment

    def asked(self, segment: int) -> int:
        """Tokens of the chunks for which a segment has blocks, when ``run_until`` reports it. [token]"""
        return int(self._seg["asked"][segment])

    def ready(self, segment: int, tokens: int) -> None:
        """So many tokens of a prompt that waits have been loaded: they need no prefill. [token]"""
        self._seg["ready"][segment] = tokens

    def blocks_of(self, segments: Sequence[int]) -> int:
        """Count the KV blocks that some segments hold, each once. [block]"""
        if self.shared is None:
            return int(self._seg["blocks"][list(segments)].sum())
        return distinct_blocks(self.home, np.array(segments, np.int64))

    def begin_again(self, requests: Ints, numbers: Sequence[int]) -> None:
        """Requests go on under new numbers, those after the last, with the priority that they have."""
        if self._priority.size:
            assert numbers[0] == self._priority.size
            self._priority = np.append(self._priority, self._priority[requests])
            self._bind()

    def given(self, requests: Ints) -> tuple[Ints, Floats]:
        """Count what the segments of some requests have emitted for the user, none of them at work any more.

        Returns tokens of each request, and when its last came, NaN without one [token], [s].
        """
        return given(self._seg[: self._count], requests)

    def add(self, spec: InstanceSpec, now: float) -> int:
        """Bring a new instance and return its number; ``views`` is a new array from here on."""
        self._enlarge([spec], now)
        return len(self._specs) - 1

    def refresh(self, now: float, only: int = -1) -> None:
        """Count the decode steps that ended by ``now`` in the views of all instances, or of one.

        Nothing that follows changes but by rounding.
        """
        if self._due.item(1) <= now:
            kernel.refresh(self.home, only, float(now))

    def flops(self) -> Floats:
        """Work that the model needed so far on each instance, all its GPUs together. [FLOP]

        Attention counts as if no layer had a sliding window.
        """
        inst, works = self._inst[: len(self._specs)], [spec.table.work for spec in self._specs]
        work = np.array([[each.per_token, each.per_pair, each.per_emitted] for each in works])
        emitted = inst["decode_tokens"] + inst["first_tokens"]
        tokens = inst["prefill_tokens"] + inst["decode_tokens"]
        pairs = inst["prefill_pairs"] + inst["decode_context"]
        done: Floats = tokens * work[:, 0] + pairs * work[:, 1] + emitted * work[:, 2]
        return done

    def _control(self, action: int, segment: int, instance: int, now: float) -> bool:
        done: bool = kernel.control(self.home, action, segment, instance, float(now))
        return done

    def _enlarge(self, specs: list[InstanceSpec], now: float) -> None:
        """Make room for more instances, and start them."""
        there, have, inst, sets = len(self._specs), len(self._inst), self._inst, self._sets
        self._specs.extend(specs)
        self._ranks = [spec.table.ranks for spec in self._specs]
        heads, self._values = pack_tables([spec.table for spec in self._specs])
        own = np.arange(len(self._specs))
        several = np.concatenate([own[:0], *([i] * ranks for i, ranks in enumerate(self._ranks) if ranks > 1)])
        of = np.concatenate([own, several]).astype(np.intp)  # the instance of each row: all instances, then their ranks
        moved = np.concatenate([own[:there], len(specs) + np.arange(there, have)])  # where the old rows are now
        width = max(-(-spec.max_sequences // ranks) for spec, ranks in zip(self._specs, self._ranks, strict=True))
        self._inst = np.zeros(of.size, INSTANCE)
        self._sets = np.zeros((2, of.size, width), dtype=np.int64)
        self._inst[moved] = inst
        self._sets[:, moved, : sets.shape[2]] = sets
        self._inst["table"] = heads[of]
        self._inst["rank_at"] = [len(own) + np.searchsorted(several, i) if self._ranks[i] > 1 else i for i in of]
        for instance in range(there, len(self._specs)):
            self._fill(instance, now)
        self._world["instances"] = len(self._specs)
        self._bind()
        self._share(there)

    def _rows_of(self, instance: int) -> range:
        """Rows of the attention ranks of an instance: its own if it has one."""
        first = int(self._inst["rank_at"][instance])
        return range(first, first + self._ranks[instance])

    def _fill(self, instance: int, now: float) -> None:
        """Write the rows of a new instance and of its ranks."""
        spec, ranks = self._specs[instance], self._ranks[instance]
        for each in {instance, *self._rows_of(instance)}:
            row = self._inst[each]
            row["ranks"], row["rank_blocks"] = ranks if each == instance else 1, spec.blocks // ranks
            row["total_blocks"] = row["free_blocks"] = row["rank_blocks"] * row["ranks"]
            row["watermark"] = int(spec.watermark * row["rank_blocks"])
            row["admission"], row["keeps"], row["late"] = spec.admission, spec.keeps_preempted, spec.finds_computed
            row["swap_block_s"], row["swap_first_s"] = spec.swap_block_s, spec.swap_first_s
            row["ahead"] = spec.steps_ahead and row["table"]["pipeline"] == 1  # else passes in flight go ahead
            row["scheduling"], row["rank_choice"], row["active"] = spec.scheduling, spec.rank_choice, spec.active
            row["run_start_s"] = now
            let_idle(row)
        for name in ("mode", "step_limit_s", "max_prompts", "least_prefill", "hold_steps", *SHARED_LIMITS):
            self._limit(instance, name, getattr(spec, name))

    def _limit(self, instance: int, name: str, value: float) -> None:
        """Write a limit of an instance; its ranks share it, the first of them a rest."""
        self._inst[name][instance] = value
        ranks = self._ranks[instance]
        if ranks > 1:
            for k, row in enumerate(self._rows_of(instance)):
                shared = name in SHARED_LIMITS
                self._inst[name][row] = value // ranks + (k < value % ranks) if shared else value

    def _bind(self) -> None:
        """Hand the arrays, which may be new ones, to the kernel and to the views."""
        count = len(self._specs)
        self._soon, self._due = least_tree(self._inst["next_s"][:count]), least_tree(np.zeros(count))
        self._log = np.zeros(count, dtype=np.int64)
        self._world["changes"] += self._log.size + 1  # all may have
        self._world["network"], self._world["home"] = self.wires.row.ctypes.data, self.home.ctypes.data
        self._world["shared"] = 0 if self.shared is None else self.shared.row.ctypes.data
        arrays = (self._inst, self._seg, self._sets, self._values, self._itl, self._world)
        addresses_of((*arrays, self._soon, self._due, self._log, self._priority), self.home)
        self.views: Columns = self._inst[:count].view(np.recarray)
        self._seen: Any = tuple(array.view() for array in (self._inst, self._seg, self._sets, self._values))
        for array in self._seen:
            array.flags.writeable = False
        self._soonest_s = self._world["soonest_s"]
        self._status, self._instance, self._start_s = (self._seg[name] for name in ("status", "instance", "start_s"))
        self.coming_requests: Ints = self._inst["coming_requests"][:count]
        self._request = self._seg["request"]
        self._first_token_s, self._last_s = self._seg["first_token_s"], self._seg["last_s"]
