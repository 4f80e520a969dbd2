"""Write sized pools as the instances of a plan of more pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from disagg_sim.domain import MAPPING_COLUMNS
from disagg_sim.physics.encoder import EncodeStep
from disagg_sim.planning.pool_queues import Sized
from disagg_sim.planning.pools import DecodeChoice, PrefillChoice
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.search.splits import SplitGrid
from disagg_sim.serving.pools import Candidates, Member, PoolsPlan
from disagg_sim.simulation.instance_variants import FfnPool, bare, ffn_of


def members_of(grids: Sequence[Candidates], sized: Sized, rate: float, *, priced: bool) -> PoolsPlan:
    """List the pools as instances, in the order in which a request passes them.

    Takes ``rate`` [request/s].
    """
    members: list[tuple[Member, int]] = [(step, sized.encoders) for step in grids if isinstance(step, EncodeStep)]
    held = ["" for _ in members]
    added = max((step.latency for step, _ in members if isinstance(step, EncodeStep)), default=0.0)
    prefill, decode = sized.prefill, sized.decode
    own = next(each for each in grids if isinstance(each, PhaseGrid))
    row, column = _place(own, prefill)
    ftl, ttl = float(own.latency[row, column]), float(decode.step[-1])
    rates = 1.0 / prefill.utilisation(1.0, 1), decode.most * decode.work.spare
    members.append((replace(own.instance(row, column), request_rate_per_s=rates[0]), sized.instances[0]))
    split, whole = ffn_of(decode.mapping), "memory" if decode.seats == decode.memory_seats else "ttl"
    if split is None:
        grid = next(each for each in grids if isinstance(each, PhaseGrid) and each.phase == "decode")
        member: Member = replace(grid.instance(*_place(grid, decode)), request_rate_per_s=rates[1])
    else:
        halves = next(each for each in grids if isinstance(each, SplitGrid))
        place = _place_of_split(halves, decode, split)
        member = replace(halves.instance(*place), request_rate_per_s=rates[1])
        if whole != "ttl":  # the pool whose memory a larger batch would break
            beyond = halves.attention_bytes[place[0], place[1] + 1 :] > halves.setup.memory_limit
            whole = "attention_memory" if not beyond.size or beyond[0] else "ffn_memory"
    members.append((member, sized.instances[1]))
    osl = prefill.work.lengths.mean_osl
    return PoolsPlan(
        status="feasible",
        message=f"{rate:.4g} requests/s, {rate * osl / sized.gpus:,.4g} output tokens/s/GPU, with queues",
        members=tuple(members),
        held_by=(*held, "", whole),
        request_rate=rate,
        tokens_per_s_per_gpu=rate * osl / sized.gpus,
        cost=sized.cost if priced else math.nan,
        ftl_s=ftl + added,
        ttl_s=ttl,
    )


def _place(grid: PhaseGrid, choice: PrefillChoice | DecodeChoice) -> tuple[int, int]:
    """Row and column of a choice in the grid that it was taken from."""
    own = bare(choice.mapping)
    alike = np.ones(len(grid.mappings), dtype=bool)
    for name in MAPPING_COLUMNS:
        alike &= np.broadcast_to(getattr(grid.mappings, name), alike.shape) == getattr(own, name)
    batch = int(choice.batch[-1])
    return int(np.flatnonzero(alike)[0]), int(np.flatnonzero(grid.batch == batch)[0])


def _place_of_split(grid: SplitGrid, choice: DecodeChoice, ffn: FfnPool) -> tuple[int, int]:
    """The same in a grid of splits."""
    pools, own = grid.splits, bare(choice.mapping)
    alike = pools.microbatches == ffn.microbatches
    for table, one in ((pools.attention, own), (pools.ffn, ffn.mapping)):
        for name in MAPPING_COLUMNS:
            alike = alike & (np.asarray(getattr(table, name)) == getattr(one, name))
    row = int(np.flatnonzero(alike)[0])
    return row, int(np.flatnonzero(grid.batch[row] == choice.seats)[0])
