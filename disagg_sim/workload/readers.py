"""Trace files to traces; ``docs/traces.md`` has their columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import TraceError, UnknownNameError, above_zero, nearest
from disagg_sim.workload.arrivals import Poisson, arrivals, named_rng
from disagg_sim.workload.columns import Table, read_bytes
from disagg_sim.workload.mooncake import read_lines, spread_batches
from disagg_sim.workload.servegen import draw_pool, is_pool
from disagg_sim.workload.synthetic import LengthTable
from disagg_sim.workload.trace import Floats, PrefixBlocks, Tokens, Trace

#: Kind of a table with a header -> arrival, input and output column. The last has no arrivals.
COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "csv": ("arrival_s", "input_tokens", "output_tokens"),
    "lengths": ("", "num_prefill_tokens", "num_decode_tokens"),
}
KINDS = (*COLUMNS, "mooncake", "servegen", "auto")
#: What stands in the time column of an Azure-like table that has no times.
NO_TIME = "XXX"


def load_trace(
    path: str | Path, kind: str = "auto", *, spread: bool = True, rate: float | None = None, seed: int = 0
) -> Trace:
    """A trace from a file; see ``docs/traces.md`` for the forms.

    Parameters
    ----------
    path
        The file, gzipped or not; of ServeGen a folder or a tar archive.
    kind
        ``"azure"``, ``"burstgpt"``, ``"mooncake"``, ``"servegen"``, ``"csv"`` (arrival_s, input_tokens,
        output_tokens) or ``"lengths"`` (a table without arrivals); ``"auto"`` tells them by the first line.
    spread
        Of Mooncake, whose requests come in batches: spread each evenly up to the next one, or leave all of it at one
        instant.
    rate
        Of a table without arrivals: mean rate of the Poisson arrivals that it is given. [request/s]
    seed
        Of what is drawn: a ServeGen pool, and Poisson arrivals.

    Raises
    ------
    TraceError, UnknownNameError
        A faulty file, with its line; an unknown kind.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"unknown kind of trace {kind!r}{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
    path = Path(path)
    if kind == "servegen" or (kind == "auto" and is_pool(path)):
        note = f"drawn from a pool of clients with seed {seed}; inputs and outputs are independent"
        return assemble(path, *draw_pool(path, seed), notes=(note,))
    content = read_bytes(path)
    if kind == "mooncake" or (kind == "auto" and content.lstrip()[:1] == b"{"):
        return _mooncake(path, content, spread)
    table = Table(path, content)
    kind = _kind_of(table) if kind == "auto" else kind
    if kind == "lengths":
        return _without_arrivals(table, rate, seed)
    table.require(COLUMNS[kind])
    return _READERS[kind](table)


def load_lengths(path: str | Path) -> LengthTable:
    """Input and output lengths of a table, with or without arrivals, in the order of the file; zeros are left out."""
    path = Path(path)
    inputs, outputs = _length_columns(Table(path, read_bytes(path)))
    rows = (inputs > 0) & (outputs > 0)
    if not rows.any():
        raise TraceError(f"{path}: all {rows.size} rows have zero tokens; allowed: one row or more")
    return LengthTable(inputs[rows], outputs[rows])


def _kind_of(table: Table) -> str:
    """The kind most of whose columns the header has, ``csv`` where it has none."""
    order = ("csv", *COLUMNS)
    kind = max(order, key=lambda each: sum(name in table.header for name in COLUMNS[each] if name))
    if kind == "azure" and COLUMNS["azure"][0] in table.header and table.text(COLUMNS["azure"][0]).iloc[0] == NO_TIME:
        return "lengths"
    return kind


def _length_columns(table: Table) -> tuple[Tokens, Tokens]:
    """Input and output lengths of a table of any kind, zeros included."""
    kind = max(("lengths", *COLUMNS), key=lambda each: sum(name in table.header for name in COLUMNS[each][1:]))
    table.require(COLUMNS[kind][1:])
    return table.tokens(COLUMNS[kind][1]), table.tokens(COLUMNS[kind][2])


def _without_arrivals(table: Table, rate: float | None, seed: int) -> Trace:
    """The rows in their order with Poisson arrivals."""
    if rate is None:
        raise TraceError(
            f"{table.path}: no arrival times in the file; give a rate (--rate) and Poisson arrivals are drawn"
        )
    inputs, outputs = _length_columns(table)
    times = arrivals(Poisson(), named_rng(seed, "arrivals"), above_zero("rate", rate), requests=inputs.size)
    note = f"no arrival times in the file: Poisson arrivals at {rate:g} requests/s with seed {seed}"
    return assemble(table.path, times, inputs, outputs, notes=(note,))


def _mooncake(path: Path, content: bytes, spread: bool) -> Trace:
    arrival, inputs, outputs, prefix = read_lines(path, content)
    notes: tuple[str, ...] = ()
    if spread:
        arrival, instants = spread_batches(arrival)
        notes = (f"{arrival.size} requests at {instants} instants, spread evenly up to the next instant",)
    return assemble(path, arrival, inputs, outputs, prefix, notes)


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
