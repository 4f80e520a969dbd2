"""One serving instance in plain Python, step by step: what the compiled kernel is held to.

Nothing here is fast. Every decode step is a step of the loop, every KV block has a number, and every list is walked
(``reference_rank``). It shares no code with the kernel but the tables of step times. What an instance does:

1. Everything that decodes needs room for one more token. While there is none, the newest turn is preempted.
2. Caches that have landed join. Then what comes with its context takes blocks, in order, and joins, or waits for
   its transfer.
3. Prompts join by mode and admission rule. What was preempted goes before what has not begun.
4. The step runs. What comes meanwhile waits for its end, and where steps are formed ahead for that of the next one,
   unless nothing else is to be done.
"""

import math

from reference_rank import BLOCK, MIXED, Rank, Turn, mean_context

from disagg_sim.simulation.kernel import times
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode, RankChoice
from disagg_sim.simulation.kernel.step_table import StepTable


class Instance:
    """One serving instance: its ranks and their steps."""

    def __init__(self, spec: InstanceSpec, stream: int = 0) -> None:
        self.stream = stream  # of the draws by which drafts are accepted
        self.given: dict[int, list[float]] = {}  # when each request got tokens; all instances write into one
        self.spec, self.turn, self.begins = spec, 0, 0  # whose turn it is to take a request, and prompts first
        self.ranks = [Rank(spec, number) for number in range(spec.table.ranks)]
        self.leaving: list[tuple[float, Turn]] = []  # in the later stages of a pipeline, and when they leave it
        self.stages = int(spec.table.head["pipeline"][0])
        self.left = [0.0] * self.stages  # when the last parts of passes leave the last stage
        self.decodes = False  # whether the step in progress decodes
        self.step_start, self.step_end = 0.0, math.inf
        self.emits_at = math.inf  # when the prompts of the step in progress emit
        self.woken = math.inf  # an idle instance looks again at this time
        self.stalled = False  # work waits, and nothing runs
        self.computed: list[tuple[Turn, int]] = []  # tokens in the cache of each turn when the step ended
        self.decode_steps = self.passes = self.prefill_tokens = self.decode_tokens = 0
        self.busy_s = 0.0

    @property
    def due(self) -> float:
        """When something happens here next."""
        return min(self.step_end, self.woken, self.leaving[0][0] if self.leaving else math.inf)

    @property
    def idle(self) -> bool:
        """Whether no step is in progress."""
        return self.step_end == math.inf

    @property
    def used(self) -> int:
        """Blocks that turns hold."""
        return sum(rank.blocks - len(rank.free) for rank in self.ranks)

    def past(self, rank: Rank) -> int:
        """Tokens before the next piece of a rank's next prompt."""
        turn = next(rank.candidates())
        return turn.cached or (len(rank.found(turn)[0]) * BLOCK if rank.shares else 0)

    def form(self, now: float, news: list[Turn]) -> None:
        """Form the next step of all ranks; ``news`` gets the turns whose blocks are reserved."""
        self.stalled, self.woken = False, math.inf
        self.decodes, self.step_start, self.step_end = False, now, math.inf
        for rank in self.ranks:
            rank.make_room(now, news)
        full = self.stages > 1 and self.left[0] > now  # as many passes are under way as there are stages
        limit = self.within_limit() if self.spec.mode == Mode.SLO_AWARE else None
        left, count = self.spec.max_prompts, len(self.ranks)
        for rank in [] if full else self.ranks[self.begins :] + self.ranks[: self.begins]:
            rank.max_prompts = min(math.ceil(self.spec.max_prompts / count), left)
            rank.take_pieces(now, limit)
            left -= len(rank.pieces)
        pieces = [turn for rank in self.ranks for turn in rank.pieces]
        self.begins = (self.begins + bool(pieces)) % count
        decoding = [turn for rank in self.ranks for turn in rank.decoding]
        decodes = decoding or any(turn.generate - turn.emitted > 1 for turn in pieces)  # now, or after the pass
        whole = self.spec.mode not in MIXED
        if pieces and (whole or (self.stages > 1 and not decodes)):
            self.step_end = now + self.swapping() + pass_host(self.spec.table)
            for slowest, others in pass_parts(self.spec.table, [rank.pieces for rank in self.ranks], whole=whole):
                self.step_end = max(self.step_end, self.left.pop(0)) + slowest  # that left: another may enter
                self.emits_at = max(self.step_end + others, (self.left or [0.0])[-1] + slowest)
                self.left.append(self.emits_at)
            if decodes:
                self.step_end = self.emits_at  # decodes come after it: they wait for its last stage
        elif pieces or decoding:
            self.decodes = bool(decoding)
            for rank in self.ranks:
                rank.grow()
            time = step_time(self.spec.table, [(rank.decoding, rank.pieces) for rank in self.ranks])
            self.step_end = self.emits_at = now + time + self.swapping()
        else:
            late = any(rank.newcomers() for rank in self.ranks)
            if late or any(rank.preempted for rank in self.ranks):  # that made room; that are looked at now
                self.woken = now
            self.see(math.inf)
            waiting = any(rank.prompts() or rank.coming for rank in self.ranks)
            self.stalled = waiting and not full and not late
            if waiting and full:
                self.woken = min(self.woken, self.left[0])

    def swapping(self) -> float:
        """How long the step that begins waits for blocks that go to the host or come back."""
        wait, self.ranks[0].swapping_s = self.ranks[0].swapping_s, 0.0
        return wait

    def choose(self) -> int:
        """The rank that takes a request: vLLM's, SGLang's or TensorRT-LLM's choice, of those that may run one."""
        open_ranks = [k for k, rank in enumerate(self.ranks) if rank.max_sequences > 0]
        count = len(self.ranks)

        def key(k: int) -> float:
            rank = self.ranks[k]
            if self.spec.rank_choice == RankChoice.IN_TURN:
                return (k - self.turn) % count
            if self.spec.rank_choice == RankChoice.FEWEST_TOKENS:
                requests = [len(each.given) for each in self.ranks]
                share = max(math.ceil((sum(requests) + 1) / count), *requests)
                return sum(turn.context + turn.prompt for turn in rank.given) if requests[k] < share else math.inf
            leaving = sum(turn.rank == k for _, turn in self.leaving)
            running = len(rank.decoding) + len(rank.prefilling) + leaving
            return 4 * (len(rank.given) - running) + running

        chosen = min(open_ranks, key=key)
        self.turn = (chosen + 1) % count
        return chosen

    def within_limit(self) -> int:
        """Tokens of prefill for each rank that keep a step within its limit, were all as full as the fullest.

        At least ``least_prefill`` over all ranks after a past so long that it exceeds the limit by itself.
        """
        spec, count = self.spec, len(self.ranks)
        waiting = [rank for rank in self.ranks if next(rank.candidates(), None) is not None]
        most = max((rank.token_budget - len(rank.decoding) * rank.verified for rank in waiting), default=0)
        if most <= 0:
            return 0
        past = max(self.past(rank) for rank in waiting)
        loads = [(len(rank.decoding) * count, mean_context(rank.decoding)) for rank in self.ranks if rank.decoding]
        context = max(loads, key=lambda load: spec.table.step_time(*load))[1] if loads else 0.0
        decodes = max((load[0] for load in loads), default=0)
        found = spec.table.largest_prefill(decodes, context, past, spec.step_limit_s, most * count)
        least = min(spec.least_prefill, most * count)
        each = math.ceil(least / count)
        if found < least and spec.table.step_time(0, 0.0, each * count, past, count) > spec.step_limit_s:
            return each
        return found // count

    def happen(self, now: float, news: list[Turn]) -> None:
        """What is due: prompts leave the pipeline, or the step ends and the next one is formed."""
        if self.leaving and self.leaving[0][0] <= now:
            while self.leaving and self.leaving[0][0] <= now:
                self.complete_prompt(self.leaving.pop(0)[1], now, news)
            if self.idle:
                self.form(now, news)
            return
        if not self.idle:
            self.end_step(now, news)
            if self.spec.steps_ahead and self.stages == 1:
                self.see(self.step_start)
        self.form(now, news)

    def see(self, until: float) -> None:
        """The step that is formed has what was there until a time."""
        for rank in self.ranks:
            rank.seen_s = until

    def end_step(self, now: float, news: list[Turn]) -> None:
        """Every decode has emitted a token, and the pieces are in the cache."""
        self.busy_s += now - self.step_start
        self.decode_steps += self.decodes
        self.passes += any(rank.pieces for rank in self.ranks)
        for rank in self.ranks:
            if self.decodes:
                self.end_decodes(rank, now, news)
            for turn in rank.pieces:
                self.prefill_tokens += turn.piece
                turn.cached += turn.piece
                turn.left -= turn.piece
                if self.spec.finds_computed:
                    rank.name(turn, turn.cached)
                if turn.left == 0:
                    rank.prefilling.remove(turn)
                    if self.emits_at > now:
                        self.leaving.append((self.emits_at, turn))
                    else:
                        self.complete_prompt(turn, now, news)
        for rank in self.ranks:
            turns = sorted(rank.decoding + rank.prefilling, key=lambda each: each.number)
            self.computed += [(turn, turn.cached) for turn in turns]

    def end_decodes(self, rank: Rank, now: float, news: list[Turn]) -> None:
        """The decodes of a rank have a token more, and those drafts that were accepted."""
        rank.decode_steps += 1
        for turn in sorted(rank.decoding, key=lambda each: each.number):
            draw = uniform(self.stream, turn.request, turn.cached)
            accepted = sum(draw < share for share in rank.acceptance)
            tokens = min(1 + accepted, turn.generate - turn.emitted)
            turn.cached += tokens
            turn.emitted += tokens
            self.decode_tokens += tokens
            turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
            self.given.setdefault(turn.request, []).append(now)
            if turn.emitted == turn.generate:
                rank.decoding.remove(turn)
                self.finish(turn, now, news)

    def complete_prompt(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The prompt is in the cache: it emits a token, and ends or decodes."""
        if turn.emitted < turn.generate:
            turn.emitted += 1
            turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
            self.given.setdefault(turn.request, []).append(now)
        if turn.emitted == turn.generate:
            self.finish(turn, now, news)
        else:
            self.ranks[turn.rank].decode(turn)

    def finish(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The turn is over; one that goes on elsewhere keeps its blocks until its cache has moved."""
        turn.finish_s = now
        self.ranks[turn.rank].given.remove(turn)
        if not turn.goes_on:
            self.ranks[turn.rank].give_back(turn)
        news.append(turn)


def uniform(stream: int, request: int, place: int) -> float:
    """A number from [0, 1) for a place of a request: the finaliser of MurmurHash3 (A. Appleby, public domain)."""

    def mix(bits: int) -> int:
        bits %= 2**32
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        return bits ^ bits >> 16

    return mix(mix(stream ^ mix(request + 1)) + place * 0x9E3779B9) / 2**32


# --- step times: what the tables of the kernel say --------------------------------------------------------------


@entry
def _piece_time(table, values, micro, alike, length, past):
    return times.piece_time(table[0], values, micro, alike, length, past)


@entry
def _linear_time(table, values, sheet, decodes, tokens):
    return times.linear_time(table[0], values, sheet, decodes, tokens)


@entry
def _expert_time(table, values, sheet, tokens):
    return times.expert_time(table[0], values, sheet, tokens)


@entry
def _scores_time(table, values, decodes, context):
    head = table[0]
    left, value, slope = times.decode_line(head, values, head.scores_at, decodes, times.knot_of(head, values, context))
    return value + (context - left) * slope


@entry
def _pass_part(table, values, chunk, prompts, length, past, filled):
    return times.pass_part(table[0], values, chunk, prompts, length, past, filled)


def attention_time(table: StepTable, decoding: list[Turn], pieces: list[Turn], micro: int) -> float:
    """Scores and values on one rank: a piece takes its share of a batch of its kind with all their pairs."""
    tables, pairs = (table.head, table.values), [turn.piece * (turn.cached + 0.5 * turn.piece) for turn in pieces]
    decodes = _scores_time(*tables, len(decoding) * table.ranks, mean_context(decoding)) if decoding else 0.0
    if not pieces:
        return decodes

    def alone(turn: Turn, alike: float) -> float:
        return _piece_time(*tables, micro, alike, float(turn.piece), float(turn.cached))

    prefill = sum(alone(turn, max(sum(pairs) / own, 1.0)) for turn, own in zip(pieces, pairs, strict=True))
    if len(pieces) > 1:  # one launch computes all: not before the piece with the most pairs is done
        prefill = max(prefill, alone(pieces[pairs.index(max(pairs))], 1.0))
    return decodes + prefill


def step_time(table: StepTable, ranks: list[tuple[list[Turn], list[Turn]]]) -> float:
    """A step of the decodes and the pieces of prompts of every rank: the slowest counts, and the experts of all."""
    tables, count = (table.head, table.values), table.ranks
    full = max(len(decoding) for decoding, _ in ranks) * count  # decodes if all ranks had as many as the fullest
    decodes, prefill = sum(len(decoding) for decoding, _ in ranks), sum(turn.piece for _, own in ranks for turn in own)
    micro, verified = min(int(table.head["pipeline"][0]), max(full, 1)), 1 + int(table.head["drafts"][0])
    attention = max(attention_time(table, *own, micro) for own in ranks)
    if prefill == 0:
        one = 1.0  # at any context: what is not scores and values does not depend on it
        linear = table.step_time(full, one) - _scores_time(*tables, full, one)
        routed = _expert_time(*tables, 1, decodes * verified) - _expert_time(*tables, 1, full * verified)
        return linear + attention + routed

    def tokens(decoding: list[Turn], pieces: list[Turn]) -> int:
        own = math.ceil(len(decoding) * count / micro) * verified
        return own * micro + sum(turn.piece for turn in pieces) * count

    fullest, sheet = max(tokens(*own) for own in ranks), 0 if prefill > decodes * verified else 1
    linear = _linear_time(*tables, sheet, full, fullest)
    linear += _expert_time(*tables, sheet, decodes * verified + prefill) - _expert_time(*tables, sheet, fullest)
    return max(linear + attention, float(table.values[table.head["floor_at"][0] + full]))


def pass_host(table: StepTable) -> float:
    """Host time of a pass through a pipeline, beside that of its parts."""
    return float(table.values[table.head["host_at"][0]]) if table.head["pipeline"][0] > 1 else 0.0


def pass_parts(table: StepTable, ranks: list[list[Turn]], *, whole: bool) -> list[tuple[float, float]]:
    """The parts of a pass, one after the other: the time of the slowest stage of each, and of all others."""
    stages, most = int(table.head["pipeline"][0]), max(len(pieces) for pieces in ranks)
    if stages == 1:
        return [(step_time(table, [([], pieces) for pieces in ranks]), 0.0)]
    chunk = int(table.head["chunk"][0]) if whole else 0
    together = most if chunk or not whole else math.ceil(most / min(stages, most))  # of a micro-batch
    parts = []
    for first in range(0, most, together):
        times, groups = [], [pieces[first : first + together] for pieces in ranks]
        of_all = sum(turn.piece for group in groups for turn in group)
        for group in groups:
            if group:
                tokens, pasts = sum(turn.piece for turn in group), sum(turn.cached for turn in group)
                pairs = sum(turn.piece * (turn.cached + turn.piece / 2) for turn in group)
                length = max(math.floor(pairs / (pasts + tokens / 2) + 0.5), 1)  # of equal prompts that have all three
                past = max(math.floor(pairs / tokens - length / 2 + 0.5), 0)
                filled = of_all / (tokens * table.ranks)
                times.append(_pass_part(table.head, table.values, chunk, tokens / length, length, past, filled))
        parts.append((max(slowest for slowest, _ in times), max(others for _, others in times)))
    return parts
