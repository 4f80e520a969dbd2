"""Load the traces of a scenario: files, synthetic requests or synthetic sessions, each at several rates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Tag

from disagg_sim.facts import load
from disagg_sim.facts.faults import SeveralFaultsError, expected
from disagg_sim.facts.schema import Axis, OneOf, PlainName, Range, Strict, Written, one_of, plain_name
from disagg_sim.reading import as_file
from disagg_sim.workload.arrivals import ArrivalProcess, Gamma, Mmpp, Poisson
from disagg_sim.workload.readers.clock import TIME_UNITS
from disagg_sim.workload.readers.load import ROLES, load_trace
from disagg_sim.workload.readers.windows import stream_trace
from disagg_sim.workload.scaling import SCALE_BY, SHIFT_S, TIME, at_rate, with_classes, with_models
from disagg_sim.workload.stream import MOST_STREAMED, TraceStream, in_memory
from disagg_sim.workload.synthetic import session_trace, synthetic_stream, synthetic_trace
from disagg_sim.workload.trace import Trace

SYNTHETIC, SESSIONS = "synthetic", "sessions"

_Rate = Annotated[float, Range(1e-6, 1e6)]
_Seconds = Annotated[float, Range(0.0, 1e9, "s")]
_Size = Annotated[float, Range(0.0, 1e6)]
#: What a column is for -> its header in the file.
_Columns = dict[Annotated[str, OneOf(ROLES)], str]
#: Class of requests -> its share of them.
_Shares = dict[PlainName, Annotated[float, Range(1e-6, 1e6)]]
#: Models and their shares of the requests, or classes and the models and shares of each.
ModelShares = tuple[tuple[str, float | tuple[tuple[str, float], ...]], ...]
_OfModels = dict[Annotated[str, load.spec_name("model")], Annotated[float, Range(1e-6, 1e6)]]
_ByClass = dict[PlainName, _OfModels]
_Models: Any = Annotated[
    Annotated[_ByClass, Tag("class")] | Annotated[_OfModels, Tag("model")],
    one_of(
        lambda value: (
            None
            if not isinstance(value, Mapping)
            else "class"
            if any(isinstance(each, Mapping) for each in value.values())
            else "model"
        ),
        "neither shares of models nor models of classes",
    ),
]
_Requests = Annotated[int | None, Range(1, 10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Requests with independent lengths, or sessions, that come by a process at a rate."""

    lengths: str | tuple[int, int]  # name of a shipped traffic, or constant (ISL, OSL) of requests [token]
    rate: float  # mean [request/s] or [session/s]
    count: int | None  # how many requests, or sessions [1], or
    duration: float | None  # how long [s]
    process: ArrivalProcess
    of_sessions: bool = False

    def draw(self, seed: int, name: str, window: int = 0) -> Trace | TraceStream:
        """The trace of one seed; of a ``window`` above 0 [request] so many of its requests at a time."""
        drawn: dict[str, Any] = {"rate": self.rate, "duration": self.duration, "arrivals_as": self.process}
        drawn |= {"seed": seed, "name": name}
        traffic = load.load_traffic(self.lengths) if isinstance(self.lengths, str) else None
        if self.of_sessions:
            assert traffic is not None
            return session_trace(traffic, sessions=self.count, **drawn)
        drawn |= {"lengths": self.lengths if traffic is None else traffic.cases[0], "requests": self.count}
        return synthetic_stream(**drawn, window=window) if window else synthetic_trace(**drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """Where a trace comes from, which part of it is replayed, and at which rates."""

    name: str
    path: str = ""  # of a file; "" = synthetic
    kind: str = "auto"  # of the file
    columns: tuple[tuple[str, str], ...] = ()  # what its columns are for and their headers, where they are others
    time_unit: str = ""  # that its times count in; "" = that of its kind
    spread: bool = True  # Mooncake: spread the batches of one instant evenly
    sessions: bool = True  # later turns of a session wait for those before them
    rate: float | None = None  # of a table without arrivals [request/s]
    synthetic: Synthetic | None = None
    requests: int | None = None  # the first so many of the part; None = all [request]
    span: tuple[float, float] | None = None  # part of the file, from its first request on; None = all [s]
    start: float = 0.0  # when the first request of the file arrives [s]
    rate_scales: tuple[float, ...] = (1.0,)  # [1]
    scale_by: str = TIME  # of ``SCALE_BY``: what makes the rate another
    shift_s: float = SHIFT_S  # by how much copies of the trace are rotated at most [s]
    classes: tuple[tuple[str, float], ...] = ()  # classes of requests and their shares [1]; none = those of the file
    models: ModelShares = ()  # models that requests ask for, or classes and theirs; none = those of the file
    window: int = 0  # most requests that are held at a time where a run allows it; 0 = all [request]

    def load(self, seed: int) -> Trace | TraceStream:
        """The trace at its own rate; a file is read once for each of its versions."""
        return _load(self, seed, _version(self.path))

    def at_rate(self, seed: int, scale: float) -> Trace | TraceStream:
        """The trace at ``scale`` times its rate, under its name here."""
        loaded = self.load(seed)
        if isinstance(loaded, TraceStream):
            loaded.count  # noqa: B018 - what is known of a stream at its own rate is known at others
            return at_rate(loaded, scale, self.scale_by)
        scaled = at_rate(loaded, scale, self.scale_by, seed=seed, shift_s=self.shift_s)
        return replace(scaled, name=self.name)

    def of_length(self, count: int) -> TraceSource:
        """The same with so many requests, or sessions where it draws sessions; the first so many of a file."""
        drawn = None if self.synthetic is None else replace(self.synthetic, count=count, duration=None)
        return replace(self, requests=count, synthetic=drawn)

    def content(self) -> str:
        """Digest of what the file holds; empty for a synthetic trace, whose values say all."""
        return _content(self.path, _version(self.path)) if self.path else ""


def _version(path: str) -> int:
    """Changes when a file does; 0 where there is none."""
    return Path(path).stat().st_mtime_ns if path and Path(path).exists() else 0


@lru_cache(maxsize=8)
def _content(path: str, version: int) -> str:  # noqa: ARG001 - a new version is another entry
    files = sorted(each for each in Path(path).rglob("*") if each.is_file()) or [Path(path)]
    digest = hashlib.sha256()
    for each in files:
        with each.open("rb") as file:
            while part := file.read(2**20):  # of a file that may be larger than the memory
                digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=8)
def _load(
    source: TraceSource,
    seed: int,
    version: int,  # noqa: ARG001 - a new version is another entry
) -> Trace | TraceStream:
    if source.window and source.synthetic is not None:
        return source.synthetic.draw(seed, source.name, source.window)
    if source.window:
        return stream_trace(source.path, window=source.window, requests=source.requests, name=source.name)
    trace = _read_or_drawn(source, seed)
    if source.classes:
        trace = with_classes(trace, dict(source.classes), seed=seed)
    if source.models:
        shares: Any = {name: dict(own) if isinstance(own, tuple) else own for name, own in source.models}
        trace = with_models(trace, shares, seed=seed)
    return trace


def _read_or_drawn(source: TraceSource, seed: int) -> Trace:
    if source.synthetic is not None:
        return in_memory(source.synthetic.draw(seed, source.name))
    trace = load_trace(
        source.path,
        source.kind,
        columns=dict(source.columns),
        time_unit=source.time_unit,
        spread=source.spread,
        sessions=source.sessions,
        rate=source.rate,
        seed=seed,
    )
    if source.span is not None:
        trace = trace.between(*source.span)
    if source.start:
        trace = replace(trace, arrival=trace.arrival + source.start)
    return trace if source.requests is None else trace.head(source.requests)


def _pairs(given: Mapping[str, Any]) -> ModelShares:
    return tuple((name, tuple(own.items()) if isinstance(own, Mapping) else own) for name, own in given.items())


class _Rates(Strict):
    """What all traces have."""

    name: PlainName = ""
    kind: str = "auto"
    rate_scale: Axis[_Rate] = (1.0,)
    scale_by: Annotated[str, OneOf(SCALE_BY)] = TIME
    shift_s: _Seconds = SHIFT_S
    classes: Annotated[tuple[tuple[str, float], ...], Written(_Shares, lambda given: tuple(given.items()))] = ()
    models: Annotated[ModelShares, Written(_Models, _pairs)] = ()


class _Common(_Rates):
    requests: _Requests = None
    rate_per_s: _Rate | None = None
    window: Annotated[int, Range(0, MOST_STREAMED)] = 0


class _FileKeys(_Common):
    """A trace from a file."""

    path: str
    columns: Annotated[tuple[tuple[str, str], ...], Written(_Columns, lambda given: tuple(given.items()))] = ()
    time_unit: Annotated[str, OneOf(TIME_UNITS)] = ""
    from_s: _Seconds | None = None
    to_s: _Seconds | None = None
    start_s: _Seconds = 0.0
    spread: bool = True
    sessions: bool = True


class _Constant(Strict):
    """Constant lengths."""

    isl: Annotated[int, Range(1, 10**9)]
    osl: Annotated[int, Range(1, 10**9)]


class _Bursts(Strict):
    """Two rates that take turns."""

    contrast: _Size
    share: _Size
    length_s: _Size


#: The name of a shipped traffic, whose first case counts, or ``{isl: 1024, osl: 128}``.
_Lengths: Any = Annotated[
    Annotated[str, load.spec_name("traffic"), Tag("name")]
    | Annotated[_Constant, AfterValidator(lambda lengths: (lengths.isl, lengths.osl)), Tag("constant")],
    one_of(
        lambda value: "name" if isinstance(value, str) else "constant" if isinstance(value, Mapping) else None,
        "neither {isl: ..., osl: ...} nor a traffic's name",
    ),
]


def _mmpp(bursts: _Bursts) -> Mmpp:
    return expected(partial(Mmpp, contrast=bursts.contrast, burst_share=bursts.share, burst_s=bursts.length_s))


class _Process(Strict):
    """How arrivals are drawn."""

    duration_s: Annotated[float | None, Range(1e-3, 1e9)] = None
    cv: Annotated[float | None, Range(0.0, 100.0)] = None
    bursts: Annotated[Mmpp | None, Written(_Bursts, _mmpp)] = None

    def process(self, count: int | None, counted: str) -> ArrivalProcess:
        """The process; ``ValueError`` unless it ends in one way and is one."""
        faults = []
        if (count is None) == (self.duration_s is None):
            faults.append(f"a synthetic trace has either '{counted}' or 'duration_s'")
        if self.cv is not None and self.bursts is not None:
            faults.append("'cv' and 'bursts' are two processes of arrivals; give one of them")
        if faults:
            raise SeveralFaultsError(((), fault) for fault in faults)
        return self.bursts or (Poisson() if self.cv is None else Gamma(self.cv))


class _SyntheticKeys(_Process, _Common):
    """A trace drawn from an arrival process and a distribution of lengths."""

    lengths: Annotated[str | tuple[int, int], Written(_Lengths, lambda lengths: lengths)]
    rate_per_s: _Rate


class _SessionKeys(_Process, _Rates):
    """Sessions drawn from a traffic that has some."""

    traffic: Annotated[str, load.spec_name("traffic")]
    sessions_per_s: _Rate
    sessions: _Requests = None


#: Keys that a source has under the same name, whatever it is of.
_SAME = ("kind", "requests")
#: Keys of a trace that need all its requests at once, whatever the window.
_OF_ALL = {"classes", "models"}
_OF_FILES = {"kind", "columns", "time_unit", "from_s", "to_s", "start_s", "spread", "sessions", "rate_per_s"}


def _of_file(keys: _FileKeys, info: Any) -> TraceSource:
    part = keys.from_s is not None or keys.to_s is not None
    found = TraceSource(
        name=keys.name or plain_name(_stem(keys.path)),
        path=_path_of(info.context.folder / keys.path),
        rate=keys.rate_per_s,
        **{name: getattr(keys, name) for name in (*_SAME, "columns", "time_unit", "spread", "sessions")},
        window=_window(keys, _OF_ALL | _OF_FILES),
        span=(keys.from_s or 0.0, 1e9 if keys.to_s is None else keys.to_s) if part else None,
        start=keys.start_s,
    )
    return _read(found, keys, info)


def _window(keys: _Common, whole: set[str]) -> int:
    """Most requests that are held at a time; 0, all of them, where a key is given that needs these. [request]"""
    return 0 if whole & keys.model_fields_set or keys.scale_by != TIME else keys.window


def _drawn(keys: _SyntheticKeys, info: Any) -> TraceSource:
    drawn = Synthetic(
        lengths=keys.lengths,
        rate=keys.rate_per_s,
        count=keys.requests,
        duration=keys.duration_s,
        process=keys.process(keys.requests, "requests"),
    )
    found = TraceSource(
        name=keys.name or SYNTHETIC,
        rate=keys.rate_per_s,
        synthetic=drawn,
        **{name: getattr(keys, name) for name in _SAME},
        window=_window(keys, _OF_ALL),
    )
    return _read(found, keys, info)


def _begun(keys: _SessionKeys, info: Any) -> TraceSource:
    drawn = Synthetic(
        lengths=keys.traffic,
        rate=keys.sessions_per_s,
        count=keys.sessions,
        duration=keys.duration_s,
        process=keys.process(keys.sessions, "sessions"),
        of_sessions=True,
    )
    return _read(TraceSource(name=keys.name or keys.traffic, kind=keys.kind, synthetic=drawn), keys, info)


def _read(found: TraceSource, keys: _Rates, info: Any) -> TraceSource:
    """A source with its rates, which was read once to find its faults, unless another takes its place."""
    source = replace(found, rate_scales=keys.rate_scale, **_scaling_of(keys))
    if not info.context.instead:
        for extreme in {min(source.rate_scales), max(source.rate_scales)}:  # the longest, the most requests
            expected(partial(source.at_rate, 0, extreme))
    return source


def _scaling_of(known: _Rates | TraceSource) -> dict[str, Any]:
    """How a trace is scaled, and what its requests ask for."""
    return {name: getattr(known, name) for name in ("scale_by", "shift_s", "classes", "models")}


def _form(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return None
    kind = value.get("kind")
    return kind if kind in (SYNTHETIC, SESSIONS) else "file"


#: A trace of a scenario: ``{path: ...}``, ``{kind: synthetic, lengths: ..., rate_per_s: ...}``, or
#: ``{kind: sessions, traffic: ..., sessions_per_s: ...}``.
TraceKeys: Any = Annotated[
    Annotated[_FileKeys, AfterValidator(_of_file), Tag("file")]
    | Annotated[_SyntheticKeys, AfterValidator(_drawn), Tag(SYNTHETIC)]
    | Annotated[_SessionKeys, AfterValidator(_begun), Tag(SESSIONS)],
    one_of(_form, "not a mapping of keys such as path, rate_scale"),
]


def replacing(path: str, sources: tuple[TraceSource, ...]) -> tuple[TraceSource, ...]:
    """Replace traces by a file, at the same rates, scaled as the first, under its name; ``ValueError`` for faults."""
    rates = tuple(dict.fromkeys(scale for source in sources for scale in source.rate_scales)) or (1.0,)
    source = TraceSource(name=plain_name(_stem(path)), path=_path_of(path), rate_scales=rates)
    if sources:
        source = replace(source, **_scaling_of(sources[0]))
    expected(source.load, 0)
    return (source,)


def _path_of(path: str | Path) -> str:
    """A path that workers can read; ``ValueError`` where nothing comes out of a pipe."""
    try:
        return as_file(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _stem(path: str) -> str:
    return Path(path).name.split(".")[0]
