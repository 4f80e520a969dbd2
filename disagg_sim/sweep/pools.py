"""Compute the block of a case that has further pools: its frontier over all of them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict

import pandas as pd

from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.encoder import EncodeStep, encode_step
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.search.splits import SplitGrid, split_grid
from disagg_sim.serving.candidates import prefill_candidates
from disagg_sim.serving.pool_frontier import COLUMNS, pools_front
from disagg_sim.sweep.cases import Case
from disagg_sim.sweep.plan import Block


def pools_of_case(block: Block) -> tuple[pd.DataFrame, int]:
    """Frontier over the pools of a case, with ``case`` in front, and the decode points that were matched.

    Encoding runs on the system of prefill, attention and feed-forward ranks on that of decode.
    """
    case, limits = block.case, block.case.limits
    encode = _encode(case)
    grid = prefill_grid(
        case.prefill_setup,
        limits.mappings(case.prefill_setup),
        case.lengths,
        mla_form=case.mla_form,
        allow_long_context=True,
    )
    within = limits.ftl_s - (0.0 if encode is None else encode.latency)
    nic = None if math.isinf(limits.nic_limit) else limits.nic_limit
    grids: list[PhaseGrid | SplitGrid] = []
    if "decode" in case.pool_names:
        grids.append(decode_grid(case.decode_setup, block.mappings, case.lengths, allow_long_context=True))
    if "attention" in case.pool_names:
        most = limits.max_gpus
        grids.append(split_grid(case.decode_setup, case.lengths, max_gpus=most, allow_long_context=True))
    points = sum(each.latency.size for each in grids)
    front = pd.DataFrame(columns=list(COLUMNS))
    if within > 0:
        candidates = prefill_candidates(grid, ftl_limit=within, nic_limit=nic)
        with suppress(InfeasibleError):  # the frontier of two pools says why
            front = pools_front(
                candidates,
                grids,
                encode=encode,
                ttl_limit=limits.ttl_s,
                gpu_cap=limits.gpu_cap,
                per=dict(case.prices) or case.per,
            )
    front.insert(0, "case", case.name)
    return front, points


def _encode(case: Case) -> EncodeStep | None:
    return None if case.images is None else encode_step(case.prefill_setup, **asdict(case.images))
