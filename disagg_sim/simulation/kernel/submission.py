"""Compiled: what comes from outside, or from another instance with its cache, joins a queue; the instance takes notice.

Under ``pull`` a segment of the receiver asks for its cache (``asked``) and waits for blocks; the cache moves when it
has them (``begin``) and lands in them (``arrive``): Python hears of none of it. What leaves in other ways is told to
Python when it has arrived (``entry.move``).
"""

from __future__ import annotations

import math

from disagg_sim.simulation.kernel.addresses import chosen, post_s, ranking_at, whole_numbers
from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.handover import count
from disagg_sim.simulation.kernel.layout import (
    AHEAD,
    BLOCK_TOKENS,
    CLOSES,
    COMING,
    FED,
    HOLD,
    LANDED,
    NOT_HANDED,
    NOTIFY,
    PROMPTS,
    RESERVE,
    WAITS,
    Feed,
    FleetState,
    Mode,
    Scheduling,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.links import Links, give_place, send
from disagg_sim.simulation.kernel.queue import by_priority, check_drained, enqueue, most_tokens, release
from disagg_sim.simulation.kernel.ranking import least_loaded, set_key
from disagg_sim.simulation.kernel.ranks import choose_rank, due_s, gather, wake

QUEUED, DONE, RESERVED = int(SegmentStatus.QUEUED), int(SegmentStatus.DONE), int(SegmentStatus.RESERVED)
MANUAL, PRIORITY = int(Mode.MANUAL), int(Scheduling.PRIORITY)

#: Why ``submitted`` refuses: lengths that the instance can never serve; events before the time of submission.
IMPOSSIBLE, LATE = 1, 2
#: Why ``asked`` does nothing: there is no room for another transfer.
NO_ROOM = 3
#: What else may become of a request of the feed that goes on: it has; its policy has to be asked.
DONE_HERE, ASKED_FOR = 0, 4


@inlined
def row_of(st: FleetState, s: int) -> int:
    """Where the rank of a segment has its queues and its memory."""
    row: int = st.inst[st.seg[s].instance].rank_at + st.seg[s].rank
    return row


@inlined
def changed(st: FleetState, i: int) -> None:
    """Bring trees, log and sums over ranks up to date with an instance that may have changed."""
    if st.inst[i].ranks > 1:
        gather(st, i)
    set_key(st.soon, i, st.inst[i].next_s)
    set_key(st.due, i, due_s(st, i))
    st.log[st.world[0].changes % len(st.log)] = i
    st.world[0].changes += 1


@inlined
def _close(st: FleetState, i: int) -> bool:
    """Close the batch of a policy on all ranks that have a part of it; whether any may begin now."""
    inst, alone = st.inst[i], False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        rank = st.inst[row]
        if rank.first[PROMPTS] >= 0 and st.seg[rank.last[PROMPTS]].closes == 0:
            st.seg[rank.last[PROMPTS]].closes = 1
            alone = alone or rank.closed == 0
            rank.closed += 1
    return alone


@inlined
def _enqueue(st: FleetState, row: int, s: int) -> bool:
    """Put a segment into the queue where it belongs; whether it is the first there, else it changes no run."""
    inst, closes = st.inst[row], st.seg[s].closes
    if st.seg[s].left == 0 or st.seg[s].reserve > 0:
        enqueue(st, row, s, COMING)
        return bool(inst.first[COMING] == s)
    enqueue(st, row, s, PROMPTS)
    first = inst.first[PROMPTS] == s or (closes == 1 and inst.closed == 0)
    inst.closed += closes
    return bool(first or (by_priority(inst) and inst.admitted > 0 and st.seg[inst.last_admitted].next == s))


@inlined
def submitted(
    st: FleetState, s: int, wanted: tuple[int, int, int, int, int, int, int], last_token_s: float, now: float
) -> int:
    """Queue a segment, see ``entry.submit``: 0, or why not."""
    i, request, context, prompt, generate, hit, flags = wanted
    inst, seg, world = st.inst, st.seg, st.world
    if inst[i].next_s < now:
        return LATE
    if context < 0 or generate < 0 or hit < 0 or prompt < 0 or prompt + generate < 1 or hit > max(prompt - 1, 0):
        return IMPOSSIBLE
    rank = choose_rank(st, i) if inst[i].ranks > 1 else 0
    row = inst[i].rank_at + rank
    if most_tokens(context, prompt, generate, inst[row].table.drafts) > inst[row].total_blocks * BLOCK_TOKENS:
        return IMPOSSIBLE
    one = seg[s]
    one.request, one.instance, one.rank, one.handed = request, i, rank, NOT_HANDED
    ranked = inst[i].scheduling == PRIORITY and request < len(st.priority)
    one.priority = st.priority[request] if ranked else 0
    one.context, one.prompt, one.generate = context, prompt, generate
    one.hit, one.expected = (0, hit) if world[0].shared != 0 else (hit, 0)
    one.notify, one.hold, one.closes = (flags & NOTIFY) != 0, (flags & HOLD) != 0, (flags & CLOSES) != 0
    one.reserve = ((flags & RESERVE) != 0) + ((flags & AHEAD) != 0)
    if one.reserve > 0:
        world[0].reserves = 1
    one.status, one.left, one.cached = QUEUED, prompt - one.hit, context + one.hit
    one.ready = one.shared = one.lent = one.reached = 0
    one.tail = -1
    one.emitted = one.joined = one.blocks = one.preemptions = one.piece = one.kept = one.moved = 0
    one.feeds = one.asked = -1
    one.late_gaps = one.late_from = 0
    one.submit_s = one.there_s = now
    one.last_s = last_token_s
    one.start_s = one.first_token_s = one.finish_s = math.nan
    one.exposed_s = one.transfer_s = one.blocked_s = 0.0
    inst[row].requests += 1
    inst[row].request_tokens += context + prompt
    inst[i].turn = (rank + 1) % inst[i].ranks
    if one.reserve < 2:
        count(st, row, s, 1)
    elif world[0].chunk_tokens > 0:  # it asks for blocks when its sender has computed a chunk
        one.status, one.asked = RESERVED, 0
        changed(st, i)
        return 0
    alone = _enqueue(st, row, s)
    if inst[i].ranks > 1 and one.closes == 1 and inst[i].mode == MANUAL:
        alone = _close(st, i) or alone
    if alone:
        wake(st, i, now, one.reserve == 0)
    changed(st, i)
    return 0


@inlined
def place_next(st: FleetState, feed: Feed, now: float) -> bool:
    """The next request of the feed comes, and is placed; whether it could be."""
    request = feed.next
    prompt, total = (
        whole_numbers(feed.prompts_at, feed.requests)[request],
        whole_numbers(feed.totals_at, feed.requests)[request],
    )
    if total > feed.most or feed.submitted == len(st.seg):
        return False
    if feed.place_at != 0:
        i = chosen(feed.place_at, st.world[0].home, feed.context_at, request, prompt, -1, now)
        if i < 0:
            return False
    else:
        ranking = (feed.trees_at, feed.group_at, feed.present_at)
        trees, group, present = ranking_at(ranking, feed.groups, feed.width, st.world[0].instances)
        i = least_loaded(st, trees, group, present, feed.load, prompt if feed.own_tokens == 1 else 1, now)
    generate = total - prompt if feed.whole == 1 else 1
    goes_on = feed.whole == 0 and (total > prompt + 1 or feed.kept == 1)
    flags = feed.hold if goes_on else feed.closes
    submitted(st, feed.submitted, (i, request, 0, prompt, generate, 0, flags), math.nan, now)
    if goes_on and feed.onward == 1:
        st.seg[feed.submitted].handed = FED
    feed.next += 1
    feed.submitted += 1
    return True


#: A cache that is to leave an instance: that instance, its segment, tokens [token], size [B], time of its descriptors
#: [s], and when the segment ended [s]. Compiled code takes plain tuples from Python soonest.
Moving = tuple[int, int, int, float, float, float]


@inner
def noted(links: Links, receiver: int, cache: Moving, now: float) -> int:
    """Write down a transfer that waits, in a place that is there."""
    k = links.head[0].free
    one = links.transfers[k]
    links.head[0].free = one.place
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
    wake(st, sender, now, False)
    check_drained(st, sender)
    changed(st, sender)
    row = row_of(st, s)
    alone = inst[row].first[LANDED] < 0
    seg[s].status, seg[s].reserve, seg[s].there_s = QUEUED, 0, now
    count(st, row, s, 1)
    enqueue(st, row, s, LANDED)
    if alone:
        wake(st, i, now, True)
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
