"""Tables of the study of prefix reuse: frontiers by cached share, tiers, and the turns of agents."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.physics.cache_tiers import break_even_bandwidth, load_time
from disagg_sim.techniques.prefix.requests_hits import routed
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.units import GB, MS
from disagg_sim.workload.synthetic import session_trace
from disagg_sim.workload.turns import turn_lengths
from docs.computed import quick, slow, table

#: Title, setup, largest instance and limit of the cases.
CASES = {
    "DeepSeek-R1, GB200": (("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), 72),
    "DeepSeek-R1, H200": (("deepseek_r1", "h200_sxm", "fp8"), 32),
    "Llama-3.1-70B, H200": (("llama_3_1_70b", "h200_sxm", "fp8"), 16),
}
ISL, OSL = 65_536, 1_024  # [token]
SHARES = (0.0, 0.5, 0.9, 0.96)
FTL_LIMIT = 10.0  # [s]
#: Speed at which the modes are compared. [token/s/user]
AT = 40.0


@cache
def modes(case: str, share: float) -> dict[str, pd.DataFrame]:
    """Every design of the three modes of a case, at a cached share."""
    names, most = CASES[case]
    at, lengths = ds.setup(*names), ds.lengths(ISL, OSL, cached=share)
    mappings = ds.enumerate_mappings(at, max_gpus=most)
    grids = (grid(at, mappings, lengths) for grid in (ds.prefill_grid, ds.decode_grid))
    found = {"disaggregated": ds.disaggregated(*grids, ftl_limit=FTL_LIMIT)}
    options = ds.Colocation(hold_steps=None)  # prompts wait for each other as far as that pays
    for mode in (ds.colocated, ds.piggyback):
        found[mode.__name__] = mode(at, mappings, lengths, ftl_limit=FTL_LIMIT, options=options)
    return found


def at_speed(points: pd.DataFrame) -> float:
    """Best throughput at ``AT``. [token/s/GPU]"""
    return float(ds.curve(ds.pareto_front(points)).at(AT))


def matched(case: str, share: float) -> pd.Series:
    """The slowest point of the disaggregated frontier that is as fast as ``AT``."""
    front = ds.pareto_front(modes(case, share)["disaggregated"])
    return front[front["tokens_per_s_per_user"] >= AT].iloc[0]


def gain_at(case: str, share: float) -> float:
    """Disaggregated over the best co-located throughput at ``AT``. [1]"""
    found = modes(case, share)
    shared = max(at_speed(points) for mode, points in found.items() if mode != "disaggregated")
    return at_speed(found["disaggregated"]) / shared


def gains(case: str, share: float) -> tuple[float, float, float]:
    """The gain at ``AT``, and 10 % and 90 % quantile of its samples by the errors of the fits. [1]"""
    found, lengths = modes(case, share), ds.lengths(ISL, OSL, cached=share)
    fronts = pd.concat([ds.pareto_front(points) for points in found.values()], ignore_index=True)
    row = ds.uncertainty(fronts, samples=400, origin=ds.Origin(lengths=lengths)).gain([AT]).iloc[0]
    return gain_at(case, share), float(row["gain_p10"]), float(row["gain_p90"])


@slow
def reuse_frontier() -> str:
    """What a cached share changes, at ``AT`` tokens/s/user."""
    rows = []
    for case in CASES:
        for share in SHARES:
            best, gain = matched(case, share), gains(case, share)
            rows.append(
                [
                    case if share == SHARES[0] else "",
                    f"{100 * share:.0f} %",
                    f"{at_speed(modes(case, share)['disaggregated']):.0f}",
                    f"{gain[0]:.2f} ({gain[1]:.2f} to {gain[2]:.2f})",
                    f"{best['ctx_gen_gpu_ratio']:.2g}",
                    f"{best['kv_egress_bytes_per_s_per_gpu'] / GB:.2g}",
                    f"{best['kv_ingress_bytes_per_s_per_gpu'] / GB:.2g}",
                ]
            )
    header = ["", "cached", "disaggregated [tokens/s/GPU]", "over co-located (80 % band)", "P:D [GPUs]"]
    return table([*header, "sent [GB/s a prefill GPU]", "taken in [GB/s a decode GPU]"], rows)


#: Instances that load a prefix: the mapping of each case.
LOADERS = {
    "DeepSeek-R1, H200": ds.Sharding(dp_attn=8, ep=8),
    "DeepSeek-R1, GB200": ds.Sharding(dp_attn=8, ep=8),
    "Llama-3.1-70B, H200": ds.Sharding(tp_attn=8, tp_ffn=8),
}


@quick
def reuse_tiers() -> str:
    """Load 90 % of a prompt from each tier, or compute it: 8 GPUs, one prompt a rank."""
    rows = []
    for case, mapping in LOADERS.items():
        at = ds.setup(*CASES[case][0])
        past = ds.lengths(ISL, OSL, cached=0.9).cached.mean_past
        batch = int(mapping.dp_attn)
        whole = ds.prefill_grid(at, mapping, ds.lengths(int(past), OSL), batch=[batch]).latency[0, 0]
        loads = [
            float(load_time(at, mapping, batch=batch, past=past, tier=at.system.tier(name)))
            for name in ("dram", "remote", "ssd")
        ]
        least = break_even_bandwidth(at, past, whole) / GB * batch / 8
        rows.append([case, *(f"{each / MS:.0f} ms" for each in loads), f"{whole:.1f} s", f"{least:.2g}"])
    header = ["58,976 tokens a prompt", "DRAM", "remote", "SSD", "computed again", "load wins above [GB/s a GPU]"]
    return table(header, rows)


#: Memory that each of four instances of eight GPUs gives to the prompts of agents: words, HBM of a GPU, tiers, whether
#: sessions stick.
ROOMS = (
    ("none", 0.0, (), True),
    ("10 GB of HBM", 10 * GB, (), True),
    ("10 GB of HBM, DRAM", 10 * GB, ("dram",), True),
    ("10 GB of HBM, DRAM, turns go anywhere", 10 * GB, ("dram",), False),
    ("10 GB of HBM, DRAM, remote, turns go anywhere", 10 * GB, ("dram", "remote"), False),
)
#: Sessions that begin. [1/s]
SESSIONS_PER_S = 0.5


@slow
def reuse_rooms() -> str:
    """Coding agents on Llama-3.1-70B by what their instances remember, hit rates from capacities."""
    names, most = CASES["Llama-3.1-70B, H200"]
    plain = ds.setup(*names)
    mappings, rows = ds.enumerate_mappings(plain, max_gpus=most), []
    for words, hbm, tiers, sticky in ROOMS:
        at = replace(plain, set_aside=hbm)
        cache = GpuCaches(gpus=8, hbm=hbm, tiers=tiers, caches=4, sticky=sticky)
        met = cache.met((at.model, at.precision), at.system, 33_000, sessions_per_s=SESSIONS_PER_S)
        law = turn_lengths("coding_agent", met)
        grids = ds.prefill_grid(at, mappings, law), ds.decode_grid(plain, mappings, law)
        points = ds.disaggregated(*grids, ftl_limit=FTL_LIMIT)
        shared = [mode(at, mappings, law, ftl_limit=FTL_LIMIT) for mode in (ds.colocated, ds.piggyback)]
        front = ds.pareto_front(points)
        best = front[front["tokens_per_s_per_user"] >= AT].iloc[0]
        found = 1 - law.mean_new / law.mean_isl
        tiers_of = ", ".join(f"{name} {100 * found * share:.0f}" for name, share in law.cached.reuse.tiers)
        rows.append(
            [
                words,
                f"{100 * found:.0f} %" + (f" ({tiers_of})" if found else ""),
                f"{at_speed(points):.0f}",
                f"{at_speed(points) / max(map(at_speed, shared)):.2f}",
                f"{best['ctx_gen_gpu_ratio']:.2g}",
            ]
        )
    header = ["memory for prompts", "found (in)", "disaggregated [tokens/s/GPU]", "over co-located", "P:D [GPUs]"]
    return table(header, rows)


#: Caches of the sessions: words, tokens of each cache, number of caches, whether sessions stick to one.
CACHES = (
    ("none", 0.0, 1, True),
    ("8 caches of 0.1 million tokens, turns go anywhere", 1e5, 8, False),
    ("8 caches without end, turns go anywhere", np.inf, 8, False),
    ("8 caches of 0.1 million tokens, sessions stick", 1e5, 8, True),
    ("8 caches without end, sessions stick", np.inf, 8, True),
)


@slow
def reuse_agents() -> str:
    """The recorded coding agents on Llama-3.1-70B by the caches that they meet."""
    names, most = CASES["Llama-3.1-70B, H200"]
    at, trace = ds.setup(*names), session_trace(ds.load_traffic("coding_agent"), rate=0.2, sessions=200, seed=1)
    mappings = ds.enumerate_mappings(at, max_gpus=most)
    rows = []
    for words, size, count, sticky in CACHES:
        curve = ds.hit_curve(trace, routed(trace, count, sticky=sticky, seed=1))
        lengths = ds.lengths(trace, cached=curve.found(size)) if size else ds.lengths(trace)
        grids = (grid(at, mappings, lengths) for grid in (ds.prefill_grid, ds.decode_grid))
        points = ds.disaggregated(*grids, ftl_limit=FTL_LIMIT)
        shared = [mode(at, mappings, lengths, ftl_limit=FTL_LIMIT) for mode in (ds.colocated, ds.piggyback)]
        front = ds.pareto_front(points)
        best = front[front["tokens_per_s_per_user"] >= AT].iloc[0]
        gain = at_speed(points) / max(map(at_speed, shared))
        share = curve.share(size) if size else 0.0
        rows.append(
            [
                words,
                f"{100 * share:.0f} %",
                f"{at_speed(points):.0f}",
                f"{gain:.2f}",
                f"{best['ctx_gen_gpu_ratio']:.2g}",
            ]
        )
    return table(["cache", "found", "disaggregated [tokens/s/GPU]", "over co-located", "P:D [GPUs]"], rows)
