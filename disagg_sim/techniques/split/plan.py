"""Choose split decode instances, whose attention and feed-forward ranks are apart, as every plan sizes them.

One is a decode choice whose step is that of both halves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from disagg_sim.planning.limits import Demand
from disagg_sim.planning.pools import DecodeChoice
from disagg_sim.serving.pool_options import SplitSide
from disagg_sim.simulation.instance_variants import FfnPool, placed
from disagg_sim.techniques.split.search import SplitGrid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitChoice(DecodeChoice):
    """A decode instance whose attention and feed-forward ranks are apart; ``memory`` is that of attention."""

    ffn_memory: float  # on the fullest feed-forward GPU with all seats taken [B]
    idle: tuple[float, float]  # shares of a full step in which ranks of attention and of feed-forward wait [1]


def split_choices(grid: SplitGrid, work: Demand) -> list[SplitChoice]:
    """The fastest split configurations of each size within the TPOT limit; links as wide as needed."""
    side = SplitSide(grid, work.tpot.seconds, math.inf, within_domain=True)
    return [_split(grid, work, row, column) for row, column in zip(side.rows, side.columns, strict=True)]


def _split(grid: SplitGrid, work: Demand, row: int, column: int) -> SplitChoice:
    one = grid.instance(row, column)
    theirs = None if grid.ffn_setup is grid.setup else grid.ffn_setup
    ffn = FfnPool(mapping=one.ffn, microbatches=one.microbatches, setup=theirs)
    batch = grid.batch[row]
    return SplitChoice(
        at=grid.setup,
        mapping=placed(one.attention, None, ffn),
        work=work,
        seats=one.batch,
        batch=batch[: column + 1].astype(float),
        step=grid.latency[row, : column + 1],
        link_rate=math.inf,
        memory=float(grid.attention_bytes[row, column]),
        memory_seats=int(batch[np.flatnonzero(grid.feasible[row])[-1]]),
        bound="",
        ffn_memory=float(grid.ffn_bytes[row, column]),
        idle=(one.attention_idle, one.ffn_idle),
    )
