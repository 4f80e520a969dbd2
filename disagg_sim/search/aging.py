"""Lengthen the points of a grid by the age of placements of experts, and by moves, at the best period of each point."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.physics.rebalance import best_period, rebalancing, staleness
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.workload.lengths import Lengths


def longer(at: Setup, mapping: Mapping, tokens: Numeric, seconds: Numeric, drift: float) -> Numeric:
    """Find by how much age and moves lengthen steps or passes, each at its best period.

    Parameters
    ----------
    at, mapping
        Setup, and sharding, numbers or columns. [1]
    tokens
        That go through a stage at once, over all ranks, of a shape that broadcasts with the times. [token]
    seconds
        Their times in a stage with copies just placed. [s]
    drift
        Time constant with which popularity drifts; inf = it stays. [s]

    Returns
    -------
    numeric
        Factor on the times; 1 where popularity stays, or there are no copies. [1]

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew0.5"), Mapping(dp_attn=32, ep=32)
    >>> copied = replace(wide, redundant_slots=32)
    >>> drifts = [(copied, math.inf), (wide, 600.0), (copied, 600.0)]
    >>> [f"{float(longer(at, each, 4096.0, 60e-3, drift)):.3f}" for each, drift in drifts]
    ['1.000', '1.000', '1.014']
    """
    if math.isinf(drift) or not np.any(mapping.redundant_slots):
        return 1.0
    factor: Numeric = 1.0 + rebalancing(at, mapping, tokens=tokens, seconds=np.real(seconds), drift=drift).loss
    return factor


def in_a_stage(mapping: Mapping, tokens: Numeric, seconds: Numeric) -> tuple[Any, Any]:
    """Find what goes through a stage at once in a step, whose micro-batches, one a stage, go through all stages.

    Parameters
    ----------
    mapping
        Its stages. [1]
    tokens, seconds
        Of the step, over all ranks [token], and its time. [s]

    Returns
    -------
    tokens, seconds : numeric
        [token], [s]

    Examples
    --------
    >>> [float(each) for each in in_a_stage(Mapping(pp=4), 64.0, 0.02)]
    [16.0, 0.005]
    """
    return np.maximum(tokens / mapping.pp, 1.0), seconds / mapping.pp


class Cycle(NamedTuple):
    """What an instance that does both phases does for a token of a slot; of shapes that broadcast."""

    decodes: Numeric  # tokens that go through a stage at once in a decode step, over all ranks [token]
    step: Numeric  # their time in a stage [s]
    steps: Numeric  # how often [1]
    piece: Numeric  # tokens that go through a stage at once in a pass, or in a mixed step [token]
    stage: Numeric  # their time [s]
    spent: Numeric  # of all passes or mixed steps [s]


class Aged(NamedTuple):
    """How the placements of an instance that does both phases are best kept."""

    period: Any  # between moves; inf = none pays [s]
    steps: Any  # factor on the times of decode steps [1]
    passes: Any  # and of passes, or mixed steps [1]


def aged_together(at: Setup, mapping: Mapping, cycle: Cycle, drift: float) -> Aged:
    r"""Find the best period of copies that decode steps and passes share.

    Kind i takes a share :math:`s_i` of the time and grows by :math:`a_i` with copies anywhere, so the instance grows by
    :math:`a = \sum s_i a_i`, of which the best period T leaves :math:`\ell = a A + c/T` (``physics.rebalance``), and of
    kind i :math:`a_i A + c/T`.

    Parameters
    ----------
    at, mapping
        Setup, and sharding, numbers or columns. [1]
    cycle
        Times with copies just placed.
    drift
        Time constant with which popularity drifts; inf = it stays. [s]

    Returns
    -------
    Aged
        Factors 1 where popularity stays, or there are no copies.

    Examples
    --------
    Where all time is that of decode steps, these lose what they lose alone:

    >>> from disagg_sim.physics.setup import setup
    >>> at, copied = setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew0.5"), Mapping(dp_attn=32, ep=32)
    >>> copied = replace(copied, redundant_slots=32)
    >>> found = aged_together(at, copied, Cycle(4096.0, 60e-3, 1.0, 4096.0, 60e-3, 0.0), 600.0)
    >>> f"{float(found.steps):.3f}, alone {float(longer(at, copied, 4096.0, 60e-3, 600.0)):.3f}"
    '1.014, alone 1.014'
    """
    if math.isinf(drift) or not np.any(mapping.redundant_slots):
        return Aged(math.inf, 1.0, 1.0)
    decoding, spent = np.real(cycle.steps * cycle.step), np.real(cycle.spent)
    (more, move), (later, _) = (staleness(at, mapping, tokens) for tokens in (cycle.decodes, cycle.piece))
    of_steps, of_passes = np.maximum(more / np.real(cycle.step), 0.0), np.maximum(later / np.real(cycle.stage), 0.0)
    growth = (decoding * of_steps + spent * of_passes) / (decoding + spent)
    period, loss = best_period(move, growth, drift)
    pause = move / period
    age = np.where(growth > 0, loss - pause, 0.0) / np.where(growth > 0, growth, 1.0)
    return Aged(period, 1.0 + of_steps * age + pause, 1.0 + of_passes * age + pause)


def piece_of_pass(
    lengths: Lengths, mapping: Mapping, chunk_tokens: Numeric, prompts: Numeric, seconds: Numeric
) -> tuple[Any, Any]:
    """Find what goes through a stage at once in a pass that walks through all stages, decode waiting.

    Parameters
    ----------
    lengths, mapping
        Of the requests, and sharding. [1]
    chunk_tokens
        0 = whole prompts. [token]
    prompts, seconds
        Of a pass [request], and its time; of shapes that broadcast. [s]

    Returns
    -------
    tokens, seconds : numeric
        [token], [s]

    Examples
    --------
    Four chunks go through two stages in five times that of a chunk:

    >>> from disagg_sim.workload.lengths import lengths
    >>> [float(each) for each in piece_of_pass(lengths(2048, 256), Mapping(pp=2), 512, 1.0, 1.0)]
    [512.0, 0.2]
    """
    tokens, share = one_piece(lengths, mapping, chunk_tokens, prompts, np.ones_like(prompts))
    return tokens, seconds / (1.0 / share + mapping.pp - 1.0)


def one_piece(
    lengths: Lengths, mapping: Mapping, chunk_tokens: Numeric, batch: Numeric, busy: Numeric
) -> tuple[Any, Any]:
    """Find what goes through a stage of prefill at once: a chunk of each prompt of a pass, or one of its micro-batches.

    Parameters
    ----------
    lengths, mapping
        Of the requests, and sharding. [1]
    chunk_tokens
        0 = whole prompts. [token]
    batch, busy
        Prompts of a pass [request], and its time of a stage [s]; of shapes that broadcast.

    Returns
    -------
    tokens, seconds : numeric
        [token], [s]

    Examples
    --------
    >>> from disagg_sim.workload.lengths import lengths
    >>> [float(each) for each in one_piece(lengths(2048, 256), Mapping(pp=2), 512, 1.0, 1.0)]
    [512.0, 0.25]
    >>> [float(each) for each in one_piece(lengths(2048, 256), Mapping(pp=2), 0, 8.0, 1.0)]
    [8192.0, 0.5]
    """
    new = lengths.mean_new
    whole = 1.0 / np.clip(np.ceil(batch / mapping.dp_attn), 1.0, mapping.pp)
    share = np.where(np.asarray(chunk_tokens) > 0, np.minimum(np.asarray(chunk_tokens) / new, 1.0), whole)
    return batch * new * share, busy * share


def aged(grid: PhaseGrid, drift: float) -> PhaseGrid:
    """Lengthen all points of a grid: steps, and what passes compute; pasts are loaded as before.

    Parameters
    ----------
    grid
        Scored with copies of experts just placed.
    drift
        Time constant with which popularity drifts; inf = it stays. [s]

    Returns
    -------
    PhaseGrid
        The grid itself where nothing ages.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at = ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew0.5")
    >>> copied = ds.Mapping(dp_attn=32, ep=32, redundant_slots=32)
    >>> grid = ds.decode_grid(at, copied, ds.lengths(4096, 512), batch=[64, 4096])
    >>> [f"{more:.3f}" for more in (aged(grid, 600.0).latency / grid.latency)[0]]
    ['1.001', '1.011']
    """
    if math.isinf(drift) or not np.any(grid.mappings.redundant_slots):
        return grid
    mapping, batch = grid.mappings.for_grid(), grid.batch[None, :].astype(float)
    if grid.phase == "decode":
        tokens, seconds = in_a_stage(mapping, batch * (1.0 + grid.drafts), grid.step)
    else:
        chunk = np.asarray(grid.mappings.chunk_tokens)[:, None]
        busy = batch / grid.request_rate if grid.busy is None else grid.busy
        tokens, seconds = one_piece(grid.lengths, mapping, chunk, batch, busy)
    factor = longer(grid.setup, mapping, tokens, seconds, drift)
    if grid.busy is None or grid.load is None:
        return replace(grid, latency=grid.latency * factor, request_rate=grid.request_rate / factor)
    busy = grid.busy * factor
    return replace(
        grid,
        latency=(grid.latency - grid.load) * factor + grid.load,
        busy=busy,
        request_rate=batch / np.maximum(busy, grid.load),
    )
