"""Keep instances in the order of their loads, so that a choice does not look at all of them; place requests by them.

A ranking has a tree of least loads for each group of instances that serve as much as each other. The log of the kernel
says which instances have changed since the last choice. What runs grows by a token a step without an event, so that
tokens in decode at the last event are a lower bound: they are brought to the present for the first of a tree, until one
at the present is the first. A tree is one array: the least of all in row 1, those of the halves in rows 2 and 3, and
so on down to the keys; those that are not there have the key infinity.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.clients import RequestWindow
from disagg_sim.simulation.kernel.addresses import FEED, state_at
from disagg_sim.simulation.kernel.compiled import entry, inlined, inner
from disagg_sim.simulation.kernel.layout import CLOSES, HOLD, NOTIFY, FleetState
from disagg_sim.simulation.kernel.ranks import uncounted


def least_tree(keys: Floats) -> Floats:
    """Make a tree of keys, twice as many as the next power of two; row 0 is not used."""
    count = 1 << max(keys.size - 1, 0).bit_length()
    tree = np.full(2 * count, np.inf)
    tree[count : count + keys.size] = keys
    while count > 1:
        tree[count // 2 : count] = tree[count : 2 * count].reshape(-1, 2).min(axis=1)
        count //= 2
    return tree


@inner
def set_key(tree: Floats, i: int, key: float) -> None:
    """Change the key of ``i``."""
    at = len(tree) // 2 + i
    if tree[at] == key:
        return
    tree[at] = key
    while at > 1:
        key = min(key, tree[at ^ 1])
        at >>= 1
        if tree[at] == key:
            return
        tree[at] = key


@inner
def first_up_to(tree: Floats, most: float) -> int:
    """The first whose key is at most ``most``; -1 = none."""
    if not tree[1] <= most or tree[1] == math.inf:
        return -1
    at, keys = 1, len(tree) // 2
    while at < keys:
        at *= 2
        if not tree[at] <= most:
            at += 1
    return at - keys


@inner
def least_of(tree: Floats) -> int:
    """The one with the least key, the first of several; -1 = all are infinite."""
    return first_up_to(tree, tree[1])


#: Loads: requests that wait or run; prompt tokens that wait or are in transfer; tokens in decode and in transfer, where
#: requests that wait for memory count as long as those that run. Prompts whose past is loaded from tiers wait.
REQUESTS, PROMPT_TOKENS, HELD_TOKENS = range(3)
#: Rankings of a run; more than its policy looks at between two changes of its instances. [1]
MOST_KEPT = 8


@inlined
def _load(st: FleetState, i: int, load: int, steps: int) -> float:
    """A load of an instance after so many decode steps that are not counted yet."""
    one = st.inst[i]
    if load == REQUESTS:
        return float(one.queued_requests + one.loading_requests + one.running_requests)
    if load == PROMPT_TOKENS:
        return float(one.queued_prompt_tokens + one.loading_prompt_tokens + one.coming_tokens)
    running = one.running_tokens + steps * one.running_requests
    mean = running / max(one.running_requests, 1)
    return running + one.coming_tokens + mean * (one.queued_requests + one.loading_requests)


@inlined
def _enter(st: FleetState, i: int, trees: Floats, group: Ints, present: Floats, load: int) -> None:
    """Note the load of an instance at its last event."""
    if group[i] >= 0:
        set_key(trees[group[i]], i, _load(st, i, load, 0))
        present[i] = -np.inf


@inlined
def _first(st: FleetState, tree: Floats, present: Floats, load: int, now: float) -> int:
    """The one with the least load of a group at the present, the first of several; -1 = the group is empty."""
    i = least_of(tree)
    while i >= 0 and load == HELD_TOKENS and present[i] != now:
        present[i] = now
        set_key(tree, i, _load(st, i, load, uncounted(st, i, now)))
        i = least_of(tree)
    return i


@inlined
def least_loaded(st: FleetState, trees: Floats, group: Ints, present: Floats, load: int, own: int, now: float) -> int:
    """See ``Rankings.least``."""
    here, count = st.world[0], len(present)
    if here.changes - group[count] > len(st.log):
        for i in range(count):
            _enter(st, i, trees, group, present, load)
    else:
        for at in range(group[count], here.changes):
            _enter(st, st.log[at % len(st.log)], trees, group, present, load)
    group[count] = here.changes
    best, fewest, most = -1, 0.0, 1.0
    for g in range(len(trees)):
        i = _first(st, trees[g], present, load, now)
        if i < 0:
            continue
        tokens, served = trees[g, trees.shape[1] // 2 + i], trees[g, 0]
        mine, its = (tokens + own) * most, (fewest + own) * served
        if best < 0 or mine < its or (mine == its and i < best):
            best, fewest, most = i, tokens, served
    return best


@entry
def _least(home: Ints, trees: Floats, group: Ints, present: Floats, load: int, own: int, now: float) -> int:
    """See ``Rankings.least``."""
    return least_loaded(state_at(home), trees, group, present, load, own, now)


class Rankings:
    """Instances of a fleet by load, over what each serves."""

    def __init__(self, home: Ints) -> None:
        self._home = home
        self._kept: dict[tuple[int, int, int], tuple[Any, ...]] = {}  # by load, instances and what these serve

    def least(self, load: int, among: NDArray[np.intp], served: Floats | Ints, own: int, now: float) -> int:
        """Find the first instance with the least load and ``own`` for what it serves. [unit of the load]"""
        key = load, id(among), id(served)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            kept = self._kept[key] = (*ranking(among, served), among, served)  # the last two keep their id
        found: int = _least(self._home, kept[0], kept[1], kept[2], load, own, now)
        return found


def ranking(among: NDArray[np.intp], served: Floats | Ints) -> tuple[Floats, Ints, Floats]:
    """Make the arrays that ``least_loaded`` keeps.

    Returns trees of the groups, with what each serves in place 0; the group of each instance, and where the log was
    read last; when the load of each was the present one.
    """
    count = len(served)
    values, member = np.unique(np.asarray(served)[among], return_inverse=True)
    trees = np.stack([least_tree(np.full(count, np.inf))] * values.size)
    trees[:, 0] = values
    group = np.full(count + 1, -1, dtype=np.int64)
    group[among] = member
    group[count] = -count - 1  # as long ago as nothing
    return trees, group, np.full(count, -np.inf)


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
    then: Choosing | None  # where it goes on; None: the kernel cannot tell


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


class RoutingQueue:
    """Requests by the times at which they come, for the kernel."""

    def __init__(
        self,
        times: Floats,
        prompts: Ints,
        totals: Ints,
        route: Route,
        *,
        most: int,
        emits_late: bool,
        supply: RequestWindow | None,
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
