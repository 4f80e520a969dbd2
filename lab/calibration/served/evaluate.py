"""Predict serving rows of any form: one line per quantity, none dropped.

The model gives a steady state; ``drain_factor`` is what a finite run of a load generator adds to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.evidence import family_of, layout_kinds
from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.load import load_engine, load_model
from disagg_sim.physics.memory import weight_bytes
from disagg_sim.physics.work import Numeric
from disagg_sim.workload.trace import MOST_TOKENS
from lab.calibration.names import names
from lab.calibration.served.masks import masked
from lab.calibration.served.rows import UNKNOWN_LENGTHS, Measurement, ServingRow, WorkerGroup
from lab.calibration.served.steady_state import (
    ClosedLoopRun,
    RowLengths,
    ServedModel,
    SteadyState,
    WorkerPool,
    at_rate,
    colocated,
    decode_time,
    disaggregated,
    prefill_time,
    served,
    static_batch,
)

#: Share of all weights that a step reads at least: the embedding is looked up, not read. [1]
MATMUL_SHARE = 0.85

#: Slots above which the factor no longer moves by more than a tenth of a per cent.
MOST_SLOTS = 512
#: Name and statistic of the one quantity whose median differs much from its mean.
FIRST_MEDIAN = ("ttft", "median")
#: Columns of ``rows.csv``, in order.
COLUMNS = (
    *("file", "row", "form", "quantity", "statistic", "basis", "measured", "predicted", "relative_error", "evaluated"),
    *("reason", "saturated", "part", "system", "hardware", "model", "framework", "engine", "recipe", "mode", "load"),
    *("gpus", "workers", "prefill_workers", "isl", "osl", "concurrency", "batch", "capacity", "qa_flag"),
    *("configuration", "held_out", "version", "family", "layout", "prefill_layout", "point"),
)


@dataclass(frozen=True)
class Prediction:
    """Answers of one group of rows, arrays of shape (rows,)."""

    tpot: Floats  # [s]
    ttft: Floats  # mean [s]
    ttft_median: Floats  # of requests past the first wave, which waits for its own prompts [s]
    latency: Floats  # [s]
    request_rate: Floats  # of the deployment [request/s]
    capacity: Floats  # requests that the memory of the deployment holds where they decode [request]
    demand: Floats  # requests in flight [request]


def pool_of(workers: Iterable[WorkerGroup]) -> WorkerPool:
    """Degrees and counts of many rows as arrays of shape (rows,)."""
    rows = list(workers)
    columns = Sharding.stack([w.mapping for w in rows])
    return WorkerPool(columns, np.array([float(w.count) for w in rows]))


def of_version(row: ServingRow) -> dict[str, Any]:
    """What a row's version has other than its engine today: the kernel of experts, unless they are cut over 8 and more,
    and the steps formed ahead where its launch does not state them; and how long its launch holds prompts back.
    """
    found: dict[str, Any] = {"steps_ahead": 0} if row.overlap == "off" else {}
    found |= {"held_at_most": row.held_iters - 1} if row.held_iters else {}
    other = names()["versions_of"].get(f"{row.engine} {row.version}")
    if other is None:
        return found
    if not row.overlap:
        found["steps_ahead"] = load_engine(other).steps_ahead
    if row.workers is None or not load_model(row.model).is_moe or np.any(np.asarray(row.workers.mapping.tp_ffn) >= 8):
        return found
    return found | {"expert_kernel": load_engine(other).expert_kernel}


def engine_of(row: ServingRow, engines: dict[str, EngineSpec]) -> EngineSpec:
    """The profile of a row's engine, as its version has it, with the token budget that its source states."""
    engine = replace(engines.get(row.engine) or load_engine(row.engine), **of_version(row))
    return replace(engine, chunk_tokens=row.chunk_tokens) if row.chunk_tokens else engine


def setup_key(row: ServingRow) -> tuple[Any, ...]:
    """What rows share that have one ``served_model``."""
    version = tuple(of_version(row).items())
    return row.model, row.system, row.recipe, row.engine, version, row.chunk_tokens, row.random_tokens


def served_model(row: ServingRow, engines: dict[str, EngineSpec] | None = None) -> ServedModel:
    """The model of a row on its system, run by its engine, which looks at requests at every step."""
    engine = engine_of(row, engines or {})
    return served(row.model, row.system, row.recipe, engine, random_tokens=row.random_tokens)


def predict(run: ServedModel, rows: Sequence[ServingRow]) -> Prediction:
    """Answers for rows of one model, system, recipe, engine, load and mode."""
    load, mode = rows[0].load, rows[0].mode
    lengths = RowLengths(np.array([r.isl for r in rows]), np.array([r.osl for r in rows]))
    pool = pool_of(r.workers for r in rows if r.workers)
    concurrency = np.array([r.concurrency for r in rows])
    batch = np.array([r.batch for r in rows])
    if load in ("prefill", "decode", "static"):
        return _isolated(run, load, pool, lengths, batch)
    # A median is of requests long after the start of the loop, a mean counts the start, too.
    patterns = [ClosedLoopRun(rows[0].waves or np.inf, rows[0].spread)]
    if any((each.name, each.statistic) == FIRST_MEDIAN for row in rows for each in row.quantities):
        patterns.append(ClosedLoopRun(np.inf, rows[0].spread))
    if mode == "disaggregated":
        prefill = pool_of(r.prefill for r in rows if r.prefill)
        most = pool.count * run.engine.max_running * pool.mapping.dp_attn
        inside = concurrency if load == "closed_loop" else most  # everything queued
        states = [disaggregated(run, prefill, pool, lengths, inside, pattern) for pattern in patterns]
        state = states[0]
        return _finished(rows, states, state.request_rate, state.capacity, inside, lengths)
    if load == "server":
        rate = np.array([r.rate for r in rows])
        state = at_rate(run, pool.mapping, lengths, rate / pool.count)
        states = [state]
        demand = np.where(state.request_rate < 0.999 * rate / pool.count, np.inf, 0.0)
    else:
        stated = np.where(np.isfinite(batch), batch * pool.mapping.dp_attn * pool.count, np.inf)
        demand = concurrency if load == "closed_loop" else stated
        most = run.engine.max_running * pool.mapping.dp_attn
        inside = np.clip(demand / pool.count, 1.0, np.fmax(most, concurrency))
        states = [colocated(run, pool.mapping, lengths, inside, pattern) for pattern in patterns]
        state = states[0]
    return _finished(rows, states, state.request_rate * pool.count, state.capacity * pool.count, demand, lengths)


def _finished(
    rows: Sequence[ServingRow],
    states: Sequence[SteadyState],
    rate: Floats,
    capacity: Floats,
    demand: Floats,
    lengths: RowLengths,
) -> Prediction:
    """The steady state as a run of so many waves shows it: on average first, long after its start last."""
    state, late = states[0], states[-1]
    waves = rows[0].waves
    drained = rate / drain_factors(np.minimum(demand, capacity), waves, rows[0].spread) if waves else rate
    shape = np.shape(lengths.isl)
    tpot, first, median, whole, drained, capacity = (
        np.broadcast_to(value, shape)
        for value in (state.tpot, state.ttft, late.ttft, state.latency(lengths), drained, capacity)
    )
    return Prediction(tpot, first, median, whole, drained, capacity, demand)


@lru_cache(maxsize=256)
def drain_factor(slots: int, waves: int, spread: float) -> float:
    """Length of a run of ``waves * slots`` requests over that of one without an end: at least 1. [1]

    A generator starts with ``slots`` prompts at one instant and ends with slots that have nothing to do. Requests of
    length uniform in ``1 +- spread`` go to whichever slot is free first (fixed random order).
    """
    if slots < 1 or waves < 1:
        return 1.0
    slots = min(slots, MOST_SLOTS)
    times = np.random.default_rng(0).uniform(1 - spread, 1 + spread, slots * waves)
    free = [0.0] * slots
    for time in times:
        heapq.heapreplace(free, free[0] + float(time))
    return max(free) * slots / float(times.sum())


def drain_factors(slots: Numeric, waves: float, spread: float) -> Numeric:
    """``drain_factor`` of every element. [1]"""
    return np.array([drain_factor(int(n), int(waves), spread) for n in np.asarray(slots, dtype=float)])


def _isolated(run: ServedModel, load: str, pool: WorkerPool, lengths: RowLengths, batch: Floats) -> Prediction:
    """A static batch, a pass of prefill or a decode step, with nothing around it; no HTTP and no queue."""
    mapping = pool.mapping
    if load == "static":
        state = static_batch(run, mapping, lengths, batch)
        first, whole = state.ttft, batch / state.request_rate
        return Prediction(state.tpot, first, first, whole, state.request_rate, state.capacity, batch)
    room = np.full(batch.shape, np.inf)
    if load == "prefill":
        prompts = np.where(np.isfinite(batch), np.maximum(batch, 1.0), 1.0)
        time = prefill_time(run, mapping, prompts * lengths.isl, np.minimum(prompts, mapping.dp_attn), lengths)
        return Prediction(time, time, time, time, prompts / time, room, prompts)
    step = decode_time(run, mapping, batch, lengths)
    return Prediction(step, step, step, step, batch / (step * np.maximum(lengths.osl, 1.0)), room, batch)


def value_of(quantity: Measurement, row: ServingRow, answer: Prediction, index: int) -> float:
    """The predicted number of a quantity, in the unit and per the GPUs of the measured one."""
    if (quantity.name, quantity.statistic) == FIRST_MEDIAN:
        return float(answer.ttft_median[index])
    if quantity.name in ("tpot", "ttft", "latency"):
        return float(getattr(answer, quantity.name)[index])
    tokens = {"total": row.isl + row.osl, "input": row.isl, "output": row.osl, "request": 1.0}[quantity.basis]
    return float(answer.request_rate[index]) * tokens / quantity.gpus


def _checked(row: ServingRow) -> ServingRow:
    """The row with a reason where a number that its load needs is missing."""
    if not row.quantities:
        return row.refused("states no latency or throughput")
    if not (0 < row.isl <= MOST_TOKENS and 0 < row.osl <= MOST_TOKENS):
        return row.refused(UNKNOWN_LENGTHS)
    if row.workers is None:
        return row.refused("the GPUs are not stated")
    if row.load == "closed_loop" and not row.concurrency > 0:
        return row.refused("the concurrency is not stated")
    if row.load in ("static", "decode") and not row.batch > 0:
        return row.refused("the batch is not stated")
    return row


def _beats_memory(run: ServedModel, row: ServingRow) -> bool:
    """Whether a dense model made tokens faster than its GPUs can read the weights."""
    if run.at.model.is_moe or row.workers is None or row.load not in ("static", "closed_loop"):
        return False
    told = {quantity.name: quantity.measured for quantity in row.quantities}
    step = told.get("tpot", told.get("latency", np.inf) / row.osl)
    bandwidth = row.workers.mapping.gpus / row.workers.mapping.pp * run.at.system.hbm_bandwidth
    return bool(step < weight_bytes(run.at.model, run.at.precision) * MATMUL_SHARE / bandwidth)


def evaluate(rows: Sequence[ServingRow], engines: dict[str, EngineSpec] | None = None) -> pd.DataFrame:
    """Predict every quantity of every row: one line each, in order, ``COLUMNS``, in s, token/s or request/s."""
    checked = masked([_checked(row) for row in rows])
    answers: dict[int, tuple[Prediction, int]] = {}

    def key(index: int) -> tuple[Any, ...]:
        row = checked[index]
        looks = (row.poll_steps, row.gather_steps, row.slots)
        return (*setup_key(row), *looks, row.load, row.mode, row.waves, row.spread)

    usable = sorted((i for i, row in enumerate(checked) if not row.reason), key=key)
    for _, found in groupby(usable, key=key):
        members = list(found)
        group = [checked[i] for i in members]
        first = group[0]
        try:
            run = served_model(first, engines)
            run = replace(run, poll_steps=first.poll_steps, gather_steps=first.gather_steps, slots=first.slots)
            answer = predict(run, group)
        except DisaggSimError as error:
            for i in members:
                checked[i] = checked[i].refused(str(error))
            continue
        for place, i in enumerate(members):
            if _beats_memory(run, checked[i]):
                checked[i] = checked[i].refused("faster than its GPUs can read the weights")
            answers[i] = (answer, place)
    lines = [line for i, row in enumerate(checked) for line in _lines(row, answers.get(i), _part(row, engines or {}))]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _mostly_waits(row: ServingRow) -> bool:
    """Whether the measured TTFT is longer than the rest of the request: the stated concurrency did not run."""
    told = {quantity.name: quantity.measured for quantity in row.quantities}
    if row.load != "closed_loop" or not {"ttft", "tpot"} <= told.keys():
        return False
    return told["ttft"] > (row.osl - 1) * told["tpot"]


def _part(row: ServingRow, engines: dict[str, EngineSpec]) -> str:
    """ "fitted" or "held-out" where the profile of the engine was fitted to the row's file, else "new"."""
    if not row.engine or not row.digest:
        return "new"
    told = engine_of(row, engines).sources.values()
    if not any(row.digest in source for source in told):
        return "new"
    return "held-out" if row.held_out else "fitted"


def _lines(row: ServingRow, answer: tuple[Prediction, int] | None, part: str) -> list[dict[str, Any]]:
    """The lines of one row; a row without a quantity has one."""
    lines, waited = [], _mostly_waits(row)
    of_row = {name: getattr(row, name) for name in COLUMNS if hasattr(row, name)} | _kinds(row) | {"part": part}
    of_row |= {"workers": _named(row.workers), "prefill_workers": _named(row.prefill)}
    for quantity in row.quantities or (Measurement(name="", measured=float("nan"), statistic=""),):
        reason = row.reason or quantity.reason
        predicted = error = capacity = float("nan")
        saturated = waited or row.qa_flag == "check"
        if answer is not None:
            prediction, index = answer
            capacity = float(prediction.capacity[index])
            saturated = saturated or bool(prediction.demand[index] > capacity)
            predicted = value_of(quantity, row, prediction, index)
            if not reason:
                if np.isfinite(predicted) and quantity.measured > 0:
                    error = predicted / quantity.measured - 1.0
                else:
                    reason = "no finite prediction" if quantity.measured > 0 else "the measured value is not above 0"
        told = {
            "quantity": quantity.name,
            "statistic": quantity.statistic,
            "basis": quantity.basis,
            "measured": quantity.measured,
            "predicted": predicted,
            "relative_error": error,
            "evaluated": bool(np.isfinite(error)),
            "reason": reason,
            "saturated": saturated,
            "capacity": capacity,
        }
        lines.append(of_row | told)
    return lines


def _kinds(row: ServingRow) -> dict[str, str]:
    """Family of the model, kind of the layout that decodes, and of the one that prefills; "" where unknown."""
    family = family_of(load_model(row.model)) if row.model else ""
    layout, prefill = (str(layout_kinds(w.mapping)[0]) if w else "" for w in (row.workers, row.prefill or row.workers))
    return {"family": family, "layout": layout, "prefill_layout": prefill}


def _named(workers: WorkerGroup | None) -> str:
    """Workers in a word: ``2xTP4``, ``DEP8``, ``TEP8``, with expert TP and stages where they differ."""
    if workers is None:
        return ""
    m = workers.mapping
    name = f"DP{m.dp_attn}" if m.dp_attn > 1 else f"TP{m.tp_attn}"
    name += f"-EP{m.ep}" * (m.ep > 1) + f"-PP{m.pp}" * (m.pp > 1)
    return f"{workers.count}x{name}" if workers.count > 1 else name
