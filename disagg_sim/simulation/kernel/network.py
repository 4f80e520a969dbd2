"""Keep the links of a fleet and the transfers on them, for the kernel (``links``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.addresses import NETWORK, PORT, TRANSFER
from disagg_sim.simulation.kernel.layout import DOWN, FREE, IN, MOVES, OUT, UP

#: Transfers for which there is room at first; it doubles.
ROOM = 64


class Pull(NamedTuple):
    """A request between two instances, under ``pull``."""

    number: int  # of the transfer
    segment: int  # of the receiver
    held: int  # of the sender
    sender: int  # instance
    receiver: int


class Wires:
    """Links between instances, and the caches on their way.

    Two instances at 10 and 5 B/s, with room for some transfers, none on its way:

    >>> wires = Wires()
    >>> wires.join(10.0, 0.5)
    >>> wires.join(5.0, 0.5)
    >>> wires.ports["bandwidth"][OUT::4].tolist(), wires.in_flight
    ([10.0, 5.0], 0)
    """

    def __init__(self) -> None:
        self.row: Any = np.zeros(1, NETWORK)
        self.row["free"], self.row["share_s"] = -1, np.inf
        self.row["first_changed"] = self.row["last_changed"] = -1
        self.transfers: Any = np.zeros(0, TRANSFER)
        self.ports: Any = np.zeros(0, PORT)
        self._heap: Ints = np.zeros(0, np.int64)
        self._joined = 0  # instances [1]
        self.grow()

    @property
    def in_flight(self) -> int:
        """Transfers. [1]"""
        return self._moving.item()  # type: ignore[no-any-return]

    @property
    def moves(self) -> bool:
        """Whether a transfer will end, or rates are to be shared anew."""
        ends = self.in_flight > 0 and self.transfers["end_s"][self._heap[0]] < np.inf
        return bool(ends or self.row["share_s"][0] < np.inf)

    @property
    def waiting(self) -> int:
        """Hand-overs that wait for blocks of their receivers, under ``pull``. [1]"""
        return self._waiting.item()  # type: ignore[no-any-return]

    def pulls(self, state: int) -> list[Pull]:
        """Hand-overs of which Python does not hear, by ``WAITS`` and ``MOVES``, in the order in which they began."""
        every = self.transfers
        where = np.flatnonzero((every["state"] == state) & (every["told"] == 0) & (every["gone"] == 0))
        begun = every["began_s" if state == MOVES else "asked_s"][where]
        where = where[np.lexsort((every["segment"][where], begun))]
        columns = (every[name][where].tolist() for name in ("segment", "held", "sender", "receiver"))
        return list(map(Pull._make, zip(where.tolist(), *columns, strict=True)))

    @property
    def full(self) -> bool:
        """Whether there is no room for another transfer."""
        return bool(self._free.item() < 0)

    def join(self, bandwidth: float, latency_s: float, leaf: int = 0) -> None:
        """Add the links of the next instance [B/s], with its latency [s] and the number of its leaf switch."""
        first = 4 * self._joined
        if first == self.ports.size:
            new = np.zeros(max(first, 4), PORT)
            new["first"] = new["last"] = new["next_changed"] = -1
            self.ports = np.concatenate([self.ports, new])
            self._bind()
        self._joined += 1
        for way in (OUT, IN):
            port = self.ports[first + way]
            port["bandwidth"], port["latency_s"], port["leaf"] = bandwidth, latency_s, leaf

    def share_uplinks(self, leaves: int, bandwidth: float) -> None:
        """Let transfers between different leaves share their uplinks, each way. [B/s]"""
        self.row["leaves"] = leaves
        for way in (UP, DOWN):
            self.ports["bandwidth"][way : 4 * leaves : 4] = bandwidth

    def grow(self) -> None:
        """Make room for more transfers."""
        have = self.transfers.size
        more = max(have, ROOM)
        new = np.zeros(more, TRANSFER)
        new["state"] = FREE
        new["place"] = np.arange(have + 1, have + more + 1)
        new["place"][-1] = self.row["free"][0]
        self.row["free"] = have
        self.transfers = np.concatenate([self.transfers, new])
        self._heap = np.concatenate([self._heap, np.zeros(more, np.int64)])
        self._bind()

    def renumber(self, number: Ints) -> None:
        """Segments have new numbers, by their old ones."""
        there = self.transfers["state"] != FREE
        for name in ("held", "segment"):
            column = self.transfers[name]
            column[there] = np.where(column[there] < 0, -1, number[column[there]])

    def _bind(self) -> None:
        """Say where the arrays are."""
        self.row["transfers_at"], self.row["room"] = self.transfers.ctypes.data, self.transfers.size
        self.row["heap_at"] = self._heap.ctypes.data
        self.row["ports_at"], self.row["ports"] = self.ports.ctypes.data, self.ports.size
        self.count: Ints = self.ports["count"]
        self._moving, self._waiting, self._free = (self.row[name] for name in ("moving", "waiting", "free"))
