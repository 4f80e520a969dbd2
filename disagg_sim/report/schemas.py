"""State the JSON of every command: a type for each, of which pydantic makes the JSON Schema.

Versions: a key that goes, or changes its meaning, makes another version; new keys do not. Units are SI; null stands for
what is not known or has no end, as JSON has neither NaN nor infinity.

Past 400 lines: the JSON of all commands is one contract, and their parts share types.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from disagg_sim.certainty.trust import MEANING
from disagg_sim.errors import InputError, nearest, quoted

Shares = Annotated[dict[str, float], Field(description="label of certainty.trust -> share, together 1 [1]")]
Percentiles = Annotated[dict[str, float | None], Field(description="p50, p90, p99 [s]")]
Band = Annotated[list[float | None], Field(description="80 % of the samples lie between them [1]")]
Row = Annotated[dict[str, Any], Field(description="a row of a table by column; units end the names of columns")]
PLAN, EXPLAIN, SWEEP = "disagg-sim/plan/2", "disagg-sim/explain/1", "disagg-sim/sweep/1"
EVALUATE, COMPARE, SIMULATE = "disagg-sim/evaluate/1", "disagg-sim/compare/1", "disagg-sim/simulate/1"
_Schema = Annotated[str, Field(pattern=r"^disagg-sim/[a-z]+/[0-9]+$", description="name and version of this JSON")]


class LimitJson(TypedDict):
    """A limit of a latency."""

    seconds: float
    share: Annotated[float, Field(description="of the requests that keep it [1]")]


class QuestionJson(TypedDict):
    """What was asked; of rate, gpus and users one is not null."""

    model: str
    systems: list[str]
    mean_isl: Annotated[float, Field(description="[token]")]
    mean_osl: Annotated[float, Field(description="[token]")]
    mean_cached: NotRequired[Annotated[float, Field(description="of a prompt, where caches hold some of it [token]")]]
    speculation: NotRequired[Annotated[str, Field(description="drafter and acceptance: plan --speculate")]]
    pools: NotRequired[Annotated[list[str], Field(description="that requests pass: plan --pools")]]
    images: NotRequired[Annotated[dict[str, float], Field(description="of a request: images, height, width, cached")]]
    ttft: LimitJson
    tpot: LimitJson
    rate_per_s: float | None
    gpus: int | None
    users: int | None
    objective: str


class PoolJson(TypedDict):
    """Equal instances of one role; attention and feed-forward ranks of an instance are a pool each."""

    role: Annotated[str, Field(pattern="^(encode|prefill|decode|attention|ffn|colocated)$")]
    instances: int
    gpus: int
    system: str
    precision: str
    engine: str
    tp_attn: int
    dp_attn: int
    tp_ffn: int
    ep: int
    pp: int
    redundant_slots: int
    dcp: int
    pcp: int
    chunk_tokens: Annotated[int, Field(description="0 = whole prompts [token]")]
    draft_tokens: Annotated[int, Field(description="of a decode step; 0 = no speculation [token]")]
    batch: Annotated[int, Field(description="prompts of a pass, or sequences [request]")]
    token_budget: Annotated[int | None, Field(description="of a step of a co-located instance [token]")]
    load: Annotated[float, Field(description="[1]")]
    memory_bytes: Annotated[float | None, Field(description="of the fullest GPU; null of encode pools [B]")]
    bound: Annotated[str, Field(description="compute, memory, communication or latency; empty of attention and ffn")]
    hold_steps: NotRequired[Annotated[int, Field(description="that prompts wait at most until every rank has one")]]
    microbatches: NotRequired[Annotated[int, Field(description="that alternate between attention and ffn ranks")]]
    idle: NotRequired[Annotated[float, Field(description="share of a full step in which the ranks wait [1]")]]


class SparesJson(TypedDict):
    """Spare instances for a stated availability; attention and ffn ranks of an instance are one pool here."""

    target: Annotated[float, Field(description="share of time at full capacity that was asked for [1]")]
    counts: Annotated[list[int], Field(description="spare instances of each pool, beside its instances [1]")]
    availability: Annotated[float, Field(description="share of time at full capacity [1]")]
    without: Annotated[float, Field(description="the same without spares [1]")]
    capacity: Annotated[float, Field(description="expected share of the load that can be served [1]")]
    mtbf: Annotated[list[float | None], Field(description="between failures of an instance; null = never [s]")]
    together: Annotated[list[int], Field(description="most instances of each pool that one failure stops [1]")]


class HostsJson(TypedDict):
    """Hosts of one system that a design fills."""

    count: int
    idle_gpus: Annotated[int, Field(description="of these hosts, that no instance of the design has [1]")]


class DesignJson(TypedDict):
    """A deployment and what it does."""

    mode: Annotated[str, Field(pattern="^(disaggregated|colocated)$")]
    gpus: int
    rate_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    simulated: NotRequired[Annotated[bool, Field(description="ttft_s and tpot_s are simulated; absent = planned")]]
    kv_bytes_per_s_per_gpu: float
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    output_tokens_per_joule: Annotated[float, Field(description="at the TDP of the GPUs [token/J]")]
    hosts: NotRequired[Annotated[dict[str, HostsJson], Field(description="by system")]]
    spares: NotRequired[SparesJson]
    pools: list[PoolJson]


class TierJson(TypedDict):
    """A tier of prefix caches of a design, for one prompt of mean length."""

    name: str
    share: Annotated[float, Field(description="of all prompt tokens, found there [1]")]
    holds: Annotated[
        float | None, Field(description="room of an instance, of all in a shared tier; null = no end [token]")
    ]
    load: Annotated[float, Field(description="of what is cached; 0 in HBM [s]")]
    recomputed: Annotated[float, Field(description="what computing it again adds to the pass [s]")]
    loads: Annotated[bool, Field(description="whether loading is the sooner")]


class FewestJson(TypedDict):
    """The design of fewest GPUs, beside one of fewest joules."""

    joules_per_output_token: Annotated[float, Field(description="of GPUs at this rate [J/token]")]
    design: DesignJson


class DrawnJson(TypedDict):
    """What the GPUs and the building draw at the planned rate."""

    watts: Annotated[float, Field(description="of all GPUs [W]")]
    watts_p10: float
    watts_p90: float
    facility_watts: Annotated[float | None, Field(description="with hosts, network, supplies and PUE; null = unknown")]
    joules_per_request: float
    output_tokens_per_drawn_joule: float
    rests_on: Annotated[str, Field(description="fitted, or inherited from another system")]


class TokenPricesJson(TypedDict):
    """Prices of a million tokens."""

    input: Annotated[float, Field(description="of prompts, not cached [USD]")]
    cached: Annotated[float | None, Field(description="of prompts; null where none are [USD]")]
    output: Annotated[float, Field(description="prefill left out [USD]")]


class PoolEvidenceJson(TypedDict):
    """How far the forecast of a pool has been checked."""

    role: str
    layout: Annotated[str, Field(description="served, or launchable or not launchable with the reason")]
    points: Annotated[int, Field(description="served operating points of this kind of layout [1]")]
    error: Annotated[float | None, Field(description="that three quarters of their forecasts stay below [1]")]
    sequences: Annotated[float, Field(description="that decode on a GPU; 0 of prefill [1]")]
    most_sequences: Annotated[float | None, Field(description="on a GPU in these runs; null where none states it [1]")]
    ttft: Shares
    tpot: Shares
    rests_on: Shares


class CauseJson(TypedDict):
    """Part of TTFT at the percentile of its limit."""

    cause: str
    forecast: Annotated[float | None, Field(description="[s]")]
    band: Annotated[Band, Field(description="[s]")]


class AssuranceJson(TypedDict):
    """How sure the answer is."""

    probability: Annotated[float | None, Field(description="that the mode is the better one [1]")]
    gain: Band
    holds: Annotated[float | None, Field(description="probability that the limits hold at the planned rate [1]")]
    ttft_holds: Annotated[float | None, Field(description="that the limit of TTFT does [1]")]
    tpot_holds: Annotated[float | None, Field(description="that the limit of TPOT does [1]")]
    within_reach: Annotated[float | None, Field(description="the most that more instances make of holds [1]")]
    most: Annotated[float | None, Field(description="rate that these GPUs serve within the limits, over its own [1]")]
    capacity: Annotated[Band, Field(description="the same with its error bars")]
    ttft: Annotated[Band, Field(description="time of a pass of prefill over its forecast [1]")]
    beside: Annotated[Band, Field(description="what a request spends beside its pass before its first token [s]")]
    tpot: Band
    encoding: NotRequired[
        Annotated[Band, Field(description="time of encoding over its forecast, of an encode pool [1]")]
    ]
    ttft_s: Annotated[Band, Field(description="TTFT at the percentile of its limit, queue included [s]")]
    ttft_causes: Annotated[list[CauseJson], Field(description="whose times add up to it")]
    text: NotRequired[
        Annotated[
            list[Band],
            Field(
                description="pass and step with the least and the most skewed experts of text, over the forecast [1]"
            ),
        ]
    ]
    pools: list[PoolEvidenceJson]
    throughput: Shares


class FlipJson(TypedDict):
    """A change of the question that changes the answer."""

    axis: Annotated[str, Field(description="ttft, tpot, isl, osl, nic or price")]
    factor: float | None
    before: float | None
    value: Annotated[float | None, Field(description="of the axis there: [s], [token], [B/s] or [USD/h]")]
    mode: Annotated[str | None, Field(description="that wins there; null where nothing keeps the limits")]
    system: str
    split: NotRequired[
        Annotated[bool, Field(description="whether attention and FFN ranks are apart there, where asked")]
    ]


class LimitCostJson(TypedDict):
    """The answer under a looser limit."""

    axis: Annotated[str, Field(description="ttft or tpot")]
    value: Annotated[float, Field(description="of the looser limit [s]")]
    gpus: int
    rate: Annotated[float, Field(description="[request/s]")]
    cost: Annotated[float, Field(description="over that of the best design, for as much work [1]")]


class RunJson(TypedDict):
    """One simulation of the design."""

    counts: list[int]
    rate: Annotated[float, Field(description="[request/s]")]
    requests: int
    ttft: Percentiles
    tpot: Percentiles
    hand_over: float | None
    lost: int
    holds_ttft: bool
    holds_tpot: bool
    holds: bool


class FailingJson(TypedDict):
    """The simulation in which as many instances fail at once as there are spares."""

    run: RunJson
    failed: Annotated[list[int], Field(description="instances of each pool")]
    moved: Annotated[int, Field(description="requests that began again elsewhere")]


class ProofJson(TypedDict):
    """What simulation found."""

    planned: RunJson
    final: RunJson
    simulations: int
    failing: NotRequired[Annotated[FailingJson, Field(description="plan --availability, where it has spares")]]


class PlanJson(TypedDict):
    """Answer of ``disagg-sim plan --json``."""

    schema: _Schema
    status: Annotated[str, Field(pattern="^(feasible|infeasible)$")]
    binds: Annotated[str, Field(description="of an infeasible plan: what binds, and the nearest limits; else empty")]
    labels: Annotated[dict[str, str], Field(description="what the labels of shares mean")]
    question: QuestionJson
    gain: Annotated[float | None, Field(description="of the better mode over the other; null without another [1]")]
    best: DesignJson | None
    runners_up: list[DesignJson]
    assurance: AssuranceJson | None
    flips: list[FlipJson] | None
    limit_costs: NotRequired[list[LimitCostJson] | None]
    set_aside: NotRequired[Annotated[DesignJson | None, Field(description="that would cost less; null = none does")]]
    simulated: ProofJson | None
    joules_per_output_token: NotRequired[Annotated[float, Field(description="plan --objective joule [J/token]")]]
    fewest_gpus: NotRequired[Annotated[FewestJson, Field(description="plan --objective joule")]]
    tiers: NotRequired[Annotated[list[TierJson], Field(description="where tiers are named: plan --tiers")]]
    drawn: NotRequired[Annotated[DrawnJson, Field(description="of the best design: plan --energy")]]
    usd_per_million_tokens: NotRequired[
        Annotated[TokenPricesJson, Field(description="of the best design: plan --utilisation")]
    ]
    left_out: list[str]
    said: Annotated[dict[str, Any], Field(description="sentences of the screen, for people")]


class EvaluateJson(TypedDict):
    """Answer of ``disagg-sim evaluate --json``."""

    schema: _Schema
    holds: Annotated[bool, Field(description="whether both limits do, and sequence slots are free often enough")]
    missed: Annotated[list[str], Field(description="ttft, tpot, seats: what does not hold")]
    overloaded: Annotated[list[str], Field(description="roles of pools whose queues grow without end")]
    capacity_per_s: Annotated[float, Field(description="highest rate within the limits; 0 = none [request/s]")]
    full_share: Annotated[float, Field(description="of the time in which all sequence slots of decode are in use [1]")]
    design: Annotated[DesignJson, Field(description="the deployment; latencies are null where queues grow")]
    assurance: Annotated[AssuranceJson | None, Field(description="null where it is overloaded")]
    planned: Annotated[DesignJson | None, Field(description="the plan for this load; null: none, or not asked")]
    said: Annotated[list[str], Field(description="the verdict, for people")]


class LatencyTrustJson(TypedDict):
    """What a latency of a design rests on."""

    row: int | str
    latency: Annotated[str, Field(pattern="^(ttl|ftl)$")]
    rests_on: Shares


class PrefillDelayEffectJson(TypedDict):
    """A co-located design at its wait, and at none."""

    steps: Annotated[int, Field(description="decode steps that prefill is delayed at most [1]")]
    gathered: Annotated[float, Field(description="prompts of a pass, on average [request]")]
    between: Annotated[float, Field(description="decode steps from a pass to the next [1]")]
    ttl: Annotated[float, Field(description="[s]")]
    ttl_without: Annotated[float, Field(description="where prompts do not wait [s]")]
    ftl: Annotated[float, Field(description="with the wait for a slot [s]")]
    ftl_without: Annotated[float, Field(description="where prompts do not wait [s]")]


class HandOverJson(TypedDict):
    """The hand-over of the cache of a prompt, which shares its link with no other."""

    link: Annotated[str, Field(description="as its case is called; empty where the table does not say")]
    bandwidth: Annotated[float | None, Field(description="of a GPU, one way; null = the wire takes no time [B/s]")]
    size: Annotated[float, Field(description="cache of a prompt, each element once [B]")]
    descriptors: Annotated[float, Field(description="that a GPU of the receiver posts [1]")]
    post: Annotated[float, Field(description="to post them [s]")]
    wire: Annotated[float, Field(description="latency, and the bytes of the busiest GPU [s]")]
    time: Annotated[float, Field(description="both [s]")]
    ftl: Annotated[float, Field(description="with it, which the FTL limit holds for [s]")]


class ExplainJson(TypedDict):
    """Answer of ``disagg-sim explain --json``: the frames of ``ds.breakdown``."""

    schema: _Schema
    status: Annotated[str, Field(pattern="^(feasible|infeasible)$")]
    binds: Annotated[
        str, Field(description="of an infeasible design: the GPU that is too full, by how much; else empty")
    ]
    labels: Annotated[dict[str, str], Field(description="what the labels of shares mean")]
    points: list[Row]
    operators: list[Row]
    fits: list[Row]
    memory: list[Row]
    elasticities: list[Row]
    trust: list[LatencyTrustJson]
    energy: NotRequired[
        Annotated[list[Row], Field(description="of one GPU in one pass, by operator [s], [W], [J]: explain --energy")]
    ]
    tiers: NotRequired[Annotated[list[TierJson], Field(description="where tiers are named: explain --tiers")]]
    spares: NotRequired[Annotated[SparesJson, Field(description="of the pools of the design: explain --availability")]]
    held_prompts: NotRequired[Annotated[PrefillDelayEffectJson, Field(description="where prefill is delayed")]]
    hand_over: NotRequired[Annotated[HandOverJson, Field(description="rows of a sweep with kv_link")]]


class PointJson(TypedDict):
    """A point of a frontier."""

    at_least: Annotated[float | None, Field(description="interactivity asked for; null = best throughput [token/s]")]
    rests_on: Shares
    point: Annotated[dict[str, Any], Field(description="columns of frontier.csv in which points differ")]


class FrontJson(TypedDict):
    """The frontier of a case in one mode."""

    mode: str
    points: Annotated[int, Field(description="on the frontier [1]")]
    best: Annotated[list[PointJson], Field(description="highest throughput from an interactivity on, where reached")]


class CaseJson(TypedDict):
    """A case of a sweep."""

    case: str
    verdict: Annotated[str, Field(description="why there is no result; empty where there is one")]
    common: Annotated[dict[str, Any], Field(description="columns in which all points of the case agree")]
    gain: Annotated[
        dict[str, float], Field(description="interactivity -> disaggregated over best co-located throughput [1]")
    ]
    modes: list[FrontJson]


class SweepJson(TypedDict):
    """Answer of ``disagg-sim sweep --json``: the best points of each frontier, which ``frontier.csv`` has whole."""

    schema: _Schema
    labels: Annotated[dict[str, str], Field(description="what the labels of shares mean")]
    name: str
    results: Annotated[str, Field(description="directory or file of the results")]
    cases: list[CaseJson]


class PairJson(TypedDict):
    """Interactivity and throughput of a point."""

    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float


class CompareJson(TypedDict):
    """What ``disagg-sim compare --json`` and ``check --json`` write."""

    schema: _Schema
    baseline: str
    results: str
    rtol: float
    same: bool
    worse: bool
    inputs: Annotated[list[Row] | None, Field(description="inputs that differ; null where they are not known")]
    fronts: list[FrontChangeJson]


class ChangedPointJson(TypedDict, total=False):
    """A point that was lost, is new or moved; without the sides and changes that it does not have."""

    configuration: Row
    baseline: PairJson
    results: PairJson
    moves: list[Row]
    curve_kept: bool


class AreaJson(TypedDict):
    """Area under two frontiers, from the origin."""

    baseline: float
    results: float
    relative_change: float | None


class FrontChangeJson(TypedDict):
    """One frontier against another."""

    case: str
    mode: str
    same: bool
    worse: bool
    points: Annotated[dict[str, int], Field(description="baseline and results -> points [1]")]
    area: AreaJson
    lost: list[ChangedPointJson]
    new: list[ChangedPointJson]
    moved: list[ChangedPointJson]


class SimulateJson(TypedDict):
    """Answer of ``disagg-sim simulate --json``: rows of ``summary.csv`` and ``capacity.csv``."""

    schema: _Schema
    name: str
    results: str
    runs: list[Row]
    capacity: list[Row]


#: JSON by the command that prints it.
SCHEMAS: dict[str, tuple[str, Any]] = {
    "plan": (PLAN, PlanJson),
    "evaluate": (EVALUATE, EvaluateJson),
    "explain": (EXPLAIN, ExplainJson),
    "sweep": (SWEEP, SweepJson),
    "compare": (COMPARE, CompareJson),
    "simulate": (SIMULATE, SimulateJson),
}


def json_schema(command: str) -> dict[str, Any]:
    """Make the JSON Schema, draft 2020-12, of what a command prints with ``--json``; its version is ``$id``."""
    if command not in SCHEMAS:
        said = f"no JSON of a command {quoted(command)}{nearest(command, SCHEMAS)}"
        raise InputError(f"{said}; allowed: {', '.join(SCHEMAS)}")
    version, kind = SCHEMAS[command]
    made = TypeAdapter(kind).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": version, **made}


def plain(value: Any) -> Any:
    """Turn a value into JSON's own types; None stands for what is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, str) else value


def labels() -> dict[str, str]:
    """Say what the labels of shares mean."""
    return {str(label): meaning for label, meaning in MEANING.items()}
