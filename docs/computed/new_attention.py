"""The sweep ``new_attention``: models of sparse, compressed and linear attention beside DeepSeek-R1.

The sweep runs in ``build/new_attention`` and goes on where it stood, so only the first caller pays for it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.cli.progress import listener
from disagg_sim.physics.kv_transfer import kv_bytes_per_request
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.units import GB, MB
from docs.computed import quick, slow, table

ROOT = Path(__file__).resolve().parents[2]
#: Models of the sweep, as pictures and tables name them.
LABELS = {
    "deepseek_r1": "DeepSeek-R1",
    "deepseek_v3_2": "DeepSeek-V3.2",
    "minimax_m3": "MiniMax-M3",
    "deepseek_v4_pro": "DeepSeek-V4-Pro",
    "qwen3_5_397b_a17b": "Qwen3.5-397B",
    "kimi_k3": "Kimi-K3",
    "nemotron_3_super_120b_a12b": "Nemotron-3-Super",
}
SYSTEMS = {"gb200_nvl72": "GB200", "h200_sxm": "H200"}
#: Prompt [token] -> speed at which designs are shown [token/s/user].
SPEEDS = {8_192: 50.0, 131_072: 50.0, 1_047_552: 20.0}
#: Prompt [token] -> its name.
PROMPTS = dict(zip(SPEEDS, ("8k", "128k", "1M"), strict=True))
X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"
CO_LOCATED = ("colocated", "piggyback")


@cache
def frontier(sweep: str = "new_attention") -> pd.DataFrame:
    """Frontiers of all cases and modes of a shipped sweep."""
    plan = plan_sweep(load_sweep(sweep))
    return run_sweep(plan, ROOT / "build" / sweep, jobs=os.cpu_count() or 1, listener=listener()).frontier


def points(model: str, system: str, isl: int, *modes: str, sweep: str = "new_attention") -> pd.DataFrame:
    """The frontier of a case in some modes together, by interactivity."""
    rows = frontier(sweep)
    mine = (rows["model"] == model) & (rows["system"] == system) & (rows["isl"] == isl) & rows["mode"].isin(modes)
    front = rows[mine].sort_values([X, Y], ascending=False)
    best = front[Y].to_numpy() > np.maximum.accumulate(np.r_[0.0, front[Y].to_numpy()])[:-1]
    return front[best][::-1]


def best(model: str, system: str, isl: int, *modes: str, speed: float) -> pd.Series | None:
    """The design of highest throughput at a speed or above it; None where no design is as fast. [token/s/user]"""
    front = points(model, system, isl, *modes)
    fast = front[front[X] >= speed]
    return None if fast.empty else fast.iloc[0]


def gains(model: str, system: str, isl: int, speeds: np.ndarray) -> np.ndarray:
    """Throughput of the best disaggregated design over that of the best co-located one at each speed. [1]"""
    apart, together = points(model, system, isl, "disaggregated"), points(model, system, isl, *CO_LOCATED)
    if apart.empty or together.empty:
        return np.full(speeds.shape, np.nan)
    found = ds.pointwise_gain(ds.curve(apart), ds.curve(together), speeds)
    return np.where(np.isfinite(found) & (found > 0), found, np.nan)


def hand_over(model: str, isl: Any) -> Any:
    """Bytes of a prompt's cache in FP8 and of its states. [B]"""
    spec = ds.load_model(model)
    return kv_bytes_per_request(spec, ds.load_precision("fp8").resolve(spec), isl)


def _short(value: float) -> str:
    """Two digits, or whole where there are more before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _cells(model: str, system: str, isl: int) -> tuple[str, str, str]:
    """Throughput, ratio of the pools and traffic of the best design at the speed of this prompt."""
    found = best(model, system, isl, "disaggregated", speed=SPEEDS[isl])
    if found is None:
        return f"at most {points(model, system, isl, 'disaggregated')[X].max():.0f} tokens/s/user", "", ""
    traffic = [found[f"kv_{way}_bytes_per_s_per_gpu"] / GB for way in ("egress", "ingress")]
    return _short(found[Y]), _short(found["ctx_gen_gpu_ratio"]), " / ".join(_short(each) for each in traffic)


def _gain(model: str, system: str, isl: int) -> str:
    """Gain of disaggregation with its 80 % band; nothing where one of the modes is not as fast."""
    sides = [points(model, system, isl, *modes) for modes in (("disaggregated",), CO_LOCATED)]
    if min((front[X].max() if len(front) else 0.0) for front in sides) < SPEEDS[isl]:
        return "–"
    row = ds.uncertainty(pd.concat(sides, ignore_index=True), samples=400, seed=0).gain([SPEEDS[isl]]).iloc[0]
    most = f"-{row['gain_p90']:.1f}" if np.isfinite(row["gain_p90"]) else " and more"
    return f"{row['gain']:.2f} ({row['gain_p10']:.1f}{most})"


@slow
def new_attention_gains() -> str:
    """Gains of disaggregation by model, system and prompt."""
    cases = [(system, isl) for system in SYSTEMS for isl in SPEEDS]
    head = [f"{SYSTEMS[system]}, {PROMPTS[isl]} at {SPEEDS[isl]:.0f}" for system, isl in cases]
    return table(("model", *head), [(LABELS[model], *(_gain(model, *case) for case in cases)) for model in LABELS])


@slow
def new_attention_designs() -> str:
    """The best disaggregated designs of all models at each length of prompt."""
    head = ["model", "system"]
    for isl, name in PROMPTS.items():
        head += [f"{name} at {SPEEDS[isl]:.0f}: tokens/s/GPU", "P:D", "KV out / in"]
    return table(
        head,
        [
            [LABELS[model], SYSTEMS[system], *(cell for isl in SPEEDS for cell in _cells(model, system, isl))]
            for system in SYSTEMS
            for model in LABELS
        ],
    )


@quick
def new_attention_bytes() -> str:
    """What a prompt hands over, and from which length on it is less than R1's."""
    rows, yardstick = [], float(hand_over("deepseek_r1", 1_000_000)) / 1_000_000
    for model, label in LABELS.items():
        fixed = max(float(2 * hand_over(model, 2**19) - hand_over(model, 2**20)), 0.0)
        slope = float(hand_over(model, 2**20) - hand_over(model, 2**19)) / 2**19
        less = "–" if slope >= yardstick else f"{fixed / (yardstick - slope):,.0f}"
        sizes = [f"{float(hand_over(model, isl)) / GB:.3g}" for isl in SPEEDS]
        most = ds.load_model(model).max_context
        rows.append((label, f"{slope:,.0f}", f"{fixed / MB:,.0f}", *sizes, less, f"{most:,}"))
    head = ("model", "B a token", "fixed, MB", *(f"GB at {name}" for name in PROMPTS.values()))
    return table((*head, "less than R1 from, tokens", "stated context"), rows)
