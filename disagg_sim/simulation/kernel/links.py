"""Compiled: transfers between instances, which share the links of both or queue for them.

Each runs at the least of what the ends that it takes give it: ``bandwidth / transfers``. A transfer that shares with
nobody costs one event. Rates are shared anew once an instant: the caches of a pass leave together, and end together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from disagg_sim.arrays import Ints
from disagg_sim.simulation.kernel.addresses import NETWORK, PORT, TRANSFER, carray, pointer, whole_numbers
from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import DOWN, FREE, IN, MOVES, OUT, UP, Network, Port, TransferRecord


class Links(NamedTuple):
    """The arrays of a network."""

    head: Sequence[Network]  # one row
    transfers: Sequence[TransferRecord]
    heap: Ints  # of transfers that move, by their ends
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
def next_end(links: Links) -> float:
    """When the next transfer ends; inf = none does. [s]"""
    return links.transfers[links.heap[0]].end_s if links.head[0].moving > 0 else math.inf


@inner
def take_place(links: Links) -> int:
    """A place for a transfer; -1 = there is none left."""
    k = links.head[0].free
    if k >= 0:
        links.head[0].free = links.transfers[k].place
    return k


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


@inner
def _take_out(links: Links, k: int) -> None:
    """Take a transfer out of the heap."""
    head = links.head[0]
    place = links.transfers[k].place
    head.moving -= 1
    last = links.heap[head.moving]
    if last != k:
        _sort_in(links, last, place)


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
    """A transfer begins: latency and descriptors, then its bytes."""
    one, head, ports = links.transfers[k], links.head[0], links.ports
    out, into = 4 * one.sender + OUT, 4 * one.receiver + IN
    one.state = MOVES
    one.since_s = now + max(ports[out].latency_s, ports[into].latency_s) + one.post_s
    one.rate, one.end_s = 0.0, math.inf
    for way in range(4):
        one.port[way] = -1
    head.serial += 1
    one.serial = head.serial
    if head.queues == 1:
        begin = max(one.since_s, ports[out].free_s, ports[into].free_s)
        one.end_s = begin + one.left / min(ports[out].bandwidth, ports[into].bandwidth)
        ports[out].free_s = ports[into].free_s = one.end_s
    head.moving += 1
    _sort_in(links, k, head.moving - 1)
    if head.queues == 1:
        return
    _join(links, k, out)
    _join(links, k, into)
    crosses = head.leaves > 0 and ports[out].leaf != ports[into].leaf
    if crosses:
        _join(links, k, 4 * ports[out].leaf + UP)
        _join(links, k, 4 * ports[into].leaf + DOWN)
    if ports[out].count == 1 and ports[into].count == 1 and not crosses:
        _pace(links, k, one.since_s)
    else:
        changed(links, one.sender, one.receiver, now)


@inner
def end_next(links: Links, now: float) -> int:
    """The transfer whose last byte arrives now, which has left its links; its place is still its own."""
    k: int = links.heap[0]
    one = links.transfers[k]
    _take_out(links, k)
    shared, crossed = False, one.port[UP] >= 0
    for way in range(4):
        if one.port[way] >= 0:
            _leave(links, k, way)
            shared = shared or (way <= IN and links.ports[one.port[way]].count > 0)
    if crossed or shared:
        changed(links, one.sender, one.receiver, now)
    return k
