"""Classes of service and models: requests with limits of latency of their own, and what those of each got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Mask
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, check_kinds, nearest
from disagg_sim.simulation.records import Outcome, RequestLimits, Requests, quantile, requests_of, rows_of, totals_of
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: What is said of each class, and of each model.
GROUP_COLUMNS = (
    "requests",
    "completed",
    "rejected",
    "slo_attainment",
    "goodput_requests_per_s",
    "goodput_tokens_per_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p90_s",
    "tpot_p99_s",
    "slo_ttft_s",
    "slo_tpot_s",
)
#: Columns of ``by_class``, in its order.
CLASS_COLUMNS = ("class", "priority", *GROUP_COLUMNS)
#: Columns of ``by_model``, in its order.
MODEL_COLUMNS = (
    "model",
    "gpus",
    *GROUP_COLUMNS,
    "throughput_tokens_per_s",
    "throughput_tokens_per_s_per_gpu",
    "goodput_tokens_per_s_per_gpu",
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
    """Look up what the requests of a model are promised where their class is promised nothing; its policy steers by it.

    >>> small = ServiceClass(name="llama_3_1_8b", slo=Slo(ttft=0.5, tpot=0.02), of=MODEL)
    >>> [slo_of(name, Slo(ttft=2.0, tpot=0.1), [small]).ttft for name in ("llama_3_1_8b", "llama_3_1_70b")]
    [0.5, 2.0]
    """
    return next((each.slo for each in classes if each.of == MODEL and each.name == model), slo)


def with_class(requests: pd.DataFrame, trace: Trace | TraceStream) -> pd.DataFrame:
    """Add the class of each request to rows of ``RunResult.frame()``, where its trace has classes.

    Returns the table with a last column ``class``, or unchanged.

    >>> from disagg_sim.workload.request_columns import Labels
    >>> kinds = Labels(names=("chat", "batch"), number=[1])
    >>> trace = Trace(arrival=[0.0], input_tokens=[5], output_tokens=[1], classes=kinds)
    >>> with_class(pd.DataFrame({"request": [0]}), trace).values.tolist()
    [[0, 'batch']]
    """
    if trace.classes is None:
        return requests
    return requests.assign(**{"class": np.array(trace.classes.names)[trace.classes.number[requests["request"]]]})


def by_class(requests: pd.DataFrame, trace: Trace, slo: Slo, classes: Sequence[ServiceClass]) -> pd.DataFrame:
    """Tabulate what each class of requests got.

    Returns a row a class of the trace, columns ``CLASS_COLUMNS``; rates over the time of the whole run, from the first
    arrival to the last finish; times in s, shares [1].
    """
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
    """Tabulate what the requests of each model got, and those of all together.

    Returns a row a model and one of ``ALL``, columns ``MODEL_COLUMNS``; rates over the time of the whole run, those a
    GPU over the GPUs of the model, or over all; times in s, shares [1].
    """
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


#: Percentiles of a class. [1]
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
