"""Compare TPOT and TTFT that ``ds.evaluate`` forecasts for co-located deployments with their simulation.

``python benchmarks/planned_latencies.py``: forecast over simulated at p50, p90 and p99, Poisson arrivals at shares of
what each deployment takes. ``JUDGED`` are those that the law of TPOT (``planning.token_times``) was not found with;
``SEVERAL`` are instances that share requests, from which ``planning.shared_instances.EVEN`` was chosen, with constant
lengths and with lengths that spread. Ninety seconds; the numbers below "Plans, simulated" of docs/fidelity.md.
``--counts`` plays ``COUNTED`` as 1 to 16 instances, each with as much to do (three minutes); ``--others`` likewise
deployments and spreads that were not looked at while ``planning.shared_instances`` was derived (three minutes).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.traffic import EmpiricalLength, TrafficCase
from disagg_sim.planning.evaluate import evaluate
from disagg_sim.planning.limits import SHARES
from disagg_sim.planning.prove import prove
from disagg_sim.simulation.deployment import Replicas


class Case(NamedTuple):
    """Instances of one kind, and the mean lengths of their requests [token]."""

    model: str
    system: str
    mapping: Sharding
    instances: int
    batch: int
    isl: int
    osl: int


TP2, TP4, TP8 = (Sharding(tp_attn=degree, tp_ffn=degree) for degree in (2, 4, 8))
DP8 = Sharding(dp_attn=8, ep=8)
JUDGED = (
    Case("qwen3_30b_a3b", "h100_sxm", Sharding(), 1, 128, 1024, 256),
    Case("gemma_3_27b", "a100_sxm_80gb", TP4, 1, 64, 3000, 300),
    Case("mistral_small_3_1_24b", "h100_sxm", TP2, 3, 64, 6000, 400),
    Case("llama_3_1_8b", "b200_sxm", Sharding(), 2, 128, 1024, 128),
    Case("glm_4_5", "h200_sxm", DP8, 1, 256, 2048, 512),
    Case("qwen3_235b_a22b", "h200_sxm", DP8, 2, 256, 1024, 256),
    Case("kimi_k2", "b200_sxm", DP8, 1, 256, 3000, 500),
    Case("deepseek_r1", "gb200_nvl72", Sharding(dp_attn=4, tp_ffn=4), 2, 256, 1000, 1000),
    Case("gpt_oss_120b", "h100_sxm", Sharding(tp_attn=2, ep=2), 1, 128, 10000, 500),
    Case("llama_3_1_405b", "h200_sxm", TP8, 1, 64, 2000, 200),
)
SEVERAL = (
    Case("llama_3_1_70b", "h100_sxm", TP4, 8, 64, 4096, 512),
    Case("llama_3_1_70b", "h100_sxm", TP4, 3, 64, 2048, 256),
    Case("llama_3_1_8b", "h100_sxm", Sharding(), 16, 64, 4096, 256),
    Case("mistral_small_3_1_24b", "h100_sxm", TP2, 4, 64, 6000, 400),
    Case("llama_3_1_405b", "b200_sxm", TP4, 2, 64, 9000, 700),
    Case("qwen3_32b", "h200_sxm", TP2, 6, 64, 2048, 128),
)
COUNTED = (
    Case("llama_3_1_70b", "b200_sxm", TP4, 1, 64, 16384, 512),
    Case("llama_3_1_8b", "h100_sxm", Sharding(), 1, 64, 4096, 256),
    Case("qwen3_32b", "h200_sxm", TP2, 1, 64, 2048, 128),
    Case("mistral_small_3_1_24b", "h100_sxm", TP2, 1, 64, 6000, 400),
    Case("gemma_3_27b", "h100_sxm", Sharding(), 1, 32, 8192, 256),
)
COUNTS = (1, 2, 4, 8, 16)
UNSEEN = (
    Case("llama_3_3_70b", "h200_sxm", TP2, 1, 48, 3072, 384),
    Case("qwen3_8b", "l40s", Sharding(), 1, 32, 1500, 200),
    Case("gpt_oss_120b", "b200_sxm", Sharding(), 1, 96, 6000, 800),
    Case("qwen3_30b_a3b", "h100_sxm", Sharding(), 1, 128, 2048, 128),
    Case("llama_3_1_405b", "gb200_nvl72", TP4, 1, 32, 8192, 400),
    Case("llama_3_1_8b", "a100_sxm_80gb", Sharding(), 1, 64, 600, 120),
    Case("gemma_3_27b", "h200_sxm", Sharding(), 1, 48, 12000, 300),
)
LIMITS: dict[str, Any] = {"ttft": "60 s", "tpot": "2 s"}


def constant(case: Case) -> Any:
    return ds.lengths(case.isl, case.osl)


def spread(case: Case, prompts: float = 0.4, outputs: float = 0.6) -> TrafficCase:
    """Prompts and outputs spread evenly by these shares of their means."""
    means = ((case.isl, prompts), (case.osl, outputs))
    ends = (((1.0 - share) * mean, (1.0 + share) * mean) for mean, share in means)
    isl, osl = (EmpiricalLength(probabilities=(0.0, 1.0), tokens=each) for each in ends)
    return TrafficCase(isl=isl, osl=osl)


def wide(case: Case) -> TrafficCase:
    return spread(case, 0.8, 0.9)


def pools_of(case: Case) -> dict[str, Replicas]:
    return {"colocated": Replicas(mapping=case.mapping, instances=case.instances, batch=case.batch)}


def most_of(case: Case, lengths: Any) -> float:
    """Rate that the pool of a case takes. [request/s]"""
    return evaluate(case.model, case.system, pools_of(case), lengths, rate=0.1, **LIMITS).capacity


def ratios(case: Case, lengths: Any, loads: tuple[float, ...], most: float = 0.0) -> Iterator[dict[str, float]]:
    """Forecast over simulated at shares of a rate [request/s]; 0 = what the pool takes."""
    pools, most = pools_of(case), most or most_of(case, lengths)
    for load in loads:
        found = evaluate(case.model, case.system, pools, lengths, rate=load * most, **LIMITS)
        run = prove(found.given, found.design, adapt=False).planned
        yield {
            "load": load,
            **{f"tpot {share}": found.tpot[share] / run.tpot[share] for share in SHARES},
            **{f"ttft {share}": found.ttft[share] / run.ttft[share] for share in SHARES},
        }


def by_count(
    cases: tuple[Case, ...], kinds: tuple[Any, ...], counts: tuple[int, ...], loads: tuple[float, ...]
) -> None:
    """Print forecast over simulated by how many instances share requests."""
    for made in kinds:
        rows: list[dict[str, float]] = []
        for case in cases:
            work = made(case)
            alone = most_of(case, work)
            for count in counts:
                found = ratios(case._replace(instances=count), work, loads, count * alone)
                rows += [{"instances": count, **row} for row in found]
        table = pd.DataFrame(rows).groupby(["load", "instances"])[["ttft p90", "tpot p90"]]
        print(f"{made.__name__} lengths: forecast over simulated, {len(cases)} deployments")
        print(table.agg(["min", "median", "max"]).round(2).to_string(), end="\n\n")


def main() -> None:
    warnings.simplefilter("ignore")
    if "--counts" in sys.argv[1:]:
        by_count(COUNTED, (constant, spread), COUNTS, (0.3, 0.6, 0.8))
        return
    if "--others" in sys.argv[1:]:
        by_count(UNSEEN, (spread, wide), (2, 6, 16), (0.4, 0.7, 0.85))
        return
    for name, cases, made, loads in (
        ("judged", JUDGED, constant, (0.3, 0.5, 0.7, 0.8)),
        ("several instances, constant lengths", SEVERAL, constant, (0.5, 0.8)),
        ("several instances, spread lengths", SEVERAL, spread, (0.5, 0.8)),
    ):
        table = pd.DataFrame([row for case in cases for row in ratios(case, made(case), loads)])
        print(f"{name}: forecast over simulated, {len(cases)} deployments")
        print(table.drop(columns="load").quantile([0.05, 0.5, 0.95]).round(2).to_string())
        print(table[table["load"] == 0.8].agg(["min", "max"]).round(2).to_string(), end="\n\n")


if __name__ == "__main__":
    main()
