"""Say how often copies of experts are best moved, in a sweep whose experts become others' popular."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.designs import cycle_of, times_of
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.domain import SHARDING, Mapping
from disagg_sim.physics.drafting import accepted_length
from disagg_sim.physics.rebalance import rebalancing
from disagg_sim.physics.setup import Setup
from disagg_sim.search.aging import aged_together, in_a_stage, one_piece
from disagg_sim.serving.points import Column
from disagg_sim.workload.lengths import Lengths

#: What rows have beside ``points.COLUMNS`` in a sweep that counts drift.
MOVE_COLUMNS: tuple[Column, ...] = (
    Column("prefill_rebalance_s", "float64", "s", "best time between moves of copies of experts, prefill; inf = never"),
    Column("decode_rebalance_s", "float64", "s", "the same of decode"),
)


def with_moves(points: pd.DataFrame, ends: tuple[Setup, Setup], lengths: Lengths, drift: float) -> pd.DataFrame:
    """Add ``MOVE_COLUMNS`` to disaggregated points, of their lengthened passes; ``ends`` are prefill and decode."""
    periods = np.full((2, len(points)), math.inf)
    if len(points) and math.isfinite(drift):

        def column(name: str) -> Any:
            return points[name].to_numpy(dtype=float)

        drafts = column("decode_draft_tokens")
        step = column("ttl_s") * accepted_length(ends[1].speculation, drafts)
        busy = column("prefill_batch") / column("prefill_request_rate_per_s")
        degrees: list[dict[str, Any]] = [
            {name: column(f"{side}_{name}") for name in SHARDING} for side in ("prefill", "decode")
        ]
        first, then = (Mapping(**columns) for columns in degrees)
        passes = one_piece(lengths, first, column("prefill_chunk_tokens"), column("prefill_batch"), busy)
        work = passes, in_a_stage(then, column("decode_batch") * (1.0 + drafts), step)
        for place, (mapping, at, (tokens, seconds)) in enumerate(zip((first, then), ends, work, strict=True)):
            found = rebalancing(at, mapping, tokens=tokens, seconds=seconds, drift=drift)
            periods[place] = found.period
    return _told(points, periods)


def with_shared_moves(points: pd.DataFrame, origin: Origin, drift: float) -> pd.DataFrame:
    """Add ``MOVE_COLUMNS`` to co-located points: one period for both phases, of passes just after a move."""
    periods = np.full((2, len(points)), math.inf)
    if math.isfinite(drift):
        for designs in designs_of(points, origin):
            cycle = cycle_of(designs, times_of(designs))
            periods[:, designs.rows] = aged_together(designs.at, designs.mapping, cycle, drift).period
    return _told(points, periods)


def _told(points: pd.DataFrame, periods: Floats) -> pd.DataFrame:
    return points.assign(**{column.name: each for column, each in zip(MOVE_COLUMNS, periods, strict=True)})
