"""Read trace files into traces; ``docs/traces.md`` has their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, TraceError, UnknownNameError, above_zero, nearest
from disagg_sim.workload.arrivals import Poisson, arrivals, named_rng
from disagg_sim.workload.readers.aliases import columns_by_alias, read_lines, read_objects, spread_batches, with_usage
from disagg_sim.workload.readers.clock import TIME_UNITS, Arrivals, from_column, from_numbers, gap_note
from disagg_sim.workload.readers.columns import Table, read_bytes
from disagg_sim.workload.request_columns import Labels, PrefixBlocks, Sessions, Tokens
from disagg_sim.workload.trace import Trace

#: Kind of a table with a header -> arrival, input and output column. The last has no arrivals.
COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "csv": ("arrival_s", "input_tokens", "output_tokens"),
    "lengths": ("", "num_prefill_tokens", "num_decode_tokens"),
}
KINDS = (*COLUMNS, "mooncake", "auto")
#: What a column is for, in the order of ``COLUMNS``: the keys of ``columns``.
ROLES = ("arrival", "input_tokens", "output_tokens")
#: What is said of a request in a word -> its column.
LABELS = {"classes": "class", "models": "model"}
#: What stands in the time column of an Azure-like table that has no times.
NO_TIME = "XXX"


def load_trace(
    path: str | Path,
    kind: str = "auto",
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str = "",
    spread: bool = True,
    sessions: bool = True,
    rate: float | None = None,
    seed: int = 0,
) -> Trace:
    r"""Read a trace from a file; see ``docs/traces.md`` for the forms. Its first request arrives at 0.

    Parameters
    ----------
    path
        The file, gzipped or not.
    kind
        ``"azure"``, ``"burstgpt"``, ``"mooncake"``, ``"csv"`` (arrival_s, input_tokens, output_tokens) or ``"lengths"``
        (a table without arrivals); ``"auto"`` tells them by the first line.
    columns
        Of a table with headers that are not known (``aliases.NAMES``):
        ``{"arrival": "when", "input_tokens": "asked", "output_tokens": "answered"}``;
        what is left out keeps the name of its kind, ``"csv"`` where none is given.
    time_unit
        ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``: what the times count in, where they are numbers; by default
        milliseconds of Mooncake and seconds of all others.
    spread
        Of Mooncake, whose requests come in batches: spread each evenly up to the next one, or leave all of it at one
        instant.
    sessions
        Whether later turns of a session wait for the turn before, where the file has sessions (``session`` and
        ``think_s``; ``Session ID`` and ``Elapsed time`` of BurstGPT); else all requests arrive as recorded.
    rate
        Of a table without arrivals: mean rate of the Poisson arrivals that it is given. [request/s]
    seed
        Of these arrivals.

    Returns
    -------
    Trace
        Requests in the order of their arrival [s]; ``notes`` say what was dropped, sorted or assumed.

    Raises
    ------
    TraceError, UnknownNameError, InputError
        A faulty file, with its line; an unknown kind, role or header; an unknown unit.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.csv")
    ...     _ = path.write_text("ts,input_tokens,output_tokens\n5000,512,10\n6500,64,20\n")
    ...     trace = load_trace(path, columns={"arrival": "ts"}, time_unit="ms")
    >>> trace.arrival.tolist(), trace.input_tokens.tolist()
    ([0.0, 1.5], [512, 64])
    """
    if kind not in KINDS:
        raise UnknownNameError(f"unknown kind of trace {kind!r}{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
    for role in columns or ():
        if role not in ROLES:
            raise UnknownNameError(f"columns: unknown key {role!r}{nearest(role, ROLES)}; allowed: {', '.join(ROLES)}")
    if time_unit and time_unit not in TIME_UNITS:
        allowed = f"{nearest(time_unit, TIME_UNITS)}; allowed: {', '.join(TIME_UNITS)}"
        raise InputError(f"time_unit {time_unit!r} is unknown{allowed}")
    path = Path(path)
    content = read_bytes(path)
    first = content.lstrip()[:1]
    objects = read_objects(path, content) if kind == "auto" and first in (b"{", b"[") else None
    if kind == "mooncake" or (kind == "auto" and first == b"{" and objects is None):
        _without(path, "a trace of JSON lines", columns=columns)
        return _mooncake(path, content, spread, time_unit)
    table = Table(path, content) if objects is None else objects
    notes: tuple[str, ...] = ()
    if kind == "auto":
        kind = "csv" if columns else _kind_of(table)
        known = _length_names(table) if kind == "lengths" else COLUMNS[kind]
        if not columns and not set(known) <= set(table.header):
            table = with_usage(table)
            if (found := columns_by_alias(table.header)) is not None:
                columns, notes = found.columns, (found.note,)
                kind = "csv" if columns["arrival"] else "lengths"
                time_unit = time_unit or found.unit
    names = _names(kind, columns)
    if kind == "lengths" and not names[0]:
        _without(path, "a table without arrivals", time_unit=time_unit)
        return _without_arrivals(table, names[1:] if columns else (), rate, seed, notes)
    table.require(names)
    inputs, outputs = table.tokens(names[1]), table.tokens(names[2])
    if sessions and SESSION in table.header:
        times, turns = with_turns(table, names[0], time_unit)
        return assemble(path, times, inputs, outputs, sessions=turns, labels=_labels(table, notes), notes=notes)
    times = from_column(table, names[0], time_unit)
    recorded = of_burstgpt(table, times.seconds) if sessions else None
    return assemble(path, times, inputs, outputs, sessions=recorded, labels=_labels(table, notes), notes=notes)


def _labels(table: Table, others: Sequence[str]) -> dict[str, Labels]:
    """Classes of service and models by columns of that name, in the order in which they first stand in the file.

    Where its columns have names of other tools, ``model`` is what answered there, and none of a scenario's models.
    """
    found = {}
    for kind, column in LABELS.items():
        if column in table.header and not (others and column == "model"):
            text = table.text(column)
            table.refuse((text == "").to_numpy(), column, "is empty")
            number, names = pd.factorize(text)
            found[kind] = Labels(names=tuple(map(str, names)), number=number)
    return found


def _names(kind: str, columns: Mapping[str, str] | None) -> tuple[str, ...]:
    """Headers of arrival, input and output."""
    given = columns or {}
    return tuple(given.get(role, name) for role, name in zip(ROLES, COLUMNS[kind], strict=True))


def _without(path: Path, what: str, **options: object) -> None:
    """``TraceError`` for an option that a form does not have."""
    for name, value in options.items():
        if value:
            raise TraceError(f"{path}: {what} takes no {name}; leave it out")


def _kind_of(table: Table) -> str:
    """The kind most of whose columns the header has, ``csv`` where it has none."""
    order = ("csv", *COLUMNS)
    kind = max(order, key=lambda each: sum(name in table.header for name in COLUMNS[each] if name))
    if kind == "azure" and COLUMNS["azure"][0] in table.header and table.text(COLUMNS["azure"][0]).iloc[0] == NO_TIME:
        return "lengths"
    return kind


def _length_names(table: Table) -> tuple[str, ...]:
    """Headers of the lengths of a table of any kind: those most of which it has."""
    kind = max(("lengths", *COLUMNS), key=lambda each: sum(name in table.header for name in COLUMNS[each][1:]))
    return COLUMNS[kind][1:]


def _without_arrivals(
    table: Table, names: Sequence[str], rate: float | None, seed: int, notes: tuple[str, ...]
) -> Trace:
    """The rows in their order with Poisson arrivals."""
    if rate is None:
        raise TraceError(
            f"{table.path}: no arrival times in the file; give a rate (--rate) and Poisson arrivals are drawn"
        )
    first, second = names or _length_names(table)
    table.require((first, second))
    inputs, outputs = table.tokens(first), table.tokens(second)
    times = arrivals(Poisson(), named_rng(seed, "arrivals"), above_zero("rate", rate), requests=inputs.size)
    note = f"no arrival times in the file: Poisson arrivals at {rate:g} requests/s with seed {seed}"
    return assemble(table.path, times, inputs, outputs, notes=(*notes, note))


def _mooncake(path: Path, content: bytes, spread: bool, time_unit: str) -> Trace:
    stamps, inputs, outputs, prefix = read_lines(path, content)
    times = from_numbers(path, "timestamp", stamps, time_unit, "ms")
    notes: tuple[str, ...] = ()
    if spread:
        seconds, instants = spread_batches(times.seconds)
        times = Arrivals(seconds, times.stamp)
        notes = (f"{seconds.size} requests at {instants} instants, spread evenly up to the next instant",)
    return assemble(path, times, inputs, outputs, prefix=prefix, notes=notes)


def assemble(
    path: Path,
    times: Arrivals | Floats,
    input_tokens: Tokens,
    output_tokens: Tokens,
    *,
    prefix: PrefixBlocks | None = None,
    sessions: Sessions | None = None,
    labels: Mapping[str, Labels] | None = None,
    notes: tuple[str, ...],
) -> Trace:
    """The trace of a file's rows: sorted, without rows of zero tokens; the notes say what was done.

    ``times`` of a file are moved so that its first request arrives at 0; drawn ones, plain numbers, stay. [s]
    """
    arrival = times.seconds if isinstance(times, Arrivals) else times
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
    if sessions is not None:
        sessions = sessions.take(rows)
        later = int((sessions.previous() >= 0).sum())
        said = f"{rows.size - later} sessions: {later} later turns wait for the turn before and a think time"
        notes = (*notes, said)
    arrival = arrival[rows]
    if isinstance(times, Arrivals):
        arrival = arrival - arrival[0]
        if stamp := times.stamp(int(rows[0])):
            notes = (*notes, f"arrivals count from the first request, which is at {stamp} in the file")
    try:
        return Trace(
            arrival=arrival,
            input_tokens=input_tokens[rows],
            output_tokens=output_tokens[rows],
            prefix=prefix.take(rows) if prefix else None,
            sessions=sessions,
            **{kind: each.take(rows) for kind, each in (labels or {}).items()},
            name=path.name.split(".")[0],
            notes=(*notes, *gap_note(arrival)),
            dropped=dropped,
        )
    except InputError as error:
        raise TraceError(f"{path}: {error}") from None


#: Columns of sessions in the plain form; the last may be missing.
SESSION, THINK, TURN = "session", "think_s", "turn"
#: Columns of sessions in BurstGPT.
BURST_SESSION, BURST_ELAPSED = "Session ID", "Elapsed time"


def with_turns(table: Table, name: str, unit: str) -> tuple[Arrivals, Sessions]:
    """Read arrivals and sessions, a row each, of columns ``session``, ``think_s`` and, if there, ``turn``, in ``unit``.

    >>> from pathlib import Path
    >>> from disagg_sim.workload.readers.columns import Table
    >>> table = Table(Path("x.csv"), b"arrival_s,session,think_s\\n5,a,\\n,a,2\\n6,b,\\n")
    >>> arrivals, sessions = with_turns(table, "arrival_s", "")
    >>> arrivals.seconds.tolist(), sessions.previous().tolist()
    ([0.0, 2.0, 1.0], [-1, 0, -1])
    """
    table.require((SESSION, THINK))
    number, order, later = _order(table)
    think = _blank_is_zero(table, THINK, later) * TIME_UNITS[unit or "s"]
    empty = (table.text(name) == "").to_numpy() & later
    told = np.flatnonzero(~empty)
    arrivals = from_column(table.part(told), name, unit)
    seconds = np.full(number.size, np.nan)
    seconds[told] = arrivals.seconds
    behind = -np.inf
    for row in order.tolist():
        if empty[row]:
            seconds[row] = behind + think[row]
        elif later[row] and seconds[row] < behind:
            table.refuse(np.arange(number.size) == row, name, "lies before the turn before it")
        behind = seconds[row]
    place = np.searchsorted(told, np.arange(number.size))
    return Arrivals(seconds, lambda row: arrivals.stamp(int(place[row]))), Sessions(session=number, think_s=think)


def of_burstgpt(table: Table, seconds: NDArray[np.float64]) -> Sessions | None:
    """Read the sessions of a BurstGPT trace; ``None`` where it lacks their columns, or no session has two turns.

    The think time is what passes from the end of an answer (``Elapsed time`` after its request) to the next request of
    the session (``Session ID``). A think time that would be negative, of stamps in whole seconds, is 0.

    The answer to the first request ends at 10 + 4 s, the next of the session comes at 20:

    >>> from pathlib import Path
    >>> from disagg_sim.workload.readers.columns import Table
    >>> table = Table(Path("x.csv"), b"Timestamp,Session ID,Elapsed time\\n10,7,4\\n20,7,3\\n21,,\\n")
    >>> found = of_burstgpt(table, np.array([10.0, 20.0, 21.0]))
    >>> found.think_s.tolist(), found.session.tolist()
    ([0.0, 6.0, 0.0], [0, 0, 1])
    """
    if BURST_SESSION not in table.header or BURST_ELAPSED not in table.header:
        return None
    number = _numbers(table, BURST_SESSION)
    elapsed = _blank_is_zero(table, BURST_ELAPSED, np.zeros(number.size, dtype=bool))
    order = np.lexsort((seconds, number))
    follows = np.flatnonzero(np.diff(number[order]) == 0)
    if not follows.size:
        return None
    before, after = order[follows], order[follows + 1]
    think = np.zeros(number.size)
    think[after] = np.maximum(seconds[after] - seconds[before] - elapsed[before], 0.0)
    return Sessions(session=number, think_s=think)


def _numbers(table: Table, name: str) -> NDArray[np.int64]:
    """Sessions numbered from 0 in the order of the file; an empty cell is a session of its own."""
    text = table.text(name).to_numpy(dtype=object)
    alone = np.flatnonzero(text == "")
    text[alone] = [(row,) for row in alone.tolist()]  # equals no text
    known: dict[object, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in text.tolist()], dtype=np.int64)


def _order(table: Table) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.bool_]]:
    """Number of the session of each row; rows by session, then as in the file; which rows are no first turn."""
    number = _numbers(table, SESSION)
    order = np.argsort(number, kind="stable")
    later = np.zeros(number.size, dtype=bool)
    later[order[1:]] = np.diff(number[order]) == 0
    if TURN in table.header:
        turn, falls = table.numbers(TURN), np.zeros(number.size, dtype=bool)
        falls[order[1:]] = np.diff(turn[order]) <= 0
        table.refuse(falls & later, TURN, "is not above that of the turn before, by the rows of its session")
    return number, order, later


def _blank_is_zero(table: Table, name: str, needed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A column of numbers from 0 on; cells may be empty where they are not needed."""
    given = np.flatnonzero((table.text(name) != "").to_numpy() | needed)
    values = np.zeros(needed.size)
    if given.size:
        part = table.part(given)
        values[given] = part.numbers(name)
        part.refuse(values[given] < 0, name, "is negative; allowed: 0 or more")
    return values
