"""Keep what a cluster knows of its requests and of its past, and show it to policies: a view that only reads.

Past 400 lines: the state of a cluster, and all that policies may see of it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.simulation.clients import RequestWindow
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.instances import Index, Roster
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import Arrays
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.kernel.ranking import Rankings, RoutingQueue
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import Role, State
from disagg_sim.techniques.prefix.play import PrefixMemory
from disagg_sim.techniques.prefix.play_stated import StatedPasts

#: A segment that waits: context, prompt, generate, until [token], then, last token's time [s], whether more follows.
Waiting = tuple[int, int, int, int, int, float, bool]
#: Columns of the fleet that policies see, and those of other names than in the view.
SEEN = (
    *("queued_requests", "queued_prompt_tokens", "queued_context_tokens", "running_requests", "running_tokens"),
    *("coming_tokens", "free_blocks", "total_blocks", "rank_blocks", "decode_steps", "prefill_tokens", "decode_tokens"),
)
RENAMED = {"decode_time": "decode_s", "busy_time": "busy_s"}


class SharedQueue:
    """New requests that any instance may take, in the order in which they came."""

    def __init__(self) -> None:
        self.segments: OrderedDict[int, Waiting] = OrderedDict()  # by request; a dict would walk over what has left
        self.tokens = 0  # of prompts, together [token]

    def add(self, request: int, segment: Waiting) -> None:
        """A request joins at the end."""
        self.segments[request] = segment
        self.tokens += segment[1]

    def take(self, request: int) -> Waiting:
        """A request leaves, from wherever it stands."""
        segment = self.segments.pop(request)
        self.tokens -= segment[1]
        return segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was observed over the last seconds; means of nothing are NaN."""

    seconds: float  # that it really covers, less than asked for at the start of a run [s]
    arrivals: int  # [request]
    input_tokens: float  # mean of the arrivals [token]
    output_tokens: float  # mean of those that finished [token]


class ClusterView:
    """State of the cluster as a policy sees it: nothing of it can be written.

    Columns over instances (arrays; index them with ``prefill`` or ``decode``): ``queued_requests``,
    ``queued_prompt_tokens``, ``queued_context_tokens`` (caches that wait for memory), ``running_requests``,
    ``running_tokens``, ``coming_tokens``, ``free_blocks``, ``total_blocks``, ``rank_blocks`` (what one attention rank,
    and so one request, may hold), ``decode_steps``, ``decode_time``, ``busy_time``, ``prefill_tokens``,
    ``decode_tokens``. They are those at each instance's last event;
    ``refresh`` brings them to the present, which ticks do by themselves. ``prefill_rate`` [request/s] and ``seats`` [1]
    say what each instance serves of the expected traffic, see ``site``. ``inst`` has the records themselves, and
    ``home`` says where all arrays of the kernel are, for compiled choices.

    Sequences over requests: ``arrival_s`` [s] (NaN: not known yet), ``input_tokens``, and ``output_tokens``, which a
    real system cannot know: only predictors of lengths may look at it.
    """

    _state: ClusterState
    _engine: Engine
    _roster: Roster
    _rankings: Rankings
    site: Site
    arrival_s: memoryview
    input_tokens: memoryview
    output_tokens: memoryview
    inst: Any
    home: Ints
    queued_requests: Ints
    queued_prompt_tokens: Ints
    queued_context_tokens: Ints
    running_requests: Ints
    running_tokens: Ints
    coming_tokens: Ints
    free_blocks: Ints
    total_blocks: Ints
    rank_blocks: Ints
    decode_steps: Ints
    decode_time: Floats
    busy_time: Floats
    prefill_tokens: Ints
    decode_tokens: Ints
    prefill_rate: Floats
    seats: Ints

    def __init__(self, state: ClusterState) -> None:
        own = self.__dict__
        own["_state"], own["_engine"], own["_roster"] = state, state.engine, state.roster
        own["site"] = state.site
        self.show_requests(state)

    def show_requests(self, state: ClusterState) -> None:
        """Show the requests of the cluster, after some have begun again; for its state alone."""
        own, arrival_s = self.__dict__, state.arrival_s
        own["arrival_s"] = memoryview(arrival_s).toreadonly()  # type: ignore[arg-type, unused-ignore]
        for name, column in zip(("input_tokens", "output_tokens"), state.lengths, strict=True):
            own[name] = memoryview(np.ascontiguousarray(column)).toreadonly()  # type: ignore[arg-type, unused-ignore]
        own["home"], own["_rankings"] = locked(state.fleet.home), Rankings(state.fleet.home)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse it: what a policy changes, it wishes."""
        raise AttributeError(f"{name} of the view cannot be written: a policy reads it and returns wishes")

    def __delattr__(self, name: str) -> None:
        """Refuse it."""
        raise AttributeError(f"{name} of the view cannot be deleted: a policy reads it and returns wishes")

    @property
    def now(self) -> float:
        """Present. [s]"""
        return self._engine.now

    @property
    def arrived(self) -> int:
        """Requests so far. [request]"""
        return len(self._state.order)

    @property
    def order(self) -> Sequence[int]:
        """Requests that have come so far, in the order in which they came."""
        order = self._state.order
        return order if isinstance(order, range) else tuple(order)

    @property
    def prefill(self) -> Index:
        """Instances that are ready and take prefill, ascending."""
        return self._roster.prefill

    @property
    def decode(self) -> Index:
        """Instances that are ready and take decode, ascending."""
        return self._roster.decode

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of all instances."""
        return self._roster.roles

    @property
    def states(self) -> tuple[State, ...]:
        """Of all instances."""
        return self._roster.states

    @property
    def mappings(self) -> tuple[Sharding, ...]:
        """Of all instances."""
        return tuple(self._roster.mapping)

    def starting(self, role: Role) -> list[int]:
        """Instances on their way up that will have this role."""
        pairs = zip(self._roster.role, self._roster.state, strict=True)
        return [i for i, (has, state) in enumerate(pairs) if has == role and state == State.STARTING]

    @property
    def coming(self) -> tuple[int, ...]:
        """Segments promised to each instance: in transfer to it, or waiting there for a batch. [1]"""
        pulled = self._state.fleet.coming_requests.tolist()
        return tuple(map(add, self._roster.coming, pulled))

    @property
    def waiting_prompt_tokens(self) -> Ints:
        """Prompt tokens in the queue of each instance, and those of prompts whose past comes from tiers. [token]"""
        own = self.inst[: self.queued_prompt_tokens.size]  # rows of attention ranks follow those of instances
        tokens: Ints = self.queued_prompt_tokens + own["loading_prompt_tokens"]
        tokens.flags.writeable = False
        return tokens

    @property
    def shared_requests(self) -> int:
        """Requests in the shared queue. [request]"""
        return len(self._state.shared.segments)

    @property
    def shared_prompt_tokens(self) -> int:
        """Prompt tokens in the shared queue. [token]"""
        return self._state.shared.tokens

    @property
    def free_gpus(self) -> int:
        """GPUs that no instance holds. [1]"""
        return self._roster.budget.free(self._roster)

    def gpus_for(self, mapping: Sharding) -> int:
        """GPUs that instances of a mapping can stand on, free or held. [1]"""
        return self._roster.budget.total(self._roster, mapping)

    def free_gpus_for(self, mapping: Sharding) -> int:
        """GPUs that no instance holds, of those that instances of a mapping can stand on. [1]"""
        return self._roster.budget.free(self._roster, mapping)

    def table(self, instance: int) -> StepTable:
        """Step times of an instance."""
        return self.site.table(self._roster.mapping[instance])

    @property
    def remembers(self) -> bool:
        """Whether instances remember the prompts that they computed."""
        return self._state.prefix is not None

    def cached_tokens(self, request: int, instance: int) -> int:
        """Start of a prompt that an instance remembers; 0 without prefix caches. [token]"""
        prefix = self._state.prefix
        return prefix.found(instance, request) if prefix is not None else 0

    def cached_everywhere(self, request: int) -> Ints:
        """Starts of a prompt that all instances remember; valid until the next such question. [token]"""
        prefix = self._state.prefix
        found = prefix.found_everywhere(request) if prefix is not None else np.zeros(len(self.states), np.int64)
        tokens: Ints = locked(found)
        return tokens

    def waiting_prompts(self, instance: int) -> Ints:
        """Requests whose prompt waits on an instance, the next first, nothing of it computed yet: these can move."""
        fleet = self._state.fleet
        requests: Ints = fleet.segments.request[fleet.waiting(instance)]
        return requests

    @property
    def kernel(self) -> Arrays:
        """The arrays of the kernel, for compiled predictors that play it forward."""
        return self._state.fleet.arrays

    def least(self, load: int, among: Index, served: Floats | Ints, own: int = 0) -> int:
        """The instance of ``among`` with the least load and ``own`` for what it serves, now; see ``Rankings.least``."""
        return self._rankings.least(load, among, served, own, self._engine.now)

    def refresh(self, only: int = -1) -> None:
        """Bring the columns of all instances to the present, or of one; nothing else changes."""
        self._state.fleet.refresh(self._engine.now, only)

    def window(self, seconds: float) -> Window:
        """Observations of the last ``seconds``. [s]"""
        return self._state.window(seconds)


def locked(array: NDArray[Any]) -> Any:
    """Look at an array through one that cannot be written, and that shows what is written to the first."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


class ClusterState:
    """Requests, their arrivals, the shared queue and the past of a cluster, which writes all of it."""

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        roster: Roster,
        *,
        arrival_s: Floats,
        input_tokens: Ints,
        output_tokens: Ints,
        prefix: PrefixMemory | None,
        stated: StatedPasts | None,
        coming: RequestWindow | None,
    ) -> None:
        self.engine, self.fleet, self.roster, self.prefix, self.stated = engine, fleet, roster, prefix, stated
        self.site = roster.site
        self.coming = coming
        self.arrival_s = arrival_s  # those of requests that are to come may be NaN [s]
        self.prompts = _looked_up(input_tokens, coming)
        self.first_number: dict[int, int] = {}  # of requests that have begun again, by their numbers
        #: When others gave the user the token before their first, by their numbers. [s]
        self.last_given_s: dict[int, float] = {}
        self.feed: RoutingQueue | None = None  # requests that the kernel places by itself
        #: Requests that have come so far, where no feed has them.
        self.asked: array[int] | InOrder = array("q") if coming is None else InOrder()
        self.shared = SharedQueue()
        self._input, self._output = input_tokens, output_tokens
        self._tokens = input_tokens + output_tokens if coming is None else coming.tokens
        self.totals = _looked_up(self._tokens, coming)  # of prompt and output [token]
        self._oldest, self._longest, self._forgotten_s = 0, 0.0, 0.0
        self.view = ClusterView(self)
        self.rebind()

    def rebind(self) -> None:
        """Show policies the columns of the fleet anew, after instances were added."""
        columns = {name: name for name in SEEN} | RENAMED
        shown = {name: locked(getattr(self.fleet.views, column)) for name, column in columns.items()}
        shown["inst"] = self.fleet.arrays.inst
        shown["prefill_rate"] = locked(np.array(self.roster.prefill_rate))
        shown["seats"] = locked(np.array(self.roster.seats, dtype=np.int64))
        self.view.__dict__.update(shown)

    @property
    def order(self) -> Sequence[int]:
        """Requests that have come so far, in the order in which they came: under a feed that of the trace."""
        if self.feed is not None:
            return range(self.feed.arrivals)
        return self.asked if isinstance(self.asked, array) else range(self.asked.count)

    @property
    def tokens(self) -> Ints:
        """Prompt and output of all requests, those that began again at the end. [token]"""
        return self._tokens

    def first_numbers(self) -> Ints:
        """First number of every request, those that began again at the end."""
        numbers = np.arange(len(self.prompts))
        numbers[list(self.first_number)] = list(self.first_number.values())
        return numbers

    def arrived(self, request: int) -> None:
        """A request arrives now that had no time in the trace."""
        self.arrival_s[request] = self.engine.now

    def begin_again(self, requests: Sequence[int]) -> list[int]:
        """Let requests that left their instance go on from what the user has, as requests with numbers of their own."""
        old = np.unique(np.asarray(requests))
        given, last_s = self.fleet.given(old)
        inputs, outputs = self._input[old] + given, self._output[old] - given
        arrival = np.where(given > 0, self.engine.now, self.arrival_s[old])
        numbers = list(range(len(self.prompts), len(self.prompts) + old.size))
        self.fleet.begin_again(old, numbers)
        for number, request, tokens, time in zip(numbers, old.tolist(), given.tolist(), last_s.tolist(), strict=True):
            self.first_number[number] = first = self.first_number.get(request, request)
            if tokens or request in self.last_given_s:
                self.last_given_s[number] = time if tokens else self.last_given_s[request]
            if self.prefix is not None:
                self.prefix.again(first, number)
        self.prompts.extend(inputs.tolist())
        self.totals.extend((inputs + outputs).tolist())
        self._input, self._output = np.append(self._input, inputs), np.append(self._output, outputs)
        self._tokens, self.arrival_s = self._input + self._output, np.append(self.arrival_s, arrival)
        self.view.show_requests(self)
        return numbers

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Input and output of all requests, those that began again at the end. [token]"""
        return self._input, self._output

    def window(self, seconds: float) -> Window:
        """Observe the last ``seconds``. [s]"""
        now = self.engine.now
        since = now - seconds
        if max(since, 0.0) < self._forgotten_s:
            raise InputError(
                f"window of {seconds:g} s: requests leave this run in pieces; allowed: up to looks_back_s of the Parts "
                "of the policy, or records: full"
            )
        arrival: Any = self.view.arrival_s
        came = bisect_right(self.order, since, key=arrival.__getitem__)
        inputs = [self.prompts[request] for request in self.order[came:]]
        segments, tail = self.fleet.segments, self._tail(seconds)
        request, finish, emitted = (segments[name][tail] for name in ("request", "finish_s", "first_token_s"))
        context, prompt = segments["context"][tail], segments["prompt"][tail]
        exist = context + prompt + segments["generate"][tail] + (prompt == 0)
        last = exist == self._tokens[request]
        done = request[last & ~np.isnan(emitted) & (finish > since) & (finish <= now)]
        return Window(
            seconds=min(seconds, now),
            arrivals=len(inputs),
            input_tokens=_mean(np.array(inputs)),
            output_tokens=_mean(self._output[done]),
        )

    def forget(self, gone: Mask, back_s: float) -> Mask:
        """Forget what lies further back than windows look [s], but for segments that are not ``gone``: which stay."""
        since = self.engine.now - max(back_s, self._longest)
        self._forgotten_s = max(since, 0.0)
        self._oldest = 0
        stays: Mask = ~gone | (self.fleet.segments.finish_s > since)
        return stays

    def release(self, begin: int, period_s: float) -> int:
        """Give back the columns of requests that are of no use any more, none from ``begin`` on; the first that stays.

        Windows, and looks every ``period_s`` [s], still ask for those that came of late, and for the requests of
        segments that stay; the newest one says when the run ends.
        """
        since = min(self._forgotten_s, self.engine.now - period_s) - self.site.request_host_s
        come = len(self.order)
        late = bisect_left(self.arrival_s, since, 0, come)
        stays = int(self.fleet.segments.request.min(initial=begin))
        before = min(begin, late, stays, max(come - 1, 0))
        if self.coming is not None:
            self.coming.release(before)
        return before

    def _tail(self, seconds: float) -> slice:
        """Segments that may have ended within the last ``seconds``; all before them ended earlier."""
        if seconds > self._longest:
            self._longest, self._oldest = seconds, 0
        segments = self.fleet.segments
        ended = segments["finish_s"][self._oldest :] <= self.engine.now - self._longest
        ended |= segments["status"][self._oldest :] == SegmentStatus.WITHDRAWN
        self._oldest += ended.size if ended.all() else int(ended.argmin())
        return slice(self._oldest, None)


class InOrder:
    """Requests that come in the order of their numbers."""

    def __init__(self) -> None:
        self.count = 0

    def append(self, request: int) -> None:
        """The next one."""
        assert request == self.count, (request, self.count)
        self.count += 1


def _looked_up(tokens: Ints, coming: RequestWindow | None) -> Any:
    """Whole numbers for one look at a time: a third of a list, and as fast; of a stream as they are."""
    if coming is not None:
        return memoryview(tokens)  # type: ignore[arg-type, unused-ignore]
    found = array("q")
    found.frombytes(np.ascontiguousarray(tokens, np.int64).data.cast("B"))
    return found


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if values.size else np.nan
