"""Measures of load, and choices by them, that several policies share.

Loads of unequal instances are compared over what each serves (``simulation.site``): queues over the prompts that it
prefills in a second, sequences over its seats. Among equal instances these cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.ranking import HELD_TOKENS, PROMPT_TOKENS, REQUESTS, Choosing, Placing
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Leg, Limits, Role


@entry  # numpy takes four times as long for so few numbers
def least(among: Any, first: Any, second: Any, served: Any, own: int) -> Any:
    """The instance of ``among`` that ends soonest: the load of two columns plus ``own``, over its capacity.

    The first of several.
    """
    best = among[0]
    for each in among:
        if (first[each] + second[each] + own) * served[best] < (first[best] + second[best] + own) * served[each]:
            best = each
    return best


#: In place of a request, where an instance is chosen for none, as one that stops.
NOBODY = -1


class Choice(Protocol):
    """Picks one of some instances."""

    def __call__(self, view: ClusterView, among: Index, request: int = NOBODY) -> int:
        """An instance of ``among``, which is not empty, for a request, or as they are."""


#: An instance of some for a request, as routers choose it.
RequestChoice = Callable[[ClusterView, Index, int], int]


def tokens_of(view: ClusterView, request: int) -> int:
    """Tokens of the prompt of a request; 0 of none. [token]"""
    return 0 if request == NOBODY else view.input_tokens[request]


@dataclass(frozen=True, slots=True)
class Least:
    """The one with the least load for what it serves, now; the first of several."""

    load: int  # of ``kernel.ranking``
    served: str  # column of the view
    own_tokens: bool = False  # whether the request counts by its prompt tokens; else as one request

    def __call__(self, view: ClusterView, among: Index, request: int = NOBODY) -> int:
        """See ``Choice``."""
        own = tokens_of(view, request) if self.own_tokens else 1
        return view.least(self.load, among, getattr(view, self.served), own)


#: The one with the fewest requests, waiting or running, for its seats.
fewest_requests = Least(REQUESTS, "seats")
#: The one that has prefilled its queue of requests and one more first.
shortest_queue = Least(REQUESTS, "prefill_rate")
#: The one that has prefilled its prompt tokens first, cache in transfer included.
least_prefill = Least(PROMPT_TOKENS, "prefill_rate", own_tokens=True)
#: The one with the fewest tokens in decode, in transfer and in wait for its seats.
least_decode = Least(HELD_TOKENS, "seats", own_tokens=True)


def least_uncached(view: ClusterView, request: int, promised: Mapping[int, int] | None = None) -> int:
    """The decode instance with the fewest tokens for its seats, in decode or of the prompt and not remembered there.

    Without prefix caches it is that of ``least_decode``. ``promised`` are prompt tokens by instance that count, too.
    """
    tokens, among = view.input_tokens[request], view.decode
    if not view.remembers and promised is None:
        return least_decode(view, among, request)
    view.refresh()
    cached = view.cached_everywhere(request)[among] if view.remembers else 0
    running, requests = view.running_tokens[among], np.maximum(view.running_requests[among], 1)
    held = running + view.coming_tokens[among] + running / requests * view.queued_requests[among]
    if promised is not None:
        held += [promised.get(each, 0) for each in among.tolist()]
    return int(among[np.argmin((held + tokens - cached) / view.seats[among])])


class InTurn:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, view: ClusterView, among: Index, request: int = NOBODY) -> int:  # noqa: ARG002  looks at nothing
        """See ``Choice``."""
        self._turn += 1
        return int(among[self._turn % among.size])


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRole:
    """Step limits by role; an instance of both roles steps as decode instances do."""

    prefill: Limits
    decode: Limits

    def limits(self, mapping: Sharding, role: Role) -> Limits:  # noqa: ARG002  one rule for all sizes
        """See ``StepLimits``."""
        return self.prefill if role == Role.PREFILL else self.decode


def placing_of(first: RequestChoice, then: RequestChoice | None = None) -> Placing | None:
    """How the kernel makes choices by itself, of the instance and of the one after it; None: it cannot."""
    chosen = [
        Choosing(each.load, each.served, each.own_tokens) if isinstance(each, Least) else None for each in (first, then)
    ]
    return Placing(chosen[0], then is None, chosen[1]) if chosen[0] is not None else None


class Whole:
    """Routing of co-located policies: a request stays where it was placed."""

    def __init__(self, choice: RequestChoice) -> None:
        self._choice = choice
        self.placing = placing_of(choice) if type(self) is Whole else None

    def place(self, view: ClusterView, request: int) -> Leg:
        """See ``Routing``."""
        return Leg(self._choice(view, view.prefill, request))

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:  # noqa: ARG002  never asked
        """See ``Routing``; a whole request has no second leg."""
        return Leg(origin)


class Handover:
    """Plain disaggregation: prefill here, decode there; ``early``: chosen at arrival, so that the cache is pushed."""

    def __init__(self, prefill: RequestChoice, decode: RequestChoice, *, early: bool = False) -> None:
        self._prefill, self._decode, self._early = prefill, decode, early
        self.placing = None if early or type(self) is not Handover else placing_of(prefill, decode)

    def place(self, view: ClusterView, request: int) -> Leg:
        """See ``Routing``; the prefill instance emits the first token."""
        instance, first = self._prefill(view, view.prefill, request), view.input_tokens[request] + 1
        return Leg(instance, first, self._decode(view, view.decode, request)) if self._early else Leg(instance, first)

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:  # noqa: ARG002  wherever it was
        """See ``Routing``."""
        return Leg(self._decode(view, view.decode, request))
