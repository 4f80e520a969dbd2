"""Read the requests of a file a window at a time, so that it need not fit into memory.

The file has the columns of the plain form, ``arrival_s``, ``input_tokens`` and ``output_tokens``, in the order of
arrival: Parquet, lines of JSON with these keys, or CSV.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.errors import TraceError, nearest, quoted
from disagg_sim.parquet import parquet_rows, read_parquet
from disagg_sim.reading import bounded
from disagg_sim.workload.readers.clock import require_unit
from disagg_sim.workload.stream import WINDOW, Piece, TraceStream
from disagg_sim.workload.trace import MOST_TOKENS

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
#: Kinds of files by what their names end in.
PARQUET, LINES, TABLE = ".parquet", ".jsonl", ".csv"


@dataclass(frozen=True, slots=True)
class FileRows:
    """The first ``requests`` rows of a file, or all; ``stream.RequestSource``."""

    path: Path
    requests: int | None

    def pieces(self, most: int) -> Iterator[Piece]:
        """See ``stream.RequestSource``; the first request arrives at 0."""
        count, start = 0, math.nan
        left = math.inf if self.requests is None else self.requests
        for rows in self._frames(most):
            frame = rows if len(rows) <= left else rows.head(int(left))
            for name in COLUMNS:
                if name not in frame.columns:
                    known = [str(each) for each in frame.columns]
                    raise TraceError(
                        f"{self.path}: no column {name!r}{nearest(name, known)}; it has {', '.join(known)}"
                    )
            times, inputs, outputs = (self._numbers(frame[name], name, count) for name in COLUMNS)
            if count == 0:
                start = float(times[0])
                require_unit(self.path, COLUMNS[0], start, "s", whole=False)
            yield Piece(times - start, inputs.astype(np.int64), outputs.astype(np.int64))
            count, left = count + len(frame), left - len(frame)
            if left <= 0:
                return

    def _frames(self, most: int) -> Iterator[pd.DataFrame]:
        """Rows as they stand in the file, none of them without any."""
        try:
            if self.path.suffix == PARQUET:
                for begin in range(0, parquet_rows(self.path), most):
                    yield read_parquet(self.path, rows=(begin, begin + most))
            elif self.path.suffix == LINES:
                text: Any = io.TextIOWrapper(bounded(self.path), encoding="utf-8")
                with text, pd.read_json(text, lines=True, chunksize=most, dtype=False) as found:
                    yield from filter(len, found)
            else:
                plain: dict[str, Any] = {"dtype": str, "keep_default_na": False}
                with bounded(self.path) as file, pd.read_csv(file, **plain, chunksize=most) as rows:
                    yield from filter(len, rows)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, TraceError):
                raise
            said = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise TraceError(f"{self.path}: cannot be read: {said}") from None

    def _numbers(self, values: pd.Series[float], name: str, before: int) -> Floats:
        """A column of a window; ``TraceError`` for the first row with another value."""
        numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
        if name == COLUMNS[0]:
            good, allowed = (numbers >= 0) & (numbers < math.inf), "numbers from 0 s on"
        else:
            good = (numbers >= 1) & (numbers <= MOST_TOKENS) & (numbers == np.rint(numbers))
            allowed = f"whole numbers from 1 to {MOST_TOKENS} tokens"
        if not good.all():
            row = int(np.argmin(good))
            said = quoted(str(values.iloc[row]))
            raise TraceError(f"{self.path}: request {before + row + 1}: {name} {said}; allowed: {allowed}")
        return numbers


def stream_trace(path: str | Path, *, window: int = WINDOW, requests: int | None = None, name: str = "") -> TraceStream:
    """Read a trace from a file a window at a time.

    Parameters
    ----------
    path
        A file in Parquet (``.parquet``), lines of JSON (``.jsonl``) or CSV (``.csv``) with columns ``arrival_s``,
        ``input_tokens`` and ``output_tokens``, in the order of arrival.
    window
        Requests that are held at a time; no number depends on it. [request]
    requests
        The first so many; None = all. [request]
    name
        Of the trace; that of the file by default.

    Returns
    -------
    TraceStream
        For ``simulate`` with ``records`` ``stream`` or ``none``. Its first request arrives at 0.

    Raises
    ------
    TraceError
        Another kind of file, here; one that cannot be read, lacks a column or holds another value, when it is read.

    Examples
    --------
    >>> import tempfile
    >>> from disagg_sim.parquet import write_parquet
    >>> rows = pd.DataFrame({"arrival_s": [5.0, 6.5], "input_tokens": [512, 64], "output_tokens": [10, 20]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_parquet(rows, f"{folder}/day.parquet", {})
    ...     stream = stream_trace(f"{folder}/day.parquet", window=1)
    ...     [each.arrival.tolist() for each in stream.windows()]
    [[0.0], [1.5]]
    """
    path = Path(path)
    if path.suffix not in (PARQUET, LINES, TABLE):
        raise TraceError(f"{path}: cannot be read in windows; allowed: {PARQUET}, {LINES}, {TABLE}")
    return TraceStream(name=name or path.name.split(".")[0], window=window, source=FileRows(path, requests))
