"""Test C10, C28, C29 and C32: pipelined prefill, length distributions, the FTL limit, size of the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model, load_traffic
from disagg_sim.facts.traffic import LogNormalLength, TrafficCase
from disagg_sim.physics.counts import prefill_work
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.serving.points import THROUGHPUT
from disagg_sim.workload.lengths import Lengths, lengths
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    HIGH,
    LARGE,
    LOW,
    MIDDLE,
    R1,
    SAME_TIME,
    Evidence,
    Front,
    listed,
    shared,
)
from lab.studies.beyond_the_buzz.pipelining import depth_row
from lab.studies.claims import Finding

DEPTHS = (1, 32)  # pipeline stages that figure 5 begins and ends with [1]
CUT_OFFS = (0.5, 1.0, 2.0, 10.0, 100.0)  # limits on the first token [s]


@TEXT.claim("C10")
def c10_pipelined_prefill(evidence: Evidence) -> Finding:
    """Figure 5: FTL and rate from one to 32 stages."""
    table, switched = evidence.pipelines(), evidence.pipelines("bf16_attention_fig05")
    (ftl, deep), rate = _ends(table, "cached", "ftl_s"), _ends(table, "cached", "request_rate_per_s")
    factor, kept = ftl / deep, rate[1] / rate[0]
    naive, naive_rate = _ends(table, "naive", "ftl_s"), _ends(table, "naive", "request_rate_per_s")
    rows = table[table["mla_form"] == "cached"]
    by_depth = ", ".join(
        f"PP{pp} {value:.3f}" for pp, value in zip(rows["pp"], rows["request_rate_per_s"] / rate[0], strict=True)
    )
    large = [int(pp) for pp in rows.loc[~rows["fits"].astype(bool), "pp"]]
    one, many = (depth_row(evidence.setup(R1), depth, chunk_tokens=1024) for depth in DEPTHS)
    coarse = one["ftl_s"] / many["ftl_s"], many["request_rate_per_s"] / one["request_rate_per_s"]
    plain, plain_rate = (_ends(switched, "cached", column) for column in ("ftl_s", "request_rate_per_s"))
    note = (
        f"rate over PP1: {by_depth}; too large for memory: PP {large}. 61 layers on 32 stages leave the slowest one 2 "
        "where 61/32 would be even (x 0.953), and every chunk reads the experts again: chunks of 1024 give "
        f"{coarse[1]:.3f} at a factor of {coarse[0]:.1f}. Form naive: factor {naive[0] / naive[1]:.1f}, rate "
        f"{naive_rate[1] / naive_rate[0]:.2f}. bf16 attention: factor {plain[0] / plain[1]:.1f}, rate "
        f"{plain_rate[1] / plain_rate[0]:.3f}, {plain[0]:.0f} s at PP1"
    )
    holds = 20 <= factor <= 32 and abs(kept - 1) <= 0.10 and 60 <= ftl <= 140 and 2 <= deep <= 5
    return Finding(f"factor {factor:.1f} ({ftl:.1f} s to {deep:.2f} s), rate {kept:.3f}", bool(holds), note)


@TEXT.claim("C28")
def c28_representative_lengths(evidence: Evidence) -> Finding:
    """Test figure 14: Llama-70B under log-normal lengths against constant lengths at the medians."""
    law = lengths("log_normal_4096_512")
    spread, constant = (evidence.front("fig14", traffic=traffic) for traffic in ("log_normal_4096_512", "4096/512"))
    narrow = _front_under(evidence, _log_normal(0.5))
    errors = {}
    for name, (low, high) in {
        "own": shared(spread, constant, low=_first(spread, constant), high=np.inf),
        "range": shared(spread, constant),
    }.items():
        x = np.geomspace(low, high, 200)
        errors[name] = np.abs(constant.throughput(x) / spread.throughput(x) - 1)
    ends = [float(constant.throughput(x) / spread.throughput(x)) for x in (LOW, HIGH)]
    error = errors["range"]
    x = np.geomspace(*shared(narrow, constant), 200)
    halved = np.abs(constant.throughput(x) / narrow.throughput(x) - 1)
    note = (
        f"constant over distribution at {LOW:.0f} and {HIGH:.0f} tokens/s/user: {ends[0]:.2f} and {ends[1]:.2f}; over "
        f"the shared range of the whole curves: largest {errors['own'].max():.2f}, mean {errors['own'].mean():.2f}. "
        "Spread of the Azure conversation trace (sigma 0.985 and 0.859), as the paper's is not published: mean prompt "
        f"{law.mean_isl:.0f} tokens against 4096, mean answer {law.mean_osl:.0f} against 512, mean context of a "
        f"sequence in flight {law.context:.0f} against {4096 + 256}. With half the sigmas: largest {halved.max():.2f}, "
        f"mean {halved.mean():.2f}"
    )
    value = f"largest {error.max():.3f}, mean {error.mean():.3f}"
    return Finding(value, bool(error.max() <= 0.20 and error.mean() <= 0.10), note)


@TEXT.claim("C29")
def c29_cut_off(evidence: Evidence) -> Finding:
    """No point above the limit; a looser limit never lowers the frontier."""
    fronts = [evidence.front("ftl_cut_off", ftl_limit_s=limit) for limit in CUT_OFFS]
    within = all(front.column("ftl_s").max() <= limit for limit, front in zip(CUT_OFFS, fronts, strict=True))
    slowest = float(evidence.front("fig06", model=R1).column("ftl_s").max())
    least = min(loose.least_over(tight) for tight, loose in pairwise(fronts))
    peaks = {f"{limit:g} s": front.column(THROUGHPUT).max() for limit, front in zip(CUT_OFFS, fronts, strict=True)}
    note = f"R1 16384/2048; highest throughput in tokens/s/GPU by limit: {listed(peaks, '.0f')}"
    value = f"longest FTL {slowest:.2f} s, smallest ratio of looser to tighter {least:.9f}"
    return Finding(value, within and slowest <= 10.0 and least >= 1 - SAME_TIME, note)


@TEXT.claim("C32")
def c32_active_parameters(evidence: Evidence) -> Finding:
    """Llama 405B over 70B at 4k prompts: FTL and cache, both models on the same GPUs."""
    large, small = (load_model(name) for name in (LARGE, MIDDLE))
    piped = _ftl_ratio(evidence, Sharding(pp=2))
    tensor = by_tp(evidence)
    cache = large.kv_elements_per_token() / small.kv_elements_per_token()
    flops = prefill_work(large, isl=4096).flops / prefill_work(small, isl=4096).flops
    inside = [name for name, ratio in tensor.items() if near_parameters(ratio)]
    note = (
        f"FLOP {flops:.2f}; the verdict is that of two stages, as {LARGE} does not fit on one GPU. FTL by TP: "
        f"{listed(tensor, '.2f')}, within the 15 %: {', '.join(inside) or 'none'}: elementwise bytes and all-reduces "
        "go with layers and hidden size (3.15), not with parameters, and TP leaves more of them"
    )
    holds = near_parameters(piped) and abs(cache / 1.575 - 1) <= 1e-9
    return Finding(f"FTL {piped:.2f} in two stages, cache {cache:.3f}", holds, note)


def by_tp(evidence: Evidence) -> dict[str, float]:
    """FTL of Llama 405B over 70B on 2, 4 and 8 GPUs. [1]"""
    return {f"TP {n}": _ftl_ratio(evidence, Sharding(tp_attn=n, tp_ffn=n)) for n in (2, 4, 8)}


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


def _front_under(evidence: Evidence, law: Lengths) -> Front:
    """The disaggregated frontier of Llama-70B under a distribution of lengths."""
    at = evidence.setup(MIDDLE)
    table = evidence.mappings(MIDDLE)
    prefill, decode = prefill_grid(at, table, law), decode_grid(at, table, law)
    return Front(match_pools(prefill, decode, Rules(keep="frontier")))


def _ends(table: pd.DataFrame, form: str, column: str) -> tuple[float, float]:
    """A column of figure 5 at one and at 32 stages."""
    rows = table[table["mla_form"] == form].set_index("pp")[column]
    shallow, deep = (float(rows.loc[depth]) for depth in DEPTHS)
    return shallow, deep


def _first(*fronts: Front) -> float:
    """Where the last of some frontiers begins. [token/s]"""
    return max(float(front.x[0]) for front in fronts)


def _ftl_ratio(evidence: Evidence, mapping: Sharding) -> float:
    large, small = (
        float(prefill_grid(evidence.setup(model), mapping, lengths(4096, 2), batch=1, chunk_tokens=0).latency[0, 0])
        for model in (LARGE, MIDDLE)
    )
    return large / small
