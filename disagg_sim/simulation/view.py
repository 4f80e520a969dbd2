"""Read-only view of the cluster for policies, current at the time of the question."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mapping
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.instances import Index, Roster
from disagg_sim.simulation.kernel.fleet import Arrays, Fleet
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.prefix_cache import PrefixCache
from disagg_sim.simulation.shared_queue import SharedQueue
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import Role, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was observed over the last seconds; means of nothing are NaN."""

    seconds: float  # that it really covers, less than asked for at the start of a run [s]
    arrivals: int  # [request]
    input_tokens: float  # mean of the arrivals [token]
    finished: int  # [request]
    output_tokens: float  # mean of those that finished [token]
    ttft_s: float  # mean of the first tokens emitted [s]
    worst_ttft_s: float  # largest of them [s]
    interval_s: Floats  # (instances,) mean time between the decode steps of each; NaN without one [s]
    decode_tokens: Ints  # (instances,) emitted by decode steps [token]
    prefill_tokens: Ints  # (instances,) [token]


class ClusterView:
    """State of the cluster, to be read only.

    Columns over instances (arrays; index them with ``prefill`` or ``decode``): ``queued_requests``,
    ``queued_prompt_tokens``, ``queued_context_tokens`` (caches that wait for memory), ``running_requests``,
    ``running_tokens``, ``coming_tokens``, ``free_blocks``, ``total_blocks``, ``decode_steps``, ``decode_time``,
    ``busy_time``, ``prefill_tokens``, ``decode_tokens``. They are those at each instance's last event;
    ``refresh`` brings them to the present, which ticks do by themselves. ``prefill_rate`` [request/s] and ``seats`` [1]
    say what each instance serves of the expected traffic, see ``service``.

    Lists over requests: ``arrival_s``, ``input_tokens``, and ``output_tokens``, which a real system
    cannot know: only predictors of lengths may look at it.
    """

    def __init__(
        self,
        site: Site,
        engine: Engine,
        fleet: Fleet,
        roster: Roster,
        arrival_s: Floats,
        input_tokens: Ints,
        output_tokens: Ints,
        prefix: PrefixCache | None,
    ) -> None:
        self.site, self.prefix = site, prefix
        self.arrival_s: list[float] = arrival_s.tolist()
        self.input_tokens: list[int] = input_tokens.tolist()
        self.output_tokens: list[int] = output_tokens.tolist()
        self._arrival, self._output, self._tokens = arrival_s.copy(), output_tokens, input_tokens + output_tokens
        self.order: list[int] = []  # requests that have come so far, in the order in which they came
        self._came: list[float] = []  # when each of them arrived [s]
        self._engine, self._fleet, self._roster = engine, fleet, roster
        self._times: list[float] = []
        self._snapshots: list[tuple[NDArray[Any], ...]] = []
        self._oldest, self._longest = 0, 0.0
        self.shared = SharedQueue()  # filled by the cluster
        self.rebind()

    def rebind(self) -> None:
        """Rebind the columns of the fleet after instances were added."""
        fleet = self._fleet.views
        self.inst: Any = self._fleet.arrays.inst  # the records themselves, for compiled choices
        self.queued_requests: Ints = fleet.queued_requests
        self.queued_prompt_tokens: Ints = fleet.queued_prompt_tokens
        self.queued_context_tokens: Ints = fleet.queued_context_tokens
        self.running_requests: Ints = fleet.running_requests
        self.running_tokens: Ints = fleet.running_tokens
        self.free_blocks: Ints = fleet.free_blocks
        self.total_blocks: Ints = fleet.total_blocks
        self.decode_steps: Ints = fleet.decode_steps
        self.decode_time: Floats = fleet.decode_s
        self.busy_time: Floats = fleet.busy_s
        self.prefill_tokens: Ints = fleet.prefill_tokens
        self.decode_tokens: Ints = fleet.decode_tokens
        self.prefill_rate: Floats = np.array(self._roster.prefill_rate)
        self.seats: Ints = np.array(self._roster.seats, dtype=np.int64)
        self.coming_tokens: Ints = fleet.coming_tokens  # kept by the cluster

    @property
    def now(self) -> float:
        """Present. [s]"""
        return self._engine.now

    @property
    def arrived(self) -> int:
        """Requests so far. [request]"""
        return len(self.order)

    @property
    def prefill(self) -> Index:
        """Instances that are ready and take prefill, ascending."""
        return self._roster.prefill

    @property
    def decode(self) -> Index:
        """Instances that are ready and take decode, ascending."""
        return self._roster.decode

    @property
    def roles(self) -> list[Role]:
        """Of all instances."""
        return self._roster.role

    @property
    def states(self) -> list[State]:
        """Of all instances."""
        return self._roster.state

    @property
    def mappings(self) -> list[Mapping]:
        """Of all instances."""
        return self._roster.mapping

    def starting(self, role: Role) -> list[int]:
        """Instances on their way up that will have this role."""
        pairs = zip(self._roster.role, self._roster.state, strict=True)
        return [i for i, (has, state) in enumerate(pairs) if has == role and state == State.STARTING]

    @property
    def coming(self) -> list[int]:
        """Segments promised to each instance: in transfer to it, or waiting there for a batch. [1]"""
        return self._roster.coming

    @property
    def shared_requests(self) -> int:
        """Requests in the shared queue. [request]"""
        return len(self.shared.segments)

    @property
    def shared_prompt_tokens(self) -> int:
        """Prompt tokens in the shared queue. [token]"""
        return self.shared.tokens

    @property
    def free_gpus(self) -> int:
        """GPUs that no instance holds. [1]"""
        return self.site.deployment.gpus - self._roster.gpus_used

    def table(self, instance: int) -> StepTable:
        """Step times of an instance."""
        return self.site.table(self._roster.mapping[instance])

    def cached_tokens(self, request: int, instance: int) -> int:
        """Start of a prompt that an instance remembers; 0 without prefix caches. [token]"""
        return self.prefix.found(instance, request) if self.prefix is not None else 0

    def waiting_prompts(self, instance: int) -> Ints:
        """Requests whose prompt waits on an instance, the next first, nothing of it computed yet: these can move."""
        fleet = self._fleet
        requests: Ints = fleet.segments.request[fleet.waiting(instance)]
        return requests

    @property
    def kernel(self) -> Arrays:
        """The arrays of the kernel, for compiled predictors that play it forward: to be read only."""
        return self._fleet.arrays

    def refresh(self) -> None:
        """Bring the columns to the present; nothing else changes."""
        self._fleet.refresh(self._engine.now)

    def arrivals(self) -> Floats:
        """When each request arrived, or will by the trace; NaN: not yet in a closed loop. [s]"""
        return self._arrival

    def take_in(self, request: int) -> None:
        """A request is there for policies to see from now on."""
        self.order.append(request)
        self._came.append(self.arrival_s[request])

    def came(self, request: int) -> None:
        """A request arrives now that had no time in the trace."""
        self.arrival_s[request] = self._arrival[request] = self._engine.now

    def snapshot(self) -> None:
        """Remember the columns for later windows; every tick does."""
        columns = (self.decode_steps, self.decode_time, self.decode_tokens, self.prefill_tokens)
        self._times.append(self._engine.now)
        self._snapshots.append(tuple(column.copy() for column in columns))

    def window(self, seconds: float) -> Window:
        """Observations of the last ``seconds`` [s]; those over instances since the nearest tick before."""
        now = self._engine.now
        since = now - seconds
        grown = self._grown_since(since)
        with np.errstate(invalid="ignore", divide="ignore"):
            interval = grown[1] / grown[0]
        inputs = [self.input_tokens[request] for request in self.order[bisect_right(self._came, since) :]]
        segments, tail = self._fleet.segments, self._tail(seconds)
        request, finish, emitted = (segments[name][tail] for name in ("request", "finish_s", "first_token_s"))
        context, prompt = segments["context"][tail], segments["prompt"][tail]
        exist = context + prompt + segments["generate"][tail] + (prompt == 0)
        last = exist == self._tokens[request]
        done = request[last & (finish > since) & (finish <= now)]
        first = (emitted > since) & (emitted <= now) & (prompt > 0)
        ttft = emitted[first] - self._arrival[request[first]]
        return Window(
            seconds=min(seconds, now),
            arrivals=len(inputs),
            input_tokens=_mean(np.array(inputs)),
            finished=int(done.size),
            output_tokens=_mean(self._output[done]),
            ttft_s=_mean(ttft),
            worst_ttft_s=float(ttft.max()) if ttft.size else np.nan,
            interval_s=interval,
            decode_tokens=grown[2],
            prefill_tokens=grown[3],
        )

    def _grown_since(self, since: float) -> tuple[NDArray[Any], ...]:
        """Decode steps, their time, decode and prefill tokens since the last snapshot at or before ``since``."""
        columns = (self.decode_steps, self.decode_time, self.decode_tokens, self.prefill_tokens)
        index = bisect_right(self._times, since) - 1
        if index < 0:
            return tuple(column.copy() for column in columns)
        grown = []
        for column, old in zip(columns, self._snapshots[index], strict=True):
            difference = column.copy()
            difference[: old.size] -= old
            grown.append(difference)
        return tuple(grown)

    def _tail(self, seconds: float) -> slice:
        """Segments that may have ended within the last ``seconds``; all before them ended earlier."""
        if seconds > self._longest:
            self._longest, self._oldest = seconds, 0
        segments = self._fleet.segments
        ended = segments["finish_s"][self._oldest :] <= self._engine.now - self._longest
        ended |= segments["status"][self._oldest :] == SegmentStatus.WITHDRAWN
        self._oldest += ended.size if ended.all() else int(ended.argmin())
        return slice(self._oldest, None)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if values.size else np.nan
