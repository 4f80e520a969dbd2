"""Trace files to traces; ``docs/traces.md`` has their columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import TraceError, UnknownNameError, nearest
from disagg_sim.workload.columns import Table, read_bytes
from disagg_sim.workload.trace import Floats, PrefixBlocks, Tokens, Trace

#: Kind of a table -> columns by which it is known.
COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "csv": ("arrival_s", "input_tokens", "output_tokens"),
}


def load_trace(path: str | Path, kind: str = "auto") -> Trace:
    """A trace from a file.

    Parameters
    ----------
    path
        The file, gzipped or not.
    kind
        ``"azure"``, ``"burstgpt"`` or ``"csv"`` (arrival_s, input_tokens, output_tokens); ``"auto"`` tells them by
        the header.

    Raises
    ------
    TraceError, UnknownNameError
        A faulty file, with its line; an unknown kind.
    """
    if kind not in (*COLUMNS, "auto"):
        known = (*COLUMNS, "auto")
        raise UnknownNameError(f"unknown kind of trace {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")
    path = Path(path)
    table = Table(path, read_bytes(path))
    if kind == "auto":
        kind = max(COLUMNS, key=lambda each: sum(name in table.header for name in COLUMNS[each]))
    table.require(COLUMNS[kind])
    return _READERS[kind](table)


def _azure(table: Table) -> Trace:
    """Clock times; the earliest is 0."""
    import pandas as pd

    times = pd.to_datetime(table.text("TIMESTAMP"), errors="coerce", format="ISO8601", utc=True)
    table.refuse(times.isna().to_numpy(), "TIMESTAMP", "is not a date and time")
    seconds = np.asarray((times - times.min()) / pd.Timedelta(seconds=1), dtype=np.float64)
    return assemble(table.path, seconds, table.tokens("ContextTokens"), table.tokens("GeneratedTokens"))


def _burstgpt(table: Table) -> Trace:
    """Seconds as they are; a row without response tokens is a request that failed."""
    answers = table.tokens("Response tokens")
    return assemble(table.path, _arrivals(table, "Timestamp"), table.tokens("Request tokens"), answers)


def _csv(table: Table) -> Trace:
    arrivals = _arrivals(table, "arrival_s")
    return assemble(table.path, arrivals, table.tokens("input_tokens"), table.tokens("output_tokens"))


def _arrivals(table: Table, name: str) -> Floats:
    values = table.numbers(name)
    table.refuse(values < 0, name, "is negative; allowed: 0 s or later")
    return values


def assemble(
    path: Path,
    arrival: Floats,
    input_tokens: Tokens,
    output_tokens: Tokens,
    prefix: PrefixBlocks | None = None,
    notes: tuple[str, ...] = (),
) -> Trace:
    """The trace of a file's rows: sorted, without rows of zero tokens; the notes say what was done."""
    rows: NDArray[np.intp] = np.flatnonzero((input_tokens > 0) & (output_tokens > 0))
    dropped = int(arrival.size - rows.size)
    if not rows.size:
        raise TraceError(f"{path}: all {dropped} rows have zero tokens; allowed: one request or more")
    if dropped:
        notes = (*notes, f"dropped {dropped} of {arrival.size} rows with zero input or output tokens")
    if np.any(np.diff(arrival) < 0):
        first = int(np.argmax(np.diff(arrival) < 0)) + 2
        rows = rows[np.argsort(arrival[rows], kind="stable")]
        notes = (*notes, f"warning: arrivals were not sorted (first at request {first}); sorted")
    return Trace(
        arrival=arrival[rows], input_tokens=input_tokens[rows], output_tokens=output_tokens[rows],
        prefix=prefix.take(rows) if prefix else None, name=path.name.split(".")[0], notes=notes, dropped=dropped,
    )  # fmt: skip


_READERS: dict[str, Callable[[Table], Trace]] = {"azure": _azure, "burstgpt": _burstgpt, "csv": _csv}
