"""Classes of service: requests with limits of latency and a priority of their own, and what each class got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, nearest
from disagg_sim.simulation.records import Outcome
from disagg_sim.workload.trace import Trace

#: Columns of ``by_class``, in its order.
CLASS_COLUMNS = (
    "class",
    "priority",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """What requests of one class are promised."""

    name: str
    slo: Slo  # [s]
    priority: int = 0  # below 0: may be turned away first [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits and priority of every request, shape (requests,)."""

    ttft: Floats  # [s]
    tpot: Floats  # [s]
    priority: Ints  # [1]


def limits_of(trace: Trace, slo: Slo, classes: Sequence[ServiceClass]) -> RequestLimits:
    """Look up the limits of every request.

    Parameters
    ----------
    trace
        With or without classes.
    slo
        Of requests whose class is not among ``classes``. [s]
    classes
        Those with limits of their own.

    Returns
    -------
    RequestLimits
        Shape (requests,).

    Raises
    ------
    InputError
        A class that the trace does not have.

    Examples
    --------
    >>> from disagg_sim.workload.request_columns import Labels
    >>> kinds = Labels(names=("chat", "batch"), number=[0, 1])
    >>> trace = Trace(arrival=[0.0, 1.0], input_tokens=[5, 9], output_tokens=[4, 4], classes=kinds)
    >>> batch = ServiceClass(name="batch", slo=Slo(ttft=60.0, tpot=1.0), priority=-1)
    >>> found = limits_of(trace, Slo(ttft=2.0, tpot=0.1), [batch])
    >>> found.ttft.tolist(), found.priority.tolist()
    ([2.0, 60.0], [0, -1])
    """
    own = {each.name: each for each in classes}
    names = trace.classes.names if trace.classes is not None else ()
    for name in own:
        if name not in names:
            known = ", ".join(names) or "none"
            raise InputError(f"class {name!r} is none of trace {trace.name}{nearest(name, names)}; it has {known}")
    usual = ServiceClass(name="", slo=slo)
    chosen = [own.get(name, usual) for name in names] or [usual]
    number = trace.classes.number if trace.classes is not None else np.zeros(len(trace), dtype=np.int64)
    return RequestLimits(
        ttft=np.array([each.slo.ttft for each in chosen])[number],
        tpot=np.array([each.slo.tpot for each in chosen])[number],
        priority=np.array([each.priority for each in chosen], dtype=np.int64)[number],
    )


def with_class(requests: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """Add the class of each request to the rows of ``RunResult.frame()``, where its trace has classes.

    Parameters
    ----------
    requests
        A row a request, in the order of ``trace``.
    trace
        That was served.

    Returns
    -------
    DataFrame
        With a last column ``class``, or as it was.

    Examples
    --------
    >>> from disagg_sim.workload.request_columns import Labels
    >>> kinds = Labels(names=("chat", "batch"), number=[1])
    >>> trace = Trace(arrival=[0.0], input_tokens=[5], output_tokens=[1], classes=kinds)
    >>> with_class(pd.DataFrame({"request": [0]}), trace).values.tolist()
    [[0, 'batch']]
    """
    if trace.classes is None:
        return requests
    return requests.assign(**{"class": np.array(trace.classes.names)[trace.classes.number]})


def by_class(requests: pd.DataFrame, trace: Trace, slo: Slo, classes: Sequence[ServiceClass]) -> pd.DataFrame:
    """Tabulate what each class of requests got.

    Parameters
    ----------
    requests
        Rows of ``RunResult.frame()``, in the order of ``trace``.
    trace
        That was served, with classes.
    slo, classes
        As of ``limits_of``.

    Returns
    -------
    DataFrame
        A row a class of the trace, columns ``CLASS_COLUMNS``; rates over the time of the whole run, from the first
        arrival to the last finish. Times in s, shares [1].

    Examples
    --------
    >>> from disagg_sim.workload.request_columns import Labels
    >>> kinds = Labels(names=("chat", "batch"), number=[0, 1])
    >>> trace = Trace(arrival=[0.0, 1.0], input_tokens=[5, 9], output_tokens=[1, 1], classes=kinds)
    >>> rows = pd.DataFrame({"arrival_s": [0.0, 1.0], "first_token_s": [3.0, 4.0], "finish_s": [3.0, 4.0]})
    >>> rows = rows.assign(output_tokens=1, status="completed")
    >>> batch = ServiceClass(name="batch", slo=Slo(ttft=60.0, tpot=1.0), priority=-1)
    >>> by_class(rows, trace, Slo(ttft=2.0, tpot=0.1), [batch])[["class", "slo_attainment"]].values.tolist()
    [['chat', 0.0], ['batch', 1.0]]
    """
    if trace.classes is None:
        raise InputError(f"trace {trace.name} has no classes; allowed: a column 'class', or with_classes")
    limits = limits_of(trace, slo, classes)
    ttft = (requests["first_token_s"] - requests["arrival_s"]).to_numpy()
    gaps = np.maximum(requests["output_tokens"].to_numpy() - 1, 1)
    tpot = (requests["finish_s"] - requests["first_token_s"]).to_numpy() / gaps
    done = (requests["status"] == Outcome.COMPLETED.name.lower()).to_numpy()
    inside = done & (ttft <= limits.ttft) & (tpot <= limits.tpot)
    span = float(requests["finish_s"].max() - requests["arrival_s"].min())
    rows = []
    for number, name in enumerate(trace.classes.names):
        own = trace.classes.number == number
        if not own.any():
            continue
        first, served, good = int(np.argmax(own)), own & done, own & inside
        rows.append(
            {
                "class": name,
                "priority": int(limits.priority[first]),
                "requests": int(own.sum()),
                "completed": int(served.sum()),
                "rejected": int((own & (requests["status"] == Outcome.REJECTED.name.lower()).to_numpy()).sum()),
                "slo_attainment": float(good.sum() / own.sum()),
                "goodput_requests_per_s": float(good.sum()) / span if span > 0 else np.nan,
                "goodput_tokens_per_s": float(requests["output_tokens"][good].sum()) / span if span > 0 else np.nan,
                **{f"ttft_{key}_s": _quantile(ttft[served], share) for key, share in SHARES.items()},
                **{f"tpot_{key}_s": _quantile(tpot[served], share) for key, share in SHARES.items()},
                "slo_ttft_s": float(limits.ttft[first]),
                "slo_tpot_s": float(limits.tpot[first]),
            }
        )
    return pd.DataFrame(rows, columns=list(CLASS_COLUMNS))


#: Percentiles of a class. [1]
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else np.nan
