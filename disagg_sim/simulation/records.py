"""Records of a run: columns of requests, samples in time, instances, decisions; what its requests got in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.notebook import Shown
from disagg_sim.techniques.availability.play import Failure


class Outcome(IntEnum):
    """How a request ended; each does so exactly once."""

    COMPLETED = 0
    REJECTED = 1  # refused at arrival: too large for every instance, or by the policy
    FAILED = 2  # its instance failed, or was stopped without draining
    UNFINISHED = 3  # the run was cut short


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoads:
    """What prompts found in tiers below HBM; arrays of shape (requests,) or (requests, tiers)."""

    names: tuple[str, ...]  # of the tiers, the fastest first
    tokens: Ints  # loaded from each [token]
    bytes: Floats  # the same [B]
    load_s: Floats  # from the placement of a request until its past was in HBM, waits included [s]
    computed_again: Ints  # found below HBM, but sooner computed than loaded [token]

    @property
    def columns(self) -> dict[str, Ints | Floats]:
        """Columns beside those of the requests."""
        found: dict[str, Ints | Floats] = {}
        for place, name in enumerate(self.names):
            found |= {f"{name}_tokens": self.tokens[:, place], f"{name}_bytes": self.bytes[:, place]}
        return found | {"load_s": self.load_s, "computed_again": self.computed_again}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits and priority of every request, shape (requests,)."""

    ttft: Floats  # [s]
    tpot: Floats  # [s]
    priority: Ints  # [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """One row a request, in order of the trace; times that did not happen are NaN, instances -1."""

    request: Ints  # index in the trace [1]
    arrival_s: Floats  # [s]
    input_tokens: Ints  # [token]
    output_tokens: Ints  # [token]
    status: Ints  # ``Outcome`` [1]
    prefill_instance: Ints  # of the segment that emitted the first token [1]
    decode_instance: Ints  # of the last segment [1]
    prefill_start_s: Floats  # first step that worked on it [s]
    prefill_end_s: Floats  # its prompt is computed: the first token, or the one that its decode instance emits anew [s]
    first_token_s: Floats  # [s]
    transfer_s: Floats  # of its cache between instances, in all [s]
    exposed_transfer_s: Floats  # part of it that the request waited for [s]
    reserve_wait_s: Floats  # before it, for blocks of the receiver [s]
    decode_start_s: Floats  # first step on the last instance, not before the first token [s]
    finish_s: Floats  # last token [s]
    preemptions: Ints  # [1]
    cached_tokens: Ints  # of the prompt, found in the prefix cache [token]
    segments: Ints  # instances' turns that it took [1]
    transferred_tokens: Ints  # cached tokens that crossed between instances [token]
    migrations: Ints  # times that it began again elsewhere, its instance gone [1]
    loads: TierLoads | None = None  # None = no tiers below HBM
    late_gaps: Ints | None = None  # above ``gap_limit_s`` of the run; None = there is no limit [1]


#: Records whose columns are arrays of as many rows.
Table = TypeVar("Table", bound="Requests | Instances | TierLoads | RequestLimits")


def rows_of(records: Table, rows: Any) -> Table:
    """Take some rows of all columns, by a slice, a mask or their numbers."""
    columns: dict[str, Any] = {field.name: getattr(records, field.name) for field in fields(records)}
    found = {name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)}
    found |= {name: rows_of(one, rows) for name, one in columns.items() if isinstance(one, TierLoads)}
    return replace(records, **found)


def one_table(records: Sequence[Table]) -> Table:
    """Put tables one behind the other."""
    columns = {field.name: [getattr(each, field.name) for each in records] for field in fields(records[0])}
    found: dict[str, Any] = {
        name: np.concatenate(own) for name, own in columns.items() if isinstance(own[0], np.ndarray)
    }
    found |= {name: one_table(own) for name, own in columns.items() if isinstance(own[0], TierLoads)}
    return replace(records[0], **found) if len(records) > 1 else records[0]


#: Of each ``Outcome``.
WORDS = np.array([outcome.name.lower() for outcome in Outcome])


def frame_of(requests: Requests) -> pd.DataFrame:
    """Tabulate requests, a row each: columns of ``Requests`` and of its ``loads``, ``status`` in words."""
    columns: dict[str, Any] = {}
    for each in fields(requests):
        value = getattr(requests, each.name)
        columns |= value.columns if isinstance(value, TierLoads) else {} if value is None else {each.name: value}
    return pd.DataFrame(columns | {"status": WORDS[requests.status]})


def requests_of(frame: pd.DataFrame) -> Requests:
    """Read the rows of ``frame_of``, without loads and late gaps."""
    columns: dict[str, Any] = {
        each.name: frame[each.name].to_numpy() for each in fields(Requests) if each.default is MISSING
    }
    number = {word: place for place, word in enumerate(WORDS)}
    return Requests(**columns | {"status": frame["status"].map(number).to_numpy()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The state at times a fixed period apart; shape (samples,) each."""

    time_s: Floats  # [s]
    arrivals: Ints  # so far [request]
    finished: Ints  # so far [request]
    queued: Ints  # requests that wait for their prefill [request]
    running: Ints  # requests that decode [request]
    kv_use: Floats  # used over all KV blocks of instances in service [1]
    gpus: Ints  # held by instances, starting and draining ones included [1]
    prefill_gpus: Ints  # of them with the role of prefill [1]
    decode_gpus: Ints  # of them with the role of decode, or of both [1]
    transfers: Ints  # in flight [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """One row an instance that ever held GPUs."""

    role: Ints  # at the end; ``policy.Role`` [1]
    gpus: Ints  # [1]
    start_s: Floats  # when it took its GPUs [s]
    stop_s: Floats  # when it gave them back, or the end of the run [s]
    busy_s: Floats  # in steps [s]
    decode_steps: Ints  # steps that held a decode [1]
    decode_s: Floats  # time of those steps [s]
    prefill_tokens: Ints  # prompt tokens computed, recomputation included [token]
    decode_tokens: Ints  # output tokens of decode steps [token]
    flops: Floats  # useful work [FLOP]
    flips: Ints  # changes of role [1]
    kv_blocks: Ints  # [block]
    failed_s: Floats  # out of service after failures, its GPUs held [s]

    @property
    def gpu_s(self) -> Floats:
        """GPU-seconds held. [s]"""
        return self.gpus * (self.stop_s - self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeUse:
    """What an encode pool held and did."""

    gpus: int  # an instance each [1]
    held_s: float  # all of them, to the end of the run [s]
    busy_s: float  # of all together [s]
    flops: float  # useful work [FLOP]

    @property
    def gpu_s(self) -> float:
        """GPU-seconds held. [s]"""
        return self.gpus * self.held_s


class Decision(NamedTuple):
    """One line of the decision log."""

    time_s: float  # [s]
    kind: str  # "flip", "start", "stop", "move", "limits"; "failure", which nobody decided
    instance: int  # that it changed, or started
    wish: str  # in words
    reason: str  # the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Several models of a cluster, and which of them is whose."""

    names: tuple[str, ...]
    request: Ints  # (requests,) place of the model that each asked for among the names [1]
    instance: Ints  # (instances,) of the one that each served [1]


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


def latencies(records: Requests) -> tuple[Floats, Floats]:
    """Compute TTFT and TPOT of the completed requests among some records; TPOT 0 of a single token. [s], [s]"""
    done = records.status == Outcome.COMPLETED
    first, finish = records.first_token_s[done], records.finish_s[done]
    return first - records.arrival_s[done], (finish - first) / np.maximum(records.output_tokens[done] - 1, 1)


def quantile(values: Floats | Sketch, share: float) -> float:
    """The value below which ``share`` [1] of all lies, in proportion between two ranks; NaN of no values."""
    if isinstance(values, Sketch):
        return values.percentile(share)
    return float(np.quantile(values, share)) if len(values) else math.nan


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
    ttft: Floats | Sketch = field(default_factory=Sketch)  # of those that were completed [s]
    tpot: Floats | Sketch = field(default_factory=Sketch)  # [s]


def totals_of(records: Requests, limits: Slo | RequestLimits) -> Totals:
    """Add up records, whose latencies are kept; the limits are those of all requests, or of each."""
    done = records.status == Outcome.COMPLETED
    (ttft, tpot), output = latencies(records), records.output_tokens[done]
    most = limits if isinstance(limits, Slo) else rows_of(limits, done)
    inside = (ttft <= most.ttft) & (tpot <= most.tpot)
    moved = records.transferred_tokens > 0
    arrived = records.arrival_s[~np.isnan(records.arrival_s)]
    return Totals(
        ended=np.bincount(records.status, minlength=len(Outcome)),
        inside=int(inside.sum()),
        inside_tokens=int(output[inside].sum()),
        output_tokens=int(output.sum()),
        first_arrival_s=float(arrived.min(initial=math.inf)),
        last_finish_s=float(records.finish_s[done].max(initial=-math.inf)),
        preemptions=int(np.sum(records.preemptions)),
        migrated=int(np.count_nonzero(records.migrations)),
        transfers=int(moved.sum()),
        transfer_s=float(np.sum(records.transfer_s[moved])),
        exposed_transfer_s=float(np.sum(records.exposed_transfer_s[moved])),
        ttft=ttft,
        tpot=tpot,
    )


def added(first: Totals, second: Totals) -> Totals:
    """Add up totals whose latencies are in sketches, and others: so that no value is kept."""
    ttft, tpot = (each if isinstance(each, Sketch) else Sketch().counted(each) for each in (second.ttft, second.tpot))
    second = replace(second, ttft=ttft, tpot=tpot)
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
        """The requests as a table, see ``frame_of``; with ``model`` where there are several."""
        found = frame_of(self.requests)
        if self.models is None:
            return found
        place = list(found).index("migrations") + 1
        found.insert(place, "model", np.array(self.models.names)[self.models.request])
        return found
