"""Draw a day of arrivals and lengths from ServeGen client pools: per-client rates and histograms.

A pool is a folder, or a tar archive, with two files a client: ``chunk-N-trace.csv`` (no header; start of a window
[s], rate [request/s], coefficient of variation of the gaps, family of the gaps, its shape and scale) and
``chunk-N-dataset.json`` (start of a longer window [s] -> histograms of ``input_tokens`` and ``output_tokens``, each a
text such as ``"{39: 0.25, 40: 0.75}"``).

A client's windows are drawn one by one as stationary renewal processes at the rate and with the shape of the window,
its lengths from the two histograms independently, each client from a random stream of its own. The fitted scale is
not used: with it the mean gap differs from 1/rate, by a factor of up to 7 where gaps are very uneven.
Source: Xiang et al., "ServeGen", arXiv 2505.09999.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import LONGEST_SHOWN, InputError, TraceError, printable, quoted
from disagg_sim.reading import read_file, unpacked
from disagg_sim.units import MB
from disagg_sim.workload.arrivals import ArrivalProcess, Gamma, Weibull, arrivals, named_rng
from disagg_sim.workload.readers.columns import MOST_BYTES
from disagg_sim.workload.request_columns import Tokens
from disagg_sim.workload.trace import MOST_REQUESTS, too_many

#: How the name of an archive ends.
POOL_ENDS = (".tar", ".tar.gz", ".tgz")
_FILE = re.compile(r"(?:.*/)?chunk-(\d+)-(trace\.csv|dataset\.json)")


@dataclass(frozen=True, slots=True)
class _Window:
    start: float  # [s]
    end: float  # [s]
    rate: float  # [request/s]
    process: ArrivalProcess


@dataclass(frozen=True, slots=True)
class _Histogram:
    values: Tokens  # (bins,) [token]
    cumulative: Floats  # (bins,) ending at 1 [1]

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        return self.values[np.searchsorted(self.cumulative, rng.random(count), side="right")]


def draw_pool(path: Path, seed: int) -> tuple[Floats, Tokens, Tokens]:
    """Sorted arrivals [s], input and output lengths [token] of a day of all clients, each (requests,)."""
    files = _members(path)
    clients = sorted({client for client, _ in files})
    drawn, expected = [], 0.0
    for client in clients:
        for form in ("trace.csv", "dataset.json"):
            if (client, form) not in files:
                raise TraceError(f"{path}: no chunk-{client}-{form} beside the other file of client {client}")
        (where, text), (data_at, data) = files[client, "trace.csv"], files[client, "dataset.json"]
        windows, lengths = _windows(where, text.decode(errors="replace")), _lengths(data_at, data)
        expected += sum(window.rate * (window.end - window.start) for window in windows)
        if expected > MOST_REQUESTS:
            raise TraceError(too_many(where, expected))
        drawn.append(_draw_client(data_at, windows, lengths, named_rng(seed, f"servegen/{client}")))
    times, inputs, outputs = (np.concatenate(column) for column in zip(*drawn, strict=True))
    if not times.size:
        raise TraceError(f"{path}: no client of the pool sends a request")
    order = np.argsort(times, kind="stable")
    return times[order], inputs[order], outputs[order]


def _members(path: Path) -> dict[tuple[int, str], tuple[str, bytes]]:
    """(client, form) -> name for messages and content of a file."""
    import tarfile

    found: dict[tuple[int, str], tuple[str, bytes]] = {}
    left = MOST_BYTES

    def content(file: IO[bytes]) -> bytes:
        nonlocal left
        text = file.read(left + 1)
        left -= len(text)
        if left < 0:
            raise TraceError(f"{path}: its files hold more than {MOST_BYTES / MB:,.0f} MB, the largest file read")
        return text

    try:
        if path.is_dir():
            for each in sorted(path.rglob("chunk-*")):
                if match := _FILE.fullmatch(each.name):
                    found[int(match[1]), match[2]] = (str(each), content(io.BytesIO(read_file(each, MOST_BYTES))))
        else:
            packed = io.BytesIO(unpacked(read_file(path, MOST_BYTES), MOST_BYTES))
            with tarfile.open(fileobj=packed, mode="r:") as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() else None
                    if stream and (match := _FILE.fullmatch(member.name)):
                        found[int(match[1]), match[2]] = (f"{path}:{member.name}", content(stream))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise TraceError(f"{path}: no chunk-N-trace.csv in it, as a client pool has")
    return found


def _windows(where: str, text: str) -> list[_Window]:
    """Windows of a client with traffic; each ends where the next begins, the last is as long as the one before."""
    rows = [(line, row) for line, row in enumerate(csv.reader(text.splitlines()), start=1) if row]
    windows = []
    starts = [_number(where, line, row, 0) for line, row in rows]
    for place, (line, row) in enumerate(rows):
        rate = _number(where, line, row, 1)
        if not rate:
            continue
        if place + 1 < len(rows):
            end = starts[place + 1]
        elif place:
            end = 2 * starts[place] - starts[place - 1]
        else:
            raise TraceError(f"{where}:{line}: a single window has no length; allowed: two windows or more")
        if not end > starts[place]:
            raise TraceError(f"{where}:{line}: windows must ascend; the next one starts at {end:g} s")
        windows.append(_Window(starts[place], end, rate, _process(where, line, row)))
    return windows


def _process(where: str, line: int, row: list[str]) -> ArrivalProcess:
    family, shape = row[3].strip() if len(row) > 3 else "", _number(where, line, row, 4)
    try:
        if family == "Gamma" and shape > 0:
            return Gamma(1 / math.sqrt(shape))
        if family == "Weibull":
            return Weibull(shape)
    except InputError:
        pass
    allowed = "Gamma or Weibull, shape above 0"
    raise TraceError(f"{where}:{line}: gaps {quoted(family)} of shape {shape:g}; allowed: {allowed}")


def _number(where: str, line: int, row: list[str], column: int) -> float:
    text = row[column] if column < len(row) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(f"{where}:{line}: column {column + 1} is {quoted(text)}; allowed: a number from 0")
    return value


def _lengths(where: str, content: bytes) -> Mapping[float, tuple[_Histogram | None, _Histogram | None]]:
    """Start of a window [s] -> histograms of input and output; ``None`` for an empty one."""
    try:
        windows = json.loads(content)
        return {
            float(start): (_histogram(window["input_tokens"]), _histogram(window["output_tokens"]))
            for start, window in windows.items()
        }
    except (RecursionError, MemoryError):
        raise TraceError(f"{where}: malformed: nested too deeply") from None
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError) as error:
        said = printable(str(error)[:LONGEST_SHOWN])
        raise TraceError(f"{where}: malformed: {type(error).__name__}: {said}") from None


def _histogram(text: str) -> _Histogram | None:
    shares = ast.literal_eval(text)
    if not shares:
        return None
    values = np.array(list(shares.keys()))
    weights: NDArray[np.float64] = np.array(list(shares.values()), dtype=np.float64)
    if values.dtype.kind != "i" or values.min() < 0 or not (weights.min() >= 0 and 0 < weights.sum() < math.inf):
        raise ValueError("a histogram needs whole lengths from 0 with shares from 0")
    cumulative = np.cumsum(weights)
    return _Histogram(values.astype(np.int64), cumulative / cumulative[-1])


def _draw_client(
    where: str,
    windows: list[_Window],
    lengths: Mapping[float, tuple[_Histogram | None, _Histogram | None]],
    rng: np.random.Generator,
) -> tuple[Floats, Tokens, Tokens]:
    starts = np.array(sorted(lengths))
    times, inputs, outputs = [np.zeros(0)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for window in windows:
        place = int(np.searchsorted(starts, window.start, side="right")) - 1
        first, second = lengths[starts[place]] if place >= 0 else (None, None)
        if first is None or second is None:
            raise TraceError(f"{where}: no lengths for the requests from {window.start:g} s on")
        try:
            found = window.start + arrivals(window.process, rng, window.rate, duration=window.end - window.start)
        except InputError as error:
            raise TraceError(f"{where}: window from {window.start:g} s on: {error}") from None
        times.append(found)
        inputs.append(first.draw(rng, found.size))
        outputs.append(second.draw(rng, found.size))
    return np.concatenate(times), np.concatenate(inputs), np.concatenate(outputs)
