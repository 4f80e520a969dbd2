"""Tables that take minutes: simulations, and a study as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import disagg_sim as ds
from disagg_sim.study.beyond_the_buzz.claims import evaluate
from disagg_sim.study.beyond_the_buzz.frontiers import Frontiers
from disagg_sim.study.claims import holding as counted
from disagg_sim.workload.synthetic import log_normal
from docs.computed import slow, table
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


@slow
def unequal_instances() -> str:
    """Attainment of every policy on unequal instances. [%]"""
    tp4, tp8 = (ds.Mapping(tp_attn=n, tp_ffn=n) for n in (4, 8))
    pp4_twice, tp4_twice = (ds.Replicas(mapping=mapping, instances=2) for mapping in (ds.Mapping(pp=4), tp4))
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


@slow
def beyond_the_buzz_verdicts() -> str:
    """How many claims hold under each profile."""
    with TemporaryDirectory() as folder:
        frontiers = Frontiers(Path(folder), jobs=os.cpu_count() or 1)
        frontiers.prepare(frontiers.names, PROFILES)
        claims = evaluate(frontiers, PROFILES)
    rows = [
        (f"`{line['profile']}`", f"{line['holds']} of {line['of']}", line["fails"])
        for line in counted(claims).to_dict("records")
    ]
    return table(("profile", "hold", "miss"), rows)
