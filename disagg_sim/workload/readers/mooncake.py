"""Read Mooncake traces: one JSON object per line, with ids of the prompt's blocks of 512 tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import TraceError, nearest, quoted
from disagg_sim.workload.request_columns import PrefixBlocks, Tokens
from disagg_sim.workload.trace import MOST_TOKENS

#: Tokens of a block. [token]
BLOCK_TOKENS = 512
#: Ids are kept in 64 bits; two traces that run together move theirs apart. [1]
LARGEST_ID = 2**62
#: Keys of a line: arrival [ms] and lengths [token].
FIELDS = ("timestamp", "input_length", "output_length")


def read_lines(path: Path, content: bytes) -> tuple[Floats, Tokens, Tokens, PrefixBlocks | None]:
    """Time stamps, input and output lengths [token] of all lines, each (requests,), and their prefix blocks, if any."""
    rows, blocks = [], []
    for line, text in enumerate(content.splitlines(), start=1):
        if text.strip():
            row, ids = _record(path, line, text)
            rows.append(row)
            blocks.append(ids)
    timestamp, inputs, outputs = np.array(rows, dtype=np.float64).T
    sizes, prefix = np.array([len(ids) for ids in blocks]), None
    if sizes.any():
        flat = np.fromiter(chain.from_iterable(blocks), dtype=np.int64, count=int(sizes.sum()))
        prefix = PrefixBlocks(offsets=np.concatenate([[0], np.cumsum(sizes)]), ids=flat, block_tokens=BLOCK_TOKENS)
    return timestamp, inputs.astype(np.int64), outputs.astype(np.int64), prefix


def spread_batches(arrival: Floats) -> tuple[Floats, int]:
    """Requests of one instant spread evenly up to the next instant, or over the median interval where that is shorter.

    Returns the new times, in the same order, and the number of instants. [s], [1]
    """
    instants, place, sizes = np.unique(arrival, return_inverse=True, return_counts=True)
    if instants.size == 1:
        return arrival, 1
    intervals = np.diff(instants)
    intervals = np.minimum(np.append(intervals, np.inf), np.median(intervals))
    order = np.argsort(place, kind="stable")
    rank = np.empty(arrival.size, dtype=np.int64)  # of a request within its batch
    rank[order] = np.arange(arrival.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return arrival + intervals[place] * rank / sizes[place], int(instants.size)


def _record(path: Path, line: int, text: bytes) -> tuple[list[float], Sequence[int]]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{line}: malformed JSON at column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{line}: not a text file in UTF-8: {error.reason}") from None
    except ValueError as error:  # a number of thousands of digits
        raise TraceError(f"{path}:{line}: malformed JSON: {str(error).split(';')[0]}") from None
    except RecursionError:
        raise TraceError(f"{path}:{line}: malformed: nested too deeply; allowed: one object with lists") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{line}: malformed: expected a JSON object")
    row = [_number(path, line, record, name) for name in FIELDS]
    ids = record.get("hash_ids", ())
    if not isinstance(ids, list | tuple) or not all(type(each) is int and abs(each) < LARGEST_ID for each in ids):
        raise TraceError(f"{path}:{line}: hash_ids must be a list of whole numbers of less than 63 bits")
    if len(ids) > math.ceil(row[1] / BLOCK_TOKENS):
        raise TraceError(
            f"{path}:{line}: {len(ids)} hash_ids for an input_length of {row[1]:g}; allowed: up to one for every "
            f"{BLOCK_TOKENS} tokens"
        )
    return row, ids


def _number(path: Path, line: int, record: dict[str, Any], name: str) -> float:
    if name not in record:
        raise TraceError(f"{path}:{line}: no key {name!r}{nearest(name, record)}")
    value = record[name]
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TraceError(f"{path}:{line}: {name} {quoted(value)} is not a number")
    if number < 0:
        raise TraceError(f"{path}:{line}: {name} {value} is negative; allowed: 0 or more")
    if name != "timestamp" and (not number.is_integer() or number > MOST_TOKENS):
        raise TraceError(f"{path}:{line}: {name} {quoted(value)} is not a whole number of tokens up to {MOST_TOKENS}")
    return number
