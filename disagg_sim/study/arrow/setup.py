"""What the study of Arrow runs: its workloads, its systems, and a bench that keeps what each run showed.

Setting of the paper: Llama-3.1-8B on eight H800 of one server. Traces are replayed at other rates by
multiplying their time stamps. NVLink moves 200 GB/s one way, of which 80 % are reached here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Mapping, Slo
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.simulation.capacity import Capacity, attains, serving_capacity
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import Summary, summary
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.records import Floats, Ints, RunResult
from disagg_sim.simulation.run import RunOptions, run
from disagg_sim.study.papers import trace_file
from disagg_sim.study.published_like import burstgpt_standin
from disagg_sim.workload.arrivals import Mmpp, Poisson, fit_mmpp
from disagg_sim.workload.readers import load_trace
from disagg_sim.workload.synthetic import log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace

MODEL, SYSTEM, RECIPE, PROFILE = "llama_3_1_8b", "h800_sxm", "bf16", "measured"
LINK_SHARE = 0.8  # of NVLink's bandwidth that a transfer of cache reaches, assumed [1]
TOLERANCE = 0.05  # relative width of the bracket at which a search ends [1]
SHARE = 0.9  # of all requests inside both SLOs: what serving capacity asks for [1]
MOONCAKE_S = 600.0  # of the Mooncake trace that the paper replays [s]
AZURE = ("code", "conversation")
ALL = (*AZURE, "burstgpt", "mooncake")
HALF = "code_half"  # every second request of the code trace: half the rate in bursts as long as before
#: The Azure traces under a TPOT limit [s] below the time of a step with a whole chunk of prefill.
TIGHT, TIGHT_TPOT = tuple(f"{name}_tight" for name in AZURE), 0.02
QUICK_S = 300.0  # of every trace in a quick run [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Numbers of a published trace that its stand-in has, too; computed from its file."""

    file: str
    requests: int  # [1]
    duration: float  # [s]
    inputs: tuple[float, float]  # mean [token] and c_v [1]
    outputs: tuple[float, float]
    minute_cv: float = 0.0  # of the input tokens of a minute; 0 = as Poisson arrivals [1]
    burst_s: float = 60.0  # mean length of a burst, by the autocorrelation after a minute [s]

    def arrivals(self) -> Mmpp | Poisson:
        """A process with this c_v; a fifth of the time is burst, as in the stand-in for BurstGPT."""
        if not self.minute_cv:
            return Poisson()
        return fit_mmpp(
            self.minute_cv,
            rate=self.requests / self.duration,
            length_cv=self.inputs[1],
            burst_share=0.2,
            burst_s=self.burst_s,
        )

    def drawn(self, name: str) -> Trace:
        """Lengths log-normal and independent; stretched to the duration, which a few bursts do not fix."""
        lengths = (log_normal(*self.inputs), log_normal(*self.outputs))
        trace = synthetic_trace(
            rate=self.requests / self.duration,
            requests=self.requests,
            lengths=lengths,
            arrivals_as=self.arrivals(),
            name=f"{name}_standin",
        )
        return trace.scaled(trace.duration / self.duration)


#: Azure: Patel et al., "Splitwise", ISCA 2024; Mooncake: Qin et al., FAST 2025, conversation, first ten minutes.
SHAPES = {
    "code": Shape(
        file="AzureLLMInferenceTrace_code.csv",
        requests=8819,
        duration=3436.0,
        inputs=(2047.8, 0.964),
        outputs=(27.9, 2.147),
        minute_cv=1.013,
        burst_s=60.0,
    ),
    "conversation": Shape(
        file="AzureLLMInferenceTrace_conv.csv",
        requests=19366,
        duration=3501.7,
        inputs=(1154.7, 0.960),
        outputs=(211.1, 0.771),
        minute_cv=0.371,
        burst_s=300.0,
    ),
    "mooncake": Shape(
        file="conversation_trace.jsonl.gz",
        requests=1750,
        duration=MOONCAKE_S,
        inputs=(13992.0, 1.323),
        outputs=(354.1, 0.711),
    ),
}


class Workload(NamedTuple):
    """A trace with its limits, and what the paper says of it."""

    trace: Trace
    slo: Slo
    start: float  # rate scale at which searches begin [1]
    paper: tuple[float, float]  # capacity of Arrow over vLLM's and vLLM-disaggregated's [1]
    stand_in: str  # what stands in for the trace; "" = it is the published one


def workloads(traces: Path | None, *, quick: bool = False) -> dict[str, Workload]:
    """The four of the paper, published where a directory has them, else stand-ins; and changes of them for claims."""
    limits = {
        "code": (Slo(ttft=3.0, tpot=0.1), 16.0, (5.62, 7.78)),
        "conversation": (Slo(ttft=2.0, tpot=0.15), 16.0, (3.76, 4.06)),
        "burstgpt": (Slo(ttft=0.25, tpot=0.075), 48.0, (3.60, 5.04)),
        "mooncake": (Slo(ttft=30.0, tpot=0.1), 2.0, (3.73, 4.14)),
    }
    found = {}
    for name, (slo, start, paper) in limits.items():
        trace, stand_in = _trace(name, traces)
        if quick:
            trace = trace.between(0.0, QUICK_S)
        found[name] = Workload(trace, slo, start, paper, stand_in)
    code = found["code"]
    found[HALF] = code._replace(trace=code.trace.take(np.arange(0, len(code.trace), 2)))
    for name, tight in zip(AZURE, TIGHT, strict=True):
        where = found[name]
        found[tight] = where._replace(slo=Slo(ttft=where.slo.ttft, tpot=TIGHT_TPOT))
    return found


def _trace(name: str, traces: Path | None) -> tuple[Trace, str]:
    if name == "burstgpt":
        return burstgpt_standin(), "MMPP with the published c_v of per-minute input and means for the BurstGPT clip"
    shape = SHAPES[name]
    if traces is None:
        process = "MMPP with its c_v of per-minute input" if shape.minute_cv else "Poisson arrivals"
        return shape.drawn(name), f"{process}, log-normal lengths with its means and c_v for {shape.file}"
    trace = load_trace(trace_file(traces, shape.file, shape.file.removesuffix(".gz")))
    return (trace.between(0.0, MOONCAKE_S) if name == "mooncake" else trace), ""


def _equal(tp: int, instances: int) -> tuple[Replicas, ...]:
    return (Replicas(mapping=Mapping(tp_attn=tp, tp_ffn=tp), instances=instances),)


EIGHT = ServedDeployment(name="8 x TP1", gpus=8, prefill=_equal(1, 4), decode=_equal(1, 4), colocated=_equal(1, 8))
FOUR = ServedDeployment(name="4 x TP1", gpus=4, prefill=_equal(1, 2), decode=_equal(1, 2))
SEVEN = ServedDeployment(name="7 + 1 x TP1", gpus=8, prefill=_equal(1, 7), decode=_equal(1, 1))
PAIR = ServedDeployment(name="2 x TP1", gpus=2, prefill=_equal(1, 1), decode=_equal(1, 1))
WHOLE = ServedDeployment(name="TP8", gpus=8, colocated=_equal(8, 1))
HALVES = ServedDeployment(name="TP4 + TP4", gpus=8, prefill=_equal(4, 1), decode=_equal(4, 1))


class Case(NamedTuple):
    """A system on a deployment."""

    label: str
    deployment: ServedDeployment
    system: Policy
    flip_s: float = 0.0  # out of service for a change of role [s]


CASES = {
    "arrow": Case("Arrow, 8 x TP1", EIGHT, policy_named("arrow")),
    "least_load": Case("least load, 4 + 4 x TP1", EIGHT, policy_named("least_load")),
    "round_robin": Case("round robin, 4 + 4 x TP1", EIGHT, policy_named("round_robin")),
    "vllm": Case("vLLM, TP8", WHOLE, policy_named("vllm")),
    "disaggregated": Case("vLLM-disaggregated, TP4 + TP4", HALVES, policy_named("disaggregated")),
    "colocated": Case("vLLM, 8 x TP1", EIGHT, policy_named("vllm")),
    "observed": Case("Arrow that reacts, 8 x TP1", EIGHT, policy_named("arrow", trigger="observed")),
    "arrow_4": Case("Arrow, 4 x TP1", FOUR, policy_named("arrow")),
    "static_7_1": Case("least load, 7 + 1 x TP1", SEVEN, policy_named("least_load")),
    "flip_60": Case("Arrow, flips of 60 s", EIGHT, policy_named("arrow"), 60.0),
    "flip_300": Case("Arrow, flips of 300 s", EIGHT, policy_named("arrow"), 300.0),
    "arrow_batched": Case("Arrow, several prompts a step", EIGHT, policy_named("arrow", prompts_per_step=256)),
    "arrow_printed": Case("Arrow, as printed", EIGHT, policy_named("arrow", waiting_counts=False)),
    "least_load_batched": Case(
        "least load, several prompts a step", EIGHT, policy_named("least_load", prompts_per_step=256)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one run showed."""

    summary: Summary
    fewest: tuple[int, int]  # instances of prefill and of decode at any time [1]
    stayed: int  # requests that decoded where their prefill was [1]
    stayed_transfer_s: float  # transfer of those, in all [s]


@dataclass(slots=True, kw_only=True)
class Bench:
    """Runs workloads under cases and keeps what they showed; each run is done once."""

    workloads: dict[str, Workload]
    runs: int = 0  # done so far [1]
    _seen: dict[tuple[str, str, float], Seen] = field(default_factory=dict)
    _capacities: dict[tuple[str, str], Capacity] = field(default_factory=dict)
    _setting: Setup = field(default_factory=lambda: setup(MODEL, SYSTEM, RECIPE, PROFILE))

    @property
    def setting(self) -> Setup:
        """Model, hardware, recipe and profile."""
        return self._setting

    def result(self, workload: str, case: str, scale: float, *, sample_s: float = 10.0) -> RunResult:
        """A run in full."""
        where, how = self.workloads[workload], CASES[case]
        link = LinkSpec(bandwidth=LINK_SHARE * self._setting.system.nvlink_bandwidth)
        self.runs += 1
        return run(
            where.trace.scaled(scale),
            how.deployment,
            how.system,
            setting=self._setting,
            slo=where.slo,
            options=RunOptions(link=link, flip_s=how.flip_s, sample_s=sample_s),
        )

    def seen(self, workload: str, case: str, scale: float) -> Seen:
        """A run at a rate scale."""
        key = (workload, case, scale)
        if key not in self._seen:
            result = self.result(workload, case, scale)
            here = result.requests.segments > 1
            here &= result.requests.prefill_instance == result.requests.decode_instance
            self._seen[key] = Seen(
                summary=summary(result, self.workloads[workload].slo, rate_scale=scale),
                fewest=fewest_instances(result, CASES[case].deployment),
                stayed=int(here.sum()),
                stayed_transfer_s=float(result.requests.transfer_s[here].sum()),
            )
        return self._seen[key]

    def capacity(self, workload: str, case: str) -> Capacity:
        """Largest rate with ``SHARE`` of the requests inside both limits, as the paper looks for it: a boundary."""
        key = (workload, case)
        if key not in self._capacities:
            where = self.workloads[workload]
            self._capacities[key] = serving_capacity(
                lambda scale: self.seen(workload, case, scale).summary,
                attains(SHARE),
                rate=where.trace.rate,
                start=where.start,
                tolerance=TOLERANCE,
                checked=False,
            )
        return self._capacities[key]

    def rate(self, workload: str, case: str) -> float:
        """Serving capacity. [request/s]"""
        return self.capacity(workload, case).requests_per_s

    def ratio(self, workload: str, case: str, over: str) -> float:
        """Capacity of a case over that of another; NaN where the other has none. [1]"""
        least = self.rate(workload, over)
        return self.rate(workload, case) / least if least else np.nan

    def attainments(self, workload: str, case: str, scales: tuple[float, ...]) -> list[float]:
        """Shares of requests inside both limits at some rate scales. [1]"""
        return [self.seen(workload, case, scale).summary.slo_attainment for scale in scales]

    def runs_seen(self) -> list[tuple[str, str, Seen]]:
        """Every run kept so far: workload, case, what it showed."""
        return [(workload, case, seen) for (workload, case, _), seen in self._seen.items()]

    def all_seen(self, *cases: str) -> list[Seen]:
        """Every run kept so far of some cases."""
        return [seen for _, case, seen in self.runs_seen() if case in cases]

    def stand_ins(self, *names: str) -> str:
        """What a claim that uses these workloads has to say of its data; "" = they are the paper's."""
        said = [self.workloads[name].stand_in for name in names]
        return "".join(f"stand-in: {text}; " for text in dict.fromkeys(said) if text)


def fewest_instances(result: RunResult, deployment: ServedDeployment) -> tuple[int, int]:
    """Fewest instances that a run ever had for prefill and for decode, by its decision log. [1]"""
    count = [sum(each.instances for each in deployment.part(part)) for part in ("prefill", "decode")]
    role = [0] * count[0] + [1] * count[1]
    fewest = list(count)
    for decision in result.decisions:
        if decision.kind == "flip":
            count[role[decision.instance]] -= 1
            role[decision.instance] = 1 - role[decision.instance]
            count[role[decision.instance]] += 1
            fewest = [min(pair) for pair in zip(fewest, count, strict=True)]
    return fewest[0], fewest[1]


def loads(result: RunResult, step: float) -> tuple[Ints, Ints]:
    """Requests in prefill, waiting ones included, and in decode at times ``step`` [s] apart. [request]"""
    requests = result.requests
    times = np.arange(0.0, result.duration_s + step, step)

    def between(start: Floats, end: Floats) -> Ints:
        return np.searchsorted(np.sort(start), times, "right") - np.searchsorted(np.sort(end), times, "right")

    return (between(requests.arrival_s, requests.first_token_s), between(requests.first_token_s, requests.finish_s))
