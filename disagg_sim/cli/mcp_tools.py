"""Tools for agents: the JSON of the commands, by the same functions. ``GUIDE`` says when to take which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from disagg_sim.certainty.rows import Origin
from disagg_sim.choices import EVEN_RANKS, FAILURES, POOLS, RANK_IMBALANCES
from disagg_sim.cli.compare import causes_of
from disagg_sim.cli.explain import breakdown_of, by_hand, mapping_by_hand, reuse_by_hand
from disagg_sim.cli.plan import cached_work, memory_of, token_prices_of, work_of
from disagg_sim.cli.plan_pools import facts_of, of_more_pools, of_pools, pools_question
from disagg_sim.cli.sweep import compute
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.acceptance import asked_speculation
from disagg_sim.facts.load import (
    list_specs,
    load_failures,
    load_model,
    load_precision,
    load_profile,
    load_system,
    load_traffic,
)
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.physics.setup import setup
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import assurance
from disagg_sim.planning.energy import drawn
from disagg_sim.planning.flips import changes_of
from disagg_sim.planning.limits import TPOT, TTFT
from disagg_sim.planning.plan import plan as planned
from disagg_sim.planning.question import PlanOptions, Size
from disagg_sim.planning.spares import Availability
from disagg_sim.planning.turns import plan_turns
from disagg_sim.report.documents import compare_json, simulate_json, sweep_json
from disagg_sim.report.more_pools import pools_json
from disagg_sim.report.plan import PlanExtras, plan_json
from disagg_sim.report.schemas import CompareJson, ExplainJson, PlanJson, PoolsJson, SimulateJson, SweepJson
from disagg_sim.serving.costs import JOULE
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.sweep.backends.run import staying
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.compare import compare_frontiers, read_frontier
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.units import GB, asked_quantity
from disagg_sim.workload.lengths import Lengths, lengths, uneven, with_cached
from disagg_sim.workload.synthetic import synthetic_trace
from disagg_sim.workload.trace import Trace

GUIDE = """\
disagg-sim forecasts LLM inference on GPU clusters: what to deploy, and why. Units are SI unless a name says otherwise.
1. list_names: names of models, systems (hardware), precision recipes and traffics. Use them as they are.
2. plan: the deployment for a model, systems, lengths, limits of TTFT and TPOT, and ONE of rate_per_s, gpus and users.
   system may name several, "h100_sxm,h200_sxm", or be "any". status "infeasible" is an answer: "binds" says what binds.
   Say what the deployment really does: speculate (drafts), cached and tiers (prompts in caches), availability (spares).
   plan_pools: the same with encode, attention and feed-forward pools.
3. explain: why an instance is as fast as it is, operator by operator.
4. sweep: frontiers over every mapping and batch, of a YAML file that you write or a shipped one; its keys are
   axes, such as kv_link, hold_steps, availability, kv_tiers, per and columns. sweep_summary and compare read results.
   simulate replays Poisson arrivals through a small deployment.
Tell the user how sure an answer is: assurance.probability, the bands, and what numbers rest on (rests_on: shares of
measured, fitted, inherited, assumed; the meaning is under "labels"). Layouts that are not "served" were never measured.
"""
#: Requests of a simulation at most. [request]
MOST_REQUESTS = 20_000
#: Design points of a sweep at most: some seconds on a core or two. [1]
MOST_POINTS = 2_000_000

Model = Annotated[str, Field(description="name of a model, or a file of one")]
System = Annotated[str, Field(description="name of a GPU system")]
LIMIT = "'500 ms', or with a percentile '2 s@p99'; p90 unless said; without one "
Tokens = Annotated[int, Field(ge=1, description="[token]")]
Count = Annotated[int, Field(ge=1)]
Results = Annotated[str, Field(description="directory of the results of a sweep, or a frontier.csv")]
Speculate = Annotated[str, Field(description="draft tokens of a decode step: auto, off, or how many")]
Acceptance = Annotated[
    str, Field(description="of drafts: a shipped curve, 'mtp 0.8 0.6' by position, or 'draft_model MODEL 0.8 0.6'")
]


def _as(what: str, unit: float = 1.0) -> BeforeValidator:
    """Read a text or a number as the command does, with its units; None stays."""

    def read(value: object) -> object:
        try:
            return value if value is None else asked_quantity(value, what, "") / unit
        except InputError as error:
            raise ValueError(str(error).strip()) from None

    return BeforeValidator(read)


#: Limits of latency: seconds as a number, or a text with a unit.
Latency = str | float | None
Rate = Annotated[float | None, _as("rate"), Field(description="serve so many requests a second with the least")]
Used = Annotated[float | None, _as("share"), Field(description="price tokens at this share of used hours [1]")]
Cached = Annotated[float, _as("share"), Field(ge=0, le=1, description="share of every prompt that caches hold [1]")]
Tiers = Annotated[str, Field(description="where that lies: 'dram', or shares such as 'hbm=0.5,dram=0.5'; empty = hbm")]
Ranks = Annotated[
    str, Field(description=f"DP ranks that wait for each other, by routing: {', '.join(RANK_IMBALANCES)}")
]
Full = Annotated[
    float | None, _as("share"), Field(gt=0, lt=1, description="share of time with full capacity, by spares [1]")
]
Failing = Annotated[str, Field(description="failure rates behind the spares: a shipped name, or a file")]


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
    ttft: Annotated[Latency, Field(description=f"{LIMIT}2 s")] = None,
    tpot: Annotated[Latency, Field(description=f"{LIMIT}50 ms")] = None,
    rate_per_s: Rate = None,
    gpus: Annotated[int | None, Field(description="serve the most with so many GPUs")] = None,
    users: Annotated[int | None, Field(description="serve so many users, a request each in flight")] = None,
    objective: Annotated[str, Field(description="gpus, throughput, usd, watt or joule")] = "gpus",
    precision: Annotated[str, Field(description="recipe; empty = the usual one of model and system")] = "",
    engine: Annotated[str, Field(description="vllm, sglang or trtllm; empty = the usual one of the system")] = "",
    max_nic_gb_per_s: Annotated[
        float | None, _as("nic", GB), Field(description="most KV bandwidth of a GPU, each way; or '400 Gbit/s'")
    ] = None,
    prefill_system: Annotated[str, Field(description="another system for the prefill pool")] = "",
    speculate: Speculate = "off",
    acceptance: Acceptance = "",
    cached: Cached = 0.0,
    tiers: Annotated[
        str, Field(description="as 'hbm=0.5,dram=0.5'; of a traffic with sessions 'hbm=20 GB,dram', and no share")
    ] = "",
    rank_imbalance: Ranks = EVEN_RANKS,
    availability: Full = None,
    failures: Failing = FAILURES,
    prices: Annotated[dict[str, float] | None, Field(description="of a GPU by system [USD/h]")] = None,
    utilisation: Used = None,
    energy: Annotated[bool, Field(description="say what GPUs and building draw")] = False,
) -> PlanJson:
    """Answer what to deploy: disaggregated or co-located, pools, mappings, counts, latencies, price, bands, flips."""
    work = work_of(isl, osl, traffic, "")
    memory = memory_of(work, traffic, cached, tiers)
    options = PlanOptions(
        users=users,
        objective=objective,
        prefill_system=prefill_system or None,
        precision=precision or None,
        engine=engine or None,
        max_nic=None if max_nic_gb_per_s is None else max_nic_gb_per_s * GB,
        speculation=asked_speculation(load_model(model).name, speculate, acceptance),
        rank_imbalance=rank_imbalance,
        availability=availability,
        failures=failures,
        prices=prices or {},
        set_aside=0.0 if memory is None else memory.hbm,
    )

    def of(lengths: Lengths | Trace | TrafficCase) -> Plan:
        limits = {"ttft": TTFT if ttft in (None, "") else ttft, "tpot": TPOT if tpot in (None, "") else tpot}
        return planned(model, system, lengths, **limits, rate=rate_per_s, gpus=gpus, options=options)

    found = of(cached_work(work, cached, tiers)) if memory is None else plan_turns(traffic, memory, of).plan
    if found.best is None:
        return plan_json(found, PlanExtras())
    told = PlanExtras(sure=assurance(found), prices=token_prices_of(found, utilisation), changes=changes_of(found))
    return plan_json(found, replace(told, drawn=drawn(found.best) if energy or objective == JOULE else None))


def plan_pools(
    model: Model,
    system: Annotated[str, Field(description="of decode and attention pools: a name, several with commas, or 'any'")],
    pools: Annotated[str, Field(description=f"with commas, of {', '.join(POOLS)}")],
    isl: Tokens,
    osl: Tokens,
    images: Annotated[str, Field(description="of a request: '2x1120x1120', '@0.5' where half is kept")] = "",
    ttft: Annotated[Latency, Field(description="limit of TTFT, encoding and queues included: '2 s@p99'")] = None,
    tpot: Annotated[Latency, Field(description="limit of TPOT: '50 ms', p90 unless said")] = None,
    rate_per_s: Rate = None,
    gpus: Annotated[int | None, Field(description="serve the most with so many GPUs")] = None,
    objective: Annotated[str, Field(description="gpus, usd or watt")] = "gpus",
    precision: Annotated[str, Field(description="recipe; empty = the usual one of model and system")] = "",
    prefill_system: Annotated[str, Field(description="another system for encode and prefill pools")] = "",
    ffn_system: Annotated[str, Field(description="another system for the feed-forward pool")] = "",
    speculate: Speculate = "off",
    acceptance: Acceptance = "",
    cached: Cached = 0.0,
    tiers: Tiers = "",
    prices: Annotated[dict[str, float] | None, Field(description="of a GPU by system [USD/h]")] = None,
    utilisation: Used = None,
    energy: Annotated[bool, Field(description="say what GPUs and building draw")] = False,
) -> PoolsJson:
    """Plan encode, attention and feed-forward pools beside prefill and decode: counts, rates, what binds each pool."""
    if not of_more_pools(pools, images, ffn_system):
        raise InputError(f"pools {quoted(pools)}: prefill and decode alone are of the tool plan")
    options = PlanOptions(
        objective=objective,
        prefill_system=prefill_system or None,
        precision=precision or None,
        prices=prices or {},
        speculation=asked_speculation(load_model(model).name, speculate, acceptance),
    )
    asked = pools_question(pools, images, ffn_system, (ttft, tpot), Size(rate=rate_per_s, gpus=gpus))
    work = cached_work(lengths(isl, osl), cached, tiers)
    found = of_pools(model, system, work, asked, options)
    return pools_json(found, facts=facts_of(found, energy=energy, utilisation=utilisation))


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
    engine: Annotated[str, Field(description="vllm, sglang, trtllm or kernels; empty = the usual one")] = "",
    speculate: Speculate = "off",
    acceptance: Acceptance = "",
    cached: Cached = 0.0,
    tiers: Tiers = "",
    rank_imbalance: Ranks = EVEN_RANKS,
    availability: Full = None,
    failures: Failing = FAILURES,
    energy: Annotated[bool, Field(description="tell watts and joules of the passes")] = False,
) -> ExplainJson:
    """Take the latency and the memory of one instance apart: operators, what they wait for, the fits behind them."""
    drafter = asked_speculation(load_model(model).name, speculate, acceptance)
    at = setup(model, system, precision, "measured", engine or None, drafter)
    mapping = mapping_by_hand(at, Sharding(tp_attn=tp, dp_attn=dp, pp=pp, dcp=dcp, pcp=pcp), ep)
    asked = lengths(isl, osl)
    if (reuse := reuse_by_hand(cached, tiers, phase, asked)) is not None:
        asked = with_cached(asked, reuse)
    asked = uneven(asked, rank_imbalance)
    wanted = None if availability is None else Availability(target=availability, failing=load_failures(failures))
    found = breakdown_of(by_hand(at, mapping, asked, phase, batch), Origin(lengths=asked), energy=energy, wanted=wanted)
    return found.json()


def sweep(
    file: Annotated[str, Field(description="YAML file of a sweep, or the name of a shipped one, such as smoke")],
    out: Annotated[
        str, Field(min_length=1, description="directory of the results; an interrupted sweep goes on there")
    ],
) -> SweepJson:
    """Compute the frontiers of every case of a sweep into a directory, and tell their best points."""
    asked = plan_sweep(load_sweep(file))
    if asked.points > MOST_POINTS:
        raise InputError(
            f"{file}: {asked.points:,} design points; allowed here: {MOST_POINTS:,}; run disagg-sim sweep in a shell"
        )
    with staying(Workers(1)) as there:
        compute(asked, Path(out), there, figures=False, overwrite=False, error_bars=False)
    return sweep_json(read_frontier(Path(out)))


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
    rate_per_s: Annotated[float, _as("rate"), Field(gt=0, description="of Poisson arrivals [request/s]")],
    isl: Tokens,
    osl: Tokens,
    colocated: Annotated[int, Field(ge=0, description="co-located instances; 0 with two pools")] = 0,
    prefill: Annotated[int, Field(ge=0, description="prefill instances; 0 where co-located")] = 0,
    decode: Annotated[int, Field(ge=0, description="decode instances; 0 where co-located")] = 0,
    tp: Annotated[int, Field(ge=1, description="GPUs of each instance, tensor parallel")] = 1,
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] = 2000,
    ttft_s: Annotated[float, _as("ttft"), Field(gt=0, description="limit that attainment counts [s]")] = 2.0,
    tpot_s: Annotated[float, _as("tpot"), Field(gt=0, description="limit that attainment counts [s]")] = 0.05,
) -> SimulateJson:
    """Replay Poisson arrivals of equal requests through a small deployment: latencies, attainment, utilisation."""
    from disagg_sim.simulation.simulate import simulate as simulated  # needs the extra of the simulator

    at = setup(model, system, precision)
    mapping = mapping_by_hand(at, Sharding(tp_attn=tp), 1)
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


TOOLS = (list_names, plan, plan_pools, explain, sweep, sweep_summary, compare, simulate)
