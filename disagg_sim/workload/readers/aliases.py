"""Read Mooncake traces, and columns under the names of other tools: logs of engines, OpenTelemetry, Langfuse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import TraceError, nearest, quoted
from disagg_sim.workload.readers.columns import Table
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


#: What a column is for -> its names, in lower case without what is neither letter nor digit, the first that is there
#: counts. OpenAI: usage.prompt_tokens; OpenTelemetry: gen_ai.usage.input_tokens; Langfuse: startTime, promptTokens,
#: inputUsage, usageDetails.input (langfuse.com/docs, "Blob Storage Export Field Reference").
NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        *("arrivals", "arrival", "arrivaltime", "arrivedat", "arrivaltimestamp", "requesttimestamp", "requesttime"),
        *("requeststarttime", "timestamp", "starttime", "startedat", "starttimestamp", "start", "createdat", "created"),
        *("receivedat", "submittedat", "submittime", "sendtime", "time", "ts", "datetime", "date"),
    ),
    "input_tokens": (
        *("inputtokens", "prompttokens", "inputlength", "inputlen", "promptlength", "promptlen", "isl"),
        *("numinputtokens", "numprompttokens", "numprefilltokens", "prefilltokens", "contexttokens", "requesttokens"),
        *("inputtokencount", "prompttokencount", "tokensin", "inputusage", "usageinputtokens", "usageprompttokens"),
        *("usageinput", "usagedetailsinput", "genaiusageinputtokens", "genaiusageprompttokens"),
    ),
    "output_tokens": (
        *("outputtokens", "completiontokens", "outputlength", "outputlen", "completionlength", "completionlen", "osl"),
        *("numoutputtokens", "numcompletiontokens", "numdecodetokens", "numgeneratedtokens", "decodetokens"),
        *("generatedtokens", "responsetokens", "generationtokens", "genlen", "gentokens", "outputtokencount"),
        *("completiontokencount", "tokensout", "outputusage", "usageoutputtokens", "usagecompletiontokens"),
        *("usageoutput", "usagedetailsoutput", "genaiusageoutputtokens", "genaiusagecompletiontokens"),
    ),
}
#: Columns that may hold a JSON object with token counts: of Langfuse and OpenAI.
USAGE = ("usage", "usage_details", "usageDetails")
_UNIT = re.compile(r"(.+?)(?:[ _.(\[-]+(s|ms|us|ns)[)\]]?|(?<=[a-z])(Ms|Us|Ns))")


class MatchedColumns(NamedTuple):
    """Columns of a table by what they are for; "" where there is none."""

    columns: Mapping[str, str]  # of the roles of ``NAMES``
    unit: str  # of times, where the name of their column says it; "" = it does not

    @property
    def note(self) -> str:
        """What was taken as what, in a line."""
        units = {"arrival": f" in {self.unit}" if self.unit else ""}
        said = (f"{column!r} as {role}{units.get(role, '')}" for role, column in self.columns.items() if column)
        return f"columns: {', '.join(said)}"


def columns_by_alias(header: Sequence[str]) -> MatchedColumns | None:
    """Find the columns of a table that are meant.

    Returns None where one of both lengths is missing. Times under Mooncake's names are in its unit, ms.
    """
    plain = {_plain(name): name for name in reversed(header)}
    timed: dict[str, tuple[str, str]] = {}
    for name in reversed(header):
        if (found := _UNIT.fullmatch(name)) is not None:
            timed.setdefault(_plain(found[1]), (name, (found[2] or found[3]).lower()))
    columns, unit = {}, "ms" if set(FIELDS) <= set(header) else ""
    for role, names in NAMES.items():
        for each in names:
            if each in plain or (role == "arrival" and each in timed):
                columns[role], unit_here = (plain[each], "") if each in plain else timed[each]
                unit = unit_here or unit
                break
        else:
            columns[role] = ""
    return MatchedColumns(columns, unit) if columns["input_tokens"] and columns["output_tokens"] else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def flat(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Name and text of each plain value of an object, and of objects two levels within, with dots between names."""
    for name, value in record.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield f"{before}{name}", str(value)
        elif isinstance(value, dict) and before.count(".") < 2:
            yield from flat(value, f"{before}{name}.")


def read_objects(path: Path, content: bytes) -> Table | None:
    """Read a file of JSON objects, an array or one a line, whose keys are known under other names."""
    array = content.lstrip()[:1] == b"["
    if array:
        found = _parsed(path, 1, content)
        records = list(enumerate(found if isinstance(found, list) else [], start=1))
    else:
        lines = [(line, text) for line, text in enumerate(content.splitlines(), start=1) if text.strip()]
        if not _by_alias(lines[0][1]):
            return None
        records = [(line, _parsed(path, line, text)) for line, text in lines]
    if not records:
        raise TraceError(f"{path}: the array is empty; allowed: one request or more")
    for line, record in records:
        if not isinstance(record, dict):
            raise TraceError(f"{path}:{line}: malformed: expected a JSON object")
    return Table.of_objects(path, [(line, dict(flat(record))) for line, record in records])


def _by_alias(first: bytes) -> bool:
    """Whether the first line is an object with lengths under other names than Mooncake's."""
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or set(FIELDS) <= set(record):
        return False
    return columns_by_alias([name for name, _ in flat(record)]) is not None


def _parsed(path: Path, line: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = line + error.lineno - 1
        raise TraceError(f"{path}:{where}: malformed JSON at column {error.colno}: {error.msg}") from None
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise TraceError(f"{path}:{line}: malformed JSON: {str(error).split(';')[0]}") from None
    except RecursionError:
        raise TraceError(f"{path}:{line}: malformed: nested too deeply; allowed: objects with lists") from None


def with_usage(table: Table) -> Table:
    """Add columns of JSON objects in the cells of ``USAGE``, as ``usage_details.input``; empty where one has none."""
    made: dict[str, list[str]] = {}
    for name in (each for each in USAGE if each in table.header):
        cells = table.text(name).tolist()
        for row, text in enumerate(cells):
            try:
                found = json.loads(text) if text.startswith("{") else {}
            except (ValueError, RecursionError):
                continue
            for key, value in flat(found, f"{name}."):
                made.setdefault(key, [""] * len(cells))[row] = value
    return table.widened(made) if made else table
