"""Nouns that every room shares: modes, mappings, objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, cast

import numpy as np

from disagg_sim.errors import above_zero, whole_number
from disagg_sim.notebook import Shown


class Status(IntEnum):
    """Why a design point may be used, or not; an infeasible point keeps its place in the grid."""

    OK = 0
    OUT_OF_MEMORY = 1


class ServingMode(StrEnum):
    """How prefill and decode share GPUs; the words of tables, files and commands."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    PIGGYBACK = "piggyback"


#: Largest instance without a pipeline, least NVLink domain that one may fill instead, largest with a pipeline. [1]
MAX_INSTANCE_GPUS = 64
MAX_DOMAIN_GPUS = 72
MAX_PIPELINE_GPUS = 128

#: What limits a pass, in the order of the integer codes of ``PhaseGrid.bound``.
BOUNDS = ("compute", "memory", "communication", "latency")


@cache
def _compared(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Takes the values of the fields that tell frozen objects of a class apart; the first comes twice."""
    names = [field.name for field in fields(kind) if field.compare]
    return attrgetter(names[0], *names)


class ByValue:
    """Base of frozen dataclasses with arrays among their fields: equal and hashed by what these hold."""

    __slots__ = ()

    def _values(self) -> tuple[Any, ...]:
        values = _compared(cast("Any", type(self)))(self)
        if np.ndarray not in map(type, values):
            return values
        return tuple((value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values)

    def __eq__(self, other: object) -> bool:
        """Whether both are of one class and hold the same, to the last digit."""
        return self is other or (type(self) is type(other) and self._values() == other._values())

    def __hash__(self) -> int:
        """Of the values."""
        return hash(self._values())


#: Names of the degrees of a ``Sharding``, of all that says how an instance is cut, and of all that tells one mapping
#: from another.
DEGREES = ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp")
SHARDING = (*DEGREES, "redundant_slots", "dcp", "pcp")
#: Of these, what a table or a file may leave out, and what it then means.
UNSAID = {"redundant_slots": 0, "dcp": 1, "pcp": 1}
MAPPING_COLUMNS = (*SHARDING, "chunk_tokens")
#: All of them, with what a search chooses point by point.
MAPPING_FIELDS = (*MAPPING_COLUMNS, "draft_tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharding(ByValue, Shown):
    """How one instance is sharded: tp_attn * dp_attn * pcp = tp_ffn * ep GPUs in each of pp stages.

    ``dcp`` adds no GPUs: of the tp_attn GPUs that share the heads of a sequence, those that would hold copies of a KV
    head hold shares of its tokens.

    The fields are numbers, or columns of one shape that stand for many mappings, one a row; a field that is the same
    in all rows may stay a number.

    Examples
    --------
    >>> Sharding(dp_attn=8, ep=8, pp=2).gpus
    16
    >>> both = Sharding.stack([Sharding(), Sharding(tp_attn=4, tp_ffn=4)])
    >>> both.gpus.tolist(), both[1] == Sharding(tp_attn=4, tp_ffn=4)
    ([1, 4], True)
    """

    tp_attn: Any = 1  # tensor parallel degree of attention, dense and shared feed-forward parts [1]
    dp_attn: Any = 1  # data parallel degree of attention [1]
    tp_ffn: Any = 1  # tensor parallel degree of routed experts; of a dense model, as tp_attn [1]
    ep: Any = 1  # expert parallel degree [1]
    pp: Any = 1  # pipeline stages [1]
    redundant_slots: Any = 0  # places for copies of routed experts, over all EP ranks, beside one for each expert [1]
    dcp: Any = 1  # context parallel degree of decode: GPUs of a TP group that share the cached tokens of a KV head [1]
    pcp: Any = 1  # context parallel degree of prefill: groups of GPUs that share the new tokens of a prompt [1]
    chunk_tokens: Any = 0  # CPP: tokens of a prompt in a chunk; 0 = whole prompt [token]
    draft_tokens: Any = 0  # speculation: drafts of a sequence that a decode step verifies; 0 = none [token]
    refused: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)  # (reason, mappings left out)

    def __post_init__(self) -> None:
        """``InputError`` unless degrees that are numbers are whole and from 1, and slots from 0."""
        for name in SHARDING:
            value, least = getattr(self, name), UNSAID.get(name, 1)
            if not (isinstance(value, np.ndarray) or (type(value) is int and value >= least)):
                whole_number(name, value, least)

    @classmethod
    def stack(cls, mappings: Sequence[Sharding]) -> Sharding:
        """Single mappings as columns of shape (rows,)."""
        columns: dict[str, Any] = {
            name: np.array([getattr(each, name) for each in mappings], dtype=np.int64) for name in MAPPING_FIELDS
        }
        return cls(**columns)

    @staticmethod
    def joined(tables: Sequence[Sharding]) -> Sharding:
        """The rows of tables one after the other; a field that is the same number in all of them stays one."""
        columns: dict[str, Any] = {}
        for name in MAPPING_FIELDS:
            parts = [getattr(each, name) for each in tables]
            if any(map(np.ndim, parts)) or len(set(parts)) > 1:
                whole = [np.broadcast_to(part, len(each)) for part, each in zip(parts, tables, strict=True)]
                columns[name] = np.concatenate(whole)
        return replace(tables[0], **columns)

    def _columns(self) -> dict[str, Any]:
        """The fields that are columns."""
        values = {name: getattr(self, name) for name in MAPPING_FIELDS}
        return {name: value for name, value in values.items() if np.ndim(value)}

    def __len__(self) -> int:
        """Rows; 1 where all fields are numbers."""
        return max((len(column) for column in self._columns().values()), default=1)

    def __getitem__(self, rows: Any) -> Sharding:
        """One row, its fields whole numbers, or the columns of some rows."""
        if not isinstance(rows, int | np.integer):
            return replace(self, **{name: column[rows] for name, column in self._columns().items()}, refused=())
        values = {name: getattr(self, name) for name in MAPPING_FIELDS}
        row: dict[str, Any] = {name: int(value[rows] if np.ndim(value) else value) for name, value in values.items()}
        return Sharding(**row)

    def __iter__(self) -> Iterator[Sharding]:
        """Each row as a mapping of numbers."""
        return (self[row] for row in range(len(self)))

    def for_grid(self) -> Sharding:
        """The columns as floats of shape (rows, 1), to meet an axis of batches."""
        return replace(self, **{name: column[:, None].astype(float) for name, column in self._columns().items()})

    def narrowed(self) -> Sharding:
        """Find the columns that hold one value, which then stays a number.

        The result has fewer rows to compute, and broadcasts to the same.

        >>> both = Sharding.stack([Sharding(tp_attn=2, tp_ffn=2, pp=2), Sharding(tp_attn=4, tp_ffn=4, pp=2)]).narrowed()
        >>> both.pp, both.tp_attn.tolist()
        (2, [2, 4])
        """
        columns = self._columns().items()
        return replace(self, **{name: each.flat[0].item() for name, each in columns if np.all(each == each.flat[0])})

    @property
    def stage_gpus(self) -> Any:
        """GPUs of one pipeline stage; number or column. [1]"""
        return self.tp_attn * self.dp_attn * self.pcp

    @property
    def token_ranks(self) -> Any:
        """Attention ranks of a stage that hold different new tokens; number or column. [1]"""
        return self.dp_attn * self.pcp

    @property
    def shares(self) -> tuple[Any, Any]:
        """dcp and pcp, each the number 1 where no row is above it."""
        dcp, pcp = (1.0 if np.all(np.asarray(each) == 1) else each for each in (self.dcp, self.pcp))
        return dcp, pcp

    @property
    def gpus(self) -> Any:
        """GPUs of one instance; number or column. [1]"""
        return self.stage_gpus * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives of requests. [s]"""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        """``InputError`` unless both are above 0."""
        above_zero("ttft", self.ttft, "s")
        above_zero("tpot", self.tpot, "s")
