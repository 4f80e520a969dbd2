"""Set up the study of DOPD: workloads, deployments, and a bench that stores the result of each run.

Setting of the paper: Llama-70B in FP8 with a bf16 cache on up to eight H100, prefill instances of one GPU and decode
instances of two; OPT-30B against DistServe. On one GPU the weights take 85 % of the memory, so that no cache
is left when an engine may fill 0.9: it may fill 0.95 here. With what runtime and collectives take beside
that, M' of eq. (11) is the tenth of a GPU that the paper's concurrency of 235 asks for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding, Slo
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import Summary, summary
from disagg_sim.simulation.physical_site import kv_blocks
from disagg_sim.simulation.policies.dopd.policy import Dopd
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import RunResult
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.synthetic import LengthTable, log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace
from lab.studies.bench import Bench, Place, StudyCase, read_cases, replicas
from lab.studies.claims import kept
from lab.studies.papers import trace_file
from lab.studies.published_like import BURSTGPT_REQUESTS, burstgpt_standin

SYSTEM, PROFILE, UTILISATION = "h100_sxm", "measured", 0.95
LLAMA, OPT = "llama_3_1_70b", "opt_30b"
SLO = Slo(ttft=2.0, tpot=0.08)
#: Mean input and output of the two workloads of the ratio. [token]
SHAPES = ((1000, 150), (3000, 300))
#: Requests in service of a closed loop that never lets an instance wait for work. [1]
SATURATED = 400
OPEN = RunOptions()  # requests arrive as in their trace
#: The static experiment: requests of the Azure conversation trace, and what its stand-in has of them: means and c_v.
AZURE_FILE, AZURE_REQUESTS = "AzureLLMInferenceTrace_conv.csv", 1024
AZURE_INPUTS, AZURE_OUTPUTS = (1024.4, 0.983), (245.2, 0.667)
#: Positions that OPT has; longer requests are left out of its experiment. [token]
OPT_POSITIONS = 2048
#: Prompts of the bimodal mix, and output of all. [token]
BIMODAL, BIMODAL_OUTPUT = (100, 1900), 150
#: The dynamic experiment: hours drawn, and the size of the service over that of the clip. The busiest minute then
#: brings 1.7 to 2.5 times what the first prefill instance serves, and less than eight GPUs can.
HOURS, SERVICE = 5, 4
QUICK_S = 600.0  # of an hour in a quick run [s]
FAILED_SHARE = 0.05  # of requests outside the SLO that a concurrency may have [1]
#: The engine of the published code, and what it does with a sequence that gives way; when section V-B routes.
AUTHORS_ENGINE, AUTHORS_PREEMPTION, AUTHORS_ROUTER = "vllm_v0", "swap", "arrival"


def pools(prefill: int, decode: int) -> ServedDeployment:
    """Prefill instances of one GPU and decode instances of two."""
    name, one, two = f"{prefill}P + {decode}D", replicas(1, prefill), replicas(2, decode)
    return ServedDeployment(name=name, gpus=prefill + 2 * decode, prefill=one, decode=two)


class Warm(NamedTuple):
    """A closed loop in its second pass through the requests."""

    attainment: float  # [1]
    goodput: float  # inside the SLO [request/s]
    ttft_p90: float  # [s]
    tpot_p90: float  # [s]


def case_of(deployment: ServedDeployment, policy: str, **options: object) -> StudyCase:
    """A policy with some of its options serves Llama-70B."""
    return StudyCase("", deployment, policy_named(policy, **options), LLAMA)


def static_case(deployment: ServedDeployment, **options: object) -> StudyCase:
    """DOPD on pools that keep their sizes."""
    return case_of(deployment, "dopd", resize=False, **options)


_GROUPS = read_cases(Path(__file__).with_name("cases.yaml"), LLAMA)
#: Cases of the static experiments; planners of the dynamic experiment by their names in pictures, and those that DOPD's
#: authors had.
CASES, PLANNERS, AUTHORS_PLANNERS = (_GROUPS[name] for name in ("cases", "planners", "authors"))
#: DOPD as algorithm 2 has it, with one T for observation and action [s]: the value is in the published code alone, 10.
TIMES = (10.0, 60.0, 300.0)
AS_ALGORITHM_2 = {
    (sizing, seconds): f"DOPD, {sizing}, T = {seconds:g} s" for sizing in ("printed", "published") for seconds in TIMES
}
#: Dynamo's load planner as it was in 2025: thresholds on means, a decision every 180 s, prompts given out one by one.
LOAD_2025 = "load-driven, 2025"
#: DOPD, the SLA planner and the load planner as the published configurations have them: five GPUs, or every 20 s.
AS_CONFIGURED = ("DOPD, as configured", "SLA-driven, five GPUs", "load-driven, 2025, every 20 s")


class DopdBench(Bench):
    """Settings, traces, and the results of runs, each done once."""

    def __init__(self, traces: Path | None, *, quick: bool, engine: str | None = None) -> None:
        super().__init__(Place(SYSTEM, PROFILE, {LLAMA: "fp8_bf16kv", OPT: "bf16"}, engine), quick=quick)
        self._traces = traces

    @kept
    def setting(self, model: str) -> Setup:
        """A model on hardware of which an engine may fill ``UTILISATION``."""
        at = super().setting(model)
        engine = at.overheads and replace(at.overheads, memory_utilisation=UTILISATION, cache_share=1.0)
        return at.changed(profile=replace(at.profile, memory_utilisation=UTILISATION), overheads=engine)

    @property
    def llama(self) -> Setup:
        """Llama-70B: fp8 matrices, bf16 cache."""
        return self.setting(LLAMA)

    @kept
    def table(self, tp: int) -> StepTable:
        """Step times of Llama-70B on ``tp`` GPUs."""
        return StepTable.build(self.llama, Sharding(tp_attn=tp, tp_ffn=tp))

    @property
    def stand_in(self) -> str:
        """Of notes on the static experiments; empty with the published trace."""
        law = "log-normal lengths with the means and c_v of its first 1,024 rows"
        return "" if self._traces else f"stand-in: {law} for {AZURE_FILE}; "

    @cached_property
    def azure(self) -> Trace:
        """The requests of the static experiments."""
        count = AZURE_REQUESTS // (4 if self.quick else 1)
        if self._traces is not None:
            return load_trace(trace_file(self._traces, AZURE_FILE)).head(count)
        lengths = (log_normal(*AZURE_INPUTS), log_normal(*AZURE_OUTPUTS))
        return synthetic_trace(rate=1.0, requests=count, lengths=lengths, name="azure_standin")

    def result(self, key: tuple[object, ...], trace: Trace, case: StudyCase, options: RunOptions = OPEN) -> RunResult:
        """Run once per key; the key names all that differs."""
        if self.place.engine == AUTHORS_ENGINE:
            options = replace(options, preemption=AUTHORS_PREEMPTION)
            if isinstance(case.policy, Dopd):
                case = case._replace(policy=replace(case.policy, decode_at=AUTHORS_ROUTER))
        return self.once(("run", *key), lambda: self.run(trace, case, slo=SLO, options=options))

    def results(self) -> list[tuple[str, RunResult]]:
        """All runs so far, each with the words of its key."""
        return [
            (" ".join(map(str, key[1:])), result) for key, result in self._kept.items() if isinstance(result, RunResult)
        ]

    # --- saturated pools of constant lengths ------------------------------------------------------------------------

    def most_sequences(self, *, capped: bool, shape: tuple[int, int] = SHAPES[0]) -> dict[str, int]:
        """Options of a decode instance: as many as it holds to the end, or up to 256, and it preempts."""
        if not capped:
            return {}
        return {"max_sequences": kv_blocks(self.llama, Sharding(tp_attn=2, tp_ffn=2)) * BLOCK_TOKENS // sum(shape)}

    def saturated(
        self,
        prefill: int,
        decode: int = 1,
        *,
        capped: bool = True,
        shape: tuple[int, int] = SHAPES[0],
        in_flight: int = 0,
    ) -> RunResult:
        """A closed loop of equal requests: full, or with so many of them. [request]"""
        count = 2_000 if self.quick else 12_000 * sum(SHAPES[0]) // sum(shape)
        trace = synthetic_trace(rate=1.0, requests=count, lengths=shape)
        case = static_case(pools(prefill, decode), **self.most_sequences(capped=capped, shape=shape))
        loop = in_flight or SATURATED * decode
        closed = RunOptions(concurrency=loop)
        return self.result(("saturated", prefill, decode, capped, *shape, loop), trace, case, closed)

    def open_loop(self, prefill: int, decode: int, rate: float, *, capped: bool = True) -> Summary:
        """Poisson arrivals of the first of ``SHAPES`` at a rate. [request/s]"""
        trace = synthetic_trace(rate=rate, requests=1_000 if self.quick else 6_000, lengths=SHAPES[0])
        case = static_case(pools(prefill, decode), **self.most_sequences(capped=capped))
        return summary(self.result(("open", prefill, decode, rate, capped), trace, case), SLO)

    # --- batches by length ------------------------------------------------------------------------------------------

    def bimodal(self, rate: float, policy: str, **options: object) -> RunResult:
        """Short and long prompts in equal shares on 4P + 1D at a rate. [request/s]"""
        table = LengthTable(np.array(BIMODAL), np.full(2, BIMODAL_OUTPUT))
        trace = synthetic_trace(rate=rate, requests=1_000 if self.quick else 6_000, lengths=table, seed=1)
        key = ("bimodal", rate, policy, *options.items())
        return self.result(key, trace, case_of(pools(4, 1), policy, **options))

    def bimodal_full(self, batches: str, *, capped: bool = True) -> RunResult:
        """The same mix in a full closed loop, in batches by length or in order."""
        table = LengthTable(np.array(BIMODAL), np.full(2, BIMODAL_OUTPUT))
        trace = synthetic_trace(rate=1.0, requests=2_000 if self.quick else 12_000, lengths=table, seed=1)
        case = static_case(pools(4, 1), batches=batches, local_tokens=0, **self.most_sequences(capped=capped))
        return self.result(("bimodal_full", batches, capped), trace, case, RunOptions(concurrency=SATURATED))

    def short(self, tokens: int, *, local: bool, transfer_s: float) -> RunResult:
        """One short prompt among ten of 1000/150, at half of what 4P + 1D serves; a transfer takes at least so long."""
        table = LengthTable(np.array([tokens] + [1000] * 9), np.full(10, 150))
        trace = synthetic_trace(rate=18.0, requests=1_000 if self.quick else 4_000, lengths=table, seed=2)
        case = static_case(pools(4, 1), local_tokens=tokens if local else 0)
        link = RunOptions(link=LinkSpec(latency_s=transfer_s))
        return self.result(("short", tokens, local, transfer_s), trace, case, link)

    # --- closed loops of the Azure requests -------------------------------------------------------------------------

    @kept
    def warm(self, name: str, concurrency: int) -> Warm:
        """The requests twice in a closed loop; its first pass starts all at once and does not count."""
        trace = self._suited(CASES[name].model)
        count = len(trace)
        twice = Trace(
            arrival=np.arange(2.0 * count),
            input_tokens=np.tile(trace.input_tokens, 2),
            output_tokens=np.tile(trace.output_tokens, 2),
            name=trace.name,
        )
        return _second_pass(
            self.result(("warm", name, concurrency), twice, CASES[name], RunOptions(concurrency=concurrency)), count
        )

    def _suited(self, model: str) -> Trace:
        trace = self.azure
        if model != OPT:
            return trace
        return trace.take(np.flatnonzero(trace.input_tokens + trace.output_tokens <= OPT_POSITIONS))

    def concurrency(self, name: str) -> int:
        """Largest number of requests in service with fewer than ``FAILED_SHARE`` outside the SLO."""
        low, high, most = 1, 2, min(2 * SATURATED, len(self._suited(CASES[name].model)))
        while self.warm(name, high).attainment > 1 - FAILED_SHARE and high < most:
            low, high = high, min(2 * high, most)
        while high - low > max(1, low // 32):
            middle = (low + high) // 2
            if self.warm(name, middle).attainment > 1 - FAILED_SHARE:
                low = middle
            else:
                high = middle
        return low

    def best(self, name: str) -> float:
        """Highest goodput over all concurrencies tried. [request/s]"""
        self.concurrency(name)
        return max(each.goodput for key, each in self._kept.items() if isinstance(each, Warm) and key[1] == name)

    # --- bursts -----------------------------------------------------------------------------------------------------

    @property
    def hours(self) -> range:
        """Seeds of the hours drawn."""
        return range(1 if self.quick else HOURS)

    def dynamic(self, planner: str, hour: int, service: int = SERVICE) -> RunResult:
        """An hour like the BurstGPT clip on a larger service, from 1P + 1D within eight GPUs."""

        def drawn() -> Trace:
            trace = burstgpt_standin(hour, service * BURSTGPT_REQUESTS)
            return trace.between(0.0, QUICK_S) if self.quick else trace

        trace = self.once(("hour", hour, service), drawn)
        return self.result(("dynamic", planner, hour, service), trace, (PLANNERS | AUTHORS_PLANNERS)[planner])

    def attainments(self, planner: str, service: int = SERVICE) -> Floats:
        """Of every hour. [1]"""
        return np.array([summary(self.dynamic(planner, hour, service), SLO).slo_attainment for hour in self.hours])

    def gpu_hours(self, planner: str) -> float:
        """GPU time held in an hour of bursts, on average. [GPU h]"""
        return float(np.mean([summary(self.dynamic(planner, hour), SLO).gpu_hours for hour in self.hours]))


def _second_pass(result: RunResult, count: int) -> Warm:
    """From the arrival of the first request of the second pass to that of the last."""
    r, second = result.requests, slice(count, 2 * count)
    ttft = r.first_token_s[second] - r.arrival_s[second]
    tpot = (r.finish_s[second] - r.first_token_s[second]) / np.maximum(r.output_tokens[second] - 1, 1)
    inside = float(((ttft <= SLO.ttft) & (tpot <= SLO.tpot)).mean())
    start, end = r.arrival_s[count], r.arrival_s[-1]
    rate = float(((r.finish_s > start) & (r.finish_s <= end)).sum() / (end - start))
    return Warm(inside, inside * rate, float(np.quantile(ttft, 0.9)), float(np.quantile(tpot, 0.9)))


def steady_rate(result: RunResult) -> float:
    """Requests that finish over the middle half of a run. [request/s]"""
    finish = np.sort(result.requests.finish_s)
    first, last = finish.size // 4, 3 * finish.size // 4
    return float((last - first) / (finish[last] - finish[first]))
