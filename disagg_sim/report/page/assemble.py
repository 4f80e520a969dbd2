"""Put a page together: styles, scripts and data in one HTML file that no network and no other script can touch.

Tables are packed into text that a browser turns back into arrays: one compressed block of numbers.
What the files of results lack or spoil is one line that names the file.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import InputError
from disagg_sim.parquet import read_parquet
from disagg_sim.reading import read_table as read_csv
from disagg_sim.report.schemas import plain

#: Compression: higher levels take much longer and save a few percent.
LEVEL = 6
#: Types of whole numbers, the shortest that holds a column is taken; columns begin at multiples of ``ALIGNED``. [B]
WHOLE, ALIGNED = ("<u1", "<u2", "<i4"), 4


@dataclass(frozen=True, slots=True)
class Packed:
    """Tables as one block of bytes, and what is where in it."""

    tables: dict[str, Any]  # name -> rows, columns with their place [B], type and words
    data: str  # base64 of gzip


def pack(tables: Mapping[str, pd.DataFrame]) -> Packed:
    """Pack tables: floats in single precision, integers as such, words as numbers with a list of the words."""
    described: dict[str, Any] = {}
    blocks: list[bytes] = []
    place = 0
    for name, table in tables.items():
        columns = []
        for column in table.columns:
            values, words = _numbers(table[column])
            columns.append({"name": str(column), "at": place, "type": f"{values.dtype.kind}{values.itemsize}"} | words)
            blocks.append(values.tobytes().ljust(-(-values.nbytes // ALIGNED) * ALIGNED, b"\0"))
            place += len(blocks[-1])
        described[name] = {"rows": len(table), "columns": columns}
    data = gzip.compress(b"".join(blocks), LEVEL, mtime=0)
    return Packed(described, base64.b64encode(data).decode("ascii"))


def _numbers(column: pd.Series) -> tuple[NDArray[Any], dict[str, Any]]:
    """A column as numbers of one to four bytes, little-endian; with its words where it has words."""
    if pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column):
        codes, words = pd.factorize(column.astype(str))
        return _whole(codes), {"words": [str(word) for word in words]}
    if pd.api.types.is_integer_dtype(column) and column.abs().max() < 2**31:
        return _whole(column.to_numpy()), {}
    with np.errstate(over="ignore"):
        return column.to_numpy(dtype=np.float64, na_value=np.nan).astype("<f4"), {}


def _whole(values: NDArray[Any]) -> NDArray[Any]:
    ends = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    fits = (kind for kind in WHOLE if np.iinfo(kind).min <= ends[0] and ends[1] <= np.iinfo(kind).max)
    return values.astype(next(fits))


#: Scripts in the order in which the browser runs them; those of others first.
LIBRARY, LICENCE = "vendor/uPlot.iife.min.js", "vendor/uPlot.LICENSE"
SCRIPTS = (
    "dom.js",
    "tables.js",
    "pens.js",
    "figure.js",
    "chart.js",
    "controls.js",
    "table_view.js",
    "provenance.js",
    "design.js",
    "gains.js",
    "views.js",
    "sweep.js",
    "runs.js",
    "simulation.js",
    "plan.js",
    "study.js",
    "app.js",
)
STYLES = ("vendor/uPlot.min.css", "page.css")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a page shows."""

    kind: str  # "sweep", "simulation", "plan" or "study": which script shows it
    title: str
    facts: Mapping[str, Any]  # of JSON's own types; numbers that are not finite become None
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def page_html(content: Content) -> str:
    """Write a page as HTML.

    The page states a content security policy: it may load nothing, and runs no script but the one whose hash it names.
    Names from files are data, never HTML.
    """
    packed = pack(content.tables)
    told = {"kind": content.kind, "title": content.title, "facts": plain(content.facts), "tables": packed.tables}
    style = "\n".join(_asset(name) for name in STYLES)
    own = "\n".join(_asset(name) for name in SCRIPTS)
    script = f"{_asset(LIBRARY)}\n(() => {{\n{own}\n}})();\n"
    parts = {
        "title": escape(content.title),
        "licence": _asset(LICENCE),
        "policy": _policy(script, style),
        "style": style,
        "content": _inside_script(json.dumps(told, ensure_ascii=False, separators=(",", ":"))),
        "data": packed.data,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("disagg_sim.report.page").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _inside_script(text: str) -> str:
    """JSON that no HTML parser mistakes for the end of its element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


#: What reading a file of another shape, or a cut one, raises.
FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@contextmanager
def as_content_faults(path: Path, what: str) -> Iterator[None]:
    """Tell faults of the content of a file as such; ``what`` it should be, such as "the manifest of a sweep"."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except FAULTS as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"{path}: damaged: not {what} ({said})") from None


def read_table(path: Path, *, numbers: Sequence[str] = (), texts: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV file of results; an empty table where there is no such file."""
    with as_content_faults(path, "a table"):
        try:
            table = read_csv(path, keep_default_na=False, na_values=[""], low_memory=False)
        except FileNotFoundError:
            return pd.DataFrame()
        if missing := [name for name in (*numbers, *texts) if name not in table]:
            raise InputError(f"{path}: missing column {missing[0]!r}")
        table = table.assign(**{name: pd.to_numeric(table[name]).astype(float) for name in numbers})
        return table.assign(**{name: table[name].astype(str) for name in texts})


def read_block(
    path: Path, columns: Sequence[str] | None = None, *, rows: tuple[int, int] | None = None
) -> pd.DataFrame:
    """Read a Parquet file of results."""
    with as_content_faults(path, "a table of results"):
        return read_parquet(path, columns, rows=rows)
