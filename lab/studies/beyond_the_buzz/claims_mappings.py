"""Test C33 to C36: pipelines for prompts of mixed lengths, mappings of either phase, matching, the piggyback mix."""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import DEGREES, ServingMode, Sharding
from disagg_sim.search.grid import prefill_grid
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import lengths
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    HIGH,
    LARGE,
    LONG_PROMPTS,
    LOW,
    R1,
    SMALL,
    Evidence,
    Front,
    listed,
    shared,
)
from lab.studies.claims import Finding

MIXED_PROMPTS = (4096, 16_384, 65_536)  # in equal shares [token]
FTL_LIMIT = 10.0  # [s]
WIDE = 8  # largest TP that is not wide [1]
POINTS = 200  # of a range that is compared [1]


@TEXT.claim("C33")
def c33_mixed_lengths(evidence: Evidence) -> Finding:
    """Request rate per GPU of prefill over the FTL of the longest prompts, pipelines against one stage."""
    prompts = np.array(MIXED_PROMPTS)
    grid = prefill_grid(
        evidence.setup(R1),
        evidence.mappings(R1),
        lengths(prompts, np.full(prompts.size, 2)),
        ftl_quantile=0.99,
        allow_long_context=True,
    )
    table = grid.mappings
    usable = grid.feasible & (grid.latency <= FTL_LIMIT)
    rate = grid.request_rate / grid.gpus[:, None]
    piped = usable & ((table.chunk_tokens > 0) & (table.tp_attn <= WIDE))[:, None]
    whole = usable & (table.pp == 1)[:, None]
    soonest, sooner = float(grid.latency[whole].min()), float(grid.latency[piped].min())
    limits = np.geomspace(soonest, FTL_LIMIT, POINTS)
    ours, theirs = (best_from(-grid.latency[these], rate[these], -limits) for these in (piped, whole))
    ratio = ours / theirs
    return Finding(
        f"{ratio.min():.2f} to {ratio.max():.2f} times, {ratio[0]:.2f} at {soonest:.2f} s, the shortest of one stage",
        bool(ratio.min() >= 0.95 and ratio[0] >= 1.2),
        f"pipelines reach down to {sooner:.2f} s",
    )


@TEXT.claim("C34")
def c34_one_mapping(evidence: Evidence) -> Finding:
    """Throughput where prefill has the mapping of decode, over that of any prefill, without integer counts."""
    kept = {model: _kept_by_one_mapping(evidence, model) for model in (R1, LARGE, SMALL)}
    return Finding(
        listed(kept, ".2f"),
        max(kept[R1], kept[LARGE]) <= 0.9 and kept[SMALL] > max(kept[R1], kept[LARGE]),
        f"area over {LOW:g} to {HIGH:g} tokens/s/user, log axis; FTL within {FTL_LIMIT:g} s",
    )


def _kept_by_one_mapping(evidence: Evidence, model: str) -> float:
    prefill, decode = evidence.prefill_pool(model), evidence.decode_pool(model)
    usable = prefill.feasible & (prefill.latency <= FTL_LIMIT)
    rate = np.where(usable, prefill.request_rate, 0.0).max(axis=1) / prefill.gpus
    best: dict[tuple[int, ...], float] = {}
    for mapping, found in zip(_keys(prefill.mappings), rate.tolist(), strict=True):
        best[mapping] = max(best.get(mapping, 0.0), found)
    same = np.array([best.get(mapping, 0.0) for mapping in _keys(decode.mappings)])[:, None]
    fits = decode.feasible
    user, each = 1 / decode.latency[fits], (decode.request_rate / decode.gpus[:, None])[fits]
    x = np.geomspace(LOW, HIGH, POINTS)

    def area(sends: Floats | float) -> float:
        """Mean of P R/(P + R) over the range, P and R a GPU."""
        total = np.broadcast_to(sends, fits.shape)[fits] if isinstance(sends, np.ndarray) else sends
        return float(best_from(user, each * total / (each + total), x).mean())

    return area(same) / area(float(rate.max()))


def _keys(table: Sharding) -> list[tuple[int, ...]]:
    """Degrees of every row."""
    return list(zip(*(np.asarray(getattr(table, name)).tolist() for name in DEGREES), strict=True))


@TEXT.claim("C35")
def c35_matching(evidence: Evidence) -> Finding:
    """Algorithms 1 and 2 as printed against exact matching over all prefill configurations."""
    pools = evidence.prefill_pool(R1), evidence.decode_pool(R1)
    paper = Front(match_pools(*pools, Rules(matching="paper", keep="frontier")))
    exact = Front(match_pools(*pools, Rules(keep="frontier")))
    x = np.geomspace(*shared(paper, exact), POINTS)
    ratio = paper.throughput(x) / exact.throughput(x)
    first = paper.table.iloc[0]
    return Finding(
        f"{ratio.min():.3f} to {ratio.max():.3f} of exact, {ratio.mean():.3f} on average",
        bool(ratio.max() <= 1 + 1e-9 and ratio.min() >= 0.9),
        f"one prefill instance for all: {first['prefill_gpus']:.0f} GPUs, PP {first['prefill_pp']:.0f}",
    )


@TEXT.claim("C36")
def c36_mix(evidence: Evidence) -> Finding:
    """Prefill tokens a decode token of the steps that have any, along the frontier: ISL/OSL over their share."""
    front = evidence.front("fig06", modes=(ServingMode.PIGGYBACK,), model=R1, isl=LONG_PROMPTS[0])
    inside = (front.x >= LOW) & (front.x <= HIGH)
    mean = LONG_PROMPTS[0] / (LONG_PROMPTS[1] - 1)  # over all steps [1]
    chunk, share = front.column("mixed_chunk_tokens")[inside], front.column("mixed_step_share")[inside]
    return Finding(
        f"{mean / share.max():.0f} to {mean / share.min():.0f} prefill tokens a decode token; chunks of "
        f"{chunk.min():.0f} to {chunk.max():.0f} tokens in {share.min():.1%} to {share.max():.1%} of the steps",
        bool(share.max() >= 2 * share.min()),
        f"{inside.sum()} points of the frontier",
    )
