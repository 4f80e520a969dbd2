"""Let the kernel take Arrow's choices by itself, as long as an instance meets the limits: no call from Python for each.

Where none does the kernel asks the policy, which may flip an instance.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.clients import SparseColumn
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.addresses import carray, home_at, pointer
from disagg_sim.simulation.kernel.compiled import called_by_address
from disagg_sim.simulation.kernel.layout import dtype_of
from disagg_sim.simulation.policies.arrow.account import ACCOUNT
from disagg_sim.simulation.policies.arrow.ledger import among_these, hand_over, order_of, place


class Context:
    """What the choices work on; arrays by their addresses (``_at``)."""

    ledger_at: int  # (instances)
    instances: int
    state_at: int  # (rows, width) order of those that prefill
    tokens_at: int  # order of those that decode
    rows: int
    width: int
    ends_at: int  # (requests) predicted ends, on the clock of the instance [s]
    requests: int
    ttft: float  # limits [s]
    tpot: float
    looked_s: float  # when tokens in decode were looked up last [s]


CONTEXT = dtype_of(Context)
NOBODY = -1


def _place(home: int, context: int, request: int, tokens: int, origin: int, now: float) -> int:  # noqa: ARG001
    """Algorithm 1 where an instance meets the limit; else ``NOBODY``, and nothing has changed."""
    one = carray(pointer(context), 1, CONTEXT)[0]
    ledger = carray(pointer(one.ledger_at), one.instances, ACCOUNT)
    order = carray(pointer(one.state_at), (one.rows, one.width), np.float64)
    i, end, _ = place(home_at(home), order, ledger, tokens, one.ttft, now)
    if i >= 0:
        carray(pointer(one.ends_at), one.requests, np.float64)[request] = end
    return int(i)


def _go_on(home: int, context: int, request: int, tokens: int, origin: int, now: float) -> int:
    """Algorithm 2 where an instance is within the limits; else below 0, also where the request may stay."""
    one = carray(pointer(context), 1, CONTEXT)[0]
    ledger = carray(pointer(one.ledger_at), one.instances, ACCOUNT)
    queues = carray(pointer(one.state_at), (one.rows, one.width), np.float64)
    order = carray(pointer(one.tokens_at), (one.rows, one.width), np.float64)
    if not among_these(queues, origin):
        return NOBODY
    if ledger[origin].corrects == 1:
        ledger[origin].ahead_s = now - carray(pointer(one.ends_at), one.requests, np.float64)[request]
    one.looked_s = now
    return int(hand_over(home_at(home), (queues, order), ledger, tokens, one.tpot, now, origin))


@cache
def _functions() -> tuple[Any, Any]:
    """The compiled choices, made where they are first needed."""
    return called_by_address(_place), called_by_address(_go_on)


class ArrowChooser:
    """Arrow's choices, and what they work on (``ranking.Chooser``)."""

    def __init__(self, ledger: Any, kind: Ints, *, ttft: float, tpot: float) -> None:
        self._ends = SparseColumn(1, np.float64)  # see ``ends``
        self.queues: Floats = order_of(np.zeros(0, np.intp), kind)
        self.tokens: Floats = self.queues
        self._ledger, self._kind = ledger, kind
        self._among: tuple[Index | None, Index | None] = (None, None)
        self._context: Any = np.zeros(1, CONTEXT)
        self._context["ttft"], self._context["tpot"], self._context["looked_s"] = ttft, tpot, -np.inf
        self._looked_s = self._context["looked_s"]

    @property
    def ends(self) -> Floats:
        """Predicted ends of prompts, by request. [s]"""
        return self._ends.values

    @property
    def looked_s(self) -> float:
        """When tokens in decode were looked up last; flips for prompts go by these. [s]"""
        return float(self._looked_s[0])

    def look(self, now: float) -> None:
        """Tokens in decode are looked up."""
        self._looked_s[0] = now

    def book(self, request: int, end: float) -> None:
        """A prompt is predicted to end then, on the clock of its instance. [s]"""
        if request >= self.ends.size:
            self.room_for(2 * request + 1)
        self.ends[request] = end

    def room_for(self, requests: int) -> None:
        """So many requests may come."""
        self._ends = self._ends.longer(requests)
        self._bind()

    def release(self, before: int) -> None:
        """Requests before one are over."""
        self._ends.release(before)

    def renew(self, prefill: Index, decode: Index) -> None:
        """See ``ranking.Chooser``."""
        if self._among[0] is not prefill:
            self.queues = order_of(prefill, self._kind)
        if self._among[1] is not decode:
            self.tokens = order_of(decode, self._kind)
        self._among = prefill, decode
        self._bind()

    def addresses(self) -> tuple[int, int, int]:
        """See ``ranking.Chooser``."""
        place, go_on = _functions()
        return place.address, go_on.address, self._context.ctypes.data

    def _bind(self) -> None:
        """Say where the arrays are."""
        context = self._context
        context["ledger_at"], context["instances"] = self._ledger.ctypes.data, self._ledger.size
        context["state_at"], context["tokens_at"] = self.queues.ctypes.data, self.tokens.ctypes.data
        context["rows"], context["width"] = self.queues.shape
        context["ends_at"], context["requests"] = self.ends.ctypes.data, self.ends.size
        self._looked_s = context["looked_s"]
