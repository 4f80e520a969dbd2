"""Read columns of a text table as checked arrays; every fault is one line with file and line number."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import InputError, TraceError, given_twice, nearest, quoted
from disagg_sim.memory import require_memory
from disagg_sim.reading import TABLE_BYTES, read_file, require_lines, unpacked
from disagg_sim.workload.trace import MOST_REQUESTS, MOST_TOKENS, too_many

#: Largest file, unpacked: as many requests as a trace may have, of 100 B each; all of it is held in memory. [B]
MOST_BYTES = 100 * MOST_REQUESTS
#: Most columns of a table; the widest known form has 8. [1]
MOST_COLUMNS = 1000
#: Columns that a message lists [1], and the longest that may be meant by another name [character].
SHOWN_COLUMNS, LONGEST_NAME = 12, 100
#: First bytes of files that are no text, and what they are.
NO_TEXT = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xfd7zXZ\x00": "an xz file",
    b"BZh": "a bzip2 file",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
UTF8_MARK = b"\xef\xbb\xbf"


def read_bytes(path: Path) -> bytes:
    """Text of a file, unpacked where it is gzipped, without a byte order mark."""
    try:
        content = unpacked(read_file(path, MOST_BYTES), MOST_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    for magic, form in NO_TEXT.items():
        if content.startswith(magic):
            raise TraceError(f"{path}: not a text file in UTF-8 but {form}; unpack it or save it as CSV in UTF-8")
    content = content.removeprefix(UTF8_MARK)
    if not content.strip():
        raise TraceError(f"{path}: the file is empty; allowed: one request or more")
    if (place := content.find(b"\0")) >= 0:
        raise TraceError(f"{path}:{_line(content, place)}: not a text file in UTF-8: it holds a byte 0")
    if (lines := content.count(b"\n")) > MOST_REQUESTS + 1:  # and a header
        raise TraceError(too_many(str(path), lines))
    try:
        require_lines(content)
        require_memory(str(path), TABLE_BYTES * len(content))
    except (ValueError, InputError) as error:
        raise TraceError(f"{path}: {str(error).removeprefix(f'{path} ')}") from None
    return content


def _line(content: bytes, place: int) -> int:
    """Number of the line, from 1, that a byte stands in."""
    return content.count(b"\n", 0, place) + 1


class Table:
    """A CSV file as text: columns by their names in the header, rows by their lines in the file."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Split ``content``; ``TraceError`` for a line with more fields than the header, or a name twice in it."""
        self.path = path
        columns = content[: content.find(b"\n")].count(b",") + 1
        if columns > MOST_COLUMNS:
            raise TraceError(f"{path}:1: {columns:,} columns; allowed: up to {MOST_COLUMNS:,}")
        try:
            rows = pd.read_csv(
                io.BytesIO(content),
                header=None,
                dtype=str,
                keep_default_na=False,
                skip_blank_lines=False,
                encoding="utf-8-sig",
            )
        except UnicodeDecodeError:
            raise TraceError(_undecoded(path, content)) from None
        except pd.errors.EmptyDataError:
            raise TraceError(f"{path}:1: the line is blank; allowed: the names of the columns") from None
        except (pd.errors.ParserError, OverflowError) as error:
            raise TraceError(_malformed(path, str(error))) from None
        self.header = tuple(str(name).strip() for name in rows.iloc[0])
        if twice := given_twice(name for name in self.header if name):
            raise TraceError(f"{path}:1: column {quoted(twice)} occurs twice in the header")
        places = np.flatnonzero((rows != "").any(axis=1))
        places = places[places > 0]
        self.lines = places + 1  # in the file, from 1
        blank = len(rows) - 1 - places.size  # a million rows are not copied for nothing
        self.rows: pd.DataFrame = rows.iloc[places] if blank else rows.iloc[1:]
        if not self.lines.size:
            raise TraceError(f"{path}: no line below the header; allowed: one request or more")

    @classmethod
    def of_objects(cls, path: Path, objects: Sequence[tuple[int, Mapping[str, str]]]) -> Table:
        """A table of flat JSON objects with their lines; a key that one lacks is an empty cell."""
        made = cls.__new__(cls)
        made.path = path
        made.lines = np.array([line for line, _ in objects])
        made.header = tuple(dict.fromkeys(name for _, record in objects for name in record))[:MOST_COLUMNS]
        made.rows = pd.DataFrame([[record.get(name, "") for name in made.header] for _, record in objects], dtype=str)
        return made

    def widened(self, more: Mapping[str, Sequence[str]]) -> Table:
        """The table with more columns."""
        wide = copy.copy(self)
        wide.header = (*self.header, *more)
        wide.rows = pd.concat([self.rows, pd.DataFrame(more, index=self.rows.index, dtype=str)], axis=1)
        return wide

    def part(self, rows: NDArray[np.intp]) -> Table:
        """Some rows of the same file."""
        some = copy.copy(self)
        some.rows, some.lines = self.rows.iloc[rows], self.lines[rows]
        return some

    def require(self, names: Sequence[str]) -> None:
        """``TraceError`` that names the first missing column and the nearest one."""
        for name in names:
            if name not in self.header:
                has = ", ".join(map(quoted, self.header[:SHOWN_COLUMNS]))
                has += f" and {len(self.header) - SHOWN_COLUMNS} more" if len(self.header) > SHOWN_COLUMNS else ""
                near = nearest(name, [each for each in self.header if len(each) <= LONGEST_NAME])
                raise TraceError(f"{self.path}:1: no column {name!r}{near}; the header has {has}")

    def text(self, name: str) -> pd.Series[str]:
        """A column as in the file."""
        return self.rows.iloc[:, self.header.index(name)]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column of finite numbers, (rows,); ``TraceError`` names the first line with another value."""
        text = self.text(name)
        values = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64)
        self.refuse(~np.isfinite(values), name, "is not a number")
        return values

    def tokens(self, name: str) -> NDArray[np.int64]:
        """A column of whole numbers from 0, (rows,). [token]"""
        values = self.numbers(name)
        self.refuse(values < 0, name, "is negative; allowed: 0 or more tokens")
        self.refuse(values != np.rint(values), name, "is not a whole number of tokens")
        self.refuse(values > MOST_TOKENS, name, f"is out of range; allowed: up to {MOST_TOKENS} tokens")
        return values.astype(np.int64)

    def refuse(self, bad: NDArray[np.bool_], name: str, reason: str) -> None:
        """``TraceError`` for the first row that is marked bad."""
        if bad.any():
            row = int(np.argmax(bad))
            value = str(self.text(name).iloc[row])
            said = f"{name} {quoted(value)} {reason}" if value else f"no value of {name!r}"
            raise TraceError(f"{self.path}:{self.lines[row]}: {said}")


def _undecoded(path: Path, content: bytes) -> str:
    """One line for bytes that are no UTF-8, with the first of them."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        where, byte = _line(content, error.start), error.object[error.start]
        return f"{path}:{where}: not a text file in UTF-8: {error.reason} ({byte:#x})"
    return f"{path}: not a text file in UTF-8"


def _malformed(path: Path, said: str) -> str:
    """One line for an error of the CSV parser."""
    if match := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", said):
        header, line, fields = match.groups()
        return f"{path}:{line}: malformed: {fields} fields; allowed: {header}, as in the header"
    if match := re.search(r"EOF inside string starting at row (\d+)", said):
        return f"{path}:{int(match[1]) + 1}: malformed: a quotation mark is not closed"
    return f"{path}: malformed: {said.strip()}"
