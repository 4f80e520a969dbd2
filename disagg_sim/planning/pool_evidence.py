"""Find how far the forecast of a planned pool has been checked, and what its times rest on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from disagg_sim.certainty.pool_parts import split_parts
from disagg_sim.certainty.trust import Shares, Trust, added, trust_shares
from disagg_sim.domain import Sharding
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.design import PlannedPool
from disagg_sim.planning.pools import PrefillChoice
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.layouts import LAUNCHABLE, NOT_LAUNCHABLE, checked_kind, evidence
from disagg_sim.simulation.instance_variants import ffn_of, split_of

#: Of co-located pools of engines whose served runs stopped decode for prefill (``EngineSpec.mixed_steps``).
UNMIXED = "; planned and launched with prompts in the steps of decodes, which no run of this engine judged"
#: The same of steps with drafts.
APART = "; this engine puts no prompts into steps with drafts: decodes wait for passes, which the plan does not count"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvidence:
    """How far the forecast of one pool has been checked."""

    role: str
    layout: str  # words that start with one of ``search.layouts.EVIDENCE``
    points: int  # measured operating points of this kind of layout [1]
    error: float | None  # relative error that three quarters of them stay below; None = not compared [1]
    sequences: float  # that decode on a GPU, as planned; 0 of prefill [1]
    most_sequences: float | None  # in flight on a GPU in these runs; None = none states it [1]
    ttft: Shares  # time to the first token, by trust label; empty for decode [1]
    tpot: Shares  # time of a step, by trust label; empty for prefill [1]
    rests_on: Shares  # time that the pool spends on a request, by trust label [1]


def evidence_of(plan: Plan, pool: PlannedPool) -> PoolEvidence:
    """Find how far the forecast of a pool has been checked, and how much of its times has which trust label.

    Returns measured operating points of such layouts, and shares of time by label [1].
    """
    if pool.role == "encode" or ffn_of(pool.mapping) is not None:
        return _unmeasured(plan, pool)
    at, plain = pool.setup, replace(pool.mapping, chunk_tokens=0)
    kind = checked_kind(at, pool.mapping, prefill=pool.role == "prefill")
    pass_s, ttft = _prefill(plan, pool, plain) if pool.role != "decode" else (0.0, {})
    step_s, tpot = _decode(plan, pool, plain) if pool.role != "prefill" else (0.0, {})
    unmixed = pool.role == "colocated" and at.overheads is not None and not at.overheads.mixed_steps
    unjudged = (APART if pool.mapping.draft_tokens else UNMIXED) if unmixed else ""
    return PoolEvidence(
        role=pool.role,
        layout=str(evidence(at, pool.mapping, prefill=pool.role == "prefill")[0]) + unjudged,
        points=kind.points if kind else 0,
        error=kind.error if kind else None,
        sequences=pool.sequences / pool.mapping.gpus if tpot else 0.0,
        most_sequences=kind.most_sequences if kind and tpot else None,
        ttft=_with_encoding(pool, ttft),
        tpot=tpot,
        rests_on=added([(pass_s, ttft), (step_s, tpot)]),
    )


def _unmeasured(plan: Plan, pool: PlannedPool) -> PoolEvidence:
    """The same of encoders, and of attention and feed-forward ranks apart, which no run has judged."""
    layout, tpot, rests_on = f"{LAUNCHABLE}: encoders never measured", {}, {Trust.ASSUMED: 1.0}
    if (ffn := ffn_of(pool.mapping)) is not None:
        layout, sequences = f"{NOT_LAUNCHABLE}: no engine ships attention-FFN disaggregation", max(1.0, pool.sequences)
        each = sequences / (int(pool.mapping.dp_attn) * ffn.microbatches)
        parts = split_parts(pool.setup, split_of(pool.mapping, ffn), plan.work.lengths, each, ffn.setup).parts
        shares = parts.groupby("trust")["share"].sum()
        timed = [(float(share), {Trust(str(label)): 1.0}) for label, share in shares.items()]
        tpot = rests_on = added([*timed, (1.0 - float(shares.sum()), rests_on)])  # links and the host are the rest
    return PoolEvidence(
        role=pool.role,
        layout=layout,
        points=0,
        error=None,
        sequences=pool.sequences / pool.mapping.gpus,
        most_sequences=None,
        ttft={},
        tpot=tpot,
        rests_on=rests_on,
    )


def _with_encoding(pool: PlannedPool, shares: Shares) -> Shares:
    """Shares of the time to a first token, given those of a pass, with the time that encoding adds to a prompt."""
    choice = pool.choice
    if not isinstance(choice, PrefillChoice) or choice.encode is None:
        return shares
    alone, encoding = float(choice.weights @ choice.ftl[:, 0]), choice.encode.choice.step.latency
    return added([(alone, shares), (encoding, {Trust.ASSUMED: 1.0})])


def _prefill(plan: Plan, pool: PlannedPool, plain: Sharding) -> tuple[float, Shares]:
    """Time of the pool for the prompt of a request [s], and its shares by trust label [1]."""
    chunk, split = int(pool.mapping.chunk_tokens), pool.role == "prefill"
    prompts = pool.batch if split else 1
    grid = prefill_grid(pool.setup, plain, plan.work.lengths, batch=[prompts], chunk_tokens=[chunk] if split else [0])
    row = int(np.flatnonzero(grid.mappings.chunk_tokens == chunk)[0]) if split else 0
    return float(grid.latency[row, 0]) / prompts, trust_shares(grid, row, 0)


def _decode(plan: Plan, pool: PlannedPool, plain: Sharding) -> tuple[float, Shares]:
    """Time of the pool for the output tokens of a request [s], and its shares by trust label [1]."""
    sequences = max(1, round(pool.sequences))
    grid = decode_grid(pool.setup, plain, plan.work.lengths, batch=[sequences])
    return float(grid.latency[0, 0]) * plan.work.lengths.gaps / sequences, trust_shares(grid, 0, 0)
