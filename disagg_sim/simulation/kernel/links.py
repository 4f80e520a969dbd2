"""Compiled: transfers between instances, which share the links of both.

Each runs at the least of what the ends that it takes give it: ``bandwidth / transfers``, from its first byte on. One
that shares with nobody costs two events, its first byte and its last. Rates are shared anew once an instant: the caches
of a pass leave together, and end together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.addresses import NETWORK, PORT, TRANSFER, carray, pointer, whole_numbers
from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import DOWN, FREE, IN, MOVES, OUT, UP, Network, Port, TransferRecord
from disagg_sim.simulation.kv_link import Spine


class Links(NamedTuple):
    """The arrays of a network."""

    head: Sequence[Network]  # one row
    transfers: Sequence[TransferRecord]
    heap: Ints  # of transfers that move, by their ends, or by their starts before these
    ports: Sequence[Port]


@inner
def links_at(address: int) -> Links:
    """A network, by its address."""
    head = carray(pointer(address), 1, NETWORK)
    one = head[0]
    return Links(
        head,
        carray(pointer(one.transfers_at), one.room, TRANSFER),
        whole_numbers(one.heap_at, one.room),
        carray(pointer(one.ports_at), one.ports, PORT),
    )


@inner
def give_place(links: Links, k: int) -> None:
    """A transfer is over."""
    links.transfers[k].state = FREE
    links.transfers[k].place = links.head[0].free
    links.head[0].free = k


# --- the heap of ends ---------------------------------------------------------------------------------------------


@inner
def _sooner(links: Links, k: int, other: int) -> bool:
    one, its = links.transfers[k], links.transfers[other]
    return one.end_s < its.end_s or (one.end_s == its.end_s and one.serial < its.serial)


@inner
def _put(links: Links, k: int, place: int) -> None:
    links.heap[place] = k
    links.transfers[k].place = place


@inner
def _sort_in(links: Links, k: int, place: int) -> None:
    """Put a transfer into the heap where its end belongs, from a place on that is free."""
    heap, count = links.heap, links.head[0].moving
    while place > 0 and _sooner(links, k, heap[(place - 1) // 2]):
        _put(links, heap[(place - 1) // 2], place)
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _sooner(links, heap[child + 1], heap[child]):
            child += 1
        if not _sooner(links, heap[child], k):
            break
        _put(links, heap[child], place)
        place = child
    _put(links, k, place)


# --- sharing ------------------------------------------------------------------------------------------------------


@inner
def _join(links: Links, k: int, p: int) -> None:
    """A transfer takes an end of a link."""
    one, port, way = links.transfers[k], links.ports[p], p % 4
    one.port[way], one.before[way], one.after[way] = p, port.last, -1
    if port.last >= 0:
        links.transfers[port.last].after[way] = k
    else:
        port.first = k
    port.last = k
    port.count += 1


@inner
def _leave(links: Links, k: int, way: int) -> None:
    """A transfer leaves an end of a link."""
    one = links.transfers[k]
    port, before, after = links.ports[one.port[way]], one.before[way], one.after[way]
    if before >= 0:
        links.transfers[before].after[way] = after
    else:
        port.first = after
    if after >= 0:
        links.transfers[after].before[way] = before
    else:
        port.last = before
    port.count -= 1


@inner
def _pace(links: Links, k: int, now: float) -> None:
    """Bring a transfer to its rate."""
    one, head = links.transfers[k], links.head[0]
    rate = math.inf
    for way in range(4):
        if one.port[way] >= 0:
            port = links.ports[one.port[way]]
            rate = min(rate, port.bandwidth / port.count)
    if rate == one.rate:
        return
    if now > one.since_s:
        one.left = max(0.0, one.left - one.rate * (now - one.since_s))
        one.since_s = now
    one.rate = rate
    head.serial += 1
    one.serial = head.serial
    one.end_s = one.since_s + one.left / rate if rate > 0.0 else math.inf
    _sort_in(links, k, one.place)


@inner
def _change(links: Links, p: int, now: float) -> None:
    """Transfers of an end of a link get new rates when all that happens now has happened."""
    head, port, way = links.head[0], links.ports[p], p % 4
    head.share_s = now
    if port.changed == 1:
        return
    port.changed, port.next_changed = 1, -1
    if head.last_changed[way] >= 0:
        links.ports[head.last_changed[way]].next_changed = p
    else:
        head.first_changed[way] = p
    head.last_changed[way] = p


@inner
def changed(links: Links, sender: int, receiver: int, now: float) -> None:
    """See ``_change``, of both ends."""
    _change(links, 4 * sender + OUT, now)
    _change(links, 4 * receiver + IN, now)


@inner
def share(links: Links, now: float) -> None:
    """Bring the transfers of all changed ends to their new rates."""
    head, ports, transfers = links.head[0], links.ports, links.transfers
    for way in (OUT, IN):
        p = head.first_changed[way]
        while p >= 0:
            k = ports[p].first
            while k >= 0:
                if way == OUT or ports[transfers[k].port[OUT]].changed == 0:
                    _pace(links, k, now)
                k = transfers[k].after[way]
            if head.leaves > 0:
                ports[4 * ports[p].leaf + UP].changed = 1
            p = ports[p].next_changed
    for way in (UP, DOWN):
        for leaf in range(head.leaves):
            if ports[4 * leaf + UP].changed == 1:
                k = ports[4 * leaf + way].first
                while k >= 0:
                    _pace(links, k, now)
                    k = transfers[k].after[way]
    for leaf in range(head.leaves):
        ports[4 * leaf + UP].changed = 0
    for way in (OUT, IN):
        p = head.first_changed[way]
        while p >= 0:
            ports[p].changed = 0
            p = ports[p].next_changed
        head.first_changed[way] = head.last_changed[way] = -1
    head.share_s = math.inf


# --- from the first byte to the last ------------------------------------------------------------------------------


@inner
def send(links: Links, k: int, now: float) -> None:
    """A transfer begins: latency and descriptors, then its bytes, which alone take a share of its links."""
    one, head = links.transfers[k], links.head[0]
    out, into = links.ports[4 * one.sender + OUT], links.ports[4 * one.receiver + IN]
    one.state = MOVES
    one.since_s = now + max(out.latency_s, into.latency_s) + one.post_s
    one.rate, one.end_s = -1.0, one.since_s
    for way in range(4):
        one.port[way] = -1
    head.serial += 1
    one.serial = head.serial
    head.moving += 1
    _sort_in(links, k, head.moving - 1)
    if one.since_s <= now:
        _begin(links, k)


@inner
def _begin(links: Links, k: int) -> None:
    """The first byte of a transfer leaves: from now on it shares its links."""
    one, head, ports = links.transfers[k], links.head[0], links.ports
    out, into = 4 * one.sender + OUT, 4 * one.receiver + IN
    _join(links, k, out)
    _join(links, k, into)
    crosses = head.leaves > 0 and ports[out].leaf != ports[into].leaf
    if crosses:
        _join(links, k, 4 * ports[out].leaf + UP)
        _join(links, k, 4 * ports[into].leaf + DOWN)
    if ports[out].count == 1 and ports[into].count == 1 and not crosses:
        _pace(links, k, one.since_s)
        return
    changed(links, one.sender, one.receiver, one.since_s)
    one.rate, one.end_s = 0.0, math.inf
    _sort_in(links, k, one.place)


@inner
def next_end(links: Links, now: float) -> int:
    """The transfer whose last byte arrives now, off its links but still in its place; -1: a first byte leaves."""
    k: int = links.heap[0]
    one, head = links.transfers[k], links.head[0]
    if one.rate < 0.0:
        _begin(links, k)
        return -1
    head.moving -= 1
    last = links.heap[head.moving]
    if last != k:
        _sort_in(links, last, one.place)
    shared, crossed = False, one.port[UP] >= 0
    for way in range(4):
        if one.port[way] >= 0:
            _leave(links, k, way)
            shared = shared or (way <= IN and links.ports[one.port[way]].count > 0)
    if crossed or shared:
        changed(links, one.sender, one.receiver, now)
    return k


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

    Each transfer runs at ``min(egress / transfers out of its sender, ingress / transfers into its receiver)``, of those
    whose bytes move; with a spine those between leaves share its uplinks, too.
    """

    def __init__(self, spine: Spine | None) -> None:
        self.spine = spine
        self.whole: list[float] = []  # of instances, one way, where nothing has failed [B/s]
        self._gpus = 0  # of the instances so far, which stand side by side in the order of their starts [1]
        self._leaf: list[int] = []  # of the first GPU of each instance
        self._leaves: dict[int, int] = {}  # numbers of those that have an instance, one after the other
        self.row: Any = np.zeros(1, NETWORK)
        self.row["free"], self.row["share_s"] = -1, np.inf
        self.row["first_changed"] = self.row["last_changed"] = -1
        self.transfers: Any = np.zeros(0, TRANSFER)
        self.ports: Any = np.zeros(0, PORT)
        self._heap: Ints = np.zeros(0, np.int64)
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

    def join(self, bandwidth: float, latency_s: float, gpus: int = 1) -> None:
        """Add the links of the next instance [B/s], with its latency: of two that differ the larger counts. [s]

        With a spine it stands behind those before it, on ``gpus`` GPUs, and counts at the leaf of the first.
        """
        first, leaf = 4 * len(self.whole), 0
        if self.spine is not None:
            leaf = self._leaves.setdefault(self._gpus // self.spine.leaf_gpus, len(self._leaves))
            self._gpus += gpus
        self._leaf.append(leaf)
        self.whole.append(bandwidth)
        if first == self.ports.size:
            new = np.zeros(max(first, 4), PORT)
            new["first"] = new["last"] = new["next_changed"] = -1
            self.ports = np.concatenate([self.ports, new])
            self._bind()
        for way in (OUT, IN):
            port = self.ports[first + way]
            port["bandwidth"], port["latency_s"], port["leaf"] = bandwidth, latency_s, leaf
        if self.spine is not None:
            self.row["leaves"] = leaves = len(self._leaves)
            for way in (UP, DOWN):
                self.ports["bandwidth"][way : 4 * leaves : 4] = self.spine.uplink

    def hidden_bytes(
        self, sender: int, receiver: int, total: float, pieces: int, window_s: float, post_s: float = 0.0
    ) -> float:
        """Bytes of a push in ``pieces`` that have arrived when the last piece becomes ready. [B]

        Pieces become ready evenly over ``window_s``, the time from the start to the end of the segment that
        makes them, and leave at the rate that the link would give one more transfer now, each after its share of
        ``post_s``, the time that all descriptors take.
        """
        own, leaf, count = self.ports["bandwidth"].item, self._leaf, self.ports["count"].item
        out, into = 4 * sender + OUT, 4 * receiver + IN
        if pieces <= 1 or not (own(out) and own(into)):
            return 0.0
        before = (pieces - 1) / pieces
        rate = min(own(out) / (count(out) + 1), own(into) / (count(into) + 1))
        if self.spine is not None and leaf[sender] != leaf[receiver]:
            beside = max(count(4 * leaf[sender] + UP), count(4 * leaf[receiver] + DOWN))
            rate = min(rate, self.spine.uplink / (beside + 1))
        return float(min(before * total, before * window_s * total / (total / rate + post_s)))

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
        self._moving, self._waiting, self._free = (self.row[name] for name in ("moving", "waiting", "free"))
