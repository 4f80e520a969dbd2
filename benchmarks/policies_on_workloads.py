"""Run every policy on seven workloads at three request rates, and look for what should not be.

    python benchmarks/policies_on_workloads.py [--traces DIR] [--workloads A ...] [--policies A ...] [--csv FILE]

Llama-3.1-70B in FP8 on 8 H200, an instance a GPU: four for prefill and four for decode, eight co-located, or four
pairs. A workload is ten minutes of a trace below DIR, skipped with a line where its file is missing, or drawn from a
shipped traffic. Its rates are made by requests (``workload.scaling``: thinned below the trace's own rate, superposed
above it), once for each of three seeds (``--seeds``). Traces with block ids run with ``prefix_cache``. Asked is:

* Conservation: each request ends once, completed unless it is rejected at the door; each of its tokens was emitted
  once; instances computed all prompt tokens that were not cached, and no more of them unless they preempted.
* Monotone: attainment nowhere rises with the rate beyond noise, which is ``NOISE`` above the range of the seeds.
* Cost: CPU seconds a request stay within ``SLOWER`` times those of the same policy at the next rate. The least of the
  seeds counts: the first run of a policy compiles, imports and builds step times.
* Home: no policy keeps less than a share ``BELOW`` of the attainment of ``disaggregated``.

The CSV has a row for each policy, workload and rate. The tables and the answers are printed for docs/policies.md.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.records import Outcome, RunResult
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.arrivals import ArrivalProcess, Poisson, fit_mmpp
from disagg_sim.workload.scaling import REQUESTS
from disagg_sim.workload.trace import Trace

#: Length of a workload. [s]
SPAN_S = 600.0
#: Rise of the attainment with the rate, beyond the range of the seeds, from which it counts. [1]
NOISE = 0.01
#: Ratio of CPU seconds a request at neighbouring rates, and of attainment to ``STATIC``, from which they count. [1]
SLOWER, BELOW = 5.0, 0.1
STATIC = "disaggregated"
#: Bursts of code: a minute each, a fifth of the time; tokens vary from minute to minute as in the Azure code trace
#: (docs/traces.md, Burstiness: over minutes with requests), whose prompts vary with 0.96.
BURSTS = fit_mmpp(0.78, rate=12.0, length_cv=0.96, burst_share=0.2, burst_s=60.0)


class Workload(NamedTuple):
    """Requests of a trace's file from some time on, or drawn from a traffic."""

    source: str  # a file below the folder of traces, or a traffic
    rates: tuple[float, float, float]  # [request/s]
    slo: ds.Slo
    from_s: float = 0.0
    arrivals_as: ArrivalProcess = Poisson()


CHAT = ds.Slo(ttft=2.0, tpot=0.1)
CODE = ds.Slo(ttft=5.0, tpot=0.1)
MOONCAKE = ds.Slo(ttft=30.0, tpot=0.1)  # of the paper's experiments: Qin et al., FAST 2025
LONG = ds.Slo(ttft=60.0, tpot=0.1)
WORKLOADS = {
    "Azure conversation": Workload("azure2023/AzureLLMInferenceTrace_conv.csv", (8, 16, 24), CHAT, from_s=600.0),
    "Azure code": Workload("azure2023/AzureLLMInferenceTrace_code.csv", (2, 4, 8), CODE, from_s=600.0),
    "Mooncake conversation": Workload("mooncake/conversation_trace.jsonl.gz", (0.75, 1.5, 2.25), MOONCAKE),
    "Mooncake synthetic": Workload("mooncake/synthetic_trace.jsonl.gz", (0.75, 1.5, 3), MOONCAKE),
    "chat (drawn)": Workload("azure_2023_conversation", (8, 16, 24), CHAT),
    "bursty code (drawn)": Workload("azure_2023_code", (4, 8, 12), CODE, arrivals_as=BURSTS),
    "long context (drawn)": Workload("mooncake_long_prompts", (0.1, 0.2, 0.4), LONG),
}


def trace_of(name: str, folder: Path, seed: int) -> Trace | None:
    """Ten minutes of a workload, drawn ones at their highest rate; None where its file is missing."""
    work = WORKLOADS[name]
    if "/" not in work.source:
        lengths = ds.load_traffic(work.source).cases[0]
        drawn = {"rate": max(work.rates), "duration": SPAN_S, "arrivals_as": work.arrivals_as, "seed": seed}
        return ds.synthetic_trace(lengths=lengths, name=name, **drawn)
    path = folder / work.source
    return ds.load_trace(path).between(work.from_s, work.from_s + SPAN_S) if path.exists() else None


def place() -> ds.ServedDeployment:
    """What serves."""
    four, eight = (ds.Replicas(mapping=ds.Sharding(), instances=count) for count in (4, 8))
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8")
    parts = {"prefill": (four,), "decode": (four,), "colocated": (eight,)}
    return ds.ServedDeployment(name="eight", gpus=8, setup=at, **parts)


def leaks(records: RunResult) -> list[str]:
    """What a run lost or made up; empty where everything is conserved."""
    r = records.requests
    done = r.status == Outcome.COMPLETED
    computed, asked = int(records.instances.prefill_tokens.sum()), int((r.input_tokens - r.cached_tokens)[done].sum())
    checks = {
        "requests without an end": np.isin(r.status, (Outcome.COMPLETED, Outcome.REJECTED)).all(),
        "an end of a request that was not completed": (np.isfinite(r.finish_s) == done).all(),
        "an end before the first token, or that before the arrival": (
            (r.arrival_s <= r.first_token_s) & (r.first_token_s <= r.finish_s)
        )[done].all(),
        "tokens lost or emitted twice": records.itl_counts.sum() == (r.output_tokens - 1)[done].sum(),
        "prompt tokens not computed": computed >= asked,
        "prompt tokens computed twice": computed == asked or r.preemptions.any(),
    }
    return [what for what, holds in checks.items() if not holds]


def row(
    policy: str, workload: str, rate: float, deployment: ds.ServedDeployment, traces: list[Trace]
) -> dict[str, Any]:
    """One policy on one workload at one rate: over the seeds, a trace each."""
    slo, shares, costs, problems, counts = WORKLOADS[workload].slo, [], [], [], np.zeros(4, dtype=int)
    for seed, trace in enumerate(traces):
        options = RunOptions(prefix_cache=trace.prefix is not None)
        begun = time.process_time()
        scaled = {"rate_scale": rate / trace.rate, "scale_by": REQUESTS}
        run = ds.simulate(deployment, trace, policy, slo=slo, seed=seed, options=options, **scaled)
        spent = time.process_time() - begun
        found = run.summary()
        shares.append(found.slo_attainment)
        costs.append(1000 * spent / found.requests)
        problems += leaks(run.records)
        counts += (found.requests, found.completed, found.rejected, found.preemptions)
    return {
        "policy": policy,
        "workload": workload,
        "requests_per_s": rate,
        "attainment": np.mean(shares),
        "attainment_least": min(shares),
        "attainment_most": max(shares),
        "cpu_s_per_1000": min(costs),
        **dict(zip(("requests", "completed", "rejected", "preemptions"), counts.tolist(), strict=True)),
        "not_conserved": "; ".join(sorted(set(problems))),
    }


def neighbours(rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series, pd.Series]]:
    """Rows of a policy on a workload at neighbouring rates, the lower first, and what to call them."""
    for (policy, workload), cells in rows.groupby(["policy", "workload"], sort=False):
        ordered = [cell for _, cell in cells.sort_values("requests_per_s").iterrows()]
        for low, high in pairwise(ordered):
            yield f"{policy}, {workload}, {low.requests_per_s:g} to {high.requests_per_s:g}/s", low, high


def answers(rows: pd.DataFrame) -> dict[str, list[str]]:
    """What was found by question; empty lists where nothing was."""
    static = rows[rows.policy == STATIC].set_index(["workload", "requests_per_s"]).attainment
    return {
        "not conserved": [
            f"{cell.policy}, {cell.workload}, {cell.requests_per_s:g}/s: {cell.not_conserved}"
            for cell in rows.itertuples()
            if cell.not_conserved
        ],
        "attainment rises with the rate": [
            f"{what}: {low.attainment:.1%} to {high.attainment:.1%}"
            for what, low, high in neighbours(rows)
            if high.attainment_least > low.attainment_most + NOISE
        ],
        f"{SLOWER:g} times slower than its neighbour": [
            f"{what}: {low.cpu_s_per_1000:.3f} and {high.cpu_s_per_1000:.3f} CPU s per 1,000 requests"
            for what, low, high in neighbours(rows)
            if max(low.cpu_s_per_1000, high.cpu_s_per_1000) > SLOWER * min(low.cpu_s_per_1000, high.cpu_s_per_1000)
        ],
        f"{1 / BELOW:g} times below {STATIC}": [
            f"{cell.policy}, {cell.workload}, {cell.requests_per_s:g}/s: {cell.attainment:.1%} of {usual:.1%}"
            for cell in rows.itertuples()
            if (usual := static.get((cell.workload, cell.requests_per_s), 0.0)) * BELOW > cell.attainment
        ],
    }


def printed(rows: pd.DataFrame, column: str, form: str) -> str:
    """A table of a column: a row a policy, a column a workload, the three rates in a cell."""
    cells = rows.groupby(["policy", "workload"])[column].agg(lambda each: ", ".join(map(form.format, each)))
    workloads = rows.workload.unique()
    lines = [["", *workloads], ["---"] * (1 + workloads.size)]
    lines += [[f"`{name}`", *(cells[name, each] for each in workloads)] for name in rows.policy.unique()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run all, print the tables and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=sorted(policies()), default=sorted(policies()))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    deployment, rows = place(), []
    for workload in given.workloads:
        drawn = [trace_of(workload, given.traces, seed) for seed in range(given.seeds)]
        traces = [each for each in drawn if each is not None]
        if not traces:
            print(f"{workload}: skipped, no {given.traces / WORKLOADS[workload].source}", flush=True)
            continue
        for policy in given.policies:
            for rate in WORKLOADS[workload].rates:
                rows.append(row(policy, workload, rate, deployment, traces))
                print(
                    "{policy}, {workload}, {requests_per_s:g}/s: {attainment:.1%}".format(**rows[-1]), file=sys.stderr
                )
    if not rows:
        return
    found = pd.DataFrame(rows)
    if given.csv:
        found.round(4).to_csv(given.csv, index=False)
    print(printed(found.assign(share=100 * found.attainment), "share", "{:.0f}"))
    print(printed(found, "cpu_s_per_1000", "{:.2f}"))
    for question, lines in answers(found).items():
        print(f"{question}: {len(lines)}", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
