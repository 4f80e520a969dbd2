"""The result on the first screen of README: DeepSeek-R1 on GB200 NVL72, disaggregated against co-located."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pandas as pd

import disagg_sim as ds
from disagg_sim.sweep.fidelity import fidelity_of
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from docs.computed import quick

SETUP = ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
ISL, OSL = 16_384, 2_048  # [token]
FTL_LIMIT = 10.0  # [s]
#: Interactivity at which the modes are compared. [token/s/user]
AT = 50.0


@cache
def disaggregated() -> pd.DataFrame:
    """Every disaggregated design: each decode configuration with its best match."""
    at, load = ds.setup(*SETUP), ds.lengths(ISL, OSL)
    mappings = ds.enumerate_mappings(at, max_gpus=72)
    grids = (grid(at, mappings, load) for grid in (ds.prefill_grid, ds.decode_grid))
    return ds.disaggregated(*grids, ftl_limit=FTL_LIMIT)


@cache
def colocated(*, waits: bool = True) -> pd.DataFrame:
    """Every co-located design, with prefill between decode steps, which may wait, and with prefill inside them."""
    at, load = ds.setup(*SETUP), ds.lengths(ISL, OSL)
    mappings = ds.enumerate_mappings(at, max_gpus=72)
    options = ds.Colocation(hold_steps=None if waits else ())
    modes = (ds.colocated, ds.piggyback)
    found = [mode(at, mappings, load, ftl_limit=FTL_LIMIT, options=options) for mode in modes]
    return pd.concat(found, ignore_index=True)


def at_speed(points: pd.DataFrame) -> float:
    """Best throughput at ``AT``. [token/s/GPU]"""
    return float(ds.curve(ds.pareto_front(points)).at(AT))


def gain() -> float:
    """Throughput of the best disaggregated design over that of the best co-located one. [1]"""
    return at_speed(disaggregated()) / at_speed(colocated())


@cache
def gain_band() -> tuple[float, float]:
    """10 % and 90 % quantile of that gain, by the errors of the fits, as the demo has them. [1]"""
    demo = load_sweep("demo")
    own = replace(demo, models=demo.models[:1], pools=demo.pools[:1], traffic=demo.traffic[:1])
    with TemporaryDirectory() as root:
        result = run_sweep(plan_sweep(own), Path(root), jobs=1, listener=Mock(), outside=True)
        (found,) = fidelity_of(result, Path(root), error_bars=True)
    row = found.gain[found.gain["tokens_per_s_per_user"] == AT].iloc[0]
    return float(row["gain_p10"]), float(row["gain_p90"])


@quick
def headline_disaggregated() -> str:
    """Throughput of the best disaggregated design. [token/s/GPU]"""
    return f"{at_speed(disaggregated()):,.0f}"


@quick
def headline_colocated() -> str:
    """Throughput of the best co-located design. [token/s/GPU]"""
    return f"{at_speed(colocated()):,.0f}"


@quick
def headline_gain() -> str:
    """The gain."""
    return f"{gain():.1f}"


@quick
def headline_untuned() -> str:
    """The gain if no co-located prompt is held back."""
    return f"{at_speed(disaggregated()) / at_speed(colocated(waits=False)):.1f}"


@quick
def headline_band() -> str:
    """Its 80 % band."""
    least, most = gain_band()
    return f"{least:.1f} to {most:.1f}"


@quick
def headline_outside() -> str:
    """Points of both frontiers with an operator outside the range of its fit."""
    points = pd.concat([ds.pareto_front(disaggregated()), ds.pareto_front(colocated())], ignore_index=True)
    outside = ds.outside_calibration(points)
    return f"{int((outside != '').sum())} of {len(points)}"


@quick
def ranks_together() -> str:
    """Time of a token if all 8 attention ranks had a prompt in each pass, and as seats become free."""
    at, ranks = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8)
    load, batch = ds.lengths(8192, 1024), 64
    freed = ds.colocated(at, ranks, load, options=ds.Colocation(batch=(batch,)))["ttl_s"].item()
    prompts = ds.prefill_grid(at, ranks, load, batch=[8]).latency.item()
    together = ds.decode_grid(at, ranks, load, batch=[batch]).latency.item() + (batch / 8 - 1) * prompts / load.gaps
    return f"{1e3 * together:.0f} ms in place of {1e3 * freed:.0f}"


@quick
def ranks_held() -> str:
    """Time of a token if prompts are held back until all of these ranks have a free seat, for as long as pays most."""
    at, ranks = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8)
    options = ds.Colocation(batch=(64,), hold_steps=None)
    (row,) = ds.colocated(at, ranks, ds.lengths(8192, 1024), options=options)["ttl_s"]
    return f"{1e3 * row:.0f} ms"
