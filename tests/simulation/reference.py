"""Requests that follow routes over instances, in plain Python, event by event: what the cluster is held to.

``Reference`` serves requests whose routes are given: no policy, no clock of its own but the next thing that happens. It
shares no code with the simulator but the tables of step times (``reference_instance``) and the classes of options.
How a cache moves: under *pull* the receiver reserves blocks when the sender has done its part; under *push* from the
start, if it is known then; as *chunks* it takes those of a chunk when the sender has computed it; an unlimited *buffer*
takes it at once. The sender holds its blocks until the last byte has landed.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from reference_instance import Instance
from reference_rank import BLOCK, Rank, Turn, blocks_of

from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.wishes import LATER, Leg


class Cache(NamedTuple):
    """What a model keeps of a token."""

    token_bytes: float
    layers: int
    tensors: int  # of all layers: each has a descriptor a block


@dataclass(eq=False)
class Transfer:
    """A cache on its way, from the moment at which both ends are known."""

    request: int
    origin: int
    receiver: int
    sender: Turn | None  # None: it has not done its part
    leg: Leg
    have: int  # tokens of the request that exist for the receiver
    tokens: int  # of the cache
    turn: Turn | None  # on the receiver; None: an unlimited buffer takes the cache
    asked_s: float = math.nan  # when the sender had done its part
    reserved_s: float = math.inf
    left: float = 0.0  # [B]
    hidden: float = 0.0  # bytes that came before [B]
    placed: int = 0  # tokens of chunks that have blocks
    gone: int = 0  # of them, those that have left
    chunks_s: float | None = None  # when those left that are on their way
    early_s: float = 0.0  # how long they moved before the sender had done its part
    dropped: bool = False  # what is on its way is of no use
    stuck: bool = False  # its receiver has found no blocks since its sender had done its part
    rate: float = 0.0  # [B/s]
    since: float = 0.0  # ``left`` was true then
    end: float = math.inf


class Network:
    """Transfers share what leaves their sender and what enters their receiver, as soon as their bytes move."""

    def __init__(self, link: LinkSpec, bandwidths: list[float], cache: Cache) -> None:
        self.link, self.bandwidths, self.cache = link, bandwidths, cache
        self.posted: list[Transfer] = []  # no byte of them moves before ``since``
        self.going: list[Transfer] = []
        self.tied = False  # equal caches of different senders ended at one instant: no rule says which is first

    def rate(self, sender: int, receiver: int, more: int = 0) -> float:
        """Of one transfer, with ``more`` of them than there are."""
        out = max(sum(each.origin == sender for each in self.going) + more, 1)
        come = max(sum(each.receiver == receiver for each in self.going) + more, 1)
        return min(self.bandwidths[sender] / out, self.bandwidths[receiver] / come)

    def send(self, transfer: Transfer, tokens: int, window: float | None, now: float) -> None:
        """Move tokens of a cache; with a ``window``, all pieces but the last could leave during that time."""
        sender, receiver = transfer.origin, transfer.receiver
        size = tokens * self.cache.token_bytes
        post = self.link.descriptor_s * self.cache.tensors * blocks_of(tokens)  # before the first byte
        if window is not None:
            pieces = 1
            if self.link.push != "whole":
                pieces = max(1, math.ceil(transfer.tokens / self.link.chunk_tokens))
                pieces *= self.cache.layers if self.link.push == "layer" else 1
            early = (pieces - 1) / pieces
            whole = size / self.rate(sender, receiver, more=1) + post  # if it left alone
            transfer.hidden = size * early * min(window / whole, 1.0)
        transfer.left = size - transfer.hidden
        transfer.since = now + self.link.latency_s + post * (transfer.left / size)
        self.posted.append(transfer)
        self.start(now)

    def start(self, now: float) -> None:
        """Those whose time has come take their share."""
        self.going += [each for each in self.posted if each.since <= now]
        self.posted = [each for each in self.posted if each.since > now]
        self.share(now)

    def share(self, now: float) -> None:
        """Bring all transfers to the present, and to the rates that they have from now on."""
        for each in self.going:
            if now > each.since:
                each.left, each.since = max(0.0, each.left - each.rate * (now - each.since)), now
            each.rate = self.rate(each.origin, each.receiver)
            each.end = each.since + each.left / each.rate

    def landed(self, now: float) -> Transfer:
        """The next that ends."""
        first = min(self.going, key=lambda each: each.end)
        self.going.remove(first)
        self.tied |= any(each.end - first.end < 1e-12 and each.origin != first.origin for each in self.going)
        self.share(now)
        return first


class Reference:
    """Requests that follow given routes over instances.

    Parameters
    ----------
    requests : list of (arrival [s], prompt [token], output [token])
        In the order of arrival.
    routes : list of lists of Leg
        Of each request; a leg that names the next instance (``then``) is its last but one.
    specs, bandwidths : list
        Of the instances; one way [B/s].
    options : RunOptions
        Ways of transfers, link, first token.
    cache : Cache
        Of the model.
    ids : list of lists
        Of the blocks of each prompt.
    priorities : list of int
        Of each request: higher ones go first, where instances schedule by it.
    saves : int
        How far apart recurrent states are saved. [token]
    stream : int
        Of the draws by which drafts are accepted.
    """

    def __init__(self, requests, routes, specs, bandwidths, options, cache, ids, priorities, saves, stream=0):
        self.priorities, self.ids = priorities, ids
        self.shares = options.prefix_cache  # blocks of prompts in the memory of instances
        self.requests, self.routes = requests, [list(route) for route in routes]
        self.instances = [Instance(spec, stream) for spec in specs]
        self.given: dict[int, list[float]] = {}  # when each request got tokens
        for each in self.instances:
            each.given = self.given
        for rank in (rank for each in self.instances for rank in each.ranks):
            rank.shares, rank.step = self.shares, max(saves, BLOCK)
        self.network = Network(options.link, bandwidths, cache)
        self.way, self.late_token = options.transfer, options.first_token == "decode"
        self.now = 0.0
        self.news: list[Turn] = []  # turns that ended, or whose blocks are reserved
        self.turns: list[Turn] = []  # all that were submitted
        self.pending: list[Transfer] = []  # that wait for blocks, or for their sender
        self.moved: list[tuple[int, float, float, float, int]] = []  # request, exposed, whole, wait, tokens
        self.rejected: list[int] = []
        self.circles = 0  # caches given up because instances waited for each other

    def run(self) -> None:
        """Serve all requests. What happens at one time on instances comes before what comes from outside."""
        arrivals = list(enumerate(self.requests))
        while True:
            if self.news:
                self.hear(self.news.pop(0))
                continue
            stalled = [number for number, each in enumerate(self.instances) if each.stalled]
            if stalled:
                self.instances[stalled[0]].stalled = False
                self.break_circle(stalled[0])
                continue
            instance = min(self.instances, key=lambda each: each.due)
            starts = min((each.since for each in self.network.posted), default=math.inf)
            lands = min((each.end for each in self.network.going), default=math.inf)
            arrives = arrivals[0][1][0] if arrivals else math.inf
            now = min(instance.due, starts, lands, arrives)
            if now == math.inf:
                return
            self.now = now
            if instance.due == now:
                instance.happen(now, self.news)
                for turn, cached in instance.computed:
                    self.ask_for_chunks(turn, cached)
                instance.computed.clear()
            elif starts == now:
                self.network.start(now)
            elif lands == now:
                self.land(self.network.landed(now))
            else:
                self.arrive(arrivals.pop(0)[0])

    def arrive(self, request: int) -> None:
        """A request that some instance could hold begins its route."""
        _, prompt, output = self.requests[request]
        if prompt + output > max(map(self.room, range(len(self.instances)))):
            self.rejected.append(request)
        else:
            self.submit(request, self.routes[request].pop(0), 0)

    def room(self, number: int) -> int:
        """Tokens of the largest request that an instance takes: drafts need places behind its last one."""
        rank = self.instances[number].ranks[0]
        return rank.blocks * BLOCK - len(rank.acceptance)

    def turn_of(self, request: int, leg: Leg, have: int) -> Turn | None:
        """What a leg is for its instance, from ``have`` tokens on; None: more than it can hold."""
        _, prompt, output = self.requests[request]
        until = prompt + 1 if leg.until == prompt else leg.until  # the pass that completes a prompt emits a token
        goes_on = until < prompt + output or (until == prompt + 1 and self.late_token)
        until = min(until, prompt + output)
        if have < prompt:
            context, new, generate = have, min(until, prompt) - have, max(0, until - prompt)
        else:  # the last token is not in the cache yet
            context, new, generate = have - 1, 0, until - have
        if context + new + generate > self.room(leg.instance):
            return None
        return Turn(len(self.turns), request, leg.instance, context, new, generate, until, leg.then, goes_on)

    def give(self, turn: Turn) -> Rank:
        """A rank of its instance takes a turn."""
        self.turns.append(turn)
        turn.there_s = self.now
        turn.priority = self.priorities[turn.request]
        turn.names = self.ids[turn.request] if self.shares else []
        turn.rank = self.instances[turn.instance].choose()
        turn.drafts = len(self.rank_of(turn).acceptance)
        self.rank_of(turn).given.append(turn)
        return self.rank_of(turn)

    def submit(self, request: int, leg: Leg, have: int) -> None:
        """An instance gets a turn, whose context is there."""
        turn = self.turn_of(request, leg, have)
        if turn is None:
            self.rejected.append(request)
            return
        rank = self.give(turn)
        rank.line_up(turn, rank.waiting if turn.left > 0 else rank.coming)
        if rank.may_change(turn):
            self.wake(leg.instance)
        self.promise(turn)

    def rank_of(self, turn: Turn) -> Rank:
        """Where a turn waits, has its memory and decodes."""
        return self.instances[turn.instance].ranks[turn.rank]

    def wake(self, instance: int) -> None:
        """An idle instance looks again at once; any other at the end of its step."""
        if self.instances[instance].idle:
            self.instances[instance].woken = self.now

    def handed(self, turn: Turn) -> int:
        """Tokens that exist for the instance after a turn: it may emit the first."""
        completes = turn.until == self.requests[turn.request][1] + 1
        return turn.until - 1 if completes and self.late_token else turn.until

    def promise(self, turn: Turn) -> None:
        """A turn begins whose next instance is known: under push that one reserves blocks from now on."""
        if self.way in ("push", "chunks") and turn.goes_on and turn.then not in (LATER, turn.instance):
            by_chunk = self.way == "chunks"
            found = self.reserve(turn.request, turn.instance, Leg(turn.then), self.handed(turn), by_chunk=by_chunk)
            turn.feeds = found.turn if found is not None and by_chunk else None

    def ask_for_chunks(self, turn: Turn, cached: int) -> None:
        """A step of a turn has ended: the instance after it takes blocks for whole chunks that it has computed."""
        after, chunk = turn.feeds, self.network.link.chunk_tokens
        if after is None or after.asked is None or not after.sender_at_work or after.withdrawn:
            return
        if cached < after.asked + chunk:
            return
        after.asked = cached // chunk * chunk
        self.line_up_for_blocks(after)

    def line_up_for_blocks(self, turn: Turn) -> None:
        """A turn waits for blocks for its cache."""
        rank = self.rank_of(turn)
        if turn not in rank.coming:
            rank.line_up(turn, rank.coming)
            if rank.may_change(turn):
                self.wake(turn.instance)

    def reserve(self, request: int, origin: int, leg: Leg, have: int, *, by_chunk: bool = False) -> Transfer | None:
        """A turn waits for blocks on the next instance, or will chunk by chunk; None: more than it can hold."""
        turn = self.turn_of(request, leg, have)
        if turn is None:
            return None
        turn.context_elsewhere = turn.sender_at_work = True
        self.give(turn)
        if by_chunk:
            turn.asked = 0
        else:
            self.line_up_for_blocks(turn)
        transfer = Transfer(request, origin, leg.instance, None, leg, have, self.cached(request, have), turn)
        self.pending.append(transfer)
        return transfer

    def cached(self, request: int, have: int) -> int:
        """Tokens of the cache of ``have`` tokens: the one that was emitted last is not in it."""
        return have - 1 if have > self.requests[request][1] else have

    def free(self, turn: Turn) -> None:
        """The blocks of a turn that has ended are free."""
        self.rank_of(turn).give_back(turn)
        self.wake(turn.instance)

    def withdraw(self, transfer: Transfer) -> Turn:
        """Nothing comes to a turn that waits for blocks or has reserved them."""
        self.pending.remove(transfer)
        transfer.dropped = True
        turn = transfer.turn
        turn.asked = None
        rank = self.rank_of(turn)
        if turn in rank.coming:
            rank.coming.remove(turn)
        rank.give_back(turn)
        self.wake(transfer.receiver)
        return turn

    def give_up(self, transfer: Transfer) -> None:
        """A reservation that comes to nothing."""
        turn = self.withdraw(transfer)
        turn.withdrawn = True
        self.rank_of(turn).given.remove(turn)

    # --- what instances tell ----------------------------------------------------------------------------------

    def hear(self, turn: Turn) -> None:
        """A turn has ended, or has its blocks reserved."""
        if turn.finish_s is None:
            transfer = next(each for each in self.pending if each.turn is turn)
            if turn.asked is not None:
                transfer.placed = turn.asked
                self.send_chunks(transfer)
                return
            transfer.reserved_s = self.now
            if transfer.sender is not None and transfer.chunks_s is None:
                self.send(transfer)
            return
        if not turn.goes_on:
            return
        request, named = turn.request, turn.then != LATER
        leg = Leg(turn.then) if named else self.routes[request].pop(0)
        if leg.instance != turn.instance:
            have = self.handed(turn)
            if have < turn.until:  # the next instance computes it again, for the user
                turn.first_token_s = None
                self.given[request].pop()
            self.hand_over(turn, leg, have, named)
            return
        self.free(turn)
        if turn.until < sum(self.requests[request][1:]):
            self.submit(request, leg, turn.until)

    def hand_over(self, turn: Turn, leg: Leg, have: int, named: bool) -> None:
        """The cache of a turn that has ended goes to the instance of the next leg."""
        request = turn.request
        if self.way == "buffer":
            tokens = self.cached(request, have)
            transfer = Transfer(request, turn.instance, leg.instance, turn, leg, have, tokens, None)
            transfer.reserved_s = -math.inf if named else self.now
        else:
            ahead = (each for each in self.pending if each.request == request and each.sender is None)
            promised = next(ahead, None)
            transfer = promised or self.reserve(request, turn.instance, leg, have)
            if transfer is None:
                self.free(turn)
                self.rejected.append(request)
                return
            transfer.sender, transfer.turn.sender_at_work = turn, False
            if promised is not None:
                if transfer.turn.asked is not None:
                    self.line_up_for_blocks(transfer.turn)
                self.wake(leg.instance)
        transfer.asked_s = self.now
        if transfer.reserved_s <= self.now:
            self.send(transfer)

    def send(self, transfer: Transfer) -> None:
        """The cache leaves; one whose receiver had its place before could leave piece by piece."""
        if transfer in self.pending:
            self.pending.remove(transfer)
        begun, window = transfer.reserved_s, None
        if begun < transfer.asked_s:
            window = transfer.asked_s - max(transfer.sender.start_s, begun)
        self.network.send(transfer, transfer.tokens - transfer.gone, window, self.now)

    def send_chunks(self, transfer: Transfer) -> None:
        """Chunks that have blocks leave together, behind those before them."""
        if transfer.chunks_s is None and transfer.placed > transfer.gone:
            tokens, transfer.gone, transfer.chunks_s = transfer.placed - transfer.gone, transfer.placed, self.now
            self.network.send(transfer, tokens, None, self.now)

    def land_chunks(self, transfer: Transfer) -> None:
        """Chunks have arrived, not all of the cache: what has blocks by now follows."""
        done = self.now if transfer.sender is None else transfer.sender.finish_s
        transfer.early_s += max(done - transfer.chunks_s, 0.0)
        transfer.chunks_s = None
        if transfer.reserved_s <= self.now and transfer.sender is not None:
            self.send(transfer)
        else:
            self.send_chunks(transfer)

    def land(self, transfer: Transfer) -> None:
        """The cache has arrived: the blocks of the sender are free, the receiver may go on."""
        if transfer.dropped:
            return
        if transfer in self.pending:
            self.land_chunks(transfer)
            return
        sender, turn = transfer.sender, transfer.turn
        wait = max(transfer.reserved_s - transfer.asked_s, 0.0)
        exposed = self.now - sender.finish_s - wait
        rate = min(self.network.bandwidths[transfer.origin], self.network.bandwidths[transfer.receiver])
        whole = exposed + transfer.hidden / rate + transfer.early_s
        self.moved.append((transfer.request, exposed, whole, wait, transfer.tokens))
        self.free(sender)
        if turn is None:
            self.submit(transfer.request, transfer.leg, transfer.have)
            return
        turn.context_elsewhere, turn.there_s = False, self.now
        rank = self.rank_of(turn)
        rank.line_up(turn, rank.landed)
        if len(rank.landed) == 1:
            self.wake(transfer.receiver)
        self.promise(turn)

    # --- caches that wait for each other ----------------------------------------------------------------------

    def waits_for(self, number: int) -> set[int] | None:
        """Instances that have to act before an idle one, whose blocks all wait for them, has room; None: others."""
        instance, needs, blocks = self.instances[number], set(), set()
        if not instance.idle:
            return None
        for each in self.pending:
            if self.holds_up(each, number):
                needs.add(each.receiver)
                blocks |= {(each.sender.rank, block) for block in each.sender.blocks}
            elif self.has_part(each, number):
                if each.sender is not None and not each.stuck:
                    return None
                needs.add(each.origin if each.sender is None else number)
                blocks |= {(each.turn.rank, block) for block in each.turn.blocks}
        return needs if needs and len(blocks) == instance.used else None

    def holds_up(self, transfer: Transfer, number: int) -> bool:
        """Whether the cache is whole on an instance, and waits for blocks elsewhere."""
        return transfer.origin == number and transfer.sender is not None and transfer.reserved_s > self.now

    def has_part(self, transfer: Transfer, number: int) -> bool:
        """Whether the cache has blocks on an instance, and waits for its sender or for more of them."""
        whole = transfer.reserved_s <= self.now
        if transfer.receiver != number or (whole and transfer.sender is not None):
            return False
        return whole or transfer.placed > 0

    def break_circle(self, number: int) -> None:
        """Work waits on an instance where nothing runs: in a circle of such, the youngest cache is dropped."""
        for each in self.pending:
            each.stuck |= each.receiver == number and each.sender is not None
        circle, todo = {number}, [number]
        while todo:
            needs = self.waits_for(todo.pop())
            if needs is None:
                return
            todo += needs - circle
            circle |= needs
        self.circles += 1
        held = [each for each in self.pending if self.holds_up(each, number)]
        parts = [each for each in self.pending if self.has_part(each, number)]
        chunks = [each for each in parts if each.placed > 0]
        if chunks or not held:
            given = max(chunks or parts, key=lambda each: each.turn.number)
            self.give_up(given)
            if given.sender is not None:  # it is asked for again, as a whole
                again = self.reserve(given.request, given.origin, given.leg, given.have)
                again.sender, again.asked_s, again.turn.sender_at_work = given.sender, given.asked_s, False
            return
        youngest = max(held, key=lambda each: each.sender.number)
        self.free(youngest.sender)
        turn = self.withdraw(youngest)  # its receiver computes all of it
        turn.left += turn.cached + (turn.left == 0)
        turn.cached, turn.context_elsewhere, turn.there_s = 0, False, self.now
        turn.preemptions += 1
        rank = self.rank_of(turn)
        rank.line_up(turn, rank.waiting)
        self.promise(turn)

    # --- records ----------------------------------------------------------------------------------------------

    def late_gaps(self, limit: float) -> list[int]:
        """Gaps between the tokens of each request that are above a limit."""
        times = [self.given.get(request, []) for request in range(len(self.requests))]
        return [sum(late - early > limit for early, late in pairwise(own)) for own in times]

    def records(self) -> dict[str, list[float]]:
        """Columns of the requests by their names in ``records.Requests``; times that did not happen are NaN."""
        columns: dict[str, list[float]] = {}
        for request in range(len(self.requests)):
            for name, value in self.record(request).items():
                columns.setdefault(name, []).append(math.nan if value is None else value)
        return columns

    def record(self, request: int) -> dict[str, float | None]:
        """One request; its turns are those that began, in the order of what they had to begin with."""
        _, prompt, output = self.requests[request]
        turns = [turn for turn in self.turns if turn.request == request and not turn.withdrawn]
        turns.sort(key=lambda turn: turn.context + (turn.prompt == 0))
        exposed, whole, wait, tokens = (
            sum(row[place] for row in self.moved if row[0] == request) for place in range(1, 5)
        )
        row: dict[str, float | None] = {
            "transfer_s": whole,
            "exposed_transfer_s": exposed,
            "reserve_wait_s": wait,
            "transferred_tokens": tokens,
            "preemptions": sum(turn.preemptions for turn in turns),
            "cached_tokens": sum(turn.hit for turn in turns),
            "segments": len(turns),
        }
        if not turns:
            never = {"prefill_start_s": None, "first_token_s": None, "decode_start_s": None, "finish_s": None}
            return row | never | {"prefill_instance": -1, "decode_instance": -1, "status": Outcome.REJECTED}
        last = turns[-1]
        completes = [turn for turn in turns if turn.prompt > 0 and turn.context + turn.prompt == prompt]
        ran = [turn for turn in completes if turn.first_token_s is not None or turn.finish_s is not None]
        emitted = [turn.first_token_s for turn in turns if turn.first_token_s is not None]
        first = emitted[0] if emitted else None
        done = last.context + last.prompt + last.generate + (last.prompt == 0) == prompt + output
        finish = last.finish_s if done and request not in self.rejected else None
        status = Outcome.UNFINISHED if finish is None else Outcome.COMPLETED
        return row | {
            "prefill_start_s": turns[0].start_s,
            "first_token_s": first,
            "decode_start_s": last.start_s if last.prompt == 0 else first,
            "finish_s": finish,
            "prefill_instance": (ran or turns[:1])[-1].instance,  # the last one where a lost cache was computed again
            "decode_instance": last.instance,
            "status": Outcome.REJECTED if request in self.rejected else status,
        }
