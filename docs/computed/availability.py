"""Numbers of the page on availability."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import disagg_sim as ds
from disagg_sim.facts.load import load_failures
from disagg_sim.techniques.availability.law import Need, blast_of, spares_for
from disagg_sim.units import DAY, HOUR, MINUTE
from docs.computed import quick, table

#: GPUs of the decode pool, and the availability that is asked for.
GPUS, TARGET, TTL = 576, 0.999, 0.05


@quick
def blast_radius() -> str:
    """Decode of DeepSeek-R1 at growing EP: throughput a GPU, with spares for 99.9 %."""
    failing, lengths, rows = load_failures("llama_3_405b"), ds.lengths(4096, 512), []
    for system, recipe, sizes in (
        ("h200_sxm", "fp8", (8, 16, 32, 64)),
        ("gb200_nvl72", "nvfp4_fp8kv", (4, 8, 16, 32, 64)),
    ):
        at = ds.setup("deepseek_r1", system, recipe)
        for gpus in sizes:
            grid = ds.decode_grid(at, ds.Sharding(dp_attn=gpus, ep=gpus), lengths)
            fits = grid.feasible & (grid.latency <= TTL)
            rate = float(np.max(grid.request_rate * lengths.mean_osl / gpus, where=fits, initial=0.0))
            many = GPUS // gpus
            cells = [system, f"EP{gpus}", f"{rate:,.0f}"]
            for restart in (8 * MINUTE, DAY):
                blast = blast_of(replace(failing, restart=restart), at.system, gpus, links=True)
                need = Need(instances=many, cost=gpus, blast=blast)
                spares = spares_for([need], TARGET).counts[0]
                spared = rate * many / (many + spares)
                cells += [f"{need.up(0):.2%}", f"{many} + {spares}", f"{spared:,.0f}"]
            cells.insert(3, f"{blast.mtbf / DAY:,.0f} days")
            rows.append(tuple(cells))
    head = ("system", "decode", "tokens/s/GPU", "an instance stops every", "full capacity", "instances + spares")
    head = (*head, "tokens/s/GPU with spares", "full capacity, a day each", "instances + spares", "with spares")
    return table(head, rows)


@quick
def lost_requests() -> str:
    """Share of requests whose decode instance stops while they run, EP64 on H200."""
    blast = blast_of(load_failures("llama_3_405b"), ds.load_system("h200_sxm"), 64, links=True)
    residence = 511 * TTL
    share = f"{blast.rate * residence * 1e6:.1f} in a million"
    return f"one in {blast.mtbf / residence:,.0f} ({share}, {residence:.0f} s each)"


@quick
def gpu_hours_between_failures() -> str:
    """GPU-hours between failures of any kind."""
    failing = load_failures("llama_3_405b")
    per_gpu = failing.rate("gpu") + failing.rate("link") + failing.rate("node") / failing.gpus_per_node
    return f"{1 / per_gpu / HOUR:,.0f}"
