"""Let the kernel place requests by itself, where a load is all that counts: no call from Python for each."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.addresses import FEED
from disagg_sim.simulation.kernel.layout import CLOSES, HOLD, NOTIFY

#: Fields of ``layout.Feed`` with the addresses of the arrays of a ranking.
RANKINGS = ("trees_at", "group_at", "present_at")


class Choosing(NamedTuple):
    """How a policy chooses an instance that looks at nothing but a load."""

    load: int  # of ``ranking``
    served: str  # column of the view: what each instance serves
    own_tokens: bool  # whether the prompt is added to the load; else one request is


class Placing(NamedTuple):
    """How a policy places requests that looks at nothing but loads."""

    first: Choosing
    whole: bool  # whether a request stays; else it goes on after its first token
    then: Choosing | None = None  # where it goes on; None: the kernel cannot tell


class Ranked(NamedTuple):
    """Instances in the order of a load."""

    load: int  # of ``ranking``
    own_tokens: bool
    ranking: tuple[Floats, Ints, Floats]  # of ``ranking.ranking``


class Chooser(Protocol):
    """Functions of a policy in place of rankings, compiled, and what they work on.

    Both are C functions of the address of ``home``, that of the context, a request, tokens of its prompt, the instance
    where it was, and the present [s]. They return an instance, or less than 0 where the policy itself is to be asked.
    """

    def addresses(self) -> tuple[int, int, int]:
        """Of what places a request, of what says where it goes on, and of their context; new in each process."""

    def renew(self, prefill: NDArray[np.intp], decode: NDArray[np.intp]) -> None:
        """Other instances take prompts, and decode."""


class Caches(NamedTuple):
    """What caches take from one instance to another."""

    cache_bytes: float  # of any cache [B]
    token_bytes: float  # of a token [B]
    descriptors: int  # of a block [1]
    kind: Ints  # of each instance
    post_s: Floats  # (kinds, kinds) time of a descriptor from one kind to another [s]


class Route(NamedTuple):
    """Where requests go without being asked for."""

    whole: bool  # they stay where they are placed; else they go on after the first token
    first: Ranked | None = None
    then: Ranked | None = None  # None, and no chooser: the end of their prompt is reported
    chooser: Chooser | None = None  # in place of both
    caches: Caches | None = None  # of those that go on


class Supply(Protocol):
    """Fills in the requests of a feed as they are needed."""

    def reach(self, request: int) -> int:
        """Have a request at hand, if there is one: how many are from the first on. [request]"""


class RoutingQueue:
    """Requests by the times at which they come, for the kernel.

    >>> from disagg_sim.simulation.kernel.fleet import Fleet
    >>> from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
    >>> from disagg_sim.simulation.kernel.ranking import REQUESTS, ranking
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> fleet = Fleet([InstanceSpec(table=StepTable.affine(step=1.0), blocks=100)] * 2)
    >>> fewest = Ranked(REQUESTS, False, ranking(np.arange(2), np.ones(2)))
    >>> columns = np.array([0.0, 0.5, 9.0]), np.full(3, 10), np.full(3, 12)
    >>> feed = RoutingQueue(*columns, Route(whole=True, first=fewest), most=1600, emits_late=False)
    >>> fleet.take(feed)
    >>> fleet.run_until(8.0), feed.arrivals, fleet.segments.instance.tolist(), fleet.segments.finish_s.tolist()
    ((-1, 8.0), 2, [0, 1], [2.0, 2.5])
    """

    def __init__(
        self,
        times: Floats,
        prompts: Ints,
        totals: Ints,
        route: Route,
        *,
        most: int,
        emits_late: bool,
        supply: Supply | None = None,
    ) -> None:
        #: Alive as long as the kernel knows where they are, by the fields that say it.
        self._columns: dict[str, NDArray[Any]] = {
            "times_at": np.ascontiguousarray(times, np.float64),
            "prompts_at": np.ascontiguousarray(prompts, np.int64),
            "totals_at": np.ascontiguousarray(totals, np.int64),
        }
        self._chooser, self._supply, self.row = route.chooser, supply, np.zeros(1, FEED)
        self._all = len(times)
        values: dict[str, float] = {
            "requests": len(times),
            "most": most,
            "whole": route.whole,
            "kept": emits_late,
            "hold": NOTIFY | HOLD | CLOSES,
            "closes": CLOSES,
            "onward": route.caches is not None,
        }
        for prefix, ranked in (("", route.first), ("next_", route.then)):
            if ranked is not None:
                self._columns |= dict(zip((prefix + each for each in RANKINGS), ranked.ranking, strict=True))
                values |= {prefix + "load": ranked.load, prefix + "own_tokens": ranked.own_tokens}
                values |= {prefix + "groups": ranked.ranking[0].shape[0], "width": ranked.ranking[0].shape[1]}
        if route.caches is not None:
            values |= {name: getattr(route.caches, name) for name in ("cache_bytes", "token_bytes", "descriptors")}
            values["kinds"] = route.caches.post_s.shape[0]
            self._columns["kind_at"] = np.ascontiguousarray(route.caches.kind, np.int64)
            self._columns["post_at"] = np.ascontiguousarray(route.caches.post_s)
        for name, value in values.items():
            self.row[name] = value
        self._bind()
        self.reach()

    def reach(self) -> None:
        """Have the next request at hand, if there is one."""
        if self._supply is not None:
            known = self._supply.reach(self.arrivals)
            self.row["requests"], self.row["more"] = known, known < self._all

    def _bind(self) -> None:
        """Say where the arrays are."""
        for name, column in self._columns.items():
            self.row[name] = column.ctypes.data
        if self._chooser is not None:
            self.row["place_at"], self.row["next_at"], self.row["context_at"] = self._chooser.addresses()
        self._next, self._submitted = self.row["next"], self.row["submitted"]

    @property
    def arrivals(self) -> int:
        """Requests that have come so far. [request]"""
        return int(self._next.item())

    def skip(self) -> int:
        """Take the next request out, which somebody else places; its number."""
        request = self.arrivals
        self._next[0] = request + 1
        self.reach()
        return request

    @property
    def submitted(self) -> int:
        """Segments of the fleet so far. [1]"""
        return int(self._submitted.item())

    def begin(self, submitted: int) -> None:
        """So many segments are there now."""
        self._submitted[0] = submitted
