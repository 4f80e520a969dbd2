"""Tools for agents: the JSON of the commands, by the same functions. ``GUIDE`` says when to take which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field
from typing_extensions import TypedDict

from disagg_sim.certainty.breakdown import breakdown
from disagg_sim.cli.compare import causes_of
from disagg_sim.cli.explain import by_hand, mapping_by_hand
from disagg_sim.cli.plan import work_of
from disagg_sim.domain import Mapping, Slo
from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.load import list_specs, load_model, load_precision, load_profile, load_system, load_traffic
from disagg_sim.physics.setup import setup
from disagg_sim.planning.assurance import assurance
from disagg_sim.planning.flips import flips
from disagg_sim.planning.limits import TPOT, TTFT
from disagg_sim.planning.plan import plan as planned
from disagg_sim.planning.question import PlanOptions
from disagg_sim.report.documents import compare_json, explain_json, simulate_json, sweep_json
from disagg_sim.report.plan import Told, plan_json
from disagg_sim.report.schemas import CompareJson, ExplainJson, PlanJson, SimulateJson, SweepJson
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.sweep.compare import compare_frontiers, read_frontier
from disagg_sim.units import GB
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.synthetic import synthetic_trace

GUIDE = """\
disagg-sim forecasts LLM inference on GPU clusters: what to deploy, and why. Units are SI unless a name says otherwise.
1. list_names: names of models, systems (hardware), precision recipes and traffics. Use them as they are.
2. plan: the deployment for a model, systems, lengths, limits of TTFT and TPOT, and ONE of rate_per_s, gpus and users.
   system may name several, "h100_sxm,h200_sxm", or be "any". status "infeasible" is an answer: "binds" says what binds.
3. explain: why an instance is as fast as it is, operator by operator. sweep_summary and compare read results of
   `disagg-sim sweep` from a directory. simulate replays Poisson arrivals through a small deployment.
Tell the user how sure an answer is: assurance.probability, the bands, and what numbers rest on (rests_on: shares of
measured, fitted, inherited, assumed; the meaning is under "labels"). Layouts that are not "served" were never measured.
"""
#: Requests of a simulation at most. [request]
MOST_REQUESTS = 20_000

Model = Annotated[str, Field(description="name of a model, or a file of one")]
System = Annotated[str, Field(description="name of a GPU system")]
LIMIT = "'500 ms', or with a percentile '2 s@p99'; p90 unless said; without one "
Tokens = Annotated[int, Field(ge=1, description="[token]")]
Count = Annotated[int, Field(ge=1)]
Results = Annotated[str, Field(description="directory of the results of a sweep, or a frontier.csv")]


class NamesJson(TypedDict):
    """Shipped specs of a kind."""

    kind: str
    names: Annotated[dict[str, str], Field(description="name -> title")]


_KINDS: dict[str, Any] = {
    "model": load_model,
    "hardware": load_system,
    "precision": load_precision,
    "traffic": load_traffic,
    "profile": load_profile,
}


def list_names(kind: Annotated[str, Field(description=f"one of {', '.join(_KINDS)}")]) -> NamesJson:
    """List the names that other tools take, with titles."""
    if kind not in _KINDS:
        raise InputError(f"kind {quoted(kind)} is unknown{nearest(kind, _KINDS)}; allowed: {', '.join(_KINDS)}")
    return {"kind": kind, "names": {name: _KINDS[kind](name).title for name in list_specs(kind)}}


def plan(
    model: Model,
    system: Annotated[str, Field(description="systems that compete: a name, several with commas, or 'any'")],
    isl: Annotated[int | None, Field(description="input tokens of a request; with osl")] = None,
    osl: Annotated[int | None, Field(description="output tokens of a request; with isl")] = None,
    traffic: Annotated[str, Field(description="lengths of a shipped traffic, in place of isl and osl")] = "",
    ttft: Annotated[str | None, Field(description=f"{LIMIT}2 s")] = None,
    tpot: Annotated[str | None, Field(description=f"{LIMIT}50 ms")] = None,
    rate_per_s: Annotated[float | None, Field(description="serve so many requests a second with the least")] = None,
    gpus: Annotated[int | None, Field(description="serve the most with so many GPUs")] = None,
    users: Annotated[int | None, Field(description="serve so many users, a request each in flight")] = None,
    objective: Annotated[str, Field(description="gpus, throughput, usd, watt or joule")] = "gpus",
    precision: Annotated[str, Field(description="recipe; empty = the usual one of model and system")] = "",
    engine: Annotated[str, Field(description="vllm, sglang or trtllm; empty = the usual one of the system")] = "",
    max_nic_gb_per_s: Annotated[float | None, Field(description="most KV bandwidth of a GPU")] = None,
) -> PlanJson:
    """Answer what to deploy: disaggregated or co-located, pools, mappings, counts, latencies, price, bands, flips."""
    options = PlanOptions(
        users=users,
        objective=objective,
        precision=precision or None,
        engine=engine or None,
        max_nic=None if max_nic_gb_per_s is None else max_nic_gb_per_s * GB,
    )
    work = work_of(isl, osl, traffic, "")
    limits = {"ttft": ttft or TTFT, "tpot": tpot or TPOT}
    found = planned(model, system, work, **limits, rate=rate_per_s, gpus=gpus, options=options)
    told = Told() if found.best is None else Told(sure=assurance(found), changes=flips(found))
    return plan_json(found, told)


def explain(
    model: Model,
    system: System,
    precision: Annotated[str, Field(description="recipe, such as fp8")],
    phase: Annotated[str, Field(description="prefill, decode, colocated or piggyback")] = "decode",
    tp: Count = 1,
    dp: Count = 1,
    ep: Count = 1,
    pp: Count = 1,
    dcp: Annotated[int, Field(ge=1, description="of the tp GPUs, those that share the tokens of a KV head")] = 1,
    pcp: Annotated[int, Field(ge=1, description="groups of tp GPUs that share a prompt, of prefill")] = 1,
    batch: Annotated[int, Field(ge=1, description="requests of the instance")] = 1,
    isl: Tokens = 1024,
    osl: Tokens = 256,
) -> ExplainJson:
    """Take the latency and the memory of one instance apart: operators, what they wait for, the fits behind them."""
    at = setup(model, system, precision)
    mapping = mapping_by_hand(at, Mapping(tp_attn=tp, dp_attn=dp, pp=pp, dcp=dcp, pcp=pcp), ep)
    return explain_json(breakdown(by_hand(at, mapping, lengths(isl, osl), phase, batch)))


def sweep_summary(results: Results) -> SweepJson:
    """Read the results of a sweep: best points of each frontier, gain of disaggregation, why cases have no result."""
    return sweep_json(read_frontier(Path(results)))


def compare(baseline: Results, results: Results, rtol: float = 1e-6) -> CompareJson:
    """Compare the frontiers of two sweeps: points lost, new and moved, and the inputs that differ."""
    old, new = read_frontier(Path(baseline)), read_frontier(Path(results))
    found = compare_frontiers(old, new, rtol=rtol)
    return compare_json(found, causes_of(old, new), baseline=old.path, results=new.path, rtol=rtol)


def simulate(
    model: Model,
    system: System,
    precision: Annotated[str, Field(description="recipe, such as fp8")],
    rate_per_s: Annotated[float, Field(gt=0, description="of Poisson arrivals [request/s]")],
    isl: Tokens,
    osl: Tokens,
    colocated: Annotated[int, Field(ge=0, description="co-located instances; 0 with two pools")] = 0,
    prefill: Annotated[int, Field(ge=0, description="prefill instances; 0 where co-located")] = 0,
    decode: Annotated[int, Field(ge=0, description="decode instances; 0 where co-located")] = 0,
    tp: Annotated[int, Field(ge=1, description="GPUs of each instance, tensor parallel")] = 1,
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] = 2000,
    ttft_s: Annotated[float, Field(gt=0, description="limit that attainment counts [s]")] = 2.0,
    tpot_s: Annotated[float, Field(gt=0, description="limit that attainment counts [s]")] = 0.05,
) -> SimulateJson:
    """Replay Poisson arrivals of equal requests through a small deployment: latencies, attainment, utilisation."""
    from disagg_sim.simulation.simulate import simulate as simulated  # needs the extra of the simulator

    at = setup(model, system, precision)
    mapping = mapping_by_hand(at, Mapping(tp_attn=tp), 1)
    counts = {"colocated": colocated, "prefill": prefill, "decode": decode}
    if bool(colocated) == bool(prefill and decode):
        raise InputError("give the instances as colocated, or as prefill and decode")
    parts: dict[str, Any] = {
        role: (Replicas(mapping=mapping, instances=count),) for role, count in counts.items() if count
    }
    trace = synthetic_trace(rate=rate_per_s, requests=requests, lengths=(isl, osl))
    policy = "vllm" if colocated else "disaggregated"
    deployment = ServedDeployment(name="asked", gpus=tp * sum(counts.values()), setup=at, **parts)
    run = simulated(deployment, trace, policy, slo=Slo(ttft=ttft_s, tpot=tpot_s))
    return simulate_json("asked", Path("-"), pd.DataFrame([run.summary()]), pd.DataFrame())


TOOLS = (list_names, plan, explain, sweep_summary, compare, simulate)
