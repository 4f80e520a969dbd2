"""Keep what a cluster knows of its requests and of its past, and what policies may see of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.errors import InputError
from disagg_sim.simulation.clients import RequestWindow
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.instances import Roster
from disagg_sim.simulation.kernel.auto_routing import RoutingQueue
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.view import ClusterView, SharedQueue, Window, locked
from disagg_sim.techniques.prefix.play import PrefixMemory
from disagg_sim.techniques.prefix.play_stated import StatedPasts

#: Columns of the fleet that policies see, by their names in the view.
SEEN = {
    "queued_requests": "queued_requests",
    "queued_prompt_tokens": "queued_prompt_tokens",
    "queued_context_tokens": "queued_context_tokens",
    "running_requests": "running_requests",
    "running_tokens": "running_tokens",
    "coming_tokens": "coming_tokens",
    "free_blocks": "free_blocks",
    "total_blocks": "total_blocks",
    "rank_blocks": "rank_blocks",
    "decode_steps": "decode_steps",
    "decode_time": "decode_s",
    "busy_time": "busy_s",
    "prefill_tokens": "prefill_tokens",
    "decode_tokens": "decode_tokens",
}


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
        stated: StatedPasts | None = None,
        coming: RequestWindow | None = None,
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
        self._times: list[float] = []
        self._snapshots: list[tuple[NDArray[Any], ...]] = []
        self._oldest, self._longest, self._forgotten_s = 0, 0.0, 0.0
        self.view = ClusterView(self)
        self.rebind()

    def rebind(self) -> None:
        """Show policies the columns of the fleet anew, after instances were added."""
        shown = {name: locked(getattr(self.fleet.views, column)) for name, column in SEEN.items()}
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

    def snapshot(self) -> None:
        """Remember the columns for later windows; every tick does."""
        columns = self._counters()
        self._times.append(self.engine.now)
        self._snapshots.append(tuple(column.copy() for column in columns))

    def window(self, seconds: float) -> Window:
        """Observations of the last ``seconds`` [s]; those over instances since the nearest tick before."""
        now = self.engine.now
        since = now - seconds
        if max(since, 0.0) < self._forgotten_s:
            raise InputError(
                f"window of {seconds:g} s: requests leave this run in pieces; allowed: up to looks_back_s of the Parts "
                "of the policy, or records: full"
            )
        grown = self._grown_since(since)
        with np.errstate(invalid="ignore", divide="ignore"):
            interval = grown[1] / grown[0]
        arrival: Any = self.view.arrival_s
        came = bisect_right(self.order, since, key=arrival.__getitem__)
        inputs = [self.prompts[request] for request in self.order[came:]]
        segments, tail = self.fleet.segments, self._tail(seconds)
        request, finish, emitted = (segments[name][tail] for name in ("request", "finish_s", "first_token_s"))
        context, prompt = segments["context"][tail], segments["prompt"][tail]
        exist = context + prompt + segments["generate"][tail] + (prompt == 0)
        last = exist == self._tokens[request]
        done = request[last & ~np.isnan(emitted) & (finish > since) & (finish <= now)]
        begins = context + (prompt == 0) <= self._input[request]  # decode of others begins behind their first token
        first = (emitted > since) & (emitted <= now) & begins
        if self.last_given_s:
            first &= ~np.isin(request, list(self.last_given_s))
        ttft = emitted[first] - self.arrival_s[request[first]]
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

    def forget(self, gone: Mask, back_s: float) -> Mask:
        """Forget what lies further back than windows look [s], but for segments that are not ``gone``: which stay."""
        since = self.engine.now - max(back_s, self._longest)
        self._forgotten_s = max(since, 0.0)
        before = max(bisect_right(self._times, since) - 1, 0)
        del self._times[:before], self._snapshots[:before]
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

    def _counters(self) -> tuple[NDArray[Any], ...]:
        """Decode steps, their time [s], decode tokens and prefill tokens of every instance so far."""
        view = self.view
        return view.decode_steps, view.decode_time, view.decode_tokens, view.prefill_tokens

    def _grown_since(self, since: float) -> tuple[NDArray[Any], ...]:
        """Counters since the last snapshot at or before ``since``. [s]"""
        columns = self._counters()
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
