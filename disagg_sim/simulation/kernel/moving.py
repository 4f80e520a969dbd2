"""Compiled: requests that go from one instance to another, with their caches.

Under ``pull`` a segment of the receiver asks for its cache (``asked``) and waits for blocks; the cache moves when it
has them (``begin``) and lands in them (``arrive``): Python hears of none of it. What leaves in other ways is told to
Python when it has arrived (``entry.move``).
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.addresses import chosen, post_s, ranking_at, whole_numbers
from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.handover import land
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    CLOSES,
    LANDED,
    NOT_HANDED,
    RESERVE,
    WAITS,
    Feed,
    FleetState,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.links import Links, give_place, send, take_place
from disagg_sim.simulation.kernel.progress import wake
from disagg_sim.simulation.kernel.queue import check_drained, release
from disagg_sim.simulation.kernel.ranking import least_loaded
from disagg_sim.simulation.kernel.submission import changed, row_of, submitted

DONE = int(SegmentStatus.DONE)
#: Why ``asked`` does nothing: there is no room for another transfer.
NO_ROOM = 3
#: What else may become of a request of the feed that goes on: it has; its policy has to be asked.
DONE_HERE, ASKED_FOR = 0, 4


#: A cache that is to leave an instance: that instance, its segment, tokens [token], size [B], time of its descriptors
#: [s], and when the segment ended [s]. Compiled code takes plain tuples from Python soonest.
Moving = tuple[int, int, int, float, float, float]


@inner
def noted(links: Links, receiver: int, cache: Moving, now: float) -> int:
    """Write down a transfer that waits."""
    k = take_place(links)
    one = links.transfers[k]
    one.sender, one.held, one.tokens, one.left, one.post_s, one.ended_s = cache
    one.state, one.told, one.gone = WAITS, 0, 0
    one.receiver, one.segment, one.asked_s = receiver, -1, now
    return k


@inlined
def asked(
    st: FleetState,
    links: Links,
    s: int,
    wanted: tuple[int, int, int, int, int, int, int],
    last_token_s: float,
    cache: Moving,
    now: float,
) -> int:
    """See ``entry.ask``."""
    if links.head[0].free < 0:
        return NO_ROOM
    error = submitted(st, s, wanted, last_token_s, now)
    if error == 0:
        k = noted(links, wanted[0], cache, now)
        st.seg[s].handed = k
        links.transfers[k].segment = s
        links.head[0].waiting += 1
    return error


@inlined
def begin(st: FleetState, links: Links, k: int, now: float) -> None:
    """The receiver has blocks, or needs none: the cache leaves."""
    one = links.transfers[k]
    i = one.receiver
    one.began_s = now
    links.head[0].waiting -= 1 - one.told
    st.inst[i].coming_tokens += one.tokens
    st.inst[i].coming_requests += 1 - one.told
    changed(st, i)
    send(links, k, now)


@inlined
def hand_over_to(st: FleetState, held: int, s: int, now: float) -> None:
    """The cache of a held segment has landed in the blocks of segment ``s``: those of the sender are free."""
    seg, inst = st.seg, st.inst
    sender, i = seg[held].instance, seg[s].instance
    seg[held].status = DONE
    release(st, row_of(st, held), held)
    wake(st, sender, now)
    check_drained(st, sender)
    changed(st, sender)
    row = row_of(st, s)
    alone = inst[row].first[LANDED] < 0
    land(st, row, s)
    if alone:
        wake(st, i, now)
    changed(st, i)


@inlined
def arrive(st: FleetState, links: Links, k: int, now: float) -> bool:
    """The last byte of a cache has arrived; whether Python has to hear of it."""
    one = links.transfers[k]
    i, held, s = one.receiver, one.held, one.segment
    st.inst[i].coming_tokens -= one.tokens
    st.inst[i].coming_requests -= 1 - one.told
    give_place(links, k)
    if one.told == 1 or one.gone == 1:
        changed(st, i)
        return bool(one.told == 1)
    source = st.seg[held]
    source.moved = one.tokens
    source.blocked_s = max(one.began_s - one.asked_s, 0.0)
    source.exposed_s = source.transfer_s = now - one.ended_s - source.blocked_s
    st.seg[s].handed = NOT_HANDED
    hand_over_to(st, held, s, now)
    return False


@inlined
def start_next_leg(st: FleetState, links: Links, feed: Feed, s: int, now: float) -> int:
    """The prompt of a request of the feed is computed: it goes on, ``DONE_HERE``; else ``NO_ROOM``, ``ASKED_FOR``."""
    if feed.submitted == len(st.seg) or links.head[0].free < 0:
        return NO_ROOM
    one, here = st.seg[s], st.world[0]
    request, origin = one.request, one.instance
    prompt = whole_numbers(feed.prompts_at, feed.requests)[request]
    left = whole_numbers(feed.totals_at, feed.requests)[request] - prompt
    if feed.next_at != 0:
        i = chosen(feed.next_at, here.home, feed.context_at, request, prompt, origin, now)
        if i < 0:
            return ASKED_FOR
    else:
        ranking = (feed.next_trees_at, feed.next_group_at, feed.next_present_at)
        trees, group, present = ranking_at(ranking, feed.next_groups, feed.width, here.instances)
        i = least_loaded(st, trees, group, present, feed.next_load, prompt if feed.next_own_tokens == 1 else 1, now)
    last = now
    if feed.kept == 1:  # the token of the prefill is dropped
        one.first_token_s = last = math.nan
    lengths = (i, request, prompt - feed.kept, 0, left - 1 + feed.kept, 0, CLOSES | RESERVE)
    post = feed.descriptors * -(-prompt // BLOCK_TOKENS) * post_s(feed, origin, i, here.instances)
    cache = (origin, s, prompt, feed.cache_bytes + prompt * feed.token_bytes, post, now)
    asked(st, links, feed.submitted, lengths, last, cache, now)
    feed.submitted += 1
    return DONE_HERE
