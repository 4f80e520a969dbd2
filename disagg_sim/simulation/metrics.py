"""Compute latencies, attainment, goodput and GPU utilisation of a run, and of its classes and models.

Everything is computed from a ``RunResult`` alone: from its requests, or from their totals where these have left it.
Classes of service, and models, are requests with limits of latency of their own.

* TTFT: arrival to first token, with the host time of the request where an engine stands behind the setup. TPOT: mean
  gap of a request's tokens after the first, 0 for a single token. ITL: each gap of each request, so that a long answer
  counts as often as it has gaps.
* A request attains the SLO when it was completed with TTFT and TPOT both inside; rejected, failed and
  unfinished ones count among the requests, and so against the attainment.
* Goodput counts what attains over the time from the first arrival to the last finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Mask
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, check_kinds, nearest
from disagg_sim.facts.traffic import HBM
from disagg_sim.notebook import Shown
from disagg_sim.simulation.records import (
    Outcome,
    RequestLimits,
    Requests,
    RunResult,
    quantile,
    requests_of,
    rows_of,
    totals_of,
)
from disagg_sim.units import HOUR
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Percentiles of a class. [1]
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
#: What is said of each class, and of each model.
GROUP_COLUMNS = (
    *("requests", "completed", "rejected", "slo_attainment", "goodput_requests_per_s", "goodput_tokens_per_s"),
    *(f"{name}_{share}_s" for name in ("ttft", "tpot") for share in SHARES),
    *("slo_ttft_s", "slo_tpot_s"),
)
#: Columns of ``by_class``, in its order.
CLASS_COLUMNS = ("class", "priority", *GROUP_COLUMNS)
#: Columns of ``by_model``, in its order.
MODEL_COLUMNS = (
    *("model", "gpus", *GROUP_COLUMNS, "throughput_tokens_per_s"),
    *("throughput_tokens_per_s_per_gpu", "goodput_tokens_per_s_per_gpu"),
)
#: Name of the row of all models together.
ALL = "all"


#: What requests have in common that are promised something.
CLASS, MODEL = "class", "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """What requests of one class are promised, or those of one model, where their class is promised nothing."""

    name: str
    slo: Slo  # [s]
    priority: int = 0  # below 0: may be turned away first [1]
    of: str = CLASS  # what the name is of: ``CLASS`` or ``MODEL``

    def __post_init__(self) -> None:
        """``InputError`` for a value of another kind."""
        check_kinds(self)
        if self.of not in (CLASS, MODEL):
            raise InputError(f"of {self.of!r} is unknown; allowed: {CLASS}, {MODEL}")


def limits_of(trace: Trace | TraceStream, slo: Slo, classes: Sequence[ServiceClass]) -> RequestLimits:
    """Look up the limits of every request; ``slo`` holds where neither class nor model is among ``classes``. [s]"""
    size = 1 if isinstance(trace, TraceStream) else len(trace)  # which every request of a stream shares
    ttft, tpot, priority = np.full(size, slo.ttft), np.full(size, slo.tpot), np.zeros(size, dtype=np.int64)
    for kind, labels in ((MODEL, trace.models), (CLASS, trace.classes)):  # what a class is promised comes first
        names = labels.names if labels is not None else ()
        for each in (promised for promised in classes if promised.of == kind):
            if labels is None or each.name not in names:
                known = ", ".join(names) or "none"
                raise InputError(
                    f"{kind} {each.name!r} is none of trace {trace.name}{nearest(each.name, names)}; it has {known}"
                )
            rows = labels.number == names.index(each.name)
            ttft[rows], tpot[rows], priority[rows] = each.slo.ttft, each.slo.tpot, each.priority
    every = (len(trace),)
    return RequestLimits(
        ttft=np.broadcast_to(ttft, every), tpot=np.broadcast_to(tpot, every), priority=np.broadcast_to(priority, every)
    )


def slo_of(model: str, slo: Slo, classes: Sequence[ServiceClass]) -> Slo:
    """Look up what requests of a model are promised where their class is promised nothing; its policy steers by it."""
    return next((each.slo for each in classes if each.of == MODEL and each.name == model), slo)


def with_class(requests: pd.DataFrame, trace: Trace | TraceStream) -> pd.DataFrame:
    """Add a last column ``class`` to rows of ``RunResult.frame()``, where the trace has classes."""
    if trace.classes is None:
        return requests
    return requests.assign(**{"class": np.array(trace.classes.names)[trace.classes.number[requests["request"]]]})


def by_class(requests: pd.DataFrame, trace: Trace, slo: Slo, classes: Sequence[ServiceClass]) -> pd.DataFrame:
    """Tabulate ``CLASS_COLUMNS`` of each class; rates from the first arrival to the last finish. [s], [1]"""
    if trace.classes is None:
        raise InputError(f"trace {trace.name} has no classes; allowed: a column 'class', or with_classes")
    limits, got, rows = limits_of(trace, slo, classes), requests_of(requests), []
    for number, name in enumerate(trace.classes.names):
        own = trace.classes.number == number
        if own.any():
            priority = int(limits.priority[int(np.argmax(own))])
            rows.append({"class": name, "priority": priority, **_got(got, own, limits)[0]})
    return pd.DataFrame(rows, columns=list(CLASS_COLUMNS))


def by_model(requests: pd.DataFrame, limits: RequestLimits, gpus: Mapping[str, float]) -> pd.DataFrame:
    """Tabulate ``MODEL_COLUMNS`` of each model's requests and of ``ALL``, rates a GPU over its own GPUs. [s], [1]"""
    got, rows = requests_of(requests), []
    for name, held in {**gpus, ALL: sum(gpus.values())}.items():
        own = (requests["model"] == name).to_numpy() if name != ALL else np.ones(len(requests), dtype=np.bool_)
        row, served = _got(got, own, limits)
        row |= {"model": name, "gpus": held, "throughput_tokens_per_s": served}
        for rate in ("throughput_tokens_per_s", "goodput_tokens_per_s"):
            row[f"{rate}_per_gpu"] = row[rate] / held
        rows.append(row)
    return pd.DataFrame(rows, columns=list(MODEL_COLUMNS))


def _got(requests: Requests, own: Mask, limits: RequestLimits) -> tuple[dict[str, Any], float]:
    """``GROUP_COLUMNS`` of some requests, and their output over the time of the run [token/s].

    Limits that differ among them are NaN.
    """
    span = float(np.fmax.reduce(requests.finish_s) - np.fmin.reduce(requests.arrival_s))
    found, most = totals_of(rows_of(requests, own), some := rows_of(limits, own)), int(own.sum())
    row: dict[str, Any] = {
        "requests": most,
        "completed": int(found.ended[Outcome.COMPLETED]),
        "rejected": int(found.ended[Outcome.REJECTED]),
        "slo_attainment": found.inside / most,
        "goodput_requests_per_s": found.inside / span if span > 0 else np.nan,
        "goodput_tokens_per_s": found.inside_tokens / span if span > 0 else np.nan,
        **{f"ttft_{key}_s": quantile(found.ttft, share) for key, share in SHARES.items()},
        **{f"tpot_{key}_s": quantile(found.tpot, share) for key, share in SHARES.items()},
        **{f"slo_{name}_s": _only(getattr(some, name)) for name in ("ttft", "tpot")},
    }
    return row, found.output_tokens / span if span > 0 else np.nan


def _only(values: Floats) -> float:
    """The one value that all have; NaN where there are several."""
    return float(values[0]) if np.all(values == values[0]) else np.nan


NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Shown):
    """One row of ``summary.csv``; NaN where nothing was completed."""

    policy: str
    deployment: str
    trace: str
    rate_scale: float  # of the trace's own request rate [1]
    requests: int  # that arrived [request]
    completed: int  # [request]
    rejected: int  # beyond the model's context or any instance's memory, or refused [request]
    slo_attainment: float  # completed inside both limits, over all that arrived [1]
    goodput_requests_per_s: float  # completed inside both limits [request/s]
    goodput_tokens_per_s: float  # output tokens of these [token/s]
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    itl_p99_s: float  # of all gaps of all requests
    gpu_hours: float  # held by instances, starting and draining ones included [GPU h]
    utilisation: float  # GPU time in passes over GPU time held [1]
    wall_s: float  # measured
    requests_per_cpu_s: float  # simulated; measured [request/s]
    failed: int  # their instance failed, or was stopped [request]
    unfinished: int  # the run was cut short [request]
    duration_s: float  # first arrival to last finish
    throughput_requests_per_s: float  # completed, inside the SLO or not [request/s]
    throughput_tokens_per_s: float  # their output tokens [token/s]
    itl_p50_s: float
    itl_p90_s: float
    mfu: float  # FLOP done over what the GPUs held could do at their dense peak [1]
    kv_use_mean: float  # of the KV blocks of live instances, over time [1]
    kv_use_max: float
    queued_mean: float  # requests waiting, over time [request]
    queued_max: float
    preemptions: int  # [1]
    flips: int  # changes of role [1]
    transfers: int  # of KV caches between instances [1]
    transfer_mean_s: float  # of those requests that were transferred
    exposed_transfer_mean_s: float  # of that, what delayed the request
    slo_ttft_s: float
    slo_tpot_s: float
    seed: int
    migrated: int  # that began again elsewhere, their instance gone [request]
    availability: float  # GPU time held that had not failed [1]


#: Columns of ``summary.csv``, in its order.
COLUMNS = tuple(field.name for field in fields(Summary))
#: Those that measure the machine: two runs of the same seed differ in them alone.
MEASURED = ("wall_s", "requests_per_cpu_s")


def histogram_percentile(edges: Floats, counts: NDArray[np.int64], share: float) -> float:
    """Estimate a percentile of values counted in bins, at most one bin's width off; NaN without values."""
    total = int(np.sum(counts))
    if not total:
        return NAN
    below = np.cumsum(counts)
    rank = share * total
    index = int(np.searchsorted(below, rank, side="left"))
    index = min(index, len(counts) - 1)
    while counts[index] == 0:  # share 0 before the first value
        index += 1
    if not np.isfinite(edges[index + 1]):
        return float(edges[index])
    inside = (rank - (below[index] - counts[index])) / counts[index]
    return float(edges[index] + inside * (edges[index + 1] - edges[index]))


def summary(result: RunResult, slo: Slo, *, rate_scale: float = 1.0, limits: RequestLimits | None = None) -> Summary:
    """Summarise a run: latencies [s], attainment [1], goodput and use of the GPUs; NaN for what a run does not have."""
    if result.totals is None:
        found = totals_of(result.requests, limits or slo)
    elif result.judged_by == slo:
        found = result.totals
    else:
        raise InputError(f"records of the requests are gone; allowed: the limits of the run, {result.judged_by}")
    total, completed = int(found.ended.sum()), int(found.ended[Outcome.COMPLETED])
    duration = found.last_finish_s - found.first_arrival_s if completed else NAN
    held = float(np.sum(result.instances.gpu_s))
    busy, flops = float(np.sum(result.instances.busy_s * result.instances.gpus)), float(np.sum(result.instances.flops))
    if (encode := result.encode) is not None:
        held, busy, flops = held + encode.gpu_s, busy + encode.busy_s, flops + encode.flops
    return Summary(
        policy=result.policy,
        deployment=result.deployment,
        trace=result.trace,
        rate_scale=rate_scale,
        requests=total,
        completed=completed,
        rejected=int(found.ended[Outcome.REJECTED]),
        slo_attainment=found.inside / total if total else NAN,
        goodput_requests_per_s=_ratio(found.inside, duration) if found.inside else 0.0,
        goodput_tokens_per_s=_ratio(found.inside_tokens, duration) if found.inside else 0.0,
        ttft_p50_s=quantile(found.ttft, 0.5),
        ttft_p90_s=quantile(found.ttft, 0.9),
        ttft_p99_s=quantile(found.ttft, 0.99),
        tpot_p50_s=quantile(found.tpot, 0.5),
        tpot_p90_s=quantile(found.tpot, 0.9),
        tpot_p99_s=quantile(found.tpot, 0.99),
        itl_p99_s=histogram_percentile(result.itl_edges, result.itl_counts, 0.99),
        gpu_hours=held / HOUR,
        utilisation=_ratio(busy, held),
        wall_s=result.wall_s,
        requests_per_cpu_s=_ratio(total, result.cpu_s),
        failed=int(found.ended[Outcome.FAILED]),
        unfinished=int(found.ended[Outcome.UNFINISHED]),
        duration_s=duration,
        throughput_requests_per_s=_ratio(completed, duration),
        throughput_tokens_per_s=_ratio(found.output_tokens, duration),
        itl_p50_s=histogram_percentile(result.itl_edges, result.itl_counts, 0.5),
        itl_p90_s=histogram_percentile(result.itl_edges, result.itl_counts, 0.9),
        mfu=_ratio(flops, held * result.peak_flops),
        kv_use_mean=_mean(result.samples.kv_use),
        kv_use_max=_most(result.samples.kv_use),
        queued_mean=_mean(result.samples.queued),
        queued_max=_most(result.samples.queued),
        preemptions=found.preemptions,
        flips=int(np.sum(result.instances.flips)),
        transfers=found.transfers,
        transfer_mean_s=_ratio(found.transfer_s, found.transfers),
        exposed_transfer_mean_s=_ratio(found.exposed_transfer_s, found.transfers),
        slo_ttft_s=slo.ttft,
        slo_tpot_s=slo.tpot,
        seed=result.seed,
        migrated=found.migrated,
        availability=1.0 - _ratio(float(result.instances.failed_s @ result.instances.gpus), held),
    )


def tier_use(requests: pd.DataFrame, tiers: Sequence[str]) -> pd.DataFrame:
    """Tabulate where prompts were found: a row for HBM, one for each tier below it, and one for what was computed.

    Returns ``tier``, ``tokens`` and their ``share`` of all prompt tokens [1], ``bytes`` loaded, and ``bytes_per_s``
    into all instances together, from the first arrival to the last finish.
    """
    below = [float(requests[f"{name}_tokens"].sum()) for name in tiers]
    whole, cached = (float(requests[name].sum()) for name in ("input_tokens", "cached_tokens"))
    tokens = np.array([cached - sum(below), *below, whole - cached])
    moved = np.array([0.0, *(requests[f"{name}_bytes"].sum() for name in tiers), 0.0])
    seconds = requests["finish_s"].max() - requests["arrival_s"].min()
    columns = {"tokens": tokens, "share": tokens / whole, "bytes": moved, "bytes_per_s": moved / seconds}
    return pd.DataFrame({"tier": [HBM, *tiers, "computed"], **columns})


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else NAN


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else NAN


def _most(values: Any) -> float:
    return float(np.max(values)) if len(values) else NAN
