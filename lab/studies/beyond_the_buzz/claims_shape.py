"""Test C5-C10, C28, C29 and C31-C36: mappings and batches on the frontier, pipelines, lengths, limits, size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.domain import DEGREES, ServingMode, Sharding
from disagg_sim.facts.load import load_model, load_traffic
from disagg_sim.facts.traffic import LogNormalLength, TrafficCase
from disagg_sim.physics.setup import Setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import Lengths, lengths
from lab.calibration.kernels.residuals import rank_correlation
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    DOMAIN,
    HIGH,
    LARGE,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    SAME_TIME,
    SMALL,
    Evidence,
    Front,
    listed,
    shared,
)
from lab.studies.beyond_the_buzz.frontiers import depth_row
from lab.studies.claims import Told, Ways


@TEXT.claim("C5")
def c5_batch_and_tp(evidence: Evidence) -> Told:
    """Figure 6: the batch per GPU falls and TP rises along the whole frontier, by rank correlation."""
    found: dict[str, float] = {}
    holds = True
    for model in (R1, MIDDLE):
        front = _front(evidence, model)
        batch = rank_correlation(front.x, front.column("decode_batch") / front.column("decode_gpus"))
        tp = rank_correlation(front.x, front.column("decode_tp_attn"))
        found |= {f"{model} batch per GPU": batch, f"{model} TP": tp}
        holds &= batch < -0.8 and tp > 0.5
    return listed(found, ".2f"), holds


@TEXT.claim("C6")
def c6_llama_tp(evidence: Evidence) -> Told:
    """Decode TP of Llama-70B at both ends of the frontier."""
    tp = _front(evidence, MIDDLE).column("decode_tp_attn")
    degrees = (2, 8, 16, 32, 64)
    mappings = [Sharding(tp_attn=n, tp_ffn=n) for n in degrees]
    ttl = decode_grid(evidence.setup(MIDDLE), mappings, lengths(*LONG_PROMPTS), batch=1).latency[:, 0]
    times = ", ".join(f"TP{n} {1e3 * t:.2f}" for n, t in zip(degrees, ttl, strict=True))
    holds = bool(tp[0] <= 4 and tp[-1] >= 32)
    return f"first TP {tp[0]:.0f}, last TP {tp[-1]:.0f}", holds, f"TTL of one request in ms: {times}"


@TEXT.claim("C7")
def c7_expert_parallel(evidence: Evidence) -> Told:
    """Share of R1's frontier that runs experts in parallel inside the domain."""
    parallel = in_parallel(_front(evidence, R1))
    return f"{parallel.mean():.2f} of {parallel.size} points", bool(parallel.mean() >= 0.9)


@TEXT.authors("C7", ways=Ways(True, False, "experts as the profile has them"))
def expert_parallel(evidence: Evidence, even: bool) -> Told:
    """Share of R1's frontier that runs experts in parallel inside the domain, even and picked at random."""
    front = _front(evidence, R1)
    if even:
        at = evidence.setup(R1)
        at = at.changed(profile=replace(at.profile, random_routing=False, expert_skew=0.0, rank_skew=0.0))
        front = front_of(at, evidence.mappings(R1), lengths(*LONG_PROMPTS), allow_long_context=True)
    parallel = float(in_parallel(front).mean())
    return f"{parallel:.2f} of the points", parallel >= 0.9


def in_parallel(front: Front) -> NDArray[np.bool_]:
    """Whether each point runs experts in parallel inside the domain."""
    stage = front.column("decode_gpus") / front.column("decode_pp")
    return (front.column("decode_ep") > 1) & (stage <= DOMAIN)


@TEXT.claim("C8")
def c8_attention_modes(evidence: Evidence) -> Told:
    """R1's attention by its TP degree along the frontier, and the share of points below an earlier degree."""
    tp = _front(evidence, R1).column("decode_tp_attn")
    below = float(np.mean(tp < np.maximum.accumulate(tp)))
    holds = below <= 0.1 and tp[0] <= 2 and tp[-1] >= 4
    return f"starts at TP {tp[0]:.0f}, ends at TP {tp[-1]:.0f}, falls at {below:.2f}", bool(holds)


@TEXT.claim("C9")
def c9_loose_batch(evidence: Evidence) -> Told:
    """Batch of R1's instance at the throughput end."""
    batch = _front(evidence, R1).column("decode_batch")[0]
    return f"{batch:.0f} requests", bool(batch >= 100)


@TEXT.authors("C9", ways=Ways(False, True, "a replica is that of attention, an attention rank"))
def loose_batch(evidence: Evidence, a_rank: bool) -> Told:
    """Batch of R1 at the throughput end, a replica of the model and one of its attention."""
    front = _front(evidence, R1)
    batch, ranks = (float(front.column(f"decode_{name}")[0]) for name in ("batch", "dp_attn"))
    requests = batch / ranks if a_rank else batch
    return f"{requests:.0f} requests", 100 <= requests < 1000, f"{ranks:.0f} attention ranks"


@TEXT.claim("C31")
@TEXT.authors("C31", higher=True)
def c31_tensor_parallel(evidence: Evidence, *, higher: bool = False) -> Told:
    """TP of disaggregated decode over co-located TP at the same interactivity, medians over the middle half of the
    range: at least as high, or higher.
    """
    medians = {}
    for model in (R1, MIDDLE):
        fronts = evidence.both("fig06", model=model)
        x = np.geomspace(*shared(*fronts), 201)[50:151]
        ours, theirs = (front.at("decode_tp_attn", x) for front in fronts)
        medians[model] = float(np.median(ours / theirs))
    holds = min(medians.values()) >= 1 and (not higher or min(medians.values()) > 1)
    return f"{'median ratio ' * higher}{listed(medians)}", holds


def _front(evidence: Evidence, model: str) -> Front:
    return evidence.front("fig06", model=model, isl=LONG_PROMPTS[0])


DEPTHS = (1, 32)  # pipeline stages that figure 5 begins and ends with [1]
#: Chunks of figure 5, of which the paper names none: the best keeps the rate within a tenth. [token]
CHUNKS = (512, 1024, 2048, 4096)
CUT_OFFS = (0.5, 1.0, 2.0, 10.0, 100.0)  # limits on the first token [s]


@TEXT.claim("C10")
def c10_pipelined_prefill(evidence: Evidence) -> Told:
    """Figure 5: FTL and rate from one to 32 stages."""
    table = evidence.pipelines()
    rows = table[table["mla_form"] == "cached"].set_index("pp")
    (ftl, deep), rate = (rows.loc[list(DEPTHS), column].to_numpy() for column in ("ftl_s", "request_rate_per_s"))
    factor, kept = ftl / deep, rate[1] / rate[0]
    one, many = (depth_row(evidence.setup(R1), depth, chunk_tokens=1024) for depth in DEPTHS)
    coarse = one["ftl_s"] / many["ftl_s"], many["request_rate_per_s"] / one["request_rate_per_s"]
    note = f"chunks of 1024: factor {coarse[0]:.1f}, rate {coarse[1]:.3f}"
    holds = 20 <= factor <= 32 and abs(kept - 1) <= 0.10 and 60 <= ftl <= 140 and 2 <= deep <= 5
    return f"factor {factor:.1f} ({ftl:.1f} s to {deep:.2f} s), rate {kept:.3f}", bool(holds), note


@TEXT.authors("C10")
def pipelined(evidence: Evidence) -> Told:
    """Figure 5: FTL and rate from one to 32 stages by chunk."""
    rows = {}
    for chunk in CHUNKS:
        one, many = (depth_row(evidence.setup(R1), depth, chunk_tokens=chunk) for depth in DEPTHS)
        times = one["ftl_s"], many["ftl_s"]
        rows[chunk] = times[0] / times[1], many["request_rate_per_s"] / one["request_rate_per_s"], times
    kept = {chunk: each for chunk, each in rows.items() if each[1] >= 0.9}
    said = ", ".join(f"{chunk} {factor:.1f} at {rate:.3f}" for chunk, (factor, rate, _) in rows.items())
    if not kept:
        return f"factor of the FTL at the rate, by chunk: {said}", False
    factor, _, (first, last) = kept[max(kept, key=lambda chunk: kept[chunk][0])]
    holds = 20 <= factor <= 32 and 60 <= first <= 140 and 2 <= last <= 5
    return f"factor of the FTL at the rate, by chunk: {said}; {first:.1f} s to {last:.2f} s", holds


@TEXT.claim("C28")
def c28_representative_lengths(evidence: Evidence) -> Told:
    """Test figure 14: Llama-70B under log-normal lengths against constant lengths at the medians."""
    law = lengths("log_normal_4096_512")
    spread, constant = (evidence.front("fig14", traffic=traffic) for traffic in ("log_normal_4096_512", "4096/512"))

    def apart(front: Front) -> Floats:
        x = np.geomspace(*shared(front, constant), 200)
        return np.abs(constant.throughput(x) / front.throughput(x) - 1)

    error, halved = apart(spread), apart(front_of(evidence.setup(MIDDLE), evidence.mappings(MIDDLE), _log_normal(0.5)))
    ends = [float(constant.throughput(x) / spread.throughput(x)) for x in (LOW, HIGH)]
    note = (
        f"constant over distribution at {LOW:.0f} and {HIGH:.0f} tokens/s/user: {ends[0]:.2f} and {ends[1]:.2f}. "
        "Spread of the Azure conversation trace (sigma 0.985 and 0.859), as the paper's is not published: means "
        f"{law.mean_isl:.0f}/{law.mean_osl:.0f}, mean context of a sequence in flight {law.context:.0f} against "
        f"{4096 + 256}. With half the sigmas: largest {halved.max():.2f}, mean {halved.mean():.2f}"
    )
    value = f"largest {error.max():.3f}, mean {error.mean():.3f}"
    return value, bool(error.max() <= 0.20 and error.mean() <= 0.10), note


@TEXT.claim("C29")
def c29_cut_off(evidence: Evidence) -> Told:
    """No point above the limit; a looser limit never lowers the frontier."""
    fronts = [evidence.front("ftl_cut_off", ftl_limit_s=limit) for limit in CUT_OFFS]
    within = all(front.column("ftl_s").max() <= limit for limit, front in zip(CUT_OFFS, fronts, strict=True))
    slowest = float(evidence.front("fig06", model=R1).column("ftl_s").max())
    least = min(loose.least_over(tight) for tight, loose in pairwise(fronts))
    value = f"longest FTL {slowest:.2f} s, smallest ratio of looser to tighter {least:.9f}"
    return value, within and slowest <= 10.0 and least >= 1 - SAME_TIME


@TEXT.claim("C32")
@TEXT.authors("C32", ways=Ways(False, True, "TP 2, 4 and 8 in place of stages"))
def c32_active_parameters(evidence: Evidence, in_tensors: bool = False) -> Told:
    """Llama 405B over 70B at 4k prompts: FTL and cache, both models on two GPUs, as 405B does not fit on one."""
    if in_tensors:
        ratios = {f"TP {n}": _ftl_ratio(evidence, Sharding(tp_attn=n, tp_ffn=n)) for n in (2, 4, 8)}
        return f"FTL {listed(ratios, '.2f')}", all(map(near_parameters, ratios.values()))
    large, small = (load_model(name) for name in (LARGE, MIDDLE))
    piped = _ftl_ratio(evidence, Sharding(pp=2))
    cache = large.kv_elements_per_token() / small.kv_elements_per_token()
    holds = near_parameters(piped) and abs(cache / 1.575 - 1) <= 1e-9
    return f"FTL {piped:.2f} in two stages, cache {cache:.3f}", holds


def near_parameters(ratio: float) -> bool:
    """Within 15 % of the ratio of parameters."""
    return abs(ratio / 5.8 - 1) <= 0.15


def _log_normal(share: float) -> Lengths:
    """The distribution of figure 14 with a share of its sigmas."""
    case = load_traffic("log_normal_4096_512").cases[0]
    assert isinstance(case.isl, LogNormalLength)
    assert isinstance(case.osl, LogNormalLength)
    isl, osl = (replace(side, sigma=share * side.sigma) for side in (case.isl, case.osl))
    return lengths(TrafficCase(isl=isl, osl=osl))


def front_of(at: Setup, mappings: Sharding, law: Lengths, **options: Any) -> Front:
    """The disaggregated frontier of a model under a distribution of lengths."""
    prefill, decode = (score(at, mappings, law, **options) for score in (prefill_grid, decode_grid))
    return Front(match_pools(prefill, decode, Rules(keep="frontier")))


def _ftl_ratio(evidence: Evidence, mapping: Sharding) -> float:
    large, small = (
        float(prefill_grid(evidence.setup(model), mapping, lengths(4096, 2), batch=1, chunk_tokens=0).latency[0, 0])
        for model in (LARGE, MIDDLE)
    )
    return large / small


MIXED_PROMPTS = (4096, 16_384, 65_536)  # in equal shares [token]
FTL_LIMIT = 10.0  # [s]
WIDE = 8  # largest TP that is not wide [1]
POINTS = 200  # of a range that is compared [1]


@TEXT.claim("C33")
def c33_mixed_lengths(evidence: Evidence) -> Told:
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
    soonest = float(grid.latency[whole].min())
    limits = np.geomspace(soonest, FTL_LIMIT, POINTS)
    ours, theirs = (best_from(-grid.latency[these], rate[these], -limits) for these in (piped, whole))
    ratio = ours / theirs
    return (
        f"{ratio.min():.2f} to {ratio.max():.2f} times, {ratio[0]:.2f} at {soonest:.2f} s, the shortest of one stage",
        bool(ratio.min() >= 0.95 and ratio[0] >= 1.2),
    )


@TEXT.claim("C34")
def c34_one_mapping(evidence: Evidence) -> Told:
    """Throughput where prefill has the mapping of decode, over that of any prefill, without integer counts."""
    kept = {model: _kept_by_one_mapping(evidence, model) for model in (R1, LARGE, SMALL)}
    large = max(kept[R1], kept[LARGE])
    return listed(kept, ".2f"), large <= 0.9 and kept[SMALL] > large


def _kept_by_one_mapping(evidence: Evidence, model: str) -> float:
    prefill, decode = (evidence.pool(score, model) for score in (prefill_grid, decode_grid))
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
def c35_matching(evidence: Evidence) -> Told:
    """Algorithms 1 and 2 as printed against exact matching over all prefill configurations."""
    pools = evidence.pool(prefill_grid, R1), evidence.pool(decode_grid, R1)
    paper, exact = (Front(match_pools(*pools, Rules(matching=way, keep="frontier"))) for way in ("paper", "exact"))
    x = np.geomspace(*shared(paper, exact), POINTS)
    ratio = paper.throughput(x) / exact.throughput(x)
    value = f"{ratio.min():.3f} to {ratio.max():.3f} of exact, {ratio.mean():.3f} on average"
    return value, bool(ratio.max() <= 1 + 1e-9 and ratio.min() >= 0.9)


@TEXT.claim("C36")
def c36_mix(evidence: Evidence) -> Told:
    """Prefill tokens a decode token of the steps that have any, along the frontier: ISL/OSL over their share."""
    front = evidence.front("fig06", modes=(ServingMode.PIGGYBACK,), model=R1, isl=LONG_PROMPTS[0])
    inside = (front.x >= LOW) & (front.x <= HIGH)
    mean = LONG_PROMPTS[0] / (LONG_PROMPTS[1] - 1)  # over all steps [1]
    chunk, share = front.column("mixed_chunk_tokens")[inside], front.column("mixed_step_share")[inside]
    return (
        f"{mean / share.max():.0f} to {mean / share.min():.0f} prefill tokens a decode token; chunks of "
        f"{chunk.min():.0f} to {chunk.max():.0f} tokens in {share.min():.1%} to {share.max():.1%} of the steps",
        bool(share.max() >= 2 * share.min()),
    )
