"""Numbers of the page on further pools."""

from __future__ import annotations

import numpy as np

import disagg_sim as ds
from disagg_sim.physics.setup import Setup
from docs.computed import quick, table

#: TTL limits of the comparison. [s]
TTL_LIMITS = (0.02, 0.03, 0.05, 0.1)


def _best(at: Setup, limit: float) -> tuple[float, float, str]:
    """Decode throughput of whole and of split instances within a TTL limit, and the best split. [token/s/GPU]"""
    lengths = ds.lengths(4096, 512)
    whole, split = ds.decode_grid(at, ds.enumerate_mappings(at), lengths), ds.split_grid(at, lengths)
    best = []
    for grid in (whole, split):
        rate = grid.request_rate * lengths.mean_osl / grid.gpus[:, None]
        best.append(np.where(grid.feasible & (grid.latency <= limit), rate, 0.0))
    row, column = np.unravel_index(best[1].argmax(), best[1].shape)
    found = split.instance(int(row), int(column))
    text = f"{found.attention.gpus} + {found.ffn.gpus} GPUs, {found.microbatches} micro-batches, "
    text += f"idle {found.attention_idle:.0%} and {found.ffn_idle:.0%}"
    return float(best[0].max()), float(best[1].max()), text


@quick
def split_against_whole() -> str:
    """Attention and feed-forward apart against whole decode instances, decode GPUs alone."""
    rows = []
    for system, recipe in (("gb200_nvl72", "nvfp4_fp8kv"), ("h200_sxm", "fp8")):
        at = ds.setup("deepseek_r1", system, recipe)
        for limit in TTL_LIMITS:
            whole, split, text = _best(at, limit)
            rates = f"{whole:,.0f}", f"{split:,.0f}", f"{split / whole:.2f}"
            rows.append((system, f"{limit * 1e3:.0f} ms", *rates, text))
    return table(("system", "TTL up to", "whole", "split", "ratio", "best split: attention + FFN"), rows)


@quick
def encode_pools() -> str:
    """Pools of requests with images, at one budget."""
    at, lengths = ds.setup("qwen3_5_397b_a17b", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(8192, 512)
    mappings = ds.enumerate_mappings(at, max_gpus=16)
    grids = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
    rows = []
    for images in (0, 1, 2, 4):
        encode = [ds.encode_step(at, images=images, height=1120, width=1120)] if images else []
        plan = ds.plan_pools([*encode, *grids], ftl_limit=4.0, ttl_limit=0.03, gpu_budget=144)
        gpus = plan.gpus
        added = f"{encode[0].latency * 1e3:.0f} ms" if encode else "0"
        pools = (str(gpus.get(name, 0)) for name in ("encode", "prefill", "decode"))
        rows.append((str(images), *pools, f"{plan.request_rate:.1f}", added))
    head = ("images a request", "encode GPUs", "prefill GPUs", "decode GPUs", "requests/s", "added to the FTL")
    return table(head, rows)
