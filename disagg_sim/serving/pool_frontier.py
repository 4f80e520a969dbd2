"""Trace the frontier of deployments of more pools than prefill and decode, counts of instances by enumeration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import MAPPING_COLUMNS, SHARDING
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.search.pareto import pareto_mask
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, check_same_case
from disagg_sim.serving.costs import Per, costs_of_gpus, throughput_of
from disagg_sim.serving.pairing import best_counts_of_pools
from disagg_sim.serving.points import COST_COLUMNS, INTERACTIVITY, THROUGHPUT, pareto_front
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.split.search import SplitGrid, setups_of
from disagg_sim.units import HOUR

#: GPUs of each pool, in the order in which a request passes them.
GPUS = ("encode_gpus", "prefill_gpus", "decode_gpus", "attention_gpus", "ffn_gpus")
#: Columns of a frontier over pools.
COLUMNS = (
    *("isl", "osl", INTERACTIVITY, THROUGHPUT, "ftl_s", "ttl_s", "request_rate_per_s", "total_gpus", *GPUS),
    *("encode_instances", "prefill_instances", "decode_instances", "prefill_batch", "decode_batch", "microbatches"),
    *(f"prefill_{name}" for name in MAPPING_COLUMNS),
    *(f"{side}_{name}" for side in ("decode", "ffn") for name in SHARDING),
)


def pools_front(
    prefill: PrefillCandidates,
    decode: Sequence[PhaseGrid | SplitGrid],
    *,
    encode: EncodeStep | None = None,
    ttl_limit: float = np.inf,
    gpu_cap: int,
    per: Per = "gpu",
) -> pd.DataFrame:
    """Match every decode configuration with prefill and encode instances, and keep what no other beats.

    Columns ``COLUMNS``, one row a point, interactivity rising; ``decode_*`` are the degrees of whole instances or of
    attention ranks; ``ffn_*`` those of feed-forward ranks, 0 for whole instances; GPUs are those of whole pools [s,
    request/s, token/s].
    """
    prefill.require()
    systems: list[SystemSpec | str] = [prefill.system, *(at.system for grid in decode for at in setups_of(grid))]
    systems += [] if encode is None else [encode.setup.system]
    costs = None if per == "gpu" else costs_of_gpus(systems, per)
    tables = []
    for grid in decode:
        check_same_case(prefill, grid)
        rows, columns = _undominated(grid, ttl_limit)
        for choice in range(prefill.batch.size):
            prices = None if costs is None else [each[rows] for each in _prices(prefill, grid, encode, costs)]
            table = _matched(prefill, choice, grid, rows, columns, encode, gpu_cap, prices)
            tables.append(table if prices is None else _with_cost(table, prices, per))
    table = pd.concat(tables, ignore_index=True)
    return pareto_front(table, by=(), throughput=throughput_of(per)) if len(table) else table


def _with_cost(table: pd.DataFrame, prices: list[Floats], per: Per) -> pd.DataFrame:
    """Add the cost of all pools and the throughput over it; rows of the table have the places of the prices."""
    first, last = table["encode_gpus"], table["total_gpus"] - table["encode_gpus"] - table["prefill_gpus"]
    gpus = [*([first] if len(prices) > 2 else []), table["prefill_gpus"], last]
    cost = sum(price[table.index] * own for price, own in zip(prices, gpus, strict=True))
    unit = per if isinstance(per, str) else "usd"
    tokens = table[THROUGHPUT] * table["total_gpus"] * (HOUR if unit == "usd" else 1.0)
    return table.assign(**dict(zip((column.name for column in COST_COLUMNS[unit]), (cost, tokens / cost), strict=True)))


def _prices(
    prefill: PrefillCandidates, grid: PhaseGrid | SplitGrid, encode: EncodeStep | None, costs: dict[str, float]
) -> list[Floats]:
    """Price of a GPU of each pool, encode first where there is one; of halves on two systems the mean. Shape (rows,)"""
    own = np.full(grid.gpus.shape, costs[grid.setup.system.name])
    if isinstance(grid, SplitGrid):
        own += (costs[grid.ffn_setup.system.name] - own) * grid.ffn_gpus / grid.gpus
    first = [] if encode is None else [np.full_like(own, costs[encode.setup.system.name])]
    return [*first, np.full_like(own, costs[prefill.system]), own]


def _undominated(grid: PhaseGrid | SplitGrid, ttl_limit: float) -> tuple[Ints, Ints]:
    """Points than which none of as many GPUs is both faster and of a higher rate."""
    rows, columns = np.nonzero(grid.feasible & (grid.latency <= ttl_limit))
    ttl, rate, gpus = grid.latency[rows, columns], grid.request_rate[rows, columns], grid.gpus[rows]
    kept = []
    for size in np.unique(gpus):
        of_size = np.flatnonzero(gpus == size)
        best = of_size[pareto_mask(-ttl[of_size], rate[of_size])]
        kept.append(best[np.argsort(ttl[best])])
    places = np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)
    return rows[places], columns[places]


def _matched(
    prefill: PrefillCandidates,
    choice: int,
    grid: PhaseGrid | SplitGrid,
    rows: Ints,
    columns: Ints,
    encode: EncodeStep | None,
    gpu_cap: int,
    prices: list[Floats] | None,
) -> pd.DataFrame:
    """One row for every decode point that fits the cap together with one prefill configuration."""
    ttl, rate = grid.latency[rows, columns], grid.request_rate[rows, columns]
    ones = np.ones(rows.size)
    rates = [prefill.request_rate[choice] * ones, rate]
    sizes = [prefill.gpus[choice] * ones, grid.gpus[rows].astype(float)]
    if encode is not None:
        rates, sizes = [encode.request_rate * ones, *rates], [ones, *sizes]
    counts = best_counts_of_pools(rates, sizes, gpu_cap, prices) if rows.size else tuple(np.zeros((len(rates), 0)))
    fits = counts[-1] > 0
    total: Floats = sum((n * g for n, g in zip(counts, sizes, strict=True)), start=0.0 * ones)
    matched = np.min([n * r for n, r in zip(counts, rates, strict=True)], axis=0) if rows.size else ones
    split = isinstance(grid, SplitGrid)
    decode = grid.splits.attention if isinstance(grid, SplitGrid) else grid.mappings
    batch = grid.batch[rows, columns] if isinstance(grid, SplitGrid) else grid.batch[columns]
    lengths, whole = grid.lengths, np.int64
    n_d = counts[-1].astype(whole)
    values = {
        "isl": round(lengths.mean_isl),
        "osl": round(lengths.mean_osl),
        INTERACTIVITY: 1.0 / ttl,
        THROUGHPUT: np.divide(matched * lengths.mean_osl, total, out=0.0 * ones, where=total > 0),
        "ftl_s": prefill.latency[choice] + (0.0 if encode is None else encode.latency),
        "ttl_s": ttl,
        "request_rate_per_s": matched,
        "total_gpus": total.astype(whole),
        "encode_gpus": 0 if encode is None else counts[0].astype(whole),
        "prefill_gpus": (counts[-2] * sizes[-2]).astype(whole),
        "decode_gpus": 0 if split else n_d * grid.gpus[rows],
        "attention_gpus": n_d * grid.attention_gpus[rows] if isinstance(grid, SplitGrid) else 0,
        "ffn_gpus": n_d * grid.ffn_gpus[rows] if isinstance(grid, SplitGrid) else 0,
        "encode_instances": 0 if encode is None else counts[0].astype(whole),
        "prefill_instances": counts[-2].astype(whole),
        "decode_instances": n_d,
        "prefill_batch": int(prefill.batch[choice]),
        "decode_batch": batch,
        "microbatches": grid.splits.microbatches[rows]
        if isinstance(grid, SplitGrid)
        else grid.microbatches[rows, columns],
        **{f"prefill_{name}": int(getattr(prefill, name)[choice]) for name in MAPPING_COLUMNS},
        **{f"decode_{name}": np.broadcast_to(getattr(decode, name), grid.gpus.shape)[rows] for name in SHARDING},
        **{
            f"ffn_{name}": np.broadcast_to(getattr(grid.splits.ffn, name), grid.gpus.shape)[rows]
            if isinstance(grid, SplitGrid)
            else 0
            for name in SHARDING
        },
    }
    return pd.DataFrame(values, columns=list(COLUMNS), index=pd.RangeIndex(rows.size))[fits]
