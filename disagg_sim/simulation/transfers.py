"""Hand requests over from one instance to the next: reserve blocks, move the cache, free what the sender held.

How real engines do it (``WAYS``):

* *pull*: the receiver takes a request in when the sender has done its part. It reserves blocks for the whole of it as
  its admission rule says, then reads the cache. Until the last byte has landed the sender holds its blocks, which slows
  its prefill down when the receiver is full. NIXL in vLLM and Dynamo (docs.vllm.ai, "NIXL KV cache lease": P holds the
  blocks while a request is queued or in flight on D; state ``WAITING_FOR_REMOTE_KVS`` of its scheduler).
* *push*: a receiver that is known beforehand reserves blocks at once, while the sender works, and the sender writes
  into them, chunk by chunk. vLLM's ``NixlPushConnector``, SGLang (``DecodePreallocQueue``).
* *chunks*: the same, but blocks are taken chunk by chunk, when the sender has computed one, and for the rest when it is
  done (DynaServe, figure 7). What is computed and finds no blocks waits at the sender, in the order in which it asked;
  a chunk leaves when it has blocks and those before it have arrived.
* *buffer*: no engine. The cache leaves at once, and an unlimited buffer at the receiver takes it.

Instances that send to each other may all be full of caches that wait for each other. Such a circle is broken as vLLM
does when a cache is lost (``kv_load_failure_policy: recompute``): the receiver of the youngest one computes it itself.
Where the instance that stalled holds parts of caches that come in *chunks*, the one promised last gives its blocks back
first, and is sent again as under *pull*: no paper says what a full receiver does.

Past 400 lines: ways to move a cache differ in when each step happens, and share all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

import numpy as np

from disagg_sim.physics.kv_transfer import descriptors
from disagg_sim.simulation.kernel.layout import AHEAD, BLOCK_TOKENS, IDLE, MOVES, RESERVE, WAITS, Mode, SegmentStatus
from disagg_sim.simulation.kernel.ranking import Caches
from disagg_sim.simulation.view import ClusterState
from disagg_sim.simulation.wishes import Leg, State

#: How a cache gets to the next instance.
WAYS = ("pull", "push", "chunks", "buffer")
#: Ways in which a cache may leave before its sender is done, if the next instance is known.
PUSHED = ("push", "chunks")
#: Who emits the first token of a request that another instance decodes: the one that has computed its prompt; or the
#: one that decodes, in its first step. In vLLM with NIXL, and Dynamo on it, the token of the prefill is dropped: the
#: receiver takes the last token of the prompt as not computed, and samples the first token anew (vllm-project/vllm
#: pull request 51919, ai-dynamo/dynamo issue 850).
FIRST_TOKENS = ("prefill", "decode")

NAN = math.nan
AT_WORK = -1  # in place of the segment of a sender that has not done its part
STOPPED, MANUAL = State.STOPPED, Mode.MANUAL  # instances that have failed come after those that have stopped
HELD, LOST = SegmentStatus.HELD, SegmentStatus.LOST


Lengths = tuple[int, int, int]  # of a segment: context, prompt, tokens to generate [token]
#: What an instance has to do for a request, as the kernel takes it: lengths, tokens of the request that exist when it
#: ends [token], flags, and whether the request goes on after it. Plain tuples are made fastest.
Work = tuple[Lengths, int, int, bool]


@dataclass(slots=True, eq=False)
class Handed:
    """A request between two instances, under all ways but ``pull``."""

    request: int
    leg: Leg  # on the receiver
    have: int  # tokens of the request that exist before it [token]
    origin: int
    tokens: int  # of the cache that moves [token]
    segment: int  # of the receiver; unused under ``buffer``
    work: Work | None
    held: int = AT_WORK  # segment of the sender
    ended_s: float = NAN  # of the sender's segment [s]
    asked_s: float = NAN  # when the transfer could have begun; later than its end by what the decision took [s]
    reserved_s: float = NAN  # [s]
    hidden: float = 0.0  # of the cache, what had arrived when the sender was done [B]
    gone: bool = False  # whether nothing of it is awaited any more, since an instance has died or it was given up
    placed: int = 0  # of ``tokens``, those of chunks that have blocks
    left: int = 0  # of ``tokens``, those that have left in chunks before the sender was done
    began_s: float = NAN  # of the chunks on their way [s]
    took_s: float = 0.0  # to move chunks before the sender was done [s]
    stuck: bool = False  # whether the receiver has found no blocks for the rest since the sender was done

    @property
    def complete(self) -> bool:
        """Whether the sender is done and the receiver has all blocks, under ``chunks`` while the last ones move."""
        return self.held != AT_WORK and not math.isnan(self.reserved_s)


class Owner(Protocol):
    """Who knows what becomes of a request."""

    def work(self, request: int, leg: Leg, have: int) -> Work | None:
        """What the leg is for its instance, from ``have`` tokens on; None: more than it can hold."""

    def submit(self, request: int, leg: Leg, have: int, last_token_s: float) -> None:
        """The leg begins now."""

    def track_leg(self, segment: int, request: int, leg: Leg, work: Work) -> None:
        """The instance has taken over a request."""

    def refuse(self, request: int) -> None:
        """A request ends without being served."""

    def leave(self, request: int) -> None:
        """The instance is gone to which a request was to go."""


class Transfers:
    """All requests on their way from one instance to another."""

    def __init__(self, way: str, state: ClusterState, owner: Owner) -> None:
        self.way, self.state, self.owner = way, state, owner
        self.engine, self.fleet, self.roster, self.prompts = state.engine, state.fleet, state.roster, state.prompts
        self._ahead: dict[int, Handed] = {}  # by request: pushes whose sender is at work
        self._moving: dict[int, Handed] = {}  # by number of the transfer: caches on their way
        self._waiting: dict[int, Handed] = {}  # by segment of the receiver: all that is not on its way
        site = state.site
        self._site, self._model = site, site.handed_model
        self._pieces: dict[int, int] = {}  # descriptors of a cache of so many blocks
        self._shares: dict[tuple[int, int], float] = {}  # time of each of them between two kinds of instances [s]
        self._posts = any(site.wire(mapping).descriptor_s for mapping in set(state.roster.mapping))
        self._once = site.kv_bytes(0)  # of any cache, such as a hidden state for a drafter [B]
        #: Of a token, where a cache grows by the token. [B]
        self._token_bytes = site.kv_bytes(1) - self._once if self._model.linear_cache else 0.0
        if way == "chunks":
            self.fleet.take_by_chunk(site.link.chunk_tokens)

    @property
    def waiting(self) -> int:
        """Requests for which a receiver has no blocks yet, or whose sender is at work. [request]"""
        return len(self._waiting) + self.fleet.wires.waiting

    def renumber(self, number: Sequence[int]) -> None:
        """Segments have new numbers, by their old ones."""
        for handed in {id(each): each for each in (*self._waiting.values(), *self._moving.values())}.values():
            handed.segment = number[handed.segment] if handed.segment >= 0 else handed.segment
            handed.held = number[handed.held] if handed.held >= 0 else handed.held
        self._waiting = {handed.segment: handed for handed in self._waiting.values()}

    def waits(self, segment: int) -> bool:
        """Whether a segment of a receiver waits for blocks or for its cache."""
        return segment in self._waiting

    def promise(self, request: int, origin: int, sender: int, leg: Leg, have: int) -> None:
        """A ``sender`` begins its part; the next instance is known, and reserves blocks where caches are pushed."""
        known = self._ahead.get(request)
        if known is not None:  # its prompt has moved to another instance
            known.origin = origin
            self.fleet.feed(sender, known.segment)
            return
        work = self.owner.work(request, leg, have)
        if work is None:
            return
        lengths, _, flags, _ = work
        segment = self.fleet.submit(leg.instance, request, lengths, self.engine.now, flags=flags | RESERVE | AHEAD)
        handed = Handed(request, leg, have, origin, self._tokens(request, have), segment, work)
        self._ahead[request] = self._waiting[segment] = handed
        self.fleet.feed(sender, segment)

    def forget(self, request: int) -> None:
        """A request goes on elsewhere than was promised."""
        handed = self._ahead.pop(request, None)
        if handed is not None:
            self._give_up(handed)

    def _give_up(self, handed: Handed) -> None:
        """The receiver gives back what it has reserved."""
        handed.gone = True
        del self._waiting[handed.segment]
        self.fleet.cancel(handed.segment, self.engine.now)

    def begin(self, request: int, origin: int, held: int, leg: Leg, have: int, ended: float, *, known: bool) -> None:
        """A sender has done its part, which ``ended`` then [s]; its cache goes to the instance of the leg, which was
        ``known`` from its start or not.
        """
        now, target = self.engine.now, leg.instance
        if self.way == "buffer":
            since = -math.inf if known else now
            self._send(
                Handed(request, leg, have, origin, self._tokens(request, have), -1, None, held, ended, now, since)
            )
            return
        handed = self._ahead.get(request)
        if handed is not None and handed.leg.instance != target:
            self.forget(request)
            handed = None
        last = self._last_token_s(request, have, ended)
        if self.roster.state[target] >= STOPPED:  # since the decision, which took time
            self.fleet.release(held, now)
            self.owner.leave(request)
            return
        if handed is None:
            work = self.owner.work(request, leg, have)
            if work is None:
                self.fleet.release(held, now)
                self.owner.refuse(request)
                return
            lengths, _, flags, _ = work
            tokens = self._tokens(request, have)
            if self.way == "pull":
                cache = origin, held, tokens, self._bytes(tokens), self._post_s(tokens, origin, target), ended
                segment = self.fleet.ask(target, request, lengths, now, flags=flags, last_token_s=last, cache=cache)
                self.owner.track_leg(segment, request, leg, work)
                return
            self._ask(Handed(request, leg, have, origin, tokens, -1, work, held, ended, now))
            return
        del self._ahead[request]
        self.fleet.sender_done(handed.segment, now, last)
        handed.held, handed.ended_s, handed.asked_s = held, ended, now
        if handed.reserved_s <= now:
            self._send(handed)

    def _ask(self, handed: Handed) -> None:
        """A sender is done: the receiver waits for blocks for the whole cache."""
        assert handed.work is not None
        lengths, _, flags, _ = handed.work
        last = self._last_token_s(handed.request, handed.have, handed.ended_s)
        target, now = handed.leg.instance, self.engine.now
        handed.segment = self.fleet.submit(
            target, handed.request, lengths, now, flags=flags | RESERVE, last_token_s=last
        )
        self._waiting[handed.segment] = handed

    def reserved(self, segment: int) -> None:
        """The receiver has blocks."""
        handed = self._waiting[segment]
        if handed.held == AT_WORK and self.way == "chunks":
            handed.placed = self.fleet.asked(segment)
            self._send_chunks(handed)
            return
        handed.reserved_s = self.engine.now
        if handed.held != AT_WORK and math.isnan(handed.began_s):
            self._send(handed)

    def between(self) -> set[int]:
        """Segments of receivers to which a cache is on its way under ``pull``, or that wait for blocks."""
        return {each.segment for state in (WAITS, MOVES) for each in self.fleet.wires.pulls(state)}

    def died(self, instance: int) -> list[int]:
        """Drop what an instance that stopped should have sent or got; the requests that are lost with it."""
        lost = []
        for handed in list(self._waiting.values()):
            target = handed.leg.instance
            if instance not in (handed.origin, target):
                continue
            del self._waiting[handed.segment]
            self._ahead.pop(handed.request, None)
            handed.gone = True
            self._let_go(handed)
            if handed.held != AT_WORK:
                lost.append(handed.request)
        for handed in [each for each in self._moving.values() if instance in (each.origin, each.leg.instance)]:
            if not handed.gone:
                handed.gone = True
                self._let_go(handed)
                lost.append(handed.request)
        for state in (WAITS, MOVES):
            for pull in self.fleet.wires.pulls(state):
                if instance not in (pull.sender, pull.receiver):
                    continue
                if state == WAITS:
                    self.fleet.drop(pull.number)
                else:
                    self.fleet.wires.transfers["gone"][pull.number] = 1
                lost.append(self.fleet.whose(pull.segment)[0])
                self._free(pull.segment, pull.held)
        return lost

    def _let_go(self, handed: Handed) -> None:
        """Free what a request that is lost between two instances holds on the one that lives."""
        self._free(handed.segment if handed.work is not None else AT_WORK, handed.held)

    def _free(self, segment: int, held: int) -> None:
        """The same, by the segments of receiver and sender."""
        now, status_of = self.engine.now, self.fleet.status_of
        if segment != AT_WORK and status_of(segment) != LOST:
            self.fleet.cancel(segment, now)
        if held != AT_WORK and status_of(held) == HELD:
            self.fleet.release(held, now)

    def stalled(self, instance: int) -> None:
        """Nothing runs on an instance, and what waits there finds no blocks: if that is for ever, make room.

        It is for ever if all its blocks are held by caches that wait for other instances, and these for others, in
        a circle of instances that all have stalled.
        """
        for each in self._waiting.values():
            each.stuck |= each.leg.instance == instance and each.held != AT_WORK
        circle, todo = {instance}, [instance]
        while todo:
            needs = self._needs(todo.pop())
            if needs is None:
                return
            todo += needs - circle
            circle |= needs
        pulls = [each for each in self.fleet.wires.pulls(WAITS) if each.sender == instance]
        held = [each for each in self._waiting.values() if self._holds_up(each, instance)]
        kept = [each for each in self._waiting.values() if self._keeps(each, instance)]
        if partly := [each for each in kept if each.placed]:
            youngest = max(partly, key=attrgetter("segment"))
            self._ahead.pop(youngest.request, None)
            self._give_up(youngest)
            if youngest.held != AT_WORK:
                self._ask(replace(youngest, gone=False, placed=0, left=0, began_s=NAN, took_s=0.0, stuck=False))
        elif pulls:
            pull = max(pulls, key=attrgetter("held"))
            self.fleet.drop(pull.number)
            self.fleet.release(pull.held, self.engine.now)
            self.fleet.recompute(pull.segment, self.engine.now)
        elif held:
            last = max(held, key=attrgetter("held"))
            last.gone = True
            del self._waiting[last.segment]
            self.fleet.release(last.held, self.engine.now)
            self.fleet.recompute(last.segment, self.engine.now)
            assert last.work is not None
            self.owner.track_leg(last.segment, last.request, last.leg, last.work)
        else:
            self.forget(max(kept, key=attrgetter("segment")).request)

    def _holds_up(self, handed: Handed, instance: int) -> bool:
        """Whether a sender on an instance is done, and its receiver lacks blocks."""
        return handed.origin == instance and handed.held != AT_WORK and not handed.complete

    def _keeps(self, handed: Handed, instance: int) -> bool:
        """Whether a push has blocks on an instance, and its sender is at work or it lacks some."""
        has = handed.placed > 0 or (handed.held == AT_WORK and handed.reserved_s <= self.engine.now)
        return handed.leg.instance == instance and has and not handed.complete

    def _needs(self, instance: int) -> set[int] | None:
        """Instances that have to act before an idle one has room; None: it will have room anyway."""
        inst = self.fleet.views
        if inst.run_kind[instance] != IDLE or self.roster.mode[instance] == MANUAL:
            return None
        needs, held = set(), []
        for pull in self.fleet.wires.pulls(WAITS):
            if pull.sender == instance:
                needs.add(pull.receiver)
                held.append(pull.held)
        for handed in self._waiting.values():
            if self._holds_up(handed, instance):
                needs.add(handed.leg.instance)
                held.append(handed.held)
            elif self._keeps(handed, instance):
                if handed.held != AT_WORK and not handed.stuck:
                    return None
                needs.add(handed.origin if handed.held == AT_WORK else instance)
                held.append(handed.segment)
        used = int(inst.total_blocks[instance] - inst.free_blocks[instance])
        return needs if needs and self.fleet.blocks_of(held) == used else None

    def _tokens(self, request: int, have: int) -> int:
        """Tokens of the cache that moves: neither the token emitted last nor what the receiver holds are in it."""
        tokens = have - 1 if have > self.prompts[request] else have
        return tokens if self.state.stated is None else max(tokens - self.state.stated.in_decode(request), 0)

    def _bytes(self, tokens: int) -> float:
        """``Site.kv_bytes``. [B]"""
        return self._once + tokens * self._token_bytes if self._token_bytes else self._site.kv_bytes(tokens)

    def _send_chunks(self, handed: Handed) -> None:
        """Chunks that have blocks leave together, if none is on its way."""
        there = 0 if self.state.stated is None else self.state.stated.in_decode(handed.request)
        begin, end = handed.left, handed.placed - there  # the first tokens are at the receiver
        if end <= begin or not math.isnan(handed.began_s):
            return
        handed.left, handed.began_s = end, self.engine.now
        size = self._bytes(end) - (self._bytes(begin) if begin else self._once)
        post = self._post_s(end - begin, handed.origin, handed.leg.instance)
        self._move(handed, end - begin, size, post)

    def _chunks_landed(self, handed: Handed) -> None:
        """Chunks have arrived, and the next may leave; or the rest, if it waits for nothing else."""
        over = handed.ended_s if handed.held != AT_WORK else self.engine.now
        handed.took_s += max(over - handed.began_s, 0.0)
        handed.began_s = NAN
        if handed.complete:
            self._send(handed)
        else:
            self._send_chunks(handed)

    def _move(self, handed: Handed, tokens: int, size: float, post: float) -> None:
        """Begin a transfer, whose end ``landed`` hears of. [token], [B], [s]"""
        target = handed.leg.instance
        self.roster.coming[target] += 1
        cache = handed.origin, AT_WORK, tokens, size, post, NAN
        self._moving[self.fleet.move(target, cache, self.engine.now)] = handed

    def _send(self, handed: Handed) -> None:
        """The cache leaves, or what is left of it."""
        origin, target, tokens = handed.origin, handed.leg.instance, handed.tokens - handed.left
        self._waiting.pop(handed.segment, None)
        size = self._bytes(handed.tokens)
        if handed.left:
            size -= self._bytes(handed.left) - self._once
        hidden, post = 0.0, self._post_s(tokens, origin, target)
        if handed.reserved_s < handed.asked_s and size > 0.0:  # nothing moves of what decode holds already
            pieces = self._site.link.pieces(tokens, len(self._model.layers))
            window = handed.asked_s - max(self.fleet.start_s(handed.held), handed.reserved_s)
            hidden = self.fleet.wires.hidden_bytes(origin, target, size, pieces, window, post)
            post *= 1.0 - hidden / size
        handed.hidden = hidden
        self._move(handed, tokens, size - hidden, post)

    def _post_s(self, tokens: int, origin: int, target: int) -> float:
        """Time in which a GPU of the receiver posts the descriptors of a cache; both factors are looked up. [s]"""
        if not self._posts:
            return 0.0
        blocks, pair = -(-tokens // BLOCK_TOKENS), (self.roster.kind[origin], self.roster.kind[target])
        if blocks not in self._pieces:
            self._pieces[blocks] = descriptors(self._model, tokens, BLOCK_TOKENS)
        if pair not in self._shares:
            mapping = self.roster.mapping
            self._shares[pair] = self._site.post_share_s(mapping[origin], mapping[target])
        return self._pieces[blocks] * self._shares[pair]

    def caches(self) -> Caches | None:
        """What the kernel needs to hand over by itself, under ``pull`` where caches grow by the token; else None."""
        if self.way != "pull" or not self._token_bytes:
            return None
        kinds = dict(zip(self.roster.kind, self.roster.mapping, strict=True))
        pairs = [[self._site.post_share_s(kinds[a], kinds[b]) for b in range(len(kinds))] for a in range(len(kinds))]
        return Caches(
            cache_bytes=self._once,
            token_bytes=self._token_bytes,
            descriptors=descriptors(self._model, 1, BLOCK_TOKENS),
            kind=np.array(self.roster.kind),
            post_s=np.array(pairs) * self._posts,
        )

    def landed(self, number: int) -> None:
        """A cache has arrived: its sender's blocks are free, its receiver may go on."""
        handed = self._moving.pop(number)
        request, origin, leg = handed.request, handed.origin, handed.leg
        target, now = leg.instance, self.engine.now
        if handed.segment in self._waiting and not handed.gone:
            self._chunks_landed(handed)
        elif not handed.gone:
            waited = max(handed.reserved_s - handed.asked_s, 0.0)
            exposed = now - handed.ended_s - waited
            rate = min(self.fleet.wires.whole[origin], self.fleet.wires.whole[target])
            self.fleet.arrived(
                handed.held, handed.tokens, exposed, exposed + handed.hidden / rate + handed.took_s, waited
            )
            if handed.work is None:
                self.fleet.release(handed.held, now)
                self.owner.submit(request, leg, handed.have, self._last_token_s(request, handed.have, handed.ended_s))
            else:
                self.fleet.hand_over(handed.held, handed.segment, now)
                self.owner.track_leg(handed.segment, request, leg, handed.work)
        self.roster.arrived(target)

    def _last_token_s(self, request: int, have: int, ended: float) -> float:
        """When the user got the token before the one that comes after ``have``; NaN: none yet. [s]"""
        return ended if have > self.prompts[request] else self.state.last_given_s.get(request, NAN)
