"""Set up the study of Arrow: workloads, policies, and a bench that stores the result of each run.

Setting of the paper: Llama-3.1-8B on eight H800 of one server. Traces are replayed at other rates by
multiplying their time stamps. NVLink moves 200 GB/s one way, of which 80 % are reached here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.simulation.capacity import Capacity, attains, serving_capacity
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.records import RunResult
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.arrivals import Poisson, fit_mmpp
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.scaling import REQUESTS, at_rate
from disagg_sim.workload.synthetic import log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace
from lab.studies.bench import Place, RatedBench, RunMeasures, Workload, read_cases
from lab.studies.claims import kept
from lab.studies.papers import trace_file
from lab.studies.published_like import burstgpt_standin

MODEL, SYSTEM, RECIPE, PROFILE = "llama_3_1_8b", "h800_sxm", "bf16", "measured"
LINK_SHARE = 0.8  # of NVLink's bandwidth that a transfer of cache reaches, assumed [1]
TOLERANCE = 0.05  # relative width of the bracket at which a search ends [1]
SHARE = 0.9  # of all requests inside both SLOs: what serving capacity asks for [1]
MOONCAKE_S = 600.0  # of the Mooncake trace that the paper replays [s]
AZURE = ("code", "conversation")
ALL = (*AZURE, "burstgpt", "mooncake")
CLIP, CLIP_S = "conversation_clip", (1200.0, 2400.0)  # minutes 20 to 40, of figure 4 [s]
HOUR = "code_hour"  # the code trace at other rates by more requests in the same hour
#: The Azure traces under a TPOT limit [s] below the time of a step with a whole chunk of prefill.
TIGHT, TIGHT_TPOT = tuple(f"{name}_tight" for name in AZURE), 0.02
QUICK_S = 300.0  # of every trace in a quick run [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Statistics of a published trace, computed from its file, that its stand-in has as well."""

    file: str
    requests: int  # [1]
    duration: float  # [s]
    inputs: tuple[float, float]  # mean [token] and c_v [1]
    outputs: tuple[float, float]
    minute_cv: float = 0.0  # of the input tokens of a minute; 0 = as Poisson arrivals [1]
    burst_s: float = 60.0  # mean length of a burst [s]

    def drawn(self, name: str) -> Trace:
        """Lengths log-normal and independent; stretched to the duration, which a few bursts do not fix. A fifth of the
        time is burst, as in the stand-in for BurstGPT.
        """
        rate, bursts = self.requests / self.duration, {"burst_share": 0.2, "burst_s": self.burst_s}
        trace = synthetic_trace(
            rate=rate,
            requests=self.requests,
            lengths=(log_normal(*self.inputs), log_normal(*self.outputs)),
            arrivals_as=fit_mmpp(self.minute_cv, rate=rate, length_cv=self.inputs[1], **bursts)
            if self.minute_cv
            else Poisson(),
            name=f"{name}_standin",
        )
        return trace.scaled(trace.duration / self.duration)


_TABLE = read_mapping(Path(__file__).with_name("workloads.yaml"))
SHAPES = {name: Shape(**row["trace"]) for name, row in _TABLE.items() if "trace" in row}


def workloads(traces: Path | None, *, quick: bool = False) -> dict[str, Workload]:
    """The four workloads of the paper: published traces if available, else stand-ins; and variants for claims."""
    found = {}
    for name, row in _TABLE.items():
        trace, stand_in = _trace(name, traces)
        if quick:
            trace = trace.between(0.0, QUICK_S)
        found[name] = Workload(trace, Slo(**row["limits"]), stand_in, row["start"])
    code = found["code"]
    found[HOUR] = code._replace(start=8.0, scale_by=REQUESTS)
    talk = found["conversation"]
    found[CLIP] = talk if quick else talk._replace(trace=talk.trace.between(*CLIP_S))
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


COUNTS = range(2, 9)  # of figure 9 [GPU]
#: Arrow with the rules that this project adds, "_printed" as the paper has it, "_read" where a request that waits for
#: memory is running, too; and what it is compared with.
CASES = read_cases(Path(__file__).with_name("cases.yaml"), MODEL)["cases"]
#: Cases of each baseline, named as its policy, and their chunks: that of the engine's scheduler, and others. [token]
CHUNKED = {
    name: {name: 2048, **{f"{name}_{chunk}": chunk for chunk in (512, 1024, 4096, 8192)}}
    for name in ("vllm", "disaggregated")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowMeasures(RunMeasures):
    """What one run showed of flips."""

    fewest: tuple[int, int]  # instances of prefill and of decode at any time [1]
    stayed: int  # requests that decoded where their prefill was [1]
    stayed_transfer_s: float  # transfer of those, in all [s]


class ArrowBench(RatedBench[ArrowMeasures]):
    """Runs workloads under the cases of Arrow."""

    def __init__(self, workloads: dict[str, Workload], *, quick: bool = False, engine: str | None = None) -> None:
        super().__init__(workloads, CASES, Place(SYSTEM, PROFILE, {MODEL: RECIPE}, engine), quick=quick)

    def result(self, workload: str, case: str, scale: float) -> RunResult:
        """A run in full."""
        where, how = self.workloads[workload], CASES[case]
        link = LinkSpec(bandwidth=LINK_SHARE * self.setting(MODEL).system.nvlink_bandwidth)
        options = RunOptions(link=link, flip_s=how.flip_s)
        return self.run(at_rate(where.trace, scale, where.scale_by), how, slo=where.slo, options=options)

    def look(self, workload: str, case: str, scale: float) -> ArrowMeasures:
        """A run at a rate scale. [1]"""
        result = self.result(workload, case, scale)
        here = result.requests.segments > 1
        here &= result.requests.prefill_instance == result.requests.decode_instance
        return ArrowMeasures(
            summary=summary(result, self.workloads[workload].slo, rate_scale=scale),
            fewest=fewest_instances(result, CASES[case].deployment),
            stayed=int(here.sum()),
            stayed_transfer_s=float(result.requests.transfer_s[here].sum()),
        )

    @kept
    def capacity(self, workload: str, case: str) -> Capacity:
        """Largest rate with ``SHARE`` of the requests inside both limits, as the paper looks for it: a boundary."""
        where = self.workloads[workload]
        return serving_capacity(
            lambda scale: self.seen(workload, case, scale).summary,
            attains(SHARE),
            rate=where.trace.rate,
            start=where.start,
            tolerance=TOLERANCE,
            checked=False,
        )

    def rate(self, workload: str, case: str) -> float:
        """Serving capacity. [request/s]"""
        return self.capacity(workload, case).requests_per_s

    def tuned(self, workload: str, baseline: str) -> str:
        """The case of a baseline whose chunk serves most."""
        return max(CHUNKED[baseline], key=lambda case: self.rate(workload, case))

    def attainments(self, workload: str, case: str, scales: tuple[float, ...]) -> list[float]:
        """Shares of requests inside both limits at some rate scales. [1]"""
        return [self.seen(workload, case, scale).summary.slo_attainment for scale in scales]

    def all_seen(self, *cases: str) -> list[ArrowMeasures]:
        """What every run of some cases showed so far."""
        return [seen for _, case, seen in self.runs_seen() if case in cases]


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
