"""Compare the steady state of closed loops with the same loops played request by request: the law against simulation.

``python benchmarks/closed_loops.py``: errors of the law in per cent, late in a run, of the 36 loops on the accuracy
page; ``--others`` of 36 that were not looked at while the law was derived. Minutes each.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from lab.calibration.served.evaluate import predict
from lab.calibration.served.rows import ServingRow, WorkerGroup
from lab.calibration.served.simulate import MOST_REQUESTS, client_latencies
from lab.calibration.served.steady_state import served

TP1, TP2, TP4 = (Sharding(tp_attn=degree, tp_ffn=degree) for degree in (1, 2, 4))
DP4, DP8 = (Sharding(dp_attn=ranks, ep=ranks) for ranks in (4, 8))

#: Requests a slot times the square of the spread, after which requests that started together no longer stay so. [1]
FORGOTTEN = 1.2


class Loop(NamedTuple):
    """Workers of one kind, all of both phases where none prefills alone, and mean lengths [token]."""

    model: str
    system: str
    engine: str
    recipe: str
    mapping: Sharding
    isl: int
    osl: int
    prefill: int = 0
    decode: int = 1


KNOWN = (
    Loop("llama_3_1_8b", "h100_sxm", "vllm", "fp8", TP1, 2048, 256),
    Loop("qwen3_235b_a22b", "h200_sxm", "vllm", "fp8", DP4, 2048, 256),
    Loop("llama_3_1_70b", "h100_sxm", "sglang", "fp8", TP4, 2048, 256),
)
LOOPS = (*KNOWN, *(each._replace(prefill=1) for each in KNOWN))
OTHERS = (
    Loop("gemma_3_27b", "h100_sxm", "vllm", "bf16", TP2, 1024, 512),
    Loop("mistral_small_3_1_24b", "h200_sxm", "sglang", "bf16", TP1, 3000, 400),
    Loop("glm_4_5", "h200_sxm", "vllm", "fp8", DP8, 1500, 300),
    Loop("gemma_3_27b", "h100_sxm", "vllm", "bf16", TP2, 1024, 512, 1),
    Loop("qwen3_32b", "b200_sxm", "sglang", "fp8", TP1, 4096, 200, 3),
    Loop("qwen3_30b_a3b", "h100_sxm", "vllm", "fp8", TP1, 6000, 300, 2, 2),
)


def compared(loops: tuple[Loop, ...], clients: tuple[int, ...], spreads: tuple[float, ...]) -> pd.DataFrame:
    """Errors of the law on each loop [%], of all requests but those of the start of its run and of the end."""
    lines = []
    for loop, spread, count in product(loops, spreads, clients):
        waves = min(round(FORGOTTEN / spread**2), MOST_REQUESTS // count)
        row = ServingRow(
            file="",
            row="",
            form="",
            quantities=(),
            load="closed_loop",
            mode="disaggregated" if loop.prefill else "aggregated",
            workers=WorkerGroup(mapping=loop.mapping, count=loop.decode),
            prefill=WorkerGroup(mapping=loop.mapping, count=loop.prefill) if loop.prefill else None,
            concurrency=float(count),
            spread=spread,
            waves=float(waves),
            model=loop.model,
            system=loop.system,
            engine=loop.engine,
            recipe=loop.recipe,
            isl=float(loop.isl),
            osl=float(loop.osl),
        )
        run = served(loop.model, loop.system, loop.recipe, load_engine(loop.engine))
        law, found = predict(run, [replace(row, waves=0.0)]), client_latencies(run, row)
        late = slice(count * waves // 3, -count)
        tpot, ttft, life = (float(each[late].mean()) for each in (found.tpot, found.ttft, found.latency))
        line = {
            "model": loop.model,
            "mode": row.mode,
            "clients": count,
            "spread": spread,
            "waves": waves,
            "ttft_ms": 1e3 * ttft,
        }
        for name, value in (("tpot", tpot), ("ttft", ttft), ("request_rate", count / life)):
            line[name] = 100.0 * (float(getattr(law, name)[0]) / value - 1.0)
        lines.append(line)
    return pd.DataFrame(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    others = "--others" in sys.argv[1:]
    asked = (OTHERS, (12, 48, 160), (0.1, 0.2)) if others else (LOOPS, (4, 32, 128), (0.05, 0.1))
    table = compared(*asked)
    rounded = dict.fromkeys(("ttft_ms", "tpot", "ttft", "request_rate"), 1)
    print(table.round(rounded).to_string(index=False), end="\n\n")
    errors = table.set_index("mode")[["tpot", "ttft", "request_rate"]].abs().groupby(level="mode")
    print(errors.agg(["median", "max"]).round(1).to_string())


if __name__ == "__main__":
    main()
