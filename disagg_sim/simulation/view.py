"""Read-only view of the cluster for policies, current at the time of the question."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.instances import Index, Roster
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import Arrays
from disagg_sim.simulation.kernel.ranking import Rankings
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import Role, State
from disagg_sim.techniques.prefix.play import PrefixMemory

#: A segment that waits: context, prompt, generate, until [token], then, last token's time [s], whether more follows.
Waiting = tuple[int, int, int, int, int, float, bool]


class SharedQueue:
    """New requests that any instance may take, in the order in which they came.

    >>> queue = SharedQueue()
    >>> for request, prompt in enumerate((100, 20, 3)):
    ...     queue.add(request, (0, prompt, 1, prompt + 1, -1, 0.0, True))
    >>> queue.take(1)[1], queue.tokens, list(queue.segments)
    (20, 103, [0, 2])
    """

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
    finished: int  # [request]
    output_tokens: float  # mean of those that finished [token]
    ttft_s: float  # mean of the first tokens emitted [s]
    worst_ttft_s: float  # largest of them [s]
    interval_s: Floats  # (instances,) mean time between the decode steps of each; NaN without one [s]
    decode_tokens: Ints  # (instances,) emitted by decode steps [token]
    prefill_tokens: Ints  # (instances,) [token]


class ViewedState(Protocol):
    """What the view reads of the state of a cluster."""

    engine: Engine
    fleet: Fleet
    roster: Roster
    site: Site
    prefix: PrefixMemory | None
    shared: SharedQueue
    arrival_s: Floats  # [s]

    @property
    def order(self) -> Sequence[int]:
        """Requests that have come so far, in the order in which they came."""

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Input and output of all requests. [token]"""

    def window(self, seconds: float) -> Window:
        """Observations of the last ``seconds`` [s]."""


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

    _state: ViewedState
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

    def __init__(self, state: ViewedState) -> None:
        own = self.__dict__
        own["_state"], own["_engine"], own["_roster"] = state, state.engine, state.roster
        own["site"] = state.site
        self.show_requests(state)

    def show_requests(self, state: ViewedState) -> None:
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
        """Observations of the last ``seconds`` [s]; those over instances since the nearest tick before."""
        return self._state.window(seconds)


def locked(array: NDArray[Any]) -> Any:
    """Look at an array through one that cannot be written, and that shows what is written to the first.

    >>> import numpy as np
    >>> own = np.zeros(2)
    >>> seen = locked(own)
    >>> own[1] = 3.0
    >>> seen.tolist(), seen.flags.writeable
    ([0.0, 3.0], False)
    """
    seen = array.view()
    seen.flags.writeable = False
    return seen
