"""Pack tables into text that a browser turns back into arrays: one compressed block of numbers."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    """Pack tables: floats in single precision, integers as such, words as numbers with a list of the words.

    Takes ``tables`` (by name; any columns of numbers or words; missing numbers are NaN).
    """
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
