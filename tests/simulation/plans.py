"""Plans of plan_pools, simulated at a share of their own rate.

The lengths are those that were planned for, the SLO is what was planned: TPOT at the TTL limit, TTFT at twice the FTL
limit, since a request that just missed a pass waits for it before its own. Evenly spaced arrivals show what batches,
transfers, memory and routing cost; Poisson arrivals add the queue that no plan knows of.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

import disagg_sim as ds
from disagg_sim.serving.pools import PoolsPlan
from disagg_sim.simulation.metrics import Summary

#: Model, system, recipe, largest instance [GPU], GPU budgets [GPU].
CASES = (
    ("llama_3_1_8b", "h100_sxm", "fp8", 4, (24, 64)),
    ("llama_3_1_70b", "h100_sxm", "fp8", 8, (24, 64)),
    ("llama_3_1_70b", "a100_sxm_80gb", "bf16", 8, (32, 64)),
    ("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", 8, (24, 64)),
    ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", 32, (48, 128)),
    ("deepseek_r1", "h200_sxm", "fp8", 32, (48, 128)),
    ("gpt_oss_120b", "h100_sxm", "bf16", 8, (24, 64)),
    ("qwen3_235b_a22b", "h200_sxm", "fp8", 16, (24, 64)),
    ("mistral_7b", "h100_sxm", "fp8", 4, (24, 64)),
)
#: Prompt and output [token], FTL and TTL limit [s].
SHAPES = ((1024, 128, 1.0, 0.03), (4096, 256, 2.0, 0.04), (16_384, 512, 10.0, 0.05), (512, 512, 0.5, 0.02))


class Planned(NamedTuple):
    """A plan with what it was made for."""

    name: str
    plan: PoolsPlan
    isl: int
    osl: int
    ftl_limit: float  # [s]
    ttl_limit: float  # [s]


def plans(cases=CASES, shapes=SHAPES) -> Iterator[Planned]:
    """Mixed pools and one configuration a pool, for the highest rate within a budget and the fewest GPUs for a rate."""
    for model, system, recipe, most, (small, large) in cases:
        at = ds.setup(model, system, recipe)
        mappings = ds.enumerate_mappings(at, max_gpus=most)
        for isl, osl, ftl, ttl in shapes:
            lengths = ds.lengths(isl, osl)
            prefill, decode = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
            limits = {"ftl_limit": ftl, "ttl_limit": ttl}
            found = {
                f"mixed, {small} GPUs": ds.plan_pools(
                    [prefill, decode], **limits, gpu_budget=small, options=ds.MatchOptions(mixing_gain=0.0)
                ),
                f"default, {large} GPUs": ds.plan_pools([prefill, decode], **limits, gpu_budget=large),
            }
            rate = 0.6 * found[f"default, {large} GPUs"].request_rate
            if rate:
                found["fewest GPUs"] = ds.plan_pools(
                    [prefill, decode],
                    **limits,
                    required_rate=rate,
                    options=ds.MatchOptions(max_configurations_per_pool=1),
                )
            for kind, plan in found.items():
                if plan.deployment is not None:
                    yield Planned(f"{model} {system} {isl}/{osl} {kind}", plan, isl, osl, ftl, ttl)


def simulated(case: Planned, load: float, *, poisson: bool, most: int = 20_000) -> Summary:
    """The plan at a share of its rate, for three lives of a request or more."""
    rate = load * case.plan.request_rate
    life = case.ftl_limit + case.osl * case.ttl_limit
    count = int(np.clip(3 * life * rate, 400, most))
    if poisson:
        trace = ds.synthetic_trace(rate=rate, lengths=(case.isl, case.osl), requests=count, seed=1)
    else:
        lengths = {"input_tokens": np.full(count, case.isl), "output_tokens": np.full(count, case.osl)}
        trace = ds.Trace(arrival=np.arange(count) / rate, **lengths, name="even")
    slo = ds.Slo(ttft=2 * case.ftl_limit, tpot=case.ttl_limit)
    return ds.simulate(case.plan.deployment, trace, slo=slo).summary()


def holding(found: Iterable[Planned], load: float, *, poisson: bool) -> int:
    """How many plans serve 99 % of all requests in time at a share of their rate."""
    return sum(simulated(case, load, poisson=poisson).slo_attainment >= 0.99 for case in found)
