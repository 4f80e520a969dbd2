"""A discrete-event engine: one clock, one heap, named random streams. It knows no word of what it simulates.

Three kinds of things move the clock:

* *events*, put on a heap by ``at`` and ordered by (time, priority, serial);
* *feeds*, sorted arrays of times known in advance: the same order, without an entry on the heap for each;
* *sources*, mostly one, which advance by themselves up to the next event and stop early when they have something to
  tell.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from disagg_sim.choices import MOST_SEED
from disagg_sim.errors import InputError, whole_number

#: What happens at one time happens in this order; a smaller number comes first. [1]
FIRST, NORMAL, LAST, OBSERVE = 0, 1, 2, 3


class EventSource(Protocol):
    """A part of the model that keeps its own events."""

    def advance(self, until: float) -> float:
        """Process everything up to and including ``until`` [s]; when it stopped to tell something, else infinity."""

    def deliver(self) -> None:
        """Handle the event at which ``advance`` stopped; may schedule others."""


class SideBySide:
    """Several sources as one, none of which acts on another but through events."""

    def __init__(self, sources: Sequence[EventSource]) -> None:
        self._sources = sources
        self._told = [math.inf] * len(sources)  # what each has to tell, not yet handled [s]
        self._first = 0

    def advance(self, until: float) -> float:
        """See ``EventSource``; a source that has something to tell waits until all others have come as far."""
        soonest = math.inf
        for place, source in enumerate(self._sources):
            if self._told[place] == math.inf:
                self._told[place] = source.advance(min(until, soonest))
            if self._told[place] < soonest:
                self._first, soonest = place, self._told[place]
        return soonest

    def deliver(self) -> None:
        """See ``EventSource``."""
        self._told[self._first] = math.inf
        self._sources[self._first].deliver()


class Streams:
    """Random streams by name: the draws of each depend on the seed and its name, on nothing else."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: dict[str, np.random.Generator] = {}

    def __call__(self, name: str) -> np.random.Generator:
        """The stream of that name, which goes on where it was left."""
        if name not in self._known:
            key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            self._known[name] = np.random.default_rng(np.random.SeedSequence([self._seed, key]))
        return self._known[name]


class Engine:
    """Clock and order of events."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0  # [s]
        self.seed = whole_number("seed", seed, 0, most=MOST_SEED)
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._sources: list[EventSource] = []
        self.rng = Streams(self.seed)

    def at(self, time: float, priority: int, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback(*args)`` at ``time`` [s]; equal times go by priority, then in the order of the calls."""
        if not time >= self.now:
            raise InputError(f"event at {time} s is out of range; allowed: from the present, {self.now} s")
        self._serial += 1
        heappush(self._heap, (time, priority, self._serial, callback, args))

    def feed(
        self,
        times: Sequence[float],
        priority: int,
        callback: Callable[[Any], None],
        things: Sequence[Any] | None = None,
        reach: Callable[[int], object] | None = None,
    ) -> None:
        """Call ``callback(things[k])`` at ``times[k]`` [s] for every k, by default with k; the times must not fall.

        One entry stands on the heap at a time, with the serial number of this call, so that two feeds
        keep their order at equal times. ``reach(k)`` is called before ``times[k]`` is looked at, and may fill it in;
        times that come so are not checked.
        """
        falls = np.flatnonzero(~(np.diff(times, prepend=self.now) >= 0.0)) if reach is None else np.zeros(0, np.intp)
        if falls.size:
            before = max([self.now, *times[: falls[0]]])
            raise InputError(f"time {falls[0]} of a feed is {times[falls[0]]} s, before {before} s")
        heap, serial, count = self._heap, self.reserve(), len(times)

        def wait_for(place: int) -> None:
            if place < count:
                if reach is not None:
                    reach(place)
                heappush(heap, (times[place], priority, serial, fire, (place,)))

        def fire(place: int) -> None:
            wait_for(place + 1)
            callback(place if things is None else things[place])

        wait_for(0)

    def reserve(self) -> int:
        """A place in the order of events at equal times, as of a feed that is made now, for ``at_place``."""
        self._serial += 1
        return self._serial

    def at_place(self, priority: int, place: int, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback(*args)`` now: at once where nothing else happens now, else in its reserved place."""
        if self._heap and self._heap[0][0] <= self.now:
            heappush(self._heap, (self.now, priority, place, callback, args))
        else:
            callback(*args)

    def attach(self, source: EventSource) -> None:
        """Let ``source`` advance between events, beside others that are there."""
        self._sources.append(source)

    def run(self, until: float = math.inf) -> float:
        """Process events in order until none is left or ``until`` [s] is reached.

        Events at ``until`` itself still happen. Returns the time reached [s]: that of the last event, or
        ``until`` where it cut the run short.
        """
        heap, sources = self._heap, self._sources
        source = SideBySide(sources) if len(sources) > 1 else sources[0] if sources else None
        while True:
            due = heap[0][0] if heap and heap[0][0] < until else until
            if source is not None:
                told = source.advance(due)
                if told <= due and told != math.inf:
                    self.now = told
                    source.deliver()
                    continue
            if not heap:
                break
            if heap[0][0] > until:
                self.now = max(self.now, until)
                break
            self.now, _, _, callback, args = heappop(heap)
            callback(*args)
        return self.now
