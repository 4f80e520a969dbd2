"""The traces of a scenario: files beside it, or synthetic ones; each at several rates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from disagg_sim.facts import load
from disagg_sim.sweep.reader import Reader
from disagg_sim.workload.arrivals import ArrivalProcess, Gamma, Mmpp, Poisson
from disagg_sim.workload.clock import TIME_UNITS
from disagg_sim.workload.readers import ROLES, load_trace
from disagg_sim.workload.synthetic import synthetic_trace
from disagg_sim.workload.trace import Trace

SYNTHETIC = "synthetic"
COMMON_KEYS = ("kind", "name", "rate_scale", "requests", "rate_per_s")
FILE_KEYS = ("path", "columns", "time_unit", "from_s", "to_s", "start_s", "spread", *COMMON_KEYS)
SYNTHETIC_KEYS = ("lengths", "duration_s", "cv", "bursts", *COMMON_KEYS)
BURST_KEYS = ("contrast", "share", "length_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Arrivals of a process at a rate, with independent lengths."""

    lengths: str | tuple[int, int]  # name of a shipped traffic, or constant (ISL, OSL) [token]
    rate: float  # mean [request/s]
    requests: int | None  # how many [request], or
    duration: float | None  # how long [s]
    process: ArrivalProcess

    def draw(self, seed: int, name: str) -> Trace:
        """The trace of one seed."""
        lengths: Any = self.lengths
        if isinstance(lengths, str):
            lengths = load.load_traffic(lengths).cases[0]
        return synthetic_trace(
            rate=self.rate,
            lengths=lengths,
            requests=self.requests,
            duration=self.duration,
            arrivals_as=self.process,
            seed=seed,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """Where a trace comes from, which part of it is replayed, and at which rates."""

    name: str
    path: str = ""  # of a file; "" = synthetic
    kind: str = "auto"  # of the file
    columns: tuple[tuple[str, str], ...] = ()  # what its columns are for and their headers, where they are others
    time_unit: str = ""  # that its times count in; "" = that of its kind
    spread: bool = True  # Mooncake: spread the batches of one instant evenly
    rate: float | None = None  # of a table without arrivals [request/s]
    synthetic: Synthetic | None = None
    requests: int | None = None  # the first so many of the part; None = all [request]
    span: tuple[float, float] | None = None  # part of the file, from its first request on; None = all [s]
    start: float = 0.0  # when the first request of the file arrives [s]
    rate_scales: tuple[float, ...] = (1.0,)  # [1]

    def load(self, seed: int) -> Trace:
        """The trace at its own rate; a file is read once for each of its versions."""
        return _load(self, seed, _version(self.path))

    def content(self) -> str:
        """Digest of what the file holds; empty for a synthetic trace, whose values say all."""
        return _content(self.path, _version(self.path)) if self.path else ""


def _version(path: str) -> int:
    """Changes when a file does; 0 where there is none."""
    return Path(path).stat().st_mtime_ns if path and Path(path).exists() else 0


@lru_cache(maxsize=8)
def _content(path: str, version: int) -> str:  # noqa: ARG001 - a new version is another entry
    files = sorted(each for each in Path(path).rglob("*") if each.is_file()) or [Path(path)]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


@lru_cache(maxsize=8)
def _load(source: TraceSource, seed: int, version: int) -> Trace:  # noqa: ARG001 - a new version is another entry
    if source.synthetic is not None:
        return source.synthetic.draw(seed, source.name)
    trace = load_trace(
        source.path,
        source.kind,
        columns=dict(source.columns),
        time_unit=source.time_unit,
        spread=source.spread,
        rate=source.rate,
        seed=seed,
    )
    if source.span is not None:
        trace = trace.between(*source.span)
    if source.start:
        trace = replace(trace, arrival=trace.arrival + source.start)
    return trace if source.requests is None else trace.head(source.requests)


def read_traces(reader: Reader, value: object, folder: Path, instead: str) -> tuple[TraceSource, ...]:
    """Traces of a document: a mapping, or a list of them.

    Parameters
    ----------
    reader : Reader
        Takes the faults.
    value : object
        What stands under ``trace``.
    folder : Path
        Directory that paths are relative to.
    instead : str
        A file in place of all traces, at their rates; "" = none. Its own name stands for it.
    """
    entries = value if isinstance(value, list) else [value]
    if not entries:
        reader.faults.append("trace: the list is empty")
    found = [
        _trace(reader, f"trace[{number}]" if isinstance(value, list) else "trace", entry, folder, bool(instead))
        for number, entry in enumerate(entries)
    ]
    sources = tuple(source for source in found if source is not None)
    if instead:
        rates = tuple(dict.fromkeys(scale for source in sources for scale in source.rate_scales)) or (1.0,)
        sources = (TraceSource(name=reader.plain_name("--trace", _stem(instead)), path=instead, rate_scales=rates),)
        reader.attempt("--trace", sources[0].load, 0)
    reader.distinct("trace", tuple(source.name for source in sources))
    return sources


def _stem(path: str) -> str:
    return Path(path).name.split(".")[0]


def _trace(reader: Reader, where: str, value: object, folder: Path, replaced: bool) -> TraceSource | None:
    """One trace, read once to find its faults unless another takes its place."""
    synthetic = isinstance(value, Mapping) and value.get("kind") == SYNTHETIC
    given = reader.mapping(where, value, SYNTHETIC_KEYS if synthetic else FILE_KEYS)
    if not isinstance(value, Mapping):
        return None
    known = len(reader.faults)

    def scale(key: str, each: object) -> float:
        return reader.number(key, each, low=1e-6, high=1e6)

    def second(key: str, default: float) -> float:
        return reader.number(f"{where}.{key}", given.get(key, default), low=0.0, high=1e9, unit="s")

    requests = reader.whole(f"{where}.requests", given["requests"], low=1, high=10**9) if "requests" in given else None
    default = SYNTHETIC if synthetic else _stem(str(given.get("path", "trace")))
    rate = None
    if "rate_per_s" in given:
        rate = reader.number(f"{where}.rate_per_s", given["rate_per_s"], low=1e-6, high=1e6)
    source = TraceSource(
        name=reader.plain_name(f"{where}.name", given.get("name", default)),
        path="" if synthetic else str(folder / str(given.get("path", ""))),
        kind=str(given.get("kind", "auto")),
        columns=_columns(reader, f"{where}.columns", given["columns"]) if "columns" in given else (),
        time_unit=reader.choice(f"{where}.time_unit", given["time_unit"], TIME_UNITS) if "time_unit" in given else "",
        spread=reader.flag(f"{where}.spread", given.get("spread", True)),
        rate=rate,
        synthetic=_synthetic(reader, where, given, requests, rate) if synthetic else None,
        requests=requests,
        span=(second("from_s", 0.0), second("to_s", 1e9)) if {"from_s", "to_s"} & {*given} else None,
        start=second("start_s", 0.0),
        rate_scales=reader.several(f"{where}.rate_scale", given.get("rate_scale", 1.0), scale),
    )
    if not synthetic and not isinstance(given.get("path"), str):
        reader.faults.append(f"{where}: missing key 'path', or kind: {SYNTHETIC}")
    elif not replaced and len(reader.faults) == known:
        reader.attempt(where, lambda: source.load(0).scaled(min(source.rate_scales)))  # the longest of all
    return source


def _columns(reader: Reader, where: str, value: object) -> tuple[tuple[str, str], ...]:
    """``{arrival: ts, input_tokens: prompt_len, output_tokens: gen_len}``, or some of these."""
    given = reader.mapping(where, value, ROLES)
    for role, header in given.items():
        if not isinstance(header, str):
            reader.faults.append(f"{where}.{role}: {header!r} is not the header of a column")
    return tuple((role, str(header)) for role, header in given.items())


def _synthetic(
    reader: Reader, where: str, given: Mapping[str, Any], requests: int | None, rate: float | None
) -> Synthetic:
    for key in ("lengths", "rate_per_s"):
        if key not in given:
            reader.faults.append(f"{where}: missing key {key!r}")
    if (requests is None) == ("duration_s" not in given):
        reader.faults.append(f"{where}: a synthetic trace has either 'requests' or 'duration_s'")
    if "cv" in given and "bursts" in given:
        reader.faults.append(f"{where}: 'cv' and 'bursts' are two processes of arrivals; give one of them")
    duration = given.get("duration_s")
    return Synthetic(
        lengths=_lengths(reader, f"{where}.lengths", given.get("lengths", {"isl": 1, "osl": 1})),
        rate=rate or 1.0,
        requests=requests,
        duration=None if duration is None else reader.number(f"{where}.duration_s", duration, low=1e-3, high=1e9),
        process=_process(reader, where, given),
    )


def _lengths(reader: Reader, where: str, value: object) -> str | tuple[int, int]:
    """The name of a shipped traffic, whose first case counts, or ``{isl: 1024, osl: 128}``."""
    if isinstance(value, str):
        return next(iter(reader.names(where, value, load.load_traffic)), value)
    given = reader.mapping(where, value, ("isl", "osl"))
    isl, osl = (reader.whole(f"{where}.{key}", given.get(key), low=1, high=10**9) for key in ("isl", "osl"))
    return isl, osl


def _process(reader: Reader, where: str, given: Mapping[str, Any]) -> ArrivalProcess:
    if "cv" in given:
        return Gamma(reader.number(f"{where}.cv", given["cv"], low=0.0, high=100.0))
    if "bursts" not in given:
        return Poisson()
    bursts = reader.mapping(f"{where}.bursts", given["bursts"], BURST_KEYS)
    contrast, share, length = (
        reader.number(f"{where}.bursts.{key}", bursts.get(key), low=0.0, high=1e6) for key in BURST_KEYS
    )
    found = reader.attempt(f"{where}.bursts", lambda: Mmpp(contrast=contrast, burst_share=share, burst_s=length))
    return found if isinstance(found, Mmpp) else Poisson()
