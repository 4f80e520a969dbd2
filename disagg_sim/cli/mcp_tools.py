"""Tools for agents: the JSON of the commands, by the same functions. ``GUIDE`` says when to take which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pandas as pd
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from disagg_sim.cli.compare import causes_of
from disagg_sim.cli.evaluate import evaluation_of
from disagg_sim.cli.explain import explained, mapping_by_hand
from disagg_sim.cli.plan import plan_answer, with_changes
from disagg_sim.cli.sweep import compute
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InputError, check_word
from disagg_sim.facts.load import load_model, load_precision, load_profile, load_system, load_traffic
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.setup import setup
from disagg_sim.question import Ask, EvaluateQuestion, ExplainQuestion, PlanQuestion, QuestionField
from disagg_sim.report.documents import compare_json, simulate_json, sweep_json
from disagg_sim.report.evaluate import evaluate_json
from disagg_sim.report.plan import plan_json
from disagg_sim.report.schemas import CompareJson, EvaluateJson, ExplainJson, PlanJson, SimulateJson, SweepJson
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.sweep.backends.run import staying
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.compare import compare_frontiers, read_frontier
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques.registry import asked_fields, question_of
from disagg_sim.workload.synthetic import synthetic_trace

GUIDE = """\
disagg-sim forecasts LLM inference on GPU clusters: what to deploy, and why. Units are SI unless a name says otherwise.
1. list_names: names of models, systems (hardware), precision recipes and traffics. Use them as they are.
2. plan: the deployment for a model, systems, lengths, limits of TTFT and TPOT, and ONE of rate_per_s, gpus and users.
   system may name several, "h100_sxm,h200_sxm", or be "any". status "infeasible" is an answer: "binds" says what binds.
   Say what the deployment really does: speculate (drafts), cached and tiers (prompts in caches), availability (spares).
   pools, images and ffn_system: encode, attention and feed-forward pools.
   evaluate: the same of a deployment that is there: pool is a list such as ["prefill:tp=2,instances=4,batch=4",
   "decode:tp=4,instances=2,batch=128"] or ["colocated:tp=2,instances=12"].
3. explain: why an instance, or a row of results, is as fast as it is, operator by operator.
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
Tokens = Annotated[int, Field(ge=1, description="[token]")]
Results = Annotated[str, Field(description="directory of the results of a sweep, or a frontier.csv")]


def _as(option: Ask) -> BeforeValidator:
    """Read a text or a number as the command does, with its units; None stays."""

    def read(value: object) -> object:
        try:
            return value if value is None else option.read(value)
        except InputError as error:
            raise ValueError(str(error).strip()) from None

    return BeforeValidator(read)


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
    check_word("kind", kind, _KINDS)
    return {"kind": kind, "names": {name: _KINDS[kind](name).title for name in list_specs(kind)}}


def of_question(answer: Callable[[Any], Any]) -> Callable[..., Any]:
    """Make a tool of a function of a question, with an argument for each field that agents may say."""
    question, result = get_type_hints(answer).values()
    taken = {each.ask.agents or each.name: each for each in asked_fields(question) if each.ask.agents is not None}

    @wraps(answer)
    def tool(**given: Any) -> Any:
        return answer(question_of(question, {taken[name].name: value for name, value in given.items()}))

    parameters = [_argument(name, each) for name, each in taken.items()]
    tool.__signature__ = Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return tool


def _argument(name: str, field: QuestionField) -> Parameter:
    option = field.ask
    said = f"{option.help} ({option.value})" if option.value else option.help
    marks = (Field(description=said, ge=option.low, le=option.high), *([_as(option)] if option.unit else []))
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.kind, *marks])


@of_question
def plan(asked: PlanQuestion) -> PlanJson:
    """Answer what to deploy: disaggregated or co-located, pools, mappings, counts, latencies, price, bands, flips."""
    found, extras = plan_answer(asked)
    return plan_json(found, with_changes(found, extras))


@of_question
def evaluate(asked: EvaluateQuestion) -> EvaluateJson:
    """Say what a deployment does under a load: latencies, what it could serve, and the plan for the same load."""
    found = evaluation_of(asked)
    return evaluate_json(found, None if asked.alone else found.planned)


@of_question
def explain(asked: ExplainQuestion) -> ExplainJson:
    """Take the latency and the memory of one instance apart: operators, what they wait for, the fits behind them."""
    return explained(asked).json()


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
        compute(asked, Path(out), there, overwrite=False, error_bars=False)
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
    rate_per_s: Annotated[float, _as(Ask("", unit="rate")), Field(gt=0, description="of Poisson arrivals [request/s]")],
    isl: Tokens,
    osl: Tokens,
    colocated: Annotated[int, Field(ge=0, description="co-located instances; 0 with two pools")] = 0,
    prefill: Annotated[int, Field(ge=0, description="prefill instances; 0 where co-located")] = 0,
    decode: Annotated[int, Field(ge=0, description="decode instances; 0 where co-located")] = 0,
    tp: Annotated[int, Field(ge=1, description="GPUs of each instance, tensor parallel")] = 1,
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] = 2000,
    ttft_s: Annotated[
        float, _as(Ask("", unit="ttft")), Field(gt=0, description="limit that attainment counts [s]")
    ] = 2.0,
    tpot_s: Annotated[
        float, _as(Ask("", unit="tpot")), Field(gt=0, description="limit that attainment counts [s]")
    ] = 0.05,
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


TOOLS = (list_names, plan, evaluate, explain, sweep, sweep_summary, compare, simulate)
