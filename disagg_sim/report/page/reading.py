"""Read the files of results for a page: what they lack or spoil is one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from disagg_sim.errors import InputError
from disagg_sim.parquet import read_parquet
from disagg_sim.reading import read_table as read_csv

#: What reading a file of another shape, or a cut one, raises.
FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@contextmanager
def as_content_faults(path: Path, what: str) -> Iterator[None]:
    """Tell faults of the content of a file as such.

    Takes ``what`` (it should be, such as "the manifest of a sweep").

    >>> with as_content_faults(Path("plan.json"), "a plan"):
    ...     {}["schema"]
    Traceback (most recent call last):
    disagg_sim.errors.InputError: plan.json: damaged: not a plan (KeyError: 'schema')
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except FAULTS as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"{path}: damaged: not {what} ({said})") from None


def read_table(path: Path, *, numbers: Sequence[str] = (), texts: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV file of results.

    Returns an empty table where there is no such file.
    """
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
    """Read a Parquet file of results.

    Takes ``columns`` (None = all). Returns these columns.
    """
    with as_content_faults(path, "a table of results"):
        return read_parquet(path, columns, rows=rows)
