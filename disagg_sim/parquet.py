"""Read and write tables as Parquet files with DuckDB, a third of the size of other readers.

References: https://parquet.apache.org/docs/file-format and https://duckdb.org/docs/stable/data/parquet/overview.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from disagg_sim.reading import json_of

if TYPE_CHECKING:
    import duckdb

#: Metadata of a file: its columns of categories, with these, and its columns of texts, as JSON.
_CATEGORIES, _TEXTS = "disagg_sim.categories", "disagg_sim.texts"
#: Nothing is fetched. One thread: the bytes of a file are the same on every machine, and the cores have work.
_SETTINGS: dict[str, Any] = {"threads": 1, "autoinstall_known_extensions": False, "autoload_known_extensions": False}


def write_parquet(frame: pd.DataFrame, path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write a table into a file, which is replaced; the same table gives the same bytes."""
    types = frame.dtypes.to_dict()
    lists = {name: type_.categories for name, type_ in types.items() if isinstance(type_, pd.CategoricalDtype)}
    of = {name: values.tolist() for name, values in lists.items() if values.inferred_type == "string"}
    texts = [name for name, type_ in types.items() if isinstance(type_, pd.StringDtype)]
    _copy(_duckdb(), "frame", path, {_CATEGORIES: json.dumps(of), _TEXTS: json.dumps(texts), **metadata}, frame)


def join_parquet(parts: Sequence[str | PathLike[str]], path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write the tables of several files below one another into one, without holding them in memory."""
    types = {_types(part) for part in parts}
    if len(types) != 1:
        raise ValueError(f"{path}: the columns or categories of its {len(parts)} parts differ")
    ((of, texts, _),) = types
    names = ", ".join(_text(_literal(part)) for part in parts)
    joined = f"(FROM read_parquet([{names}], hive_partitioning = false))"
    _copy(_duckdb(), joined, path, {_CATEGORIES: of, _TEXTS: texts, **metadata})


def read_parquet(
    path: str | PathLike[str], columns: Sequence[str] | None = None, *, rows: tuple[int, int] | None = None
) -> pd.DataFrame:
    """Read the table of a Parquet file of this or another program, or its ``rows`` from one to before another."""
    of, texts = _kinds(parquet_metadata(path))
    enums = {name: f"{_name(name)}::ENUM({', '.join(map(_text, values))})" for name, values in of.items()}
    casts = {name: f"{enum} AS {_name(name)}" for name, enum in enums.items()}
    if columns is not None:
        chosen = ", ".join(casts.get(name, _name(name)) for name in columns)
    else:
        chosen = f"* REPLACE ({', '.join(casts.values())})" if casts else "*"
    source = "read_parquet(?, hive_partitioning = false)"
    if rows is not None:
        numbered = source.replace("hive", "file_row_number = true, hive")
        inside = f"file_row_number >= {rows[0]} AND file_row_number < {rows[1]}"
        source = f"(SELECT * EXCLUDE file_row_number FROM {numbered} WHERE {inside})"
    frame: pd.DataFrame = _asked(f"SELECT {chosen} FROM {source}", path, lambda run: run.df())
    for at, name in enumerate(frame.columns):
        if name in of:
            frame.isetitem(at, frame[name].array.as_unordered())
        elif name in texts and frame[name].dtype == object:  # without a single text
            frame.isetitem(at, frame[name].astype(pd.StringDtype(na_value=np.nan)).array)
    return frame


def parquet_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """Read the metadata of a Parquet file, not its table."""
    found: list[tuple[bytes, bytes]] = _asked("SELECT key, value FROM parquet_kv_metadata(?)", path)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in found}


def parquet_rows(path: str | PathLike[str]) -> int:
    """Count the rows of a Parquet file without reading its table. [1]

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_parquet(pd.DataFrame({"ttl_s": [0.01, 0.02]}), path := Path(folder, "a.parquet"), {})
    ...     parquet_rows(path)
    2
    """
    return int(_asked("SELECT num_rows FROM parquet_file_metadata(?)", path)[0][0])


def _kinds(said: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """Categories by column and columns of texts, as the metadata of a file say; ``ValueError`` for what is neither."""
    of, texts = json_of(said.get(_CATEGORIES, "{}")), json_of(said.get(_TEXTS, "[]"))
    named = isinstance(of, dict) and all(_are_texts(values) and values for values in of.values())
    if not named or not _are_texts(texts):
        raise ValueError(f"its metadata {_CATEGORIES} and {_TEXTS} are not those of disagg-sim")
    return of, texts


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    import duckdb

    made = duckdb.connect(config=_SETTINGS)
    made.execute("SET pandas_analyze_sample = 1000000000")  # every row of a column of objects says what it holds
    return made


@contextmanager
def _interrupted_as_one(run: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Let Ctrl-C end what runs as it ends Python: of its exception DuckDB makes others, which pass for faults."""
    answered = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(answered):
        yield
        return
    came: list[Any] = []

    def stop(*what: Any) -> None:
        came.append(what)
        run.interrupt()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answered)
        if came:
            answered(*came[0])


def _duckdb() -> duckdb.DuckDBPyConnection:
    """The one of this process; a cursor of its own, so that threads do not meet."""
    return _connection().cursor()


def _asked(
    query: str, path: str | PathLike[str], take: Callable[[duckdb.DuckDBPyConnection], Any] = lambda run: run.fetchall()
) -> Any:
    """Run a query on one file, whose name may have signs of a pattern in it, and take what it finds."""
    import duckdb

    sys.audit("open", os.fspath(path), "rb", os.O_RDONLY)  # as Python tells of the files that it opens
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ValueError("not a file")
    run = _duckdb()
    try:
        with _interrupted_as_one(run):
            return take(run.execute(query, [_literal(path)]))
    except (duckdb.Error, OverflowError, UnicodeError) as error:
        raise ValueError(str(error).partition("\n")[0]) from None


def _copy(
    run: duckdb.DuckDBPyConnection,
    source: str,
    path: str | PathLike[str],
    metadata: Mapping[str, str],
    frame: pd.DataFrame | None = None,  # noqa: ARG001 - found by its name, in half the time that it takes to register it
) -> None:
    """Write what a query reads into a file."""
    import duckdb

    sys.audit("open", os.fspath(path), "wb", os.O_WRONLY)
    kept = ", ".join(f"{_text(key)}: {_text(value)}" for key, value in metadata.items())
    how = f"FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, USE_TMP_FILE false, KV_METADATA {{{kept}}}"
    try:
        with _interrupted_as_one(run):
            run.execute(f"COPY {source} TO {_text(str(path))} ({how})")
    except duckdb.IOException as error:
        found = re.search(r'"errno":"(\d+)"', str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None


def _types(path: str | PathLike[str]) -> tuple[str, str, str]:
    """Categories, texts and columns of a file, as texts that compare."""
    said = parquet_metadata(path)
    columns = _asked("SELECT name, type FROM parquet_schema(?)", path)
    return said.get(_CATEGORIES, "{}"), said.get(_TEXTS, "[]"), str(columns)


def _literal(path: str | PathLike[str]) -> str:
    """A path none of whose characters is read as part of a pattern."""
    return re.sub(r"([*?\[])", r"[\1]", str(path))


def _name(column: str) -> str:
    """A column in a query."""
    return '"' + column.replace('"', '""') + '"'


def _text(value: str) -> str:
    """A text in a query."""
    return "'" + value.replace("'", "''") + "'"
