"""Several blocks of a group in one file, as ``disagg-sim store compact`` leaves them.

The name of the file has the numbers of its first and last block (``disaggregated-0000-0031.parquet``), its metadata the
digest, the texts and the rows of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import NamedTuple

from disagg_sim.parquet import parquet_metadata
from disagg_sim.sweep.keys import PLAIN
from disagg_sim.sweep.seal import bytes_of, is_sealed

#: Metadata of such a file: its parts, as JSON.
PARTS = "disagg_sim.parts"
#: A block that may be one of several: its name ends with its number.
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)")
_JOINED = re.compile(r"(?P<stem>.+)-(?P<first>\d+)-(?P<last>\d+)")


class Part(NamedTuple):
    """One block of such a file."""

    name: str
    digest: str
    start: int  # its first row in the file [1]
    stop: int  # the row after its last [1]
    note: str
    header: str


_TYPES = [str, str, int, int, str, str]  # rows become part of a query


def joined_name(first: str, last: str) -> str:
    """Name of the file that holds the blocks from ``first`` to ``last``, without its suffix."""
    return f"{first}-{last.rpartition('-')[2]}"


def parts_text(parts: Sequence[Part]) -> str:
    """Parts as ``parts_of`` reads them back."""
    return json.dumps(parts)


def file_with(path: Path) -> Path | None:
    """The file of several blocks that has the place of a block in it; None where there is none.

    Parameters
    ----------
    path
        Where the block lies by itself.
    """
    own = NUMBERED.fullmatch(path.stem)
    if own is None:
        return None
    for each in sorted(path.parent.glob(f"{escape(own['stem'])}-*-*.parquet")):
        found = _JOINED.fullmatch(each.stem)
        if found and found["stem"] == own["stem"] and int(found["first"]) <= int(own["number"]) <= int(found["last"]):
            return each
    return None


def files_with_several(folder: Path) -> list[Path]:
    """Files of a group that are named as holding several blocks."""
    return [path for path in sorted(folder.glob("*.parquet")) if _JOINED.fullmatch(path.stem)]


def parts_of(path: Path) -> Mapping[str, Part] | None:
    """The blocks in a file by name, none where it is one block; None where it was changed after it was written."""
    try:
        held = path.stat()
        return _parts(path, held.st_mtime_ns, held.st_size)
    except OSError:
        return None


@lru_cache(maxsize=256)
def _parts(path: Path, changed: int, size: int) -> Mapping[str, Part] | None:  # noqa: ARG001 - of the cache
    if not is_sealed(bytes_of(path)):
        return None
    try:
        parts = [Part(*values) for values in json.loads(parquet_metadata(path).get(PARTS, "[]"))]
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(PLAIN.fullmatch(part.name) and [*map(type, part)] == _TYPES for part in parts):
        return None
    return {part.name: part for part in parts}
