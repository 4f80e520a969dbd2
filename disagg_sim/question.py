"""Define the fields of a question once, for the command line, the agent tools and their schemas.

A question is a frozen dataclass. An ``Ask`` in the annotation of a field gives its help, unit, range and spelling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from disagg_sim.choices import (
    EVEN_RANKS,
    FAILURES,
    HEADROOM,
    LAUNCHERS,
    MORE_PHASES,
    MOST_HEADROOM,
    MOST_SEED,
    MOST_SKEW,
    NO_DELAY,
    OBJECTIVES,
    PHASES,
    POOLS,
    RANK_IMBALANCES,
    TUNED_DELAY,
)
from disagg_sim.errors import InputError, quoted
from disagg_sim.units import asked_quantity

#: Field of a question that holds the values of techniques; each technique has an option of its own.
TECHNIQUES = "techniques"


@dataclass(frozen=True, slots=True)
class Ask:
    """Help, unit, range and spelling of a field of a question.

    ``Annotated[float, Ask("Share of each prompt.", "SHARE", unit="share", low=0.0, high=1.0)]`` reads ``90%`` as 0.9.
    """

    help: str
    value: str = ""  # placeholder of the value in the help; "" = its type
    low: float | None = None  # least value; None = any
    high: float | None = None
    unit: str = ""  # key of ``units.BARE``, which has the units of numbers and of text; "" = no unit
    flag: str = ""  # option of the command line; "" = the name of the field
    argument: bool = False  # whether it is a positional argument
    agents: str | None = ""  # argument of an agent tool; "" = the name of the field; None = no argument

    def read(self, given: object) -> float:
        """Convert a number, or text with a unit, to SI units; refuse values out of range.

        >>> Ask("", unit="share", low=0.0, high=1.0).read("90%")
        0.9
        """
        number = asked_quantity(given, self.unit, "") if self.unit else float(str(given))
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not low <= number <= high:
            up_to = "" if self.high is None else f" to {high:g}"
            raise InputError(f"{given} is out of range; allowed: from {low:g}{up_to}")
        return number


class QuestionField(NamedTuple):
    """A field of a question."""

    name: str
    kind: Any  # type of its value; the command line takes the first type of a union
    ask: Ask
    default: Any  # ``dataclasses.MISSING`` = required

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{(self.ask.flag or self.name).replace('_', '-')}"


def fields_of(question: type) -> Iterator[QuestionField]:
    """List the fields of a question in the order of its help."""
    hints = get_type_hints(question, include_extras=True)
    for each in fields(question):
        if each.name != TECHNIQUES:
            kind, ask = get_args(hints[each.name])
            yield QuestionField(each.name, kind, ask, each.default)


def changed_flags(asked: Any, *names: str) -> list[str]:
    """List the options of the named fields whose values differ from the defaults.

    >>> changed_flags(ExplainQuestion(best=True, tp=8), "row", "best"), changed_flags(ExplainQuestion())
    (['--best'], [])
    """
    named = (each for each in fields_of(type(asked)) if each.name in names)
    techniques = asked.techniques.split(", ") if TECHNIQUES in names and asked.techniques else []
    return [
        *(each.flag for each in named if getattr(asked, each.name) != each.default),
        *(f"--{part.partition('=')[0].replace('_', '-')}" for part in techniques),
    ]


def prices_of(given: Iterable[str]) -> dict[str, float]:
    """Read the price of a GPU of each system. [USD/h]

    >>> prices_of(["h100_sxm=2.5", "b200_sxm=$4/h"])
    {'h100_sxm': 2.5, 'b200_sxm': 4.0}
    """
    prices: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            prices[name] = float(number.strip().removeprefix("$").removesuffix("/h"))
        except ValueError:
            allowed = "allowed: SYSTEM=USD_PER_GPU_HOUR, such as h100_sxm=2.5"
            raise InputError(f"--price {quoted(text)}; {allowed}") from None
    return prices


def share(text: str, low: float = 0.0, high: float | None = None) -> Ask:
    """Make the ``Ask`` of a share [1], which may be given in percent."""
    return Ask(text, "SHARE", low, high, unit="share")


# Types of values, and fields of several questions.
Number = float | None
Latency = str | float | None  # '500 ms', or seconds
Prices = list[str] | dict[str, float] | None  # SYSTEM=USD each, or a mapping
Cached = Annotated[float, share("Share of each prompt that is cached.", 0.0, 1.0)]
RankImbalance = Annotated[str, Ask(f"Routing to attention-DP ranks: {', '.join(RANK_IMBALANCES)}.", "ROUTING")]
Speculate = Annotated[str, Ask("Draft tokens per decode step.", "auto|off|K")]
Acceptance = Annotated[
    str, Ask("Draft acceptance: a curve, 'mtp 0.8 0.6', 'draft_model MODEL 0.8 0.6'.", "NAME|METHOD SHARES")
]
PrefillDelay = Annotated[
    str, Ask("Prefill delay: most decode steps to wait until every rank has a prompt.", "none|tuned|N")
]
Precision = Annotated[str, Ask("Precision recipe; default: the usual one of model and system.")]
Failures = Annotated[str, Ask("Failure rates for --availability.", "NAME|FILE")]
Row = Annotated[int | None, Ask("Row of the table, counted from 0.", low=0)]
Case = Annotated[str, Ask("Only rows of this case.")]
Best = Annotated[bool, Ask("Take the row with the highest throughput.")]
AtInteractivity = Annotated[Number, Ask("Take the highest throughput at X tokens/s/user or more.", "X")]
ISL, OSL = Ask("Input tokens.", low=1), Ask("Output tokens.", low=2)
TIERS, TIERS_VALUE = "Tiers of cached tokens: hbm, dram, ssd, remote.", "TIER[=SHARE,...]"


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """Plan a deployment: disaggregated or co-located, pools, mappings, counts, latencies, price.

    Give the lengths by --isl and --osl, --traffic or --trace, and the size by --gpus, --rate or --users.
    """

    model: Annotated[str, Ask("Model: its name, YAML or config.json.", "NAME|FILE")]
    system: Annotated[str, Ask("GPU systems to compare.", "S[,S2,...]|any")]
    prefill_system: Annotated[str, Ask("Another system for the prefill pool.", "P")] = ""
    isl: Annotated[int | None, ISL] = None
    osl: Annotated[int | None, OSL] = None
    traffic: Annotated[str, Ask("Lengths of a shipped traffic.", "NAME")] = ""
    trace: Annotated[str, Ask("Lengths and arrivals of a request trace.", "FILE")] = ""
    pools: Annotated[str, Ask(f"Pools in place of prefill,decode; of {', '.join(POOLS)}.", "POOL,...")] = ""
    images: Annotated[str, Ask("Images of a request, 2x1120x1120; share of cached encodings.", "NxHxW[@SHARE]")] = ""
    ffn_system: Annotated[str, Ask("Another system for the ffn pool.", "F")] = ""
    cached: Cached = 0.0
    tiers: Annotated[str, Ask(f"{TIERS} With sessions: 'hbm=20 GB,dram', no shares.", TIERS_VALUE)] = ""
    rank_imbalance: RankImbalance = EVEN_RANKS
    speculate: Speculate = "off"
    acceptance: Acceptance = ""
    ttft: Annotated[Latency, Ask("TTFT: '2 s', '500 ms@p99'; p90 by default. [default: 2 s]", "LIMIT")] = None
    tpot: Annotated[Latency, Ask("TPOT: '50 ms', '30 ms@p99'; p90 by default. [default: 50 ms]", "LIMIT")] = None
    gpus: Annotated[int | None, Ask("Serve the highest rate with this many GPUs.", low=1)] = None
    rate: Annotated[
        Number, Ask("Serve this many requests/s at the least cost.", "RATE", unit="rate", agents="rate_per_s")
    ] = None
    users: Annotated[int | None, Ask("Serve this many users, each with one request in flight.", low=1)] = None
    objective: Annotated[str, Ask(f"{', '.join(OBJECTIVES)}.")] = "gpus"
    engine: Annotated[str, Ask("vllm, sglang, trtllm; default: the system's.")] = ""
    precision: Precision = ""
    max_dcp: Annotated[int, Ask("Largest DCP degree: GPUs that share the cache of a KV head.", low=1)] = 1
    max_pcp: Annotated[int, Ask("Largest PCP degree: prefill ranks that share a prompt.", low=1)] = 1
    max_redundant_experts: Annotated[int, Ask("Most redundant expert slots.", low=0)] = 0
    expert_skew: Annotated[float, Ask("Coefficient of variation of expert popularity.", low=0.0, high=MOST_SKEW)] = 0.0
    hold_prompts: PrefillDelay = TUNED_DELAY
    headroom: Annotated[float, share("Spare rate of every pool, as a share of its rate.", 0.0, MOST_HEADROOM)] = (
        HEADROOM
    )
    confidence: Annotated[
        Number, share("Add GPUs, or lower the rate, until the limits hold with this probability.", 0.5, 0.99)
    ] = None
    max_nic: Annotated[
        Number, Ask("Most KV bandwidth of a GPU, each way.", "GB/s", low=0.0, unit="nic", agents="max_nic_gb_per_s")
    ] = None
    price: Annotated[Prices, Ask("Price of a GPU hour.", "SYSTEM=USD", agents="prices")] = None
    utilisation: Annotated[Number, share("Share of the paid GPU hours that are used; prices tokens.")] = None
    energy: Annotated[bool, Ask("Also print the power of GPUs and data center at the planned rate.")] = False
    availability: Annotated[Number, share("Add spares: full capacity for this share of the time.")] = None
    failures: Failures = FAILURES
    emit: Annotated[
        str, Ask(f"Plan for an engine and write its launch files: {', '.join(LAUNCHERS)}.", "ENGINE", agents=None)
    ] = ""
    proof: Annotated[bool, Ask("Simulate the plan and adjust instance counts.", flag="simulate", agents=None)] = False
    seed: Annotated[int, Ask("Seed of simulated arrivals and lengths.", low=0, high=MOST_SEED, agents=None)] = 0
    out: Annotated[Path | None, Ask("Also write everything as files.", "DIR", agents=None)] = None
    as_json: Annotated[bool, Ask("Print JSON of a versioned schema.", flag="json", agents=None)] = False
    techniques: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluateQuestion:
    """Evaluate a deployment: TTFT and TPOT of its requests, its highest rate, and the plan for the same load.

    Give the deployment by one --pool or --launch for each pool, or by --plan; the lengths by --isl and --osl,
    --traffic or --trace.
    """

    model: Annotated[str, Ask("Model: its name, YAML or config.json.", "NAME|FILE")]
    system: Annotated[str, Ask("GPU system of the pools.", "S")]
    prefill_system: Annotated[str, Ask("Another system of the prefill pool.", "P")] = ""
    pool: Annotated[
        list[str] | None, Ask("colocated, or prefill and decode: decode:tp=4,instances=2,batch=128.", "ROLE:KEY=N,...")
    ] = None
    launch: Annotated[
        list[str] | None,
        Ask(
            "Launch command of a pool, its script or directory: 'decode: 2 x decode.sh'.", "[ROLE:] [N x] FILE|COMMAND"
        ),
    ] = None
    plan: Annotated[Path | None, Ask("Take the pools of a plan that was written with --out.", "DIR|FILE")] = None
    isl: Annotated[int | None, ISL] = None
    osl: Annotated[int | None, OSL] = None
    traffic: Annotated[str, Ask("Lengths of a shipped traffic.", "NAME")] = ""
    trace: Annotated[str, Ask("Lengths and arrivals of a request trace.", "FILE")] = ""
    rate: Annotated[
        Number, Ask("Requests/s; default: the rate of the trace.", "RATE", unit="rate", agents="rate_per_s")
    ] = None
    ttft: Annotated[Latency, Ask("TTFT: '2 s', '500 ms@p99'; p90 by default. [default: 2 s]", "LIMIT")] = None
    tpot: Annotated[Latency, Ask("TPOT: '50 ms', '30 ms@p99'; p90 by default. [default: 50 ms]", "LIMIT")] = None
    engine: Annotated[str, Ask("vllm, sglang, trtllm; default: the system's.")] = ""
    precision: Precision = ""
    cached: Cached = 0.0
    tiers: Annotated[str, Ask(TIERS, TIERS_VALUE)] = ""
    speculate: Speculate = "off"
    acceptance: Acceptance = ""
    expert_skew: Annotated[float, Ask("Coefficient of variation of expert popularity.", low=0.0, high=MOST_SKEW)] = 0.0
    max_nic: Annotated[
        Number, Ask("Most KV bandwidth of a GPU, each way.", "GB/s", low=0.0, unit="nic", agents="max_nic_gb_per_s")
    ] = None
    price: Annotated[Prices, Ask("Price of a GPU hour.", "SYSTEM=USD", agents="prices")] = None
    alone: Annotated[bool, Ask("Skip the plan for the same load.")] = False
    as_json: Annotated[bool, Ask("Print JSON of a versioned schema.", flag="json", agents=None)] = False
    techniques: str = ""


@dataclass(frozen=True, kw_only=True)
class ExplainQuestion:
    """Break TTL, FTL and memory of a design down to the equation, the fit and the YAML line of each part.

    Name a table of results and one of its rows, or give a design by options.
    """

    results: Annotated[
        Path | None, Ask("Results of a sweep, its frontier.csv, or a file of points/.", "DIR|FILE", argument=True)
    ] = None
    row: Row = None
    case: Case = ""
    best: Best = False
    at_interactivity: AtInteractivity = None
    model: Annotated[str, Ask("Model of a design given by the options down to --osl.")] = ""
    system: Annotated[str, Ask("The GPU system.")] = ""
    precision: Precision = ""
    profile: Annotated[str, Ask("ideal, optimistic or measured.")] = "measured"
    engine: Annotated[str, Ask("Engine profile; default: the system's.")] = ""
    phase: Annotated[
        str, Ask(f"{', '.join(PHASES)}: an instance of one phase or of both; {', '.join(MORE_PHASES)}: further pools.")
    ] = "decode"
    ffn_gpus: Annotated[int, Ask("For attention_ffn: GPUs of the feed-forward pool.", low=0, agents=None)] = 0
    microbatches: Annotated[int, Ask("For attention_ffn: micro-batches that alternate.", low=1, agents=None)] = 3
    images: Annotated[str, Ask("For encode: images of a request.", "NxHxW[@SHARE]", agents=None)] = ""
    tp: Annotated[int, Ask("Tensor parallelism of attention.", low=1)] = 1
    dp: Annotated[int, Ask("Data parallelism of attention.", low=1)] = 1
    ep: Annotated[int, Ask("Expert parallelism; the FFN shards over tp*dp*pcp/ep.", low=1)] = 1
    pp: Annotated[int, Ask("Pipeline stages.", low=1)] = 1
    dcp: Annotated[int, Ask("GPUs among the tp that share the tokens of a KV head.", low=1)] = 1
    pcp: Annotated[int, Ask("Groups of tp GPUs that share a prompt, for prefill.", low=1)] = 1
    speculate: Speculate = "off"
    acceptance: Acceptance = ""
    batch: Annotated[int, Ask("Requests in a batch of the instance.", low=1)] = 1
    isl: Annotated[int, ISL] = 1024
    osl: Annotated[int, OSL] = 256
    traffic: Annotated[
        str, Ask("Lengths of a shipped traffic, in place of --isl and --osl, or of a table without lengths.", "NAME")
    ] = ""
    cached: Cached = 0.0
    tiers: Annotated[str, Ask(TIERS, TIERS_VALUE)] = ""
    rank_imbalance: RankImbalance = EVEN_RANKS
    hold_prompts: PrefillDelay = NO_DELAY
    figure: Annotated[
        Path | None, Ask("Picture to write (.png, .svg, .pdf): bars and roofline.", "FILE", agents=None)
    ] = None
    energy: Annotated[bool, Ask("Also print watts and joules of the passes.")] = False
    availability: Annotated[Number, share("Print capacity lost by a failure, spares for this availability.")] = None
    failures: Failures = FAILURES
    as_json: Annotated[bool, Ask("Print JSON.", flag="json", agents=None)] = False
    techniques: str = ""


@dataclass(frozen=True, kw_only=True)
class LaunchQuestion:
    """Write commands or manifests of a serving engine for a row of a frontier, or for a deployment of a scenario.

    Also print each part that the engine cannot express, with the engines that can.
    """

    source: Annotated[
        Path, Ask("Results of a sweep, its frontier.csv, or a scenario (.yaml).", "DIR|FILE", argument=True)
    ]
    engine: Annotated[str, Ask(f"{', '.join(LAUNCHERS)}.")]
    backend: Annotated[str, Ask("Engine of Dynamo's workers; default: the engine of the plan.")] = ""
    row: Row = None
    case: Case = ""
    best: Best = False
    at_interactivity: AtInteractivity = None
    deployment: Annotated[str, Ask("Deployment of the scenario.", "NAME")] = ""
    checkpoint: Annotated[str, Ask("Model to load; default: a published one.", "NAME|PATH")] = ""
    node_gpus: Annotated[int | None, Ask("GPUs of a node; default: 8, on a rack 4.", low=1)] = None
    out: Annotated[Path | None, Ask("Directory to write to; default: print.", "DIR")] = None
