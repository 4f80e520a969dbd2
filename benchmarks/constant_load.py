"""Which policies settle under a load that does not change: changes of sizes and attainment in the last half of a run.

``python benchmarks/constant_load.py [SECONDS]``: 60 requests/s of the Azure conversation, Llama-3.1-70B in FP8, TP4 on
64 H100, begun as 8P + 8D; half an hour by default. The table of docs/policies.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np

import disagg_sim as ds
from disagg_sim.simulation.policies.registry import policy_named

RATE, TTFT_S, TPOT_S = 60.0, 2.0, 0.1
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("arrow", {}),
    ("dynamo_sla", {}),
    ("dynamo_sla", {"load": True}),
    ("dynamo_load", {}),
    ("dynamo_load", {"mode": "throughput"}),
    ("dynamo_load", {"mode": "latency"}),
    ("dynamo_load", {"mode": "v2025", "period_s": 180.0, "queue_threshold": 0.0}),
    ("dopd", {}),
    ("dopd", {"sizing": "printed"}),
    ("dopd", {"sizing": "published"}),
    ("dopd", {"sizing": "published", "window_s": 10.0, "action_s": 10.0}),
    ("dopd", {"sizing": "little"}),
    ("dopd", {"sizing": "little", "headroom": 0.1}),
)


def main(seconds: float = 1800.0) -> None:
    """Print a line a policy."""
    part = (ds.Replicas(mapping=ds.Sharding(tp_attn=4, tp_ffn=4), instances=8),)
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8")
    pools = ds.ServedDeployment(name="constant", gpus=64, setup=at, prefill=part, decode=part)
    lengths = ds.load_traffic("azure_2023_conversation").cases[0]
    trace = ds.synthetic_trace(rate=RATE, requests=round(RATE * seconds), lengths=lengths)
    for name, options in CASES:
        records = ds.simulate(pools, trace, policy_named(name, **options), slo=ds.Slo(ttft=TTFT_S, tpot=TPOT_S)).records
        r = records.requests
        late = [each for each in records.decisions if seconds / 2 < each.time_s <= seconds]
        tpot = (r.finish_s - r.first_token_s) / np.maximum(r.output_tokens - 1, 1)
        inside = ((r.first_token_s - r.arrival_s <= TTFT_S) & (tpot <= TPOT_S))[r.arrival_s > seconds / 2].mean()
        sizes = Counter(each.reason.rpartition(" to ")[2] for each in late).most_common(2)
        print(f"{name} {options}: {len(late)} changes, {inside:.1%} in time; {sizes}", flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
