"""Read time columns of trace files: numbers in a unit, or dates; arrivals count from the first request.

A number counts in the unit of its form unless the user names another. Where the earliest number, read in another
unit, is a date of this century and in its own unit is none, the unit is asked for: milliseconds since 1970 that are
taken for seconds make a trace of 50,000 years.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from disagg_sim.workload.readers.columns import Table

#: Units of a time column. [s]
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Seconds since 1970 that are a date of this century: 2001-09-09 to 2099-12-03. [s]
CLOCK_S = (1e9, 4.1e9)
#: A gap between arrivals from which on a note tells of it: a day. [s]
LONG_GAP_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of the rows of a file."""

    seconds: Floats  # (rows,) from the earliest row on [s]
    stamp: Callable[[int], str]  # what the file says of a row's time, for notes; "" for 0


def from_numbers(path: Path, name: str, values: Floats, unit: str, own: str) -> Arrivals:
    """Arrivals of numbers in a ``unit``; "" = not said, so that ``own`` holds unless the numbers speak against it."""
    first = float(values.min())
    if not unit:
        require_unit(path, name, first, own)
    counted = unit or own

    def stamp(row: int) -> str:
        if not values[row]:
            return ""
        seconds = float(values[row]) * TIME_UNITS[counted]
        date = f" ({np.datetime64(round(seconds), 's')} UTC)" if CLOCK_S[0] <= seconds <= CLOCK_S[1] else ""
        return f"{name} {_plain(float(values[row]))} {counted}{date}"

    return Arrivals((values - first) * TIME_UNITS[counted], stamp)


def require_unit(path: Path, name: str, first: float, own: str, *, whole: bool = True) -> None:
    """``TraceError`` where the first time of a file, taken for ``own``, is a date in another unit.

    In windows, not ``whole``, a file has no other unit than seconds.
    """
    dates = (unit for unit, scale in TIME_UNITS.items() if CLOCK_S[0] <= first * scale <= CLOCK_S[1])
    if (likely := next(dates, own)) == own:
        return
    say = f"say which: time_unit: {likely} of a scenario's trace, --time-unit {likely}, time_unit={likely!r}"
    if not whole:
        say = f"windows take {own} alone: divide the column, or leave out 'window' and say time_unit: {likely}"
    raise TraceError(
        f"{path}: {name} {_plain(first)} looks like a date in {likely} since 1970, and would be taken for {own}; {say}"
    )


def from_column(table: Table, name: str, unit: str) -> Arrivals:
    """Arrivals of a column of a table: of seconds, of numbers in ``unit``, or of dates and times (ISO 8601)."""
    text = table.text(name)
    if pd.notna(pd.to_numeric(text.iloc[0], errors="coerce")):
        values = table.numbers(name)
        table.refuse(values < 0, name, "is negative; allowed: 0 or later")
        return from_numbers(table.path, name, values, unit, "s")
    dates = pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True)
    if pd.isna(dates.iloc[0]):
        table.refuse(dates.isna().to_numpy(), name, "is not a number, nor a date and time such as 2024-05-10T00:00:01")
    table.refuse(dates.isna().to_numpy(), name, "is not a date and time, as the rows before it are")
    if unit:
        raise TraceError(f"{table.path}: {name} holds dates and times, which have no time_unit {unit!r}; leave it out")
    seconds = np.asarray((dates - dates.min()) / pd.Timedelta(seconds=1), dtype=np.float64)
    return Arrivals(seconds, lambda row: f"{name} {text.iloc[row]}")


def gap_note(arrival: Floats) -> tuple[str, ...]:
    """A note of the longest gap between arrivals, where it is ``LONG_GAP_S`` or more. [s]"""
    gaps = np.diff(arrival)
    if not gaps.size or gaps.max() < LONG_GAP_S:
        return ()
    place = int(np.argmax(gaps))
    return (
        f"warning: no request arrives for {gaps[place] / LONG_GAP_S:.3g} days from {arrival[place]:.9g} s on; "
        "from_s and to_s, or Trace.between, take a part",
    )


def _plain(value: float) -> str:
    """A number as a file has it: without an exponent where it is whole."""
    return f"{value:.0f}" if value.is_integer() else f"{value:.15g}"
