"""Play the closed loops of served runs request by request, for what a steady state cannot have.

A load generator holds N requests in flight: it sends N at once, the next when one ends, a stated number in all.
``simulation`` plays that with the step times of the same setup, so that a run has a start, queues, a distribution and
an end; of its requests come means, medians and percentiles, each to be held against its like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.fixed import Disaggregated, Vllm
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.records import Outcome, RunResult
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import Limits
from disagg_sim.workload.trace import Trace
from lab.calibration.served.evaluate import engine_of, predict, served_model, setup_key
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup
from lab.calibration.served.steady_state import RowLengths, ServedModel, capacity, looked_late, slots_for_load

#: Requests a slot where the source states none: as InferenceX sends. [1]
USUAL_WAVES = 10
#: Most requests of a played run: a longer one has fewer waves, at least ``LEAST_WAVES``. [request]
MOST_REQUESTS, LEAST_WAVES = 40_000, 3
#: Half width of lengths over their mean where a source states none, under engines that mix prefill and decode: with
#: equal lengths such an engine keeps requests together for good, and TPOT of the gap runs (fitted part) would be 15 %
#: too low, as nothing waits for single prompts. Runs under SGLang do stay together. [1]
UNSTATED_SPREAD = 0.1
#: Seats of an attention rank over its part of the requests, where its engine has more: as many as it ever takes while
#: others have fewer, in step tables of twice the size. With its part alone a prompt whose rank is full waits. [1]
UNEVEN = 2
#: Prompts take all their blocks at once: what the memory of a row holds is counted beforehand.
SCHEDULER = "vllm_v0_2024"
#: Period of samples that nobody reads. [s]
NO_SAMPLES = 1e6
#: Share of a percentile's name. [1]
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


class ClientLatencies(NamedTuple):
    """What the clients of a played run saw."""

    ttft: Floats  # (requests,) [s]
    tpot: Floats  # (requests,) mean time of the tokens after the first [s]
    latency: Floats  # (requests,) [s]
    output: Floats  # (requests,) [token]
    request_rate: float  # of the deployment, from the first request sent to the last one done [request/s]
    token_rate: float  # of input and output together, likewise [token/s]


@dataclass(frozen=True, slots=True)
class Answer:
    """Numbers of one operating point by (quantity, statistic), or why there are none."""

    key: str  # of ``key_of``
    numbers: dict[tuple[str, str], float]  # [s]; ("rate", "request") and ("rate", "total") [1/s]
    requests: int = 0  # played [request]
    shortened: bool = False  # fewer waves than the source sent, to keep to ``MOST_REQUESTS``
    reason: str = ""


def key_of(row: ServingRow) -> str:
    """What a played run depends on: an operating point, and the engine with its token budget and what it waits for."""
    of = engine_of(row, {})
    engine = f"{row.engine}|{of.expert_kernel}|{of.steps_ahead}|{of.held_at_most}|{row.chunk_tokens}"
    return f"{row.point}|{engine}|{row.poll_steps}|{row.gather_steps}|{row.slots}|{row.waves:g}|{row.spread:g}"


def tasks_of(rows: Sequence[ServingRow]) -> list[tuple[ServingRow, ...]]:
    """Collect the closed loops among the rows, once for each operating point, together where they share a setup: each a
    piece of work for one process, the largest first.
    """
    once = {key_of(row): row for row in rows if row.load == "closed_loop" and row.workers}
    tasks = [tuple(found) for _, found in groupby(sorted(once.values(), key=setup_key), key=setup_key)]
    return sorted(tasks, key=lambda task: -sum(row.concurrency for row in task))


def play(task: Sequence[ServingRow]) -> list[Answer]:
    """Play rows of one setup, request by request; one that cannot be played is a reason of one line."""
    try:
        run = served_model(task[0])
    except DisaggSimError as error:
        return [Answer(key_of(row), {}, reason=str(error)) for row in task]
    tables: dict[Any, StepTable] = {}
    answers = []
    for row in task:
        try:
            answers.append(_answer(row, client_latencies(run, row, tables)))
        except DisaggSimError as error:
            answers.append(Answer(key_of(row), {}, reason=str(error).splitlines()[0]))
    return answers


def value_of(quantity: Measurement, answer: Answer) -> float:
    """The played number of a quantity, in the unit and per the GPUs of the measured one; NaN where there is none."""
    if quantity.name != "throughput":
        return answer.numbers.get((quantity.name, quantity.statistic), math.nan)
    return answer.numbers.get(("rate", quantity.basis), math.nan) / quantity.gpus


def _answer(row: ServingRow, found: ClientLatencies) -> Answer:
    values = {
        ("rate", "total"): found.token_rate,
        ("rate", "request"): found.request_rate,
        ("rate", "input"): found.request_rate * row.isl,
        ("rate", "output"): found.request_rate * row.osl,
    }
    for name in ("ttft", "tpot", "latency"):
        each = getattr(found, name)
        values[name, "mean"] = float(each.mean())
        values |= {(name, word): float(np.quantile(each, share)) for word, share in PERCENTILES.items()}
    shortened = found.ttft.size < round((row.waves or USUAL_WAVES) * max(round(row.concurrency), 1))
    return Answer(key_of(row), values, found.ttft.size, shortened)


def client_latencies(run: ServedModel, row: ServingRow, tables: dict[Any, StepTable] | None = None) -> ClientLatencies:
    """Play the closed loop of a row: all requests, start and end included, as benches count them. Of disaggregated
    workers the first token is there when the decode worker has the cache: it answers the client.
    """
    run = _looking_late(run, row)
    trace = trace_of(row, run.engine)
    site, policy = _site(run, row, trace, {} if tables is None else tables)
    loop = RunOptions(
        concurrency=max(round(row.concurrency), 1), sample_s=NO_SAMPLES, transfer="buffer", first_token="prefill"
    )
    return _latencies_of(serve(trace, policy, site, Engine(0), loop), disaggregated=row.mode == "disaggregated")


def _looking_late(run: ServedModel, row: ServingRow) -> ServedModel:
    """The run with the wait for looks and sendings, at the steps of the steady state, in the host time of a request; a
    client that is alone on an instance of both phases finds a scheduler that looks at once.
    """
    assert row.workers is not None
    seldom = replace(run, poll_steps=row.poll_steps, gather_steps=row.gather_steps)
    if seldom == run or (not row.prefill and row.concurrency <= row.workers.count):
        return run
    law = predict(seldom, [row])
    late = float(looked_late(seldom, law.tpot, law.request_rate * law.tpot / row.workers.count)[0])
    engine = replace(run.engine, request_host=run.engine.request_host + late)
    return replace(seldom, at=run.at.changed(overheads=engine))


def trace_of(row: ServingRow, engine: EngineSpec) -> Trace:
    """Requests of a row: as many a slot as the source sends, lengths uniform in ``1 +- spread`` (``UNSTATED_SPREAD``
    under an engine that mixes prefill and decode), one fixed draw.
    """
    spread = row.spread or (UNSTATED_SPREAD if engine.mixed_steps else 0.0)
    slots = max(round(row.concurrency), 1)
    waves = row.waves or USUAL_WAVES
    most = max(MOST_REQUESTS // slots, LEAST_WAVES)
    rng = np.random.default_rng(0)
    lengths = (_drawn(rng, length, spread, round(min(waves, most) * slots)) for length in (row.isl, row.osl))
    isl, osl = lengths
    return Trace(arrival=np.zeros(isl.size), input_tokens=isl, output_tokens=osl, name=row.row)


def _drawn(rng: np.random.Generator, mean: float, spread: float, count: int) -> Any:
    low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
    return rng.integers(max(low, 1), max(high, 1), count, endpoint=True)


def _site(run: ServedModel, row: ServingRow, trace: Trace, tables: dict[Any, StepTable]) -> tuple[Site, Policy]:
    """Where a row is served, and how its engine forms steps."""
    assert row.workers is not None
    at, engine = run.at, run.engine
    slots = max(round(row.concurrency), 1)

    def part(side: WorkerGroup, *, decodes: bool = True) -> tuple[Replicas]:
        ranks = int(side.mapping.dp_attn)
        load = row.concurrency / (side.count * ranks)
        told = (row.slots or slots_for_load(load)) if row.prefill else np.inf  # by split workers
        seats = int(min(told, engine.max_running, slots, UNEVEN * math.ceil(slots / ranks)))
        batch = seats * ranks if decodes else None
        budget = engine.chunk_tokens * ranks
        return (Replicas(mapping=side.mapping, instances=side.count, batch=batch, token_budget=budget),)

    own = part(row.workers)
    deployment = ServedDeployment(
        name="measured",
        gpus=int(row.gpus),
        prefill=part(row.prefill, decodes=False) if row.prefill else (),
        decode=own if row.prefill else (),
        colocated=() if row.prefill else own,
    )
    held = engine.held_at_most * engine.ranks_wait
    policy: Policy = Disaggregated() if row.prefill else Vllm(chunked=engine.mixed_steps, hold_steps=held)
    inside = deployment.gpus <= at.system.nvlink_domain
    link = LinkSpec(bandwidth=own_link_bandwidth(at.system, at.profile, within_domain=inside))
    wire = link.wire(at, deployment.gpus)
    longest = int((trace.input_tokens + trace.output_tokens).max())
    most = max(each.token_budget or 0 for each in (*own, *deployment.prefill))
    tokens = min(most, int(trace.input_tokens.max()) * slots)
    site = Site(
        setup=at,
        deployment=deployment,
        slo=Slo(ttft=10.0, tpot=0.1),
        link=link,
        link_bandwidth=wire.bandwidth,
        link_latency_s=wire.latency_s,
        tables=partial(_table, tables, run, longest, tokens),
        blocks=partial(_blocks, run, row),
        rng=Engine(0).rng,
        start_up_s=0.0,
        flip_s=0.0,
        prompt_tokens=row.isl,
        output_tokens=row.osl,
        scheduler=load_scheduler(SCHEDULER),
    )
    return site, policy


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length()


def _table(
    tables: dict[Any, StepTable], run: ServedModel, longest: int, tokens: int, mapping: Sharding, sequences: int
) -> StepTable:
    """Step times, shared by rows whose sizes lie between the same powers of two."""
    sizes = (_power_of_two(sequences), _power_of_two(longest), _power_of_two(tokens))
    key = (replace(mapping), *sizes)
    if key not in tables:
        tables[key] = StepTable.build(
            run.at, mapping, max_sequences=sizes[0], max_context=sizes[1], max_tokens=sizes[2]
        )
    return tables[key]


def _blocks(run: ServedModel, row: ServingRow, mapping: Sharding, limits: Limits) -> int:  # noqa: ARG001  a fixed pool
    """KV blocks of an instance: those of the requests that the steady state admits, at their whole length; of all that
    is sent where nothing would fit by our count, although the engine ran.
    """
    lengths = RowLengths(np.array([row.isl]), np.array([row.osl]))
    fit = float(capacity(run, Sharding.stack([mapping]), lengths)[0])
    cached = row.isl + row.osl if run.engine.reserves_output else float(lengths.context[0])
    requests = fit if fit > 0 else row.concurrency
    whole = math.ceil((row.isl + row.osl) * (1 + row.spread)) + BLOCK_TOKENS
    ranks = int(mapping.dp_attn)  # each holds its part of the requests, and any one of them
    return ranks * max(math.ceil(requests / ranks * (cached / BLOCK_TOKENS + 1)), math.ceil(whole / BLOCK_TOKENS) + 1)


def _latencies_of(result: RunResult, *, disaggregated: bool) -> ClientLatencies:
    """Latencies of a played run; every request of it has ended."""
    records = result.requests
    if np.any(records.status != Outcome.COMPLETED):
        raise InputError("a request of the run is longer than an instance's memory")
    first = records.decode_start_s if disaggregated else records.first_token_s
    ttft, whole = first - records.arrival_s, records.finish_s - records.arrival_s
    tokens = float((records.input_tokens + records.output_tokens).sum())
    lasted = float(records.finish_s.max() - records.arrival_s.min())
    gaps = np.maximum(records.output_tokens - 1.0, 1.0)
    tpot = (whole - ttft) / gaps
    return ClientLatencies(ttft, tpot, whole, records.output_tokens.astype(float), ttft.size / lasted, tokens / lasted)
