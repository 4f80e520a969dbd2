"""Tabulate the step times of one instance, once, from the physics; the kernel interpolates.

A step of n decodes at mean context c and of p tokens of prefill after q cached ones is a sum of three parts:

* everything linear in tokens, and the host: a function of n and of the tokens n + p of the fullest rank; where there is
  prefill, the sum is at least the launches of its kernels;
* scores and values of the decodes: a function of n and c;
* scores and values of the prefill: a function of p, q and the number of pieces, stored a token.

All attention ranks are even in these. What the routed experts take less where ranks hold fewer tokens than the fullest
is the difference of their time at both numbers of tokens, which is tabulated, too.

For one pipeline stage the sum is what ``physics.passes.mixed`` adds up. Steps without prefill are taken from
``physics.passes.decode`` at every n, linear in c between knots. Interpolation stays within 1 % of the physics (tests
sample it), but for one step in a hundred where a kernel splits the keys of few new tokens (2 %). Kernels' times jump
where a tile of rows is full, so the token axis is exact up to 512 and holds both ends of every tile of 64 above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.instance_variants import bare, ffn_of
from disagg_sim.simulation.kernel import entry as kernel
from disagg_sim.simulation.kernel import times as k
from disagg_sim.simulation.kernel.layout import TableRecord, dtype_of
from disagg_sim.simulation.kernel.step_physics import Linear, SplitPhysics, StepPhysics, stair_axis, token_axis

#: Prompts of a step at which prefill attention is tabulated. [1]
PROMPT_AXIS: Floats = 2.0 ** (0.5 * np.arange(13.0))
#: Lengths a doubling at which it is tabulated; finer for MLA, whose fastest form changes at some length. [1]
OCTAVE, LATENT_OCTAVE = 4, 8

#: Kernels and expert imbalance of a step are those of the phase with more tokens.
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PassFlops:
    """FLOP of a model's passes: linear in tokens, in query-key pairs and in emitted tokens. [FLOP]"""

    per_token: float
    per_pair: float
    per_emitted: float


@dataclass(frozen=True, eq=False)
class StepTable:
    """Step times of one instance; ``build`` takes them from the physics, ``affine`` from a formula."""

    head: Any  # one row of sizes and places, see ``layout.TableRecord``
    values: Floats  # the numbers themselves, end to end [s]
    work: PassFlops  # of the whole instance

    @classmethod
    def build(
        cls,
        at: Setup,
        mapping: Sharding,
        *,
        max_sequences: int = 256,
        max_context: int = 131_072,
        max_tokens: int = 32_768,
        mla_form: str = "auto",
    ) -> StepTable:
        """Tabulate the physics of ``at`` on an instance of ``mapping``; takes some tens of milliseconds.

        Beyond ``max_context`` and ``max_tokens`` of a step (all DP ranks) [token] times go on along their last cell.
        """
        ffn, served = ffn_of(mapping), at
        at = replace(at, techniques=()) if at.techniques else at  # the kernel lengthens whole steps
        physics = StepPhysics(at, bare(mapping), mla_form) if ffn is None else SplitPhysics(at, mapping, ffn, mla_form)
        max_sequences = physics.ranks * -(-max_sequences // physics.ranks)  # as many on each as on the fullest rank
        powers = 2.0 ** (0.5 * np.arange(8, 2 * np.ceil(np.log2(max_context)) + 1))  # half powers of two [token]
        knots = np.unique(np.concatenate([[1.0], powers, np.array(physics.kinks, dtype=float)]))
        pasts = np.concatenate([[0.0], powers])
        octave = LATENT_OCTAVE if physics.switches else OCTAVE
        smooth = 2.0 ** (np.arange(int(octave * np.ceil(np.log2(max_tokens))) + 1) / octave)
        lengths = np.union1d(smooth, stair_axis(physics, max_tokens, max_context))
        decodes = np.arange(1.0, max_sequences + 1)
        full = np.arange(min(physics.stages, max_sequences) + 1.0)  # decodes of the linear part up to a full pipeline
        fifths = physics.stages * physics.ranks * np.round(1.2 ** np.arange(64))  # and beyond
        whole = physics.decode(decodes, knots)
        scores = whole - physics.linear("decode", decodes, np.zeros_like(decodes))[:, None]
        tokens = token_axis(max_tokens + (physics.queries - 1) * max_sequences)
        return _Parts(
            whole=whole,
            scores=scores,
            knots=knots,
            rows=np.unique(np.concatenate([full, fifths[fifths < max_sequences], [float(max_sequences)]])),
            tokens=tokens,
            linear=physics.linear,
            lengths=lengths,
            pasts=pasts,
            attention=physics.attention(lengths, pasts, PROMPT_AXIS),
            experts=np.stack([physics.experts(phase, tokens) for phase in PHASES]),
            passed=physics.passed_experts(tokens),
            accepted=_accepted(at, mapping),
            stages=physics.stages,
            ranks=physics.ranks,
            stage=physics.stage(tokens) if physics.stages > 1 else np.zeros(0),
            chunk=int(mapping.chunk_tokens),
            host=(physics.host_once, physics.host_each, physics.launch),
            floor=physics.launches(np.arange(max_sequences + 1.0)) if at.overheads else np.zeros(max_sequences + 1),
            stretch=np.concatenate([[1.0], served.lengthened(np.ones(max_sequences), decodes)]),
        ).table(_work(at))

    @classmethod
    def affine(
        cls,
        *,
        step: float = 0.0,
        per_sequence: float = 0.0,
        per_context: float = 0.0,
        per_token: float = 0.0,
        per_routed: float = 0.0,
        ranks: int = 1,
        max_sequences: int = 256,
        accepted: Sequence[float] = (),
    ) -> StepTable:
        """A table that is exactly ``step + per_sequence*n + per_context*n*c + per_token*p + per_routed*(N + P)``. [s]

        n decodes, their n*c cached tokens and p tokens of prefill are those of the fullest rank, N + P the tokens of
        all ranks. With drafts a sequence counts as so many routed tokens as it verifies, and once for the rest.
        """
        queries = 1 + len(accepted)
        most = ranks * -(-max_sequences // ranks)
        decodes, knots = np.arange(1.0, most + 1), np.array([1.0, 131_072.0])  # it holds beyond them, too
        scores = per_context * decodes[:, None] * knots / ranks
        pasts, lengths = np.array([0.0, knots[-1]]), np.array([1.0, 2.0])
        tokens = token_axis(2 * k.FINE_END)

        def linear(_phase: str, n: Floats, p: Floats) -> Floats:
            return step + (per_sequence * n + per_token * p) / ranks + per_routed * (n * queries + p)

        return _Parts(
            whole=scores + linear("", decodes, np.zeros_like(decodes))[:, None],
            scores=scores,
            knots=knots,
            rows=np.array([0.0, 1.0, float(most)]),
            tokens=tokens,
            linear=linear,
            lengths=lengths,
            pasts=pasts,
            attention=np.zeros((1, PROMPT_AXIS.size, lengths.size, pasts.size)),
            experts=np.stack([per_routed * tokens] * len(PHASES)),
            accepted=np.array(accepted, dtype=float),
            ranks=ranks,
        ).table(PassFlops(0.0, 0.0, 0.0))

    @property
    def max_sequences(self) -> int:
        """Largest number of decodes of a step. [1]"""
        return int(self.head["sequences"][0])

    def step_time(self, decodes: int, context: float, prefill: int = 0, past: float = 0.0, pieces: int = 1) -> float:
        """A step of ``decodes`` at mean ``context`` and ``pieces`` equal pieces of ``prefill`` tokens in all. [s]"""
        return self._ask(kernel.STEP_TIME, decodes, context, pieces, prefill, past)[0]

    @property
    def accepted_tokens(self) -> float:
        """Tokens that a decode step emits for a sequence on average: AL(k) = 1 + m_1 + ... + m_k. [token]"""
        drafts, at = int(self.head["drafts"][0]), int(self.head["accepted_at"][0])
        return 1.0 + float(self.values[at : at + drafts].sum())

    def token_time(self, decodes: int, context: float) -> float:
        """A token of each of ``decodes`` at mean ``context``: a step over the tokens that it emits on average. [s]"""
        return self.step_time(decodes, context) / self.accepted_tokens

    @property
    def stages(self) -> int:
        """Stages of its pipeline. [1]"""
        return int(self.head["pipeline"][0])

    @property
    def ranks(self) -> int:
        """DP ranks of attention. [1]"""
        return int(self.head["ranks"][0])

    def pass_time(self, prompt: int, past: int = 0, prompts: int = 1, *, packed: bool = False) -> tuple[float, float]:
        """Latency of equal prompts in one pass, and how long they keep the instance from starting the next. [s]

        Through a pipeline the prompts of each DP rank go in micro-batches, or, ``packed`` or cut into chunks, together.
        """
        head = self.head[0]
        if head["pipeline"] == 1:
            time = self.step_time(0, 0.0, prompts * prompt, float(past), prompts)
            return time, time
        own = -(-prompts // self.ranks)
        chunk = 0 if packed else int(head["chunk"])
        together = own if packed or chunk else -(-own // min(int(head["pipeline"]), own))
        busy, others = float(self.values[head["host_at"]]), 0.0  # each part has host time of its own, too
        each, more = divmod(prompts, self.ranks)  # of a rank, as even as can be: some have one more
        for first in range(0, own, together):
            count = min(together, own - first)
            longer, shorter = (min(count, max(mine - first, 0)) for mine in (each + 1, each))
            filled = (longer * more + shorter * (self.ranks - more)) / (count * self.ranks)
            slowest, rest = self._ask(kernel.PASS_TIME, chunk, 0.0, count, prompt, past, filled)
            busy, others = busy + slowest, max(others, rest)
        return busy + others, busy

    def largest_prefill(self, decodes: int, context: float, past: int, limit_s: float, most: int = 32_768) -> int:
        """Most tokens of prefill that keep a step within ``limit_s``, at least one. [token]"""
        return int(self._ask(kernel.LARGEST_PREFILL, decodes, context, 1, most, past, limit_s)[0])

    def _ask(
        self, action: int, decodes: int, context: float, pieces: int, prefill: int, past: float, limit_s: float = 0.0
    ) -> tuple[float, float]:
        step = (decodes, float(context), pieces, prefill, float(past), float(limit_s))
        found: tuple[float, float] = kernel.look_up(self.head, self.values, action, step)
        return found


def pack_tables(tables: Sequence[StepTable]) -> tuple[Any, Floats]:
    """Headers of some tables, one each, and the values of the different ones end to end."""
    distinct = {id(table): table for table in tables}
    heads = np.concatenate([table.head for table in distinct.values()])
    starts = np.cumsum([0, *(table.values.size for table in distinct.values())])[:-1]
    for name in PLACES:
        heads[name] += starts
    number = {each: place for place, each in enumerate(distinct)}
    return heads[[number[id(table)] for table in tables]], np.concatenate([each.values for each in distinct.values()])


TABLE = dtype_of(TableRecord)
#: Fields of a header that are places in ``values``.
PLACES = tuple(name for name in TABLE.names or () if name.endswith("_at"))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """The parts of a table before they are laid end to end."""

    whole: Floats  # decode steps, (decodes from 1, knots) [s]
    scores: Floats  # their scores and values [s]
    knots: Floats  # mean contexts [token]
    rows: Floats  # numbers of decodes of the linear part [1]
    tokens: Floats  # its tokens [token]
    linear: Linear
    lengths: Floats  # of prompts [token]
    pasts: Floats  # [token]
    attention: Floats  # (rows, prompts, lengths, pasts) [s/token]
    stage: Floats = field(default_factory=lambda: np.zeros(0))  # of pipelines, (tokens) [s]
    experts: Floats  # of several ranks, (phases, tokens) [s]
    passed: Floats = field(default_factory=lambda: np.zeros((2, 0)))  # of pipelines of several ranks, (2, tokens) [s]
    accepted: Floats  # marginal acceptance of the drafts [1]
    stages: int = 1
    ranks: int
    chunk: int = 0  # [token]
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of a pass, of each part of it; launches of a stage [s]
    floor: Floats | None = None  # least time of a step with prefill, (decodes from 0) [s]; None = 0
    stretch: Floats | None = None  # how many times as long techniques make a step, (decodes from 0) [1]; None = 1

    def table(self, work: PassFlops) -> StepTable:
        """Pack the table into one array of numbers and a header with offsets."""
        none, sequences = np.zeros((1, self.knots.size)), self.whole.shape[0]
        parts = {
            "knots_at": self.knots,
            "decode_at": np.concatenate([none, self.whole]),
            "scores_at": np.concatenate([none, self.scores]),
            "row_at": np.interp(np.arange(sequences + 1.0), self.rows, np.arange(float(self.rows.size))),
            "linear_at": np.stack([self._sheet(phase) for phase in PHASES]),
            "pasts_at": self.pasts,
            "lengths_at": self.lengths,
            "attention_at": self.attention,
            "stage_at": self.stage,
            "host_at": np.array(self.host),
            "floor_at": np.zeros(sequences + 1) if self.floor is None else self.floor,
            "stretch_at": np.ones(sequences + 1) if self.stretch is None else self.stretch,
            "experts_at": self.experts if self.ranks > 1 else np.zeros(0),
            "passed_at": self.passed,
            "accepted_at": self.accepted,
        }
        head, start = np.zeros(1, TABLE), 0
        for name, part in parts.items():
            head[name] = start
            start += part.size
        sizes = {
            "sequences": sequences,
            "knots": self.knots.size,
            "tokens": self.tokens.size,
            "rows": self.rows.size,
            "pasts": self.pasts.size,
            "prompts": self.attention.shape[1],
            "lengths": self.lengths.size,
            "pipeline": self.stages,
            "ranks": self.ranks,
            "chunk": self.chunk,
            "drafts": self.accepted.size,
        }
        for name, size in sizes.items():
            head[name] = size
        values = np.concatenate([part.ravel() for part in parts.values()])
        head.flags.writeable = values.flags.writeable = False
        return StepTable(head, values, work)

    def _sheet(self, phase: str) -> Floats:
        """The linear part in the kernels of one phase, shape (rows, tokens). [s]

        Row n needs a value at its own tokens and below, where no prefill is left: there it runs parallel to the row
        before.
        """
        rows, tokens, own = self.rows, self.tokens, self.rows * (1 + self.accepted.size)
        sheet = np.empty((rows.size, tokens.size))
        sheet[0] = self.linear("prefill", np.zeros_like(tokens), tokens)
        n, t = np.meshgrid(rows[1:], tokens, indexing="ij")
        real = t > own[1:, None]
        sheet[1:][real] = self.linear(phase, n[real], (t - own[1:, None])[real])
        for row in range(1, rows.size):
            first = int(np.argmax(tokens > own[row]))
            sheet[row, :first] = sheet[row - 1, :first] + (sheet[row, first] - sheet[row - 1, first])
        return sheet


def _accepted(at: Setup, mapping: Sharding) -> Floats:
    """Marginal acceptance of the drafts of an instance; none without speculation. [1]"""
    drafts = int(np.max(at.drafts(mapping)))
    return np.array(at.speculation.acceptance[:drafts] if at.speculation else (), dtype=float)


def _work(at: Setup) -> PassFlops:
    """Solve ``a*S + b*S*(S+1)/2 + h`` for the FLOP of three prompts, short enough to lie inside any window."""
    lengths = np.array([32.0, 64.0, 96.0])
    flops = [prefill_work(at.model, isl=int(each), precision=at.precision).flops for each in lengths]
    columns = np.stack([lengths, lengths * (lengths + 1) / 2, np.ones(3)], axis=1)
    return PassFlops(*(float(x) for x in np.linalg.solve(columns, np.array(flops))))
