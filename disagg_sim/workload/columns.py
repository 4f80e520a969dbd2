"""Columns of a text table as checked arrays; every fault is one line with file and line number."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import TraceError, nearest

if TYPE_CHECKING:
    import pandas as pd

#: A longer prompt or answer than this is a mistake in the file. [token]
MOST_TOKENS = 10**9
#: First bytes of a gzip file.
GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: Path) -> bytes:
    """Content of a file, unpacked where it is gzipped; ``TraceError`` where that fails or nothing is in it."""
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content.strip():
        raise TraceError(f"{path}: the file is empty; allowed: one request or more")
    return content


class Table:
    """A CSV file as text: columns by their names in the header, rows by their lines in the file."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Split ``content``; ``TraceError`` for a line with more fields than the header."""
        import pandas as pd

        self.path = path
        try:
            rows = pd.read_csv(
                io.BytesIO(content), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False,
                encoding="utf-8-sig",
            )  # fmt: skip
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: not a text file: {error}") from None
        except pd.errors.EmptyDataError:
            raise TraceError(f"{path}:1: the line is blank; allowed: the names of the columns") from None
        except pd.errors.ParserError as error:
            raise TraceError(_malformed(path, str(error))) from None
        self.header = tuple(str(name).strip() for name in rows.iloc[0])
        places = np.flatnonzero((rows != "").any(axis=1))
        places = places[places > 0]
        self.lines = places + 1  # in the file, from 1
        blank = len(rows) - 1 - places.size  # a million rows are not copied for nothing
        self.rows: pd.DataFrame = rows.iloc[places] if blank else rows.iloc[1:]
        if not self.lines.size:
            raise TraceError(f"{path}: no line below the header; allowed: one request or more")

    def require(self, names: Sequence[str]) -> None:
        """``TraceError`` that names the first missing column and the nearest one."""
        for name in names:
            if name not in self.header:
                has = ", ".join(repr(each) for each in self.header)
                near = nearest(name, self.header)
                raise TraceError(f"{self.path}:1: no column {name!r}{near}; the header has {has}")

    def text(self, name: str) -> pd.Series[str]:
        """A column as it stands in the file; of two columns of one name the first."""
        return self.rows.iloc[:, self.header.index(name)]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column of finite numbers, (rows,); ``TraceError`` names the first line with another value."""
        import pandas as pd

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
            said = f"{name} {value!r} {reason}" if value else f"no value of {name!r}"
            raise TraceError(f"{self.path}:{self.lines[row]}: {said}")


def _malformed(path: Path, said: str) -> str:
    """One line for what the CSV parser said."""
    if match := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", said):
        header, line, fields = match.groups()
        return f"{path}:{line}: malformed: {fields} fields; allowed: {header}, as in the header"
    if match := re.search(r"EOF inside string starting at row (\d+)", said):
        return f"{path}:{int(match[1]) + 1}: malformed: a quotation mark is not closed"
    return f"{path}: malformed: {said.strip()}"
