"""Set up the study of DynaServe: workloads, policies, and a bench that stores the result of each run.

Setting of the paper: Qwen2.5 models in bf16 on A100-80GB, instances in pairs. Lengths are those of published
traces, arrivals Poisson (section 6.1). Caches move over NVLink, of which 80 % are reached here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.domain import Slo
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.capacity import bracket
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, ITL_PER_OCTAVE
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.records import RunResult
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.synthetic import log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace
from lab.studies.arrow.setup import SHAPES as SHAPES_OF_TRACES
from lab.studies.arrow.setup import workloads as published
from lab.studies.bench import Place, RatedBench, RunMeasures, StudyCase, Workload, read_cases
from lab.studies.claims import kept
from lab.studies.papers import trace_file
from lab.studies.published_like import mini_reasoning_standin

SYSTEM, RECIPE, PROFILE = "a100_sxm_80gb", "bf16", "measured"
MODEL, MIDDLE, LARGE = "qwen2_5_14b", "qwen2_5_32b", "qwen2_5_72b"
LINK_SHARE = 0.8  # of NVLink's bandwidth that a transfer of cache reaches, assumed [1]
CHUNK = 512  # of a pushed cache: what a step of 100 ms prefills beside some decodes [token]
#: Largest gap between tokens; the paper bounds the time to the first one by nothing. [s]
LIMIT = Slo(ttft=3600.0, tpot=0.1)
#: Rate of completions over that of arrivals from which a rate counts as served: this study's own, as a policy that
#: serves nobody has no late gaps. [1]
SUSTAINED = 0.95
#: Gaps are counted in bins of this width, and steps are filled up to the limit itself: its bin counts as inside. [1]
BIN = 2.0 ** (1 / ITL_PER_OCTAVE)
LATE_REQUESTS = 0.01  # share of the requests that may have a gap above the limit, by the second reading of 6.3 [1]
SETTLED = 0.4  # share of the time of all arrivals after which rates are taken [1]
REQUESTS, QUICK_REQUESTS = 2000, 300  # of a run [request]
SATURATED = 1000  # of a run in a closed loop [request]
#: Requests in the loop for each instance that decodes: what rates and gaps of the paper's table 1 imply for 219/1467.
BATCH = 125
WORKLOADS = ("code", "conversation", "burstgpt", "reasoning")
MIX = "mix"
#: arXiv Summarization (section 6.1) with lengths of the Llama-2 tokenizer, cut at 4,096 tokens in all; and their means
#: and c_v, of which lengths are drawn without the file. [token]
ARXIV, ARXIV_FILE = "arxiv", "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
ARXIV_INPUTS, ARXIV_OUTPUTS = (2588.1, 0.365), (291.4, 1.820)
#: Shapes of table 1: prompt and output. [token]
SHAPES = ((8192, 32), (2048, 512), (219, 1467))


#: Co-location by chunk, the best of which counts for every workload (section 6.1).
COLOCATED = tuple(f"chunk_{chunk}" for chunk in (256, 384, 512, 768, 1024, 1536, 2048))
#: How caches move in figure 7: each chunk when it is computed, into blocks of its own.
FIGURE_7 = "chunks"
CASES = read_cases(Path(__file__).with_name("cases.yaml"), MODEL)["cases"]


def case_with(name: str, *, model: str = MODEL, **options: object) -> StudyCase:
    """A case of DynaServe with other options of its policy, on one GPU an instance."""
    policy: Any = CASES[name].policy
    return CASES[name]._replace(label="", model=model, policy=replace(policy, **options))


@dataclass(frozen=True, slots=True, kw_only=True)
class DynaServeMeasures(RunMeasures):
    """What one run showed of gaps, of both instances and of transfers."""

    rate: float  # at which its requests arrived; NaN in a closed loop [request/s]
    steady: float  # requests served over time, by their tokens, in the later part of the arrivals [request/s]
    kept_up: float  # rate of completions from the 30th to the 70th percentile, over that of as many arrivals [1]
    inside: float  # of the gaps, those within the limit [1]
    late: float  # of the requests, those with a gap above it [1]
    goodput: float  # output tokens within the limit, over the same time as ``steady`` [token/s]
    busy: tuple[float, ...]  # share of the time that each instance worked, until 90 % of the requests were done [1]
    mfu: tuple[float, ...]  # of each instance [1]
    memory: tuple[float, ...]  # of its KV blocks, each instance over time [1]
    exposed: float  # of the time of all transfers, what requests waited for [1]


def workloads(traces: Path | None, *, quick: bool) -> dict[str, Workload]:
    """Traces of one request per second with lengths drawn from published traces or stand-ins."""
    count = QUICK_REQUESTS if quick else REQUESTS
    found = {}
    sources = {
        name: (each.trace, f"log-normal lengths with the means and c_v of {_source(name)}" if each.stand_in else "")
        for name, each in published(traces).items()
    }
    reasoning = mini_reasoning_standin(rate=1.0, requests=count)
    sources["reasoning"] = (reasoning, "means 219/1467 of Mini Reasoning, log-normal with c_v 1")
    sources[ARXIV] = _arxiv(traces, count)
    for name in (*WORKLOADS, ARXIV):
        trace, stand_in = sources[name]
        drawn = synthetic_trace(rate=1.0, lengths=trace, requests=count, name=name)
        found[name] = Workload(drawn, LIMIT, stand_in)
    code, burst = found["code"], found["burstgpt"]
    rows = np.arange(count)
    half = rows % 2 == 0  # arrivals of both are independent of lengths: every other request from each
    mixed = replace(
        code.trace,
        input_tokens=np.where(half, code.trace.input_tokens, burst.trace.input_tokens),
        output_tokens=np.where(half, code.trace.output_tokens, burst.trace.output_tokens),
        name=MIX,
    )
    said = dict.fromkeys(each.stand_in for each in (code, burst) if each.stand_in)
    found[MIX] = Workload(mixed, LIMIT, "; ".join(said))
    return found


def _arxiv(traces: Path | None, count: int) -> tuple[Trace, str]:
    if traces is None:
        lengths = (log_normal(*ARXIV_INPUTS), log_normal(*ARXIV_OUTPUTS))
        drawn = synthetic_trace(rate=1.0, requests=count, lengths=lengths, name=ARXIV)
        return drawn, f"log-normal lengths with the means and c_v of {ARXIV_FILE}"
    rows = pd.read_csv(trace_file(traces, ARXIV_FILE))
    inputs, outputs = rows["num_prefill_tokens"].to_numpy(), rows["num_decode_tokens"].to_numpy()
    return Trace(arrival=np.arange(float(len(rows))), input_tokens=inputs, output_tokens=outputs, name=ARXIV), ""


def _source(name: str) -> str:
    return SHAPES_OF_TRACES[name].file if name in SHAPES_OF_TRACES else "BurstGPT"


class DynaServeBench(RatedBench[DynaServeMeasures]):
    """Runs workloads under the cases of DynaServe."""

    def __init__(self, workloads: dict[str, Workload], *, quick: bool = False, engine: str | None = None) -> None:
        recipes = dict.fromkeys((MODEL, MIDDLE, LARGE), RECIPE)
        super().__init__(workloads, CASES, Place(SYSTEM, PROFILE, recipes, engine), quick=quick)

    @kept
    def setting(self, model: str) -> Setup:
        """A model on vLLM of the paper's time (0.7.2): servers hold what the profile assumes, not what 0.19 does."""
        at = super().setting(model)
        return at.changed(overheads=at.overheads and replace(at.overheads, memory=None))

    def result(self, trace: Trace, case: StudyCase, *, concurrency: int = 0, chunk: int = CHUNK) -> RunResult:
        """A run in full; a closed loop of ``concurrency`` requests if above 0; caches go by ``chunk`` [token]."""
        bandwidth = LINK_SHARE * self.setting(case.model).system.nvlink_bandwidth
        link = LinkSpec(bandwidth=bandwidth, chunk_tokens=chunk)
        options = RunOptions(link=link, concurrency=concurrency, gap_limit_s=LIMIT.tpot * BIN)
        return self.run(trace, case, slo=LIMIT, options=options)

    def look(self, workload: str, case: str, scale: float) -> DynaServeMeasures:
        """A run at a request rate: traces have one request a second. [request/s]"""
        return look(self.result(self.workloads[workload].trace.scaled(scale), CASES[case]), scale)

    @kept
    def saturated(self, shape: tuple[int, int], case: StudyCase, batch: int = BATCH) -> DynaServeMeasures:
        """Equal requests in a closed loop: ``batch`` for every instance that decodes."""
        count = QUICK_REQUESTS if self.quick else SATURATED
        trace = synthetic_trace(rate=1.0, lengths=shape, requests=count, name=f"{shape[0]}/{shape[1]}")
        decoding = 1 if "decode" in case.policy.needs else 2
        return look(self.result(trace, case, concurrency=batch * decoding), float("nan"))

    @kept
    def rate(self, workload: str, case: str) -> float:
        """Serving capacity: largest rate that is sustained with P99 of the gaps inside; 0 where none is. [request/s]"""
        return self._largest(workload, case, lambda seen: seen.summary.itl_p99_s <= LIMIT.tpot * BIN)

    @kept
    def request_rate(self, workload: str, case: str) -> float:
        """The same by requests: of all, those with a gap above the limit, as section 6.3 also says. [request/s]"""
        return self._largest(workload, case, lambda seen: seen.late <= LATE_REQUESTS)

    def _largest(self, workload: str, case: str, inside: Callable[[DynaServeMeasures], bool]) -> float:
        def serves(rate: float) -> bool:
            seen = self.seen(workload, case, rate)
            done = seen.summary.completed == seen.summary.requests and seen.kept_up >= SUSTAINED
            return done and inside(seen)

        return bracket(serves, start=4.0)[0]

    def goodput(self, workload: str, case: str) -> float:
        """Tokens within the limit at the capacity; 0 where there is none. [token/s]"""
        rate = self.rate(workload, case)
        return self.seen(workload, case, rate).goodput if rate else 0.0

    def colocated(
        self, workload: str, measure: Callable[[str, str], float] | None = None, chunks: Sequence[str] = COLOCATED
    ) -> str:
        """Co-location with the chunk that is best for a workload: by capacity, or by another measure."""
        by = measure or self.rate
        return max(chunks, key=lambda case: by(workload, case))


def look(result: RunResult, rate: float) -> DynaServeMeasures:
    """The numbers that claims use."""
    records, machines = result.requests, result.instances
    finish = np.sort(records.finish_s[~np.isnan(records.finish_s)])
    early, late = int(0.3 * finish.size), int(0.7 * finish.size)
    ended_in, came_in = finish[late] - finish[early], records.arrival_s[late] - records.arrival_s[early]
    gaps = result.itl_counts
    inside = float(gaps[result.itl_edges[:-1] <= LIMIT.tpot].sum() / max(gaps.sum(), 1))
    transfer = float(np.nansum(records.transfer_s))
    served = _served(result)
    return DynaServeMeasures(
        summary=summary(result, LIMIT, rate_scale=rate),
        rate=rate,
        inside=inside,
        late=float((records.late_gaps > 0).mean()) if records.late_gaps is not None else float("nan"),
        steady=float(served.sum()),
        kept_up=float(came_in / ended_in),
        goodput=inside * float((served * records.output_tokens).sum()),
        busy=tuple((machines.busy_s / result.duration_s).tolist()),
        mfu=tuple((machines.flops / (machines.gpus * result.peak_flops * result.duration_s)).tolist()),
        memory=tuple(_block_shares(result).tolist()),
        exposed=float(np.nansum(records.exposed_transfer_s)) / transfer if transfer else float("nan"),
    )


def _served(result: RunResult) -> Floats:
    """What each request adds to the requests served a second between ``SETTLED`` of the arrivals and the last of them,
    its tokens evenly from the first to the last. [1/s]"""
    records = result.requests
    end = np.nanmax(records.arrival_s) or np.nanmax(records.finish_s)  # all at once: until the last one is done
    begin = SETTLED * end
    overlap = np.minimum(records.finish_s, end) - np.maximum(records.first_token_s, begin)
    took = np.maximum(records.finish_s - records.first_token_s, 1e-9)
    return np.asarray(np.clip(np.nan_to_num(overlap), 0.0, None) / took / (end - begin))


def _block_shares(result: RunResult) -> Floats:
    """Share of its KV blocks that the requests of each instance hold, over time: prompts from their first step until
    they have left, then the prompt and half of the output. [1]"""
    records, machines = result.requests, result.instances
    left = np.where(records.segments > 1, records.first_token_s + records.exposed_transfer_s, records.first_token_s)
    held = np.zeros(machines.gpus.size)
    np.add.at(held, records.prefill_instance, records.input_tokens * (left - records.prefill_start_s))
    mean = records.input_tokens + records.output_tokens / 2
    np.add.at(held, records.decode_instance, mean * (records.finish_s - records.decode_start_s))
    return np.asarray(held / (BLOCK_TOKENS * machines.kv_blocks * result.duration_s))
