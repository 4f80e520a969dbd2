"""All that a run left behind, and what its requests got in all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import Slo
from disagg_sim.notebook import Shown
from disagg_sim.simulation.classes import RequestLimits
from disagg_sim.simulation.records import (
    Decision,
    EncodeUse,
    Instances,
    Models,
    Outcome,
    Requests,
    Samples,
    TierLoads,
    frame_of,
)
from disagg_sim.techniques.availability.play import Failure

#: Largest distance of a percentile from the one of the values themselves, as a share of it. [1]
RELATIVE_ERROR = 0.005
#: Range within which it holds; values below the first count as 0, those above the last as the last.
LEAST, MOST = 1e-6, 1e7
_RATIO = (1.0 + RELATIVE_ERROR) / (1.0 - RELATIVE_ERROR)
_BINS = math.ceil(math.log(MOST / LEAST) / math.log(_RATIO)) + 1


def _none() -> Ints:
    return np.zeros(_BINS, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Values counted in bins of equal ratio: percentiles have a bounded relative error, two are added bin by bin.

    C. Masson, J. E. Rim and H. K. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
    Guarantees", VLDB 2019. Bin i holds values in (g^(i-1), g^i], g = (1 + a)/(1 - a), and stands for 2 g^i/(g + 1): no
    value in it is further away than a share a of itself. Here the bins are fixed, so that a sketch is an array.
    """

    counts: Ints = field(default_factory=_none)  # of each bin; the first has all below ``LEAST`` [1]

    def __add__(self, other: Sketch) -> Sketch:
        """Both together."""
        return Sketch(self.counts + other.counts)

    def counted(self, values: Floats) -> Sketch:
        """With more values; shape (values,)."""
        with np.errstate(divide="ignore"):
            places = np.ceil(np.log(np.maximum(values, 0.0) / LEAST) / math.log(_RATIO))
        bins = np.clip(places, 0, _BINS - 1).astype(np.int64)
        return Sketch(self.counts + np.bincount(bins, minlength=_BINS))

    def percentile(self, share: float) -> float:
        """The value below which ``share`` [1] of all lies, in proportion between two ranks; NaN of no values."""
        below = np.cumsum(self.counts)
        if not below[-1]:
            return math.nan
        rank = share * (int(below[-1]) - 1)
        first = math.floor(rank)
        low, high = (_value(int(np.searchsorted(below, each, side="right"))) for each in (first, math.ceil(rank)))
        return low + (rank - first) * (high - low)


def _value(place: int) -> float:
    """What a bin stands for."""
    return LEAST * 2.0 * _RATIO**place / (_RATIO + 1.0) if place else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """TTFT and TPOT of every completed request, and what they add up to. Arrays of shape (completed,)."""

    ttft: Floats  # arrival to first token [s]
    tpot: Floats  # mean gap after the first token; 0 for a single token [s]
    output_tokens: Ints  # [token]

    def inside(self, slo: Slo) -> Mask:
        """Which requests meet both limits, inclusive."""
        return np.asarray((self.ttft <= slo.ttft) & (self.tpot <= slo.tpot))

    def within(self, ttft: Floats, tpot: Floats) -> Mask:
        """Which requests meet limits of their own, inclusive. [s]"""
        return np.asarray((self.ttft <= ttft) & (self.tpot <= tpot))


def latencies(records: Requests) -> Latencies:
    """Compute TTFT and TPOT of the completed requests among some records."""
    done = records.status == Outcome.COMPLETED
    first, finish = records.first_token_s[done], records.finish_s[done]
    output = records.output_tokens[done]
    return Latencies(
        ttft=first - records.arrival_s[done], tpot=(finish - first) / np.maximum(output - 1, 1), output_tokens=output
    )


class PercentileSource(Protocol):
    """Values of which percentiles are asked."""

    def percentile(self, share: float) -> float:
        """The value below which ``share`` [1] of all lies; NaN of no values."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """All of them, so that percentiles are exact.

    >>> Values(np.array([1.0, 2.0, 3.0, 4.0, 5.0])).percentile(0.9)
    4.6
    """

    values: Floats

    def percentile(self, share: float) -> float:
        """See ``PercentileSource``; in proportion between two ranks."""
        return float(np.quantile(self.values, share)) if len(self.values) else math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """What some requests got, all together."""

    ended: Ints = field(default_factory=lambda: np.zeros(len(Outcome), np.int64))  # by ``Outcome`` [request]
    inside: int = 0  # completed inside their limits [request]
    inside_tokens: int = 0  # output of these [token]
    output_tokens: int = 0  # of all that were completed [token]
    first_arrival_s: float = math.inf  # [s]
    last_finish_s: float = -math.inf  # [s]
    preemptions: int = 0  # [1]
    migrated: int = 0  # that began again elsewhere [request]
    transfers: int = 0  # that were transferred [request]
    transfer_s: float = 0.0  # of these, in all [s]
    exposed_transfer_s: float = 0.0  # of that, what delayed them [s]
    ttft: PercentileSource = field(default_factory=Sketch)  # of those that were completed [s]
    tpot: PercentileSource = field(default_factory=Sketch)  # [s]


def totals_of(records: Requests, slo: Slo, limits: RequestLimits | None = None) -> Totals:
    """Add up records, whose latencies are kept."""
    found, done = latencies(records), records.status == Outcome.COMPLETED
    inside = found.inside(slo) if limits is None else found.within(limits.ttft[done], limits.tpot[done])
    moved = records.transferred_tokens > 0
    arrived = records.arrival_s[~np.isnan(records.arrival_s)]
    return Totals(
        ended=np.bincount(records.status, minlength=len(Outcome)),
        inside=int(inside.sum()),
        inside_tokens=int(found.output_tokens[inside].sum()),
        output_tokens=int(found.output_tokens.sum()),
        first_arrival_s=float(arrived.min(initial=math.inf)),
        last_finish_s=float(records.finish_s[done].max(initial=-math.inf)),
        preemptions=int(np.sum(records.preemptions)),
        migrated=int(np.count_nonzero(records.migrations)),
        transfers=int(moved.sum()),
        transfer_s=float(np.sum(records.transfer_s[moved])),
        exposed_transfer_s=float(np.sum(records.exposed_transfer_s[moved])),
        ttft=Values(found.ttft),
        tpot=Values(found.tpot),
    )


def sketched(totals: Totals) -> Totals:
    """The same with latencies counted in sketches, so that no value is kept."""
    each = (totals.ttft, totals.tpot)
    ttft, tpot = (Sketch().counted(kept.values) if isinstance(kept, Values) else kept for kept in each)
    return replace(totals, ttft=ttft, tpot=tpot)


def added(first: Totals, second: Totals) -> Totals:
    """Add up two totals whose latencies are in sketches."""
    found = {each.name: getattr(first, each.name) + getattr(second, each.name) for each in fields(Totals)}
    found["first_arrival_s"] = min(first.first_arrival_s, second.first_arrival_s)
    found["last_finish_s"] = max(first.last_finish_s, second.last_finish_s)
    return Totals(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Shown):
    """All that a run left behind; metrics are computed from it alone."""

    policy: str  # its name
    deployment: str
    trace: str
    seed: int
    requests: Requests
    itl_edges: Floats  # of the gaps between tokens, shape (bins + 1,); the last bin is open above [s]
    itl_counts: Ints  # gaps, one a token after the first, shape (bins,) [token]
    samples: Samples
    instances: Instances
    decisions: tuple[Decision, ...]
    duration_s: float  # from 0 to the last event [s]
    peak_flops: float  # dense peak of one GPU in the arithmetic of the recipe's matrices [FLOP/s]
    wall_s: float  # of the simulation itself [s]
    cpu_s: float  # [s]
    failures: tuple[Failure, ...] = ()  # that happened
    models: Models | None = None  # None = one
    tier_loads: TierLoads | None = None  # None = no tiers below HBM
    late_gaps: Ints | None = None  # of each request, above ``gap_limit_s`` of the run; None = there is no limit [1]
    totals: Totals | None = None  # of requests that have left the run in pieces; ``requests`` has none of them then
    judged_by: Slo | None = None  # the limits that these totals were judged by [s]
    encode: EncodeUse | None = None  # None = no encode pool

    def gpus_by_model(self) -> dict[str, float]:
        """GPUs that the instances of each model held on average; none where there is one model. [1]"""
        if self.models is None:
            return {}
        held = np.bincount(self.models.instance, self.instances.gpu_s, minlength=len(self.models.names))
        return dict(zip(self.models.names, (held / self.duration_s).tolist(), strict=True))

    def frame(self) -> pd.DataFrame:
        """The requests as a table; ``status`` in words, and ``model`` or loads where there are several, or tiers."""
        model = {} if self.models is None else {"model": np.array(self.models.names)[self.models.request]}
        loads = {} if self.tier_loads is None else self.tier_loads.columns
        late = {} if self.late_gaps is None else {"late_gaps": self.late_gaps}
        return frame_of(self.requests).assign(**model | loads | late)
