"""Count in a plan that placements of experts age: longer steps between moves, and moves, at the best period of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Mapping
from disagg_sim.physics.rebalance import USUAL_PASSES, loss_at, rebalancing
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.limits import Work
from disagg_sim.planning.pools import PrefillChoice
from disagg_sim.search.aging import in_a_stage, longer
from disagg_sim.search.aging import one_piece as piece_of


def lengthened(work: Work, at: Setup, mapping: Mapping, tokens: Numeric, seconds: Floats) -> Numeric:
    """Find by how much age and moves lengthen steps or passes, each at its best period.

    Parameters
    ----------
    work
        Whose drift counts.
    at, mapping
        Setup, and sharding of an instance.
    tokens
        That go through a stage at once, over all ranks, of a shape that broadcasts with the times. [token]
    seconds
        Their times in a stage with copies just placed. [s]

    Returns
    -------
    numeric
        Factor on the times; 1 where popularity stays. [1]

    Examples
    --------
    >>> import disagg_sim as ds
    >>> found = ds.plan("llama_3_1_8b", "h200_sxm", ds.lengths(2048, 256), rate=40)
    >>> lengthened(found.work, found.best.pools[0].setup, ds.Mapping(), 64.0, np.ones(1))
    1.0
    """
    return longer(at, mapping, tokens, seconds, work.drift)


def one_piece(work: Work, mapping: Mapping, batch: Floats, busy: Floats) -> tuple[Floats, Floats]:
    """Find what goes through a stage of prefill at once: a chunk of each prompt of a pass, or a micro-batch.

    Parameters
    ----------
    work, mapping
        Lengths, and sharding with its chunk size.
    batch, busy
        Prompts of a pass [request], and its time of a stage; of shape (batches,). [s]

    Returns
    -------
    tokens, seconds : ndarray
        Of the same shape. [token], [s]

    Examples
    --------
    >>> import disagg_sim as ds
    >>> work = ds.plan("llama_3_1_8b", "h200_sxm", ds.lengths(2048, 256), rate=40).work
    >>> [each.tolist() for each in one_piece(work, ds.Mapping(pp=2, chunk_tokens=512), np.ones(1), np.ones(1))]
    [[512.0], [0.25]]
    """
    return piece_of(work.lengths, mapping, mapping.chunk_tokens, batch, busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How often a pool is best rebalanced, at its mean load."""

    role: str
    period: float  # between moves; inf = none pays [s]
    passes: int | None  # in that time; None = no move pays [1]
    loss: float  # of time, moves included; in the counts of the plan [1]
    usual: float  # the same at the number of passes that the engine takes by itself; NaN = it has none [1]
    never: float  # the same without a move [1]


def moves_of(design: Design) -> tuple[Moves, ...]:
    """Find the best period of each pool with copies of experts.

    Parameters
    ----------
    design
        Of a plan.

    Returns
    -------
    tuple of Moves
        Empty where popularity stays, or no pool has copies.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> moves_of(ds.plan("llama_3_1_8b", "h200_sxm", ds.lengths(2048, 256), rate=40).best)
    ()
    """
    if math.isinf(design.work.drift):
        return ()
    return tuple(_moves(pool, design.work) for pool in design.pools if pool.mapping.redundant_slots)


def _moves(pool: PlannedPool, work: Work) -> Moves:
    at, mapping, choice = pool.setup, pool.mapping, pool.choice
    if isinstance(choice, PrefillChoice):
        tokens, seconds = (float(each[-1]) for each in one_piece(work, mapping, choice.batch, choice.busy))
    else:
        batch = max(pool.sequences, 1.0)
        step = float(np.interp(batch, choice.batch, choice.step))
        tokens, seconds = (float(each) for each in in_a_stage(mapping, batch * (1 + mapping.draft_tokens), step))
    found = rebalancing(at, mapping, tokens=tokens, seconds=seconds, drift=work.drift)
    growth, period = float(found.growth), float(found.period)
    usual = USUAL_PASSES.get(at.engine)
    return Moves(
        role=pool.role,
        period=period,
        passes=max(round(period / seconds), 1) if math.isfinite(period) else None,
        loss=float(found.loss),
        usual=math.nan if usual is None else float(loss_at(usual * seconds, found.move, growth, work.drift)),
        never=growth,
    )
