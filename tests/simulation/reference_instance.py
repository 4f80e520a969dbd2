"""One serving instance in plain Python, step by step: what the compiled kernel is held to.

Nothing here is fast. Every decode step is a step of the loop, every KV block has a number, and every list is walked.
It shares no code with the kernel but the tables of step times.

A request is served in *turns*, one for each leg of its route: ``context`` tokens are in the cache when a turn begins,
``prompt`` tokens are computed, ``generate`` tokens are emitted, the first of them by the pass that completes the
prompt. What an instance does:

1. Everything that decodes needs room for one more token. While there is none, the newest turn is preempted.
2. Caches that have landed join. Then what comes with its context takes blocks, in order, and joins, or waits for
   its transfer.
3. Prompts join by mode and admission rule. What was preempted goes before what has not begun.
4. The step runs. What comes meanwhile waits for its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from disagg_sim.simulation.kernel import times
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.fleet import InstanceSpec
from disagg_sim.simulation.kernel.layout import Admission, Mode
from disagg_sim.simulation.kernel.step_table import StepTable

BLOCK = 16  # tokens of a KV block [token]
MIXED = (Mode.CHUNKED, Mode.SLO_AWARE)  # decodes and pieces of prompts share a step


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return math.ceil(tokens / BLOCK)


@dataclass(eq=False)
class Turn:
    """What one instance does for a request."""

    number: int  # in the order of submission
    request: int
    instance: int
    context: int
    prompt: int
    generate: int
    until: int  # tokens of the request that exist when it ends
    then: int  # the instance after it, or LATER
    goes_on: bool  # another turn follows
    hit: int = 0  # prompt tokens found in the prefix cache
    context_elsewhere: bool = False  # blocks are reserved before its cache moves
    sender_at_work: bool = False  # and the turn before it has not ended
    withdrawn: bool = False  # a reservation that was given up
    left: int = 0  # prompt tokens to compute
    cached: int = 0
    emitted: int = 0
    piece: int = 0  # prompt tokens of it in this step
    blocks: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # full blocks when it was preempted
    joined: int = 0  # decode steps of its instance when it began to decode
    preemptions: int = 0
    start_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None

    def __post_init__(self) -> None:
        self.left, self.cached = self.prompt - self.hit, self.context + self.hit

    @property
    def most_blocks(self) -> int:
        """Blocks that it holds with its last token."""
        return blocks_of(
            self.context + self.prompt + (self.generate if self.prompt == 0 else max(self.generate - 1, 0))
        )


class Instance:
    """One serving instance: its memory, its queues and its steps."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.free = list(range(spec.blocks))  # blocks in the order in which they became free
        self.holds: dict[int, Turn] = {}  # block -> the turn whose tokens are in it, maybe freed since
        self.holding: list[Turn] = []  # turns with blocks, in whatever state
        self.decoding: list[Turn] = []
        self.prefilling: list[Turn] = []  # admitted prompts, the oldest first
        self.waiting: list[Turn] = []  # prompts without blocks, the preempted ones first
        self.coming: list[Turn] = []  # turns that only decode, and all that wait for a reservation
        self.landed: list[Turn] = []  # caches in reserved blocks, without a sequence yet
        self.leaving: list[tuple[float, Turn]] = []  # in the later stages of a pipeline, and when they leave it
        self.pieces: list[Turn] = []  # of the step in progress
        self.decodes = False  # whether the step in progress decodes
        self.step_start, self.step_end = 0.0, math.inf
        self.emits_at = math.inf  # when the prompts of the step in progress emit
        self.woken = math.inf  # an idle instance looks again at this time
        self.preempted = False  # in the step that is formed
        self.stalled = False  # work waits, and nothing runs
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

    # --- memory -----------------------------------------------------------------------------------------------

    def take(self, turn: Turn, count: int) -> None:
        """The blocks that have been free for longest; what was cached in them is lost."""
        for _ in range(count):
            block = self.free.pop(0)
            self.holds[block] = turn
            turn.blocks.append(block)
        if turn not in self.holding:
            self.holding.append(turn)

    def give_back(self, turn: Turn) -> None:
        """Free all blocks of a turn, the last first; their content stays until they are taken."""
        self.free += reversed(turn.blocks)
        turn.blocks = []
        if turn in self.holding:
            self.holding.remove(turn)

    def still_cached(self, turn: Turn) -> list[int]:
        """The first of its blocks at preemption that nobody has taken since."""
        found: list[int] = []
        for block in turn.kept:
            if block not in self.free or self.holds[block] is not turn:
                break
            found.append(block)
        return found

    def growth(self) -> int:
        """Blocks that the next decode step needs."""
        return sum(turn.cached == BLOCK * len(turn.blocks) for turn in self.decoding)

    def admit(self, turn: Turn, piece: int) -> bool:
        """Take the blocks that a turn needs to begin with ``piece`` tokens, if the admission rule finds them free."""
        rule, found = self.spec.admission, self.still_cached(turn)
        tokens = turn.cached + turn.left
        decodes_only = turn.left == 0
        if decodes_only and turn.context_elsewhere:
            tokens += 1  # a reservation holds the next token, too
        whole = blocks_of(tokens)
        need = whole
        if rule != Admission.PROMPT and not decodes_only and not turn.context_elsewhere:  # chunk by chunk
            need = blocks_of(min(turn.cached + len(found) * BLOCK + piece, tokens))
        asked = need if rule == Admission.FIRST_CHUNK else whole
        if rule == Admission.OUTPUT_FITS:
            asked = turn.most_blocks + sum(each.most_blocks - len(each.blocks) for each in self.holding)
        else:
            asked += self.growth()
            if decodes_only and not turn.context_elsewhere and tokens % BLOCK == 0:
                asked += 1
        spare = 0 if not self.holding else int(self.spec.watermark * self.spec.blocks)
        if asked > len(self.free) - spare:
            return False
        for block in found:
            self.free.remove(block)
        turn.cached += len(found) * BLOCK
        turn.left -= len(found) * BLOCK
        turn.blocks, turn.kept = found, []
        self.take(turn, need - len(found))
        return True

    def extend(self, turn: Turn, piece: int) -> bool:
        """Take the blocks of the next piece of an admitted prompt, from the newest turns if need be, maybe itself."""
        need = blocks_of(turn.cached + piece) - len(turn.blocks)
        while need > 0 and need + self.growth() > len(self.free):
            self.preempt_newest()
            if turn not in self.prefilling:
                return False
        self.take(turn, max(need, 0))
        return True

    def preempt_newest(self) -> None:
        """The last admitted prompt; else what joined last, of several the one that was submitted last."""
        if self.prefilling:
            turn = self.prefilling.pop()
        else:
            turn = max(self.decoding, key=lambda each: (each.joined, each.number))
            self.decoding.remove(turn)
        if self.spec.keeps_preempted:
            turn.kept = turn.blocks[: turn.cached // BLOCK]
        self.give_back(turn)
        turn.left += turn.cached + (turn.left == 0)  # and the token that was emitted last, if it decodes
        turn.cached = 0
        turn.preemptions += 1
        self.preempted = True
        self.waiting.insert(0, turn)

    # --- forming a step ---------------------------------------------------------------------------------------

    def full(self) -> bool:
        """Whether all sequences are taken."""
        return len(self.decoding) + len(self.prefilling) >= self.spec.max_sequences

    def decode(self, turn: Turn) -> None:
        """Its cache is complete: it decodes from the next step on."""
        turn.joined = self.decode_steps
        self.decoding.append(turn)

    def form(self, now: float, news: list[Turn]) -> None:
        """Form the next step; ``news`` gets the turns whose blocks are reserved."""
        self.preempted, self.stalled, self.woken = False, False, math.inf
        self.pieces, self.decodes, self.step_start, self.step_end = [], False, now, math.inf
        while self.decoding and self.growth() > len(self.free):
            self.preempt_newest()
        self.join(now, news)
        self.pieces = self.chunks(now) if self.spec.mode in MIXED else self.whole_prompts(now)
        if self.pieces and self.spec.mode not in MIXED:
            latency, busy = pass_times(self.spec.table, self.pieces)
            if self.decoding or any(turn.generate - turn.emitted > 1 for turn in self.pieces):
                busy = latency  # decodes come after it: they wait for its last stage
            self.step_end, self.emits_at = now + busy, now + latency
        elif self.pieces or self.decoding:
            self.decodes = bool(self.decoding)
            for turn in self.decoding:
                if turn.cached == BLOCK * len(turn.blocks):
                    self.take(turn, 1)
            self.step_end = self.emits_at = now + step_time(self.spec.table, self.decoding, self.pieces)
        else:
            self.stalled = bool(self.waiting or self.prefilling or self.coming)

    def join(self, now: float, news: list[Turn]) -> None:
        """Caches that have landed join; then what comes with its context takes blocks, and joins or is reserved."""
        while self.landed and not self.full():
            turn = self.landed.pop(0)
            turn.start_s = now if turn.start_s is None else turn.start_s
            if turn.left > 0:
                self.prefilling.append(turn)
            else:
                if len(turn.blocks) > blocks_of(turn.cached):  # it takes it again with its first step
                    self.free.insert(0, turn.blocks.pop())
                self.decode(turn)
        while self.coming and not self.full() and self.admit(self.coming[0], 0):
            turn = self.coming.pop(0)
            if turn.context_elsewhere:
                news.append(turn)
            else:
                turn.start_s = now if turn.start_s is None else turn.start_s
                self.decode(turn)

    def may_begin(self, turn: Turn, piece: int, now: float) -> bool:
        """Admit the first waiting prompt, if nothing speaks against it."""
        chunkwise = self.spec.admission != Admission.PROMPT
        if self.full() or (self.preempted and chunkwise):
            return False
        if self.coming and not self.coming[0].sender_at_work:  # what could come now goes before prompts
            return False
        if not self.admit(turn, piece):
            return False
        self.waiting.remove(turn)
        self.prefilling.append(turn)
        turn.start_s = now if turn.start_s is None else turn.start_s
        return True

    def prompts(self) -> list[Turn]:
        """All prompts in order, those with blocks first."""
        return self.prefilling + self.waiting

    def chunks(self, now: float) -> list[Turn]:
        """Pieces of prompts beside the decodes, up to the token budget, or to the step limit."""
        spec, pieces = self.spec, []
        budget = spec.token_budget - len(self.decoding)
        if budget <= 0 or not self.prompts():
            return []
        if spec.mode == Mode.SLO_AWARE:
            budget = self.within_limit(self.prompts()[0].cached, budget)
        most = max(budget // spec.table.ranks, 1)  # a prompt lives on one DP rank
        for turn in self.prompts():
            if budget <= 0 or len(pieces) == spec.max_prompts:
                break
            piece = min(turn.left, budget, most)
            if turn not in self.prefilling:
                if not self.may_begin(turn, min(budget, most), now):
                    break
            elif not self.extend(turn, piece):
                break
            turn.piece = min(turn.left, budget, most)  # less is left where blocks were still cached
            budget -= turn.piece
            pieces.append(turn)
        return pieces

    def within_limit(self, past: int, most: int) -> int:
        """Tokens of one piece that keep a step within its limit; at least ``least_prefill`` after a long past."""
        spec, count = self.spec, len(self.decoding)
        found = spec.table.largest_prefill(count, mean_context(self.decoding), past, spec.step_limit_s, most)
        least = min(spec.least_prefill, most)
        if found < least and spec.table.step_time(0, 0.0, least, past) > spec.step_limit_s:
            return least
        return found

    def whole_prompts(self, now: float) -> list[Turn]:
        """Whole prompts of one pass, while decodes wait."""
        spec, pieces, budget = self.spec, [], self.spec.token_budget
        for turn in self.prompts():
            if len(pieces) == (1 if spec.mode == Mode.ONE_PROMPT else spec.max_prompts):
                break
            if spec.mode == Mode.PREFILL_FIRST and pieces and turn.left > budget:
                break
            if turn not in self.prefilling:
                if not self.may_begin(turn, turn.left, now):
                    break
            elif not self.extend(turn, turn.left):
                break
            turn.piece = turn.left
            budget -= turn.piece
            pieces.append(turn)
        return pieces

    # --- the end of a step ------------------------------------------------------------------------------------

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
        self.form(now, news)

    def end_step(self, now: float, news: list[Turn]) -> None:
        """Every decode has emitted a token, and the pieces are in the cache."""
        self.busy_s += now - self.step_start
        if self.decodes:
            self.decode_steps += 1
            self.decode_tokens += len(self.decoding)
            for turn in sorted(self.decoding, key=lambda each: each.number):
                turn.cached += 1
                turn.emitted += 1
                turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
                if turn.emitted == turn.generate:
                    self.decoding.remove(turn)
                    self.finish(turn, now, news)
        self.passes += bool(self.pieces)
        for turn in self.pieces:
            self.prefill_tokens += turn.piece
            turn.cached += turn.piece
            turn.left -= turn.piece
            if turn.left == 0:
                self.prefilling.remove(turn)
                if self.emits_at > now:
                    self.leaving.append((self.emits_at, turn))
                else:
                    self.complete_prompt(turn, now, news)

    def complete_prompt(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The prompt is in the cache: it emits a token, and ends or decodes."""
        if turn.emitted < turn.generate:
            turn.emitted += 1
            turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
        if turn.emitted == turn.generate:
            self.finish(turn, now, news)
        else:
            self.decode(turn)

    def finish(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The turn is over; one that goes on elsewhere keeps its blocks until its cache has moved."""
        turn.finish_s = now
        if not turn.goes_on:
            self.give_back(turn)
        news.append(turn)


# --- step times: what the tables of the kernel say --------------------------------------------------------------


@entry
def _piece_time(table, values, micro, alike, length, past):
    return times.piece_time(table[0], values, micro, alike, length, past)


@entry
def _mixed_time(table, values, decodes, context, prefill, fullest, attention):
    return times.mixed_time(table[0], values, decodes, context, prefill, fullest, attention)


@entry
def _pass_part(table, values, prompts, length, past):
    return times.pass_part(table[0], values, prompts, length, past)


def mean_context(decoding: list[Turn]) -> float:
    """Keys that a decode reads on average, its own included."""
    return sum(turn.cached + 1 for turn in decoding) / len(decoding) if decoding else 0.0


def step_time(table: StepTable, decoding: list[Turn], pieces: list[Turn]) -> float:
    """A step of decodes and pieces of prompts: a piece takes its share of a batch of its kind with all their pairs."""
    count, context = len(decoding), mean_context(decoding)
    if not pieces:
        return table.step_time(count, context)
    tokens = sum(turn.piece for turn in pieces)
    fullest = max(*(turn.piece for turn in pieces), math.ceil(tokens / table.ranks))  # tokens of the fullest DP rank
    share = fullest / tokens
    micro = min(int(table.head["pipeline"][0]), max(count, 1))
    pairs = [turn.piece * (turn.cached + 0.5 * turn.piece) for turn in pieces]

    def alone(turn: Turn, alike: float) -> float:
        return _piece_time(table.head, table.values, micro, alike, float(turn.piece), float(turn.cached))

    attention = 0.0
    for turn, own in zip(pieces, pairs, strict=True):
        attention += share * alone(turn, max(share * sum(pairs) / own, 1.0))
    if len(pieces) > 1:  # one launch computes all: not before the piece with the most pairs is done
        attention = max(attention, alone(pieces[pairs.index(max(pairs))], 1.0))
    return _mixed_time(table.head, table.values, count, context, tokens, fullest, attention)


def pass_times(table: StepTable, pieces: list[Turn]) -> tuple[float, float]:
    """When the tokens of a pass of whole prompts come, and when the next pass may begin."""
    stages, ranks = int(table.head["pipeline"][0]), table.ranks
    if stages == 1:
        return (step_time(table, [], pieces),) * 2
    own = math.ceil(len(pieces) / ranks)
    together = math.ceil(own / min(stages, own)) * ranks  # prompts of a micro-batch
    if table.head["chunk"][0] > 0:
        together = len(pieces)
    busy, last = float(table.values[table.head["host_at"][0]]), 0.0
    for first in range(0, len(pieces), together):
        group = pieces[first : first + together]
        length = math.ceil(sum(turn.piece for turn in group) / len(group))
        past = sum(turn.cached for turn in group) // len(group)
        slowest, others = _pass_part(table.head, table.values, max(len(group) / ranks, 1.0), length, past)
        busy, last = busy + slowest, max(last, others)
    return busy + last, busy
