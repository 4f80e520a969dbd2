"""How long simulations took: a log beside the blocks of a store, which hold nothing that depends on the machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from disagg_sim.errors import StoreError
from disagg_sim.simulation.metrics import MEASURED, Summary
from disagg_sim.sweep.store import Key

LOG = "timing.jsonl"

#: Place and digest of a block -> the measured columns of each of its rows.
Timings = Mapping[tuple[str, str], list[dict[str, float]]]


def log_timing(root: Path, key: Key, rows: Sequence[Summary]) -> None:
    """Add a line: the measured columns of the rows of a block."""
    rows_told = [{name: getattr(row, name) for name in MEASURED} for row in rows]
    line = json.dumps({"block": str(key.relative), "digest": key.digest, "rows": rows_told})
    path = root / LOG
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot write: {error.strerror}") from None


def read_timings(root: Path) -> Timings:
    """The last line of each block; a line that cannot be read is no line."""
    found = {}
    try:
        lines = (root / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            held = json.loads(line)
            rows = [{name: float(row[name]) for name in MEASURED} for row in held["rows"]]
            found[str(held["block"]), str(held["digest"])] = rows
    return found


def timed(rows: list[dict[str, Any]], key: Key, timings: Timings) -> list[dict[str, Any]]:
    """Rows of a block with their measured columns; NaN where the log has none."""
    told = timings.get((str(key.relative), key.digest), [])
    unknown = dict.fromkeys(MEASURED, math.nan)
    return [row | (told[at] if len(told) == len(rows) else unknown) for at, row in enumerate(rows)]
