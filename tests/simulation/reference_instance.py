"""One serving instance in plain Python, step by step: what the compiled kernel is held to.

Nothing here is fast. Every decode step is a step of the loop, every KV block has a number, and every list is walked
(``reference_rank``). It shares no code with the kernel but the tables of step times. What an instance does:

1. Everything that decodes needs room for one more token. While there is none, the newest turn is preempted.
2. Caches that have landed join. Then what comes with its context takes blocks, in order, and joins, or waits for
   its transfer.
3. Prompts join by mode and admission rule. What was preempted goes before what has not begun.
4. The step runs. What comes meanwhile waits for its end.
"""

from __future__ import annotations

import math

from reference_rank import MIXED, Rank, Turn, mean_context

from disagg_sim.simulation.kernel import times
from disagg_sim.simulation.kernel.compiled import entry
from disagg_sim.simulation.kernel.fleet import InstanceSpec
from disagg_sim.simulation.kernel.step_table import StepTable


class Instance:
    """One serving instance: its ranks and their steps."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec, self.ranks = spec, [Rank(spec)]
        self.leaving: list[tuple[float, Turn]] = []  # in the later stages of a pipeline, and when they leave it
        self.decodes = False  # whether the step in progress decodes
        self.step_start, self.step_end = 0.0, math.inf
        self.emits_at = math.inf  # when the prompts of the step in progress emit
        self.woken = math.inf  # an idle instance looks again at this time
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

    @property
    def used(self) -> int:
        """Blocks that turns hold."""
        return sum(rank.blocks - len(rank.free) for rank in self.ranks)

    def form(self, now: float, news: list[Turn]) -> None:
        """Form the next step of all ranks; ``news`` gets the turns whose blocks are reserved."""
        self.stalled, self.woken = False, math.inf
        self.decodes, self.step_start, self.step_end = False, now, math.inf
        for rank in self.ranks:
            rank.make_room(now, news)
        for rank in self.ranks:
            rank.take_pieces(now)
        pieces = [turn for rank in self.ranks for turn in rank.pieces]
        decoding = [turn for rank in self.ranks for turn in rank.decoding]
        if pieces and self.spec.mode not in MIXED:
            latency, busy = pass_times(self.spec.table, pieces)
            if decoding or any(turn.generate - turn.emitted > 1 for turn in pieces):
                busy = latency  # decodes come after it: they wait for its last stage
            self.step_end, self.emits_at = now + busy, now + latency
        elif pieces or decoding:
            self.decodes = bool(decoding)
            for rank in self.ranks:
                rank.grow()
            self.step_end = self.emits_at = now + step_time(self.spec.table, decoding, pieces)
        else:
            self.stalled = any(rank.prompts() or rank.coming for rank in self.ranks)

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
        self.decode_steps += self.decodes
        self.passes += any(rank.pieces for rank in self.ranks)
        for rank in self.ranks:
            if self.decodes:
                self.end_decodes(rank, now, news)
            for turn in rank.pieces:
                self.prefill_tokens += turn.piece
                turn.cached += turn.piece
                turn.left -= turn.piece
                if turn.left == 0:
                    rank.prefilling.remove(turn)
                    if self.emits_at > now:
                        self.leaving.append((self.emits_at, turn))
                    else:
                        self.complete_prompt(turn, now, news)

    def end_decodes(self, rank: Rank, now: float, news: list[Turn]) -> None:
        """The decodes of a rank have a token more."""
        rank.decode_steps += 1
        self.decode_tokens += len(rank.decoding)
        for turn in sorted(rank.decoding, key=lambda each: each.number):
            turn.cached += 1
            turn.emitted += 1
            turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
            if turn.emitted == turn.generate:
                rank.decoding.remove(turn)
                self.finish(turn, now, news)

    def complete_prompt(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The prompt is in the cache: it emits a token, and ends or decodes."""
        if turn.emitted < turn.generate:
            turn.emitted += 1
            turn.first_token_s = now if turn.first_token_s is None else turn.first_token_s
        if turn.emitted == turn.generate:
            self.finish(turn, now, news)
        else:
            self.ranks[turn.rank].decode(turn)

    def finish(self, turn: Turn, now: float, news: list[Turn]) -> None:
        """The turn is over; one that goes on elsewhere keeps its blocks until its cache has moved."""
        turn.finish_s = now
        if not turn.goes_on:
            self.ranks[turn.rank].give_back(turn)
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
