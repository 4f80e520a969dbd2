"""Inputs of any size for benchmarks: grids tiled from real ones, sweeps, traces and deployments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

import disagg_sim as ds
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.sweep.plan import FRONTIER, SweepPlan, plan_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.workload.arrivals import Gamma
from disagg_sim.workload.distributions import LogNormal
from disagg_sim.workload.stream import TraceStream

MODEL, SYSTEM, RECIPE = "deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"
#: A design space of 10^9 points, and those of a length with a cached share, with and without drafts. [1]
SPACE, A_COMBINATION = Path(__file__).parent / "scale.yaml", 2.5e6
FOUR = ds.Sharding(tp_attn=4, tp_ffn=4)


def tiled(grid: PhaseGrid, points: float, seed: int) -> PhaseGrid:
    """The rows of a grid again and again, up to so many points: copies are up to a quarter slower or faster."""
    rng, (rows, columns) = np.random.default_rng(seed), grid.latency.shape
    wanted = max(1, round(points / columns))
    take = np.arange(wanted) % rows
    slower = rng.uniform(0.8, 1.25, (wanted, 1)) * rng.uniform(0.97, 1.03, (wanted, columns))
    slower[:rows] = 1.0
    same = {name: getattr(grid, name)[take] for name in ("memory_bytes", "microbatches", "bound", "mla_form", "drafts")}
    times = {"latency": grid.latency[take] * slower, "request_rate": grid.request_rate[take] / slower}
    return replace(grid, mappings=grid.mappings[take], **times, **same)


def grids(points: float) -> tuple[PhaseGrid, PhaseGrid]:
    """Prefill and decode grids of DeepSeek-R1 on GB200 NVL72, so many points together."""
    at, lengths = ds.setup(MODEL, SYSTEM, RECIPE), ds.lengths(16_384, 2048)
    mappings = ds.enumerate_mappings(at)
    found = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
    prefill, decode = (tiled(grid, points / 2, seed) for seed, grid in enumerate(found))
    return prefill, decode


def sweep(points: float, folder: Path) -> SweepPlan:
    """About so many points of ``scale.yaml``: its first lengths and cached shares, what is near a frontier kept.

    Below three million there are no drafts, below half a million smaller instances, and then one mode.
    """
    spec = yaml.safe_load(SPACE.read_text())
    every = [case | {"cached": [share]} for case in spec["traffic"] for share in case["cached"]]
    spec["traffic"] = every[: max(1, round(points / A_COMBINATION))]
    if points < 3e6:
        spec["speculation"] = ["none"]
    if points < 5e5:
        spec["limits"]["max_gpus"] = 16
    if points < 5e4:
        spec["modes"] = ["disaggregated"]
    path = folder / SPACE.name
    path.write_text(yaml.safe_dump(spec))
    return plan_sweep(load_sweep(str(path)), keep=FRONTIER)


def conversations(requests: int, instances: int) -> ds.Trace:
    """Gamma arrivals and log-normal lengths of an hour of conversations (Azure 2023): 5.4 requests/s, on more than 16
    instances as many times more."""
    rng, rate = np.random.default_rng(0), 5.4 * max(instances / 16, 1)
    return ds.Trace(
        arrival=np.cumsum(rng.gamma(0.7, 1 / (0.7 * rate), requests)),
        input_tokens=np.ceil(rng.lognormal(np.log(1155) - 0.5, 1.0, requests)).astype(int),
        output_tokens=np.ceil(rng.lognormal(np.log(211) - 0.25, 0.7, requests)).astype(int),
        name="conversations",
    )


def drawn_conversations(requests: int, instances: int, *, window: int = 0) -> ds.Trace | TraceStream:
    """Such conversations as a synthetic trace, or ``window`` of its requests at a time."""
    drawn = {
        **{"rate": 5.4 * max(instances / 16, 1), "requests": requests, "name": "conversations"},
        "arrivals_as": Gamma(cv=0.7**-0.5),
        "lengths": (LogNormal(median=1155 * np.exp(-0.5), sigma=1.0), LogNormal(median=211 * np.exp(-0.25), sigma=0.7)),
    }
    return ds.synthetic_stream(**drawn, window=window) if window else ds.synthetic_trace(**drawn)


def deployment(instances: int) -> ds.ServedDeployment:
    """Instances of four GPUs: one half each to prefill and decode, or all co-located, or in pairs."""
    half, whole = (ds.Replicas(mapping=FOUR, instances=n) for n in (instances // 2, instances))
    parts = {"prefill": (half,), "decode": (half,), "colocated": (whole,), "pairs": (whole,)}
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8", "measured")
    return ds.ServedDeployment(name="bench", gpus=4 * instances, setup=at, **parts)
