"""Tables that take minutes: simulations, and a study as a whole."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.failures import FailureEvent, Failures
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import CLOSES, NOTIFY, AdmissionRule
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_memory import kv_blocks
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.synthetic import log_normal
from docs.computed import plain_fits, slow, table
from lab.studies.beyond_the_buzz.claims import CLAIMS
from lab.studies.beyond_the_buzz.evidence import Evidence
from lab.studies.beyond_the_buzz.frontiers import Frontiers
from lab.studies.claims import evaluate
from lab.studies.claims import holding as counted
from tests.simulation.plans import holding, plans

#: Efficiency profiles, as studies order them.
PROFILES = ("ideal", "optimistic", "measured")
#: Instances and limits of the table of unequal instances on the page of policies.
UNEQUAL_RATES = (0.6, 1.5, 3.0, 4.5, 6.0)  # [request/s]
UNEQUAL_POLICIES = {
    "vllm": "`vllm` on all six",
    "arrow": "",
    "disaggregated": "",
    "least_load": "",
    "dynamo_sla": "",
    "dopd": "",
    "dynaserve": "`dynaserve`, pairs of equals",
    "dynamo_load": "",
    "round_robin": "",
}


@cache
def azure() -> pd.DataFrame:
    """The shipped scenario of eight policies on eight H100, a row a run."""
    with TemporaryDirectory() as root:
        plan = plan_scenario(load_scenario("azure_conv_on_h100"))
        return run_scenario(plan, Path(root), jobs=1, listener=Mock()).summary


@slow
def azure_policies() -> str:
    """Attainment of every policy of that scenario by rate, and its GPU-hours at the rate of the trace."""
    found = azure().set_index(["policy", "rate_scale"])
    rates = found.index.unique("rate_scale")
    rows = []
    for policy in found.index.unique("policy"):
        shares = (f"{100 * found.loc[(policy, rate), 'slo_attainment']:.1f} %" for rate in rates)
        rows.append([f"`{policy}`", *shares, f"{found.loc[(policy, rates[0]), 'gpu_hours']:.2f}"])
    return table(["policy", *(f"{rate:g} times the rate" for rate in rates), f"GPU-hours at {rates[0]:g}"], rows)


@slow
def azure_best() -> str:
    """The policies that hold the limits longest, and how the others do. [%]"""
    top = azure()[azure()["rate_scale"] == azure()["rate_scale"].max()].sort_values("slo_attainment", ascending=False)
    names, shares = top["policy"].tolist(), [f"{100 * share:.0f}" for share in top["slo_attainment"]]
    first, second, *others = shares
    both = f"{first} % (`{names[0]}`) and {second} % (`{names[1]}`) of the requests"
    return f"{both}, with the others for {others[-1]} to {others[0]} %"


@slow
def unequal_instances() -> str:
    """Attainment of every policy on unequal instances. [%]"""
    tp4, tp8 = (ds.Sharding(tp_attn=n, tp_ffn=n) for n in (4, 8))
    pp4_twice, tp4_twice = (ds.Replicas(mapping=mapping, instances=2) for mapping in (ds.Sharding(pp=4), tp4))
    tp8_once, tp8_twice = (ds.Replicas(mapping=tp8, instances=count) for count in (1, 2))
    prefill, decode = (pp4_twice, tp8_once), (tp4_twice, tp8_once)
    deployment = ds.ServedDeployment(
        name="unequal",
        gpus=32,
        prefill=prefill,
        decode=decode,
        colocated=(*prefill, *decode),
        pairs=(pp4_twice, tp4_twice, tp8_twice),
        setup=ds.setup("llama_3_1_70b", "a100_sxm_80gb", "bf16"),
    )
    lengths = (log_normal(2048, 1.0), log_normal(300, 1.0))
    traces = [ds.synthetic_trace(rate=rate, lengths=lengths, requests=2000, seed=1) for rate in UNEQUAL_RATES]
    rows = []
    for name, title in UNEQUAL_POLICIES.items():
        runs = [ds.simulate(deployment, trace, name, slo=ds.Slo(ttft=5.0, tpot=0.1)) for trace in traces]
        shares = [f"{100 * run.summary().slo_attainment:.0f}" for run in runs]
        rows.append((title or f"`{name}`", *shares))
    return table(("requests/s", *(f"{rate:g}" for rate in UNEQUAL_RATES)), rows)


@slow
def uneven_ranks() -> str:
    """Decode on attention ranks of their own, and on even ones with one memory: TPOT [ms], throughput [token/s]."""
    at, mapping = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8)
    most = 4096
    ranks = StepTable.build(at, mapping, max_sequences=most)
    head = ranks.head.copy()
    head["ranks"] = 1  # the rows of the table are those of even ranks
    rules = {"admission": AdmissionRule.PROMPT_FITS, "watermark": 0.0, "keeps_preempted": True}
    blocks = kv_blocks(at, mapping, max_sequences=most, max_tokens=most)
    rows = []
    for clients in (512, 1024, 1536, 2048):
        runs = []
        for steps in (StepTable(head, ranks.values, ranks.work), ranks):
            spec = InstanceSpec(table=steps, blocks=blocks, max_sequences=most, token_budget=8 * 8192, **rules)
            runs.append(_decode_loop(Fleet([spec]), clients))
        pairs = zip(*runs, FORMS, strict=True)
        rows.append((f"{clients:,}", *(f"{even:{form}} → {own:{form}}" for even, own, form in pairs)))
    columns = ("TPOT, median [ms]", "TPOT, p99 [ms]", "throughput [token/s]", "preemptions")
    return table(("sequences, even → own ranks", *columns), rows)


#: Digits of a row of ``uneven_ranks``.
FORMS = (".1f", ".1f", ",.0f", ",")


def _decode_loop(fleet: Fleet, clients: int) -> tuple[float, float, float, int]:
    """TPOT, median and p99 [ms], throughput [token/s] while all clients are busy, preemptions; ten requests each."""
    count, rng = 10 * clients, np.random.default_rng(1)
    context, output = (
        np.maximum(rng.lognormal(np.log(mean) - 0.5 * np.log(2.0), np.log(2.0) ** 0.5, count), 2.0).astype(int)
        for mean in (4096, 1024)
    )
    now, sent = 0.0, 0
    while sent < count:
        if sent >= clients:
            _, now = fleet.run_until(np.inf)
        lengths = (int(context[sent]), 0, int(output[sent]))
        fleet.submit(0, sent, lengths, now, flags=NOTIFY | CLOSES, last_token_s=now)
        sent += 1
    while fleet.next_time() < np.inf:
        fleet.run_until(np.inf)
    done = fleet.segments
    busy = (done.submit_s > 0.0) & (done.finish_s < done.submit_s[-1])
    tpot = 1e3 * ((done.finish_s - done.submit_s) / output)[busy]
    since, until = done.submit_s[clients + 1], done.submit_s[-1]
    ended = (done.finish_s > since) & (done.finish_s <= until)
    p50, p99 = np.percentile(tpot, [50, 99])
    return float(p50), float(p99), float(output[ended].sum() / (until - since)), int(done.preemptions.sum())


@slow
def plans_that_hold() -> str:
    """How many plans serve 99 % of the requests in time, at a share of their rate."""
    found = list(plans())
    rows = [
        (f"{load:g}", "Poisson" if poisson else "even", f"{holding(found, load, poisson=poisson)} of {len(found)}")
        for load in (0.8, 0.95)
        for poisson in (False, True)
    ]
    header = ("share of the planned rate", "arrivals", "plans with at least 99 % of the requests in time")
    return table(header, rows)


def verdicts(jobs: int) -> list[dict[str, Any]]:
    """How many claims hold under each profile, and which miss."""
    with TemporaryDirectory() as folder:
        frontiers = Frontiers(Path(folder), jobs=jobs)
        frontiers.prepare(frontiers.names, PROFILES)
        evidence = {profile: Evidence(frontiers, profile) for profile in PROFILES}
        return counted(evaluate(CLAIMS, evidence)).to_dict("records")


@slow
def beyond_the_buzz_verdicts() -> str:
    """How many claims hold under each profile."""
    rows = [
        (f"`{line['profile']}`", f"{line['holds']} of {line['of']}", line["fails"])
        for line in verdicts(os.cpu_count() or 1)
    ]
    return table(("profile", "hold", "miss"), rows)


@slow
def beyond_the_buzz_rooflines() -> str:
    """The same with one smooth roofline a kernel and regime, and which verdicts turn."""
    with plain_fits():
        smooth = verdicts(1)  # workers that are there already would keep the files of the run before
    rows = []
    for ours, theirs in zip(verdicts(1), smooth, strict=True):
        misses, others = ours["fails"].split(), theirs["fails"].split()
        hold = [each for each in misses if each not in others]
        miss = [each for each in others if each not in misses]
        rows.append((f"`{ours['profile']}`", f"{theirs['holds']} of {theirs['of']}", " ".join(hold), " ".join(miss)))
    return table(("profile", "hold with rooflines", "hold there alone", "miss there alone"), rows)


#: Requests and failures of the table of failures on the page of policies.
FAILING_RATE, FAILING_S = 14.0, 1500.0  # [request/s], [s]
FAILING_MTBF_S = 4000.0  # of a GPU: some six failures of 16 GPUs in that time [s]
FAILING_AT_S = 300.0  # of one instance, or of a node [s]
FAILING_RESTART_S = 300.0  # within the two to eight minutes that starts take [s]
FAILING_WINDOW_S, FAILING_MUCH, FAILING_LOOK_S = 10.0, 0.1, 600.0  # arrivals looked at together [s], [1], [s]


@slow
def failures_by_policy() -> str:
    """What failures of GPUs, of one instance and of a node cost each policy."""
    two = ds.Sharding(tp_attn=2, tp_ffn=2)
    half, whole = ((ds.Replicas(mapping=two, instances=count),) for count in (4, 8))
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8")
    parts = {"prefill": half, "decode": half, "colocated": whole, "pairs": whole}
    deployment = ds.ServedDeployment(name="sixteen", gpus=16, **parts, setup=at)
    lengths = (log_normal(2048, 1.0), log_normal(300, 1.0))
    trace = ds.synthetic_trace(rate=FAILING_RATE, lengths=lengths, duration=FAILING_S, seed=1)
    often = {"gpu_mtbf_s": FAILING_MTBF_S}
    first, node = (
        {"events": (FailureEvent(at_s=FAILING_AT_S, kind=kind, number=number),)}
        for kind, number in (("instance", 0), ("node", 1))
    )
    kinds = ({}, often, often | {"migration_limit": 3}, first | {"migration_limit": 3}, node | {"migration_limit": 3})
    rows = []
    for name in sorted(UNEQUAL_POLICIES):
        runs = []
        for failing in kinds:
            options = RunOptions(failures=Failures(restart_s=FAILING_RESTART_S, **failing))
            runs.append(ds.simulate(deployment, trace, name, slo=ds.Slo(ttft=2.0, tpot=0.05), options=options))
        found = [run.summary() for run in runs]
        shares = [f"{100 * each.slo_attainment:.1f}" for each in found]
        rows.append(
            (
                f"`{name}`",
                shares[0],
                f"{shares[1]} ({found[1].failed})",
                f"{shares[2]} ({found[2].migrated})",
                *(f"{shares[k]} ({found[k].migrated}), {_recovery_s(runs[0], runs[k]):.0f} s" for k in (3, 4)),
            )
        )
    header = ("", "none", "GPUs (lost)", "GPUs, with migration (moved)", "one instance (moved)", "a node (moved)")
    return table(header, rows)


def _recovery_s(plain: ds.SimulationResult, failed: ds.SimulationResult) -> float:
    """From a failure to the end of the last ten seconds whose arrivals are in time much less than without it. [s]"""
    shares = []
    for run in (plain, failed):
        each = run.frame()
        inside = each["first_token_s"] - each["arrival_s"] <= run.slo.ttft
        inside &= (each["finish_s"] - each["first_token_s"]) / (each["output_tokens"] - 1).clip(lower=1) <= run.slo.tpot
        shares.append(inside.groupby((each["arrival_s"] // FAILING_WINDOW_S).astype(int)).mean())
    worse = shares[1][shares[1] < shares[0] - FAILING_MUCH].index.to_numpy()
    ends = (worse + 1) * FAILING_WINDOW_S
    ends = ends[(ends > FAILING_AT_S) & (ends <= FAILING_AT_S + FAILING_LOOK_S)]
    return float(ends.max() - FAILING_AT_S) if ends.size else 0.0
