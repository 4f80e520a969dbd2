"""Compiled: the arrays of a fleet, found by their addresses.

A call from Python pays a quarter of a microsecond for each array of records, more than for all else that most calls do.
So entry points take one small array instead, which says where the others are. It is filled anew whenever one of them
is replaced; ``Fleet`` keeps them alive.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.extras import extra
from disagg_sim.simulation.kernel.compiled import COMPILES, inner
from disagg_sim.simulation.kernel.layout import (
    BlockRun,
    Feed,
    FleetState,
    InstanceRecord,
    Network,
    Port,
    Segment,
    Shared,
    TransferRecord,
    World,
    dtype_of,
)

with extra("simulate"):
    import numba
    from numba.core import cgutils, types
    from numba.extending import intrinsic

INSTANCE, SEGMENT, WORLD, FEED = (dtype_of(record) for record in (InstanceRecord, Segment, World, Feed))
ARRAYS = len(FleetState._fields)
TRANSFER, PORT, NETWORK, RUN, SHARED = (
    dtype_of(record) for record in (TransferRecord, Port, Network, BlockRun, Shared)
)
_ir: Any = cast(Any, cgutils).ir
_numba: Any = numba  # its stubs know neither ``carray`` nor that the first argument of an intrinsic is not passed
carray = _numba.carray


def _pointer_of(_: Any, address: Any) -> Any:
    """An address as a pointer that ``carray`` takes."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), made


#: Compiled: an address as what ``carray`` takes.
pointer: Any = intrinsic(_pointer_of)


def _plain_array(address: int, shape: Any, kind: Any) -> Any:
    """``carray`` where nothing is compiled, by an address."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.ndarray(shape, kind, (ctypes.c_char * size).from_address(int(address)))


if not COMPILES:
    carray, pointer = _plain_array, int


def _chosen_of(_: Any, function: Any, home: Any, context: Any, request: Any, tokens: Any, origin: Any, now: Any) -> Any:
    """A function by its address, of whole numbers and a time."""

    def made(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        types_of = [value.type for value in values[1:]]
        kind = _ir.FunctionType(values[0].type, types_of)
        function = builder.inttoptr(values[0], kind.as_pointer())
        return builder.call(function, values[1:])

    return types.int64(function, home, context, request, tokens, origin, now), made


#: Compiled: what a function of a policy chooses (``ranking.Chooser``).
chosen: Any = intrinsic(_chosen_of)


def addresses_of(arrays: Sequence[NDArray[Any]], home: Ints | None = None) -> Ints:
    """Write down where arrays are. [1]"""
    home = np.zeros((len(arrays), 4), dtype=np.int64) if home is None else home
    for row, array in zip(home, arrays, strict=True):
        row[0], row[1 : 1 + array.ndim] = array.ctypes.data, array.shape
    return home


@inner
def state_at(home: Ints) -> FleetState:
    """All arrays of a fleet."""
    return FleetState(
        carray(pointer(home[0, 0]), home[0, 1], INSTANCE),
        carray(pointer(home[1, 0]), home[1, 1], SEGMENT),
        carray(pointer(home[2, 0]), (home[2, 1], home[2, 2], home[2, 3]), np.int64),
        carray(pointer(home[3, 0]), home[3, 1], np.float64),
        carray(pointer(home[4, 0]), (home[4, 1], home[4, 2]), np.float64),
        carray(pointer(home[5, 0]), home[5, 1], WORLD),
        carray(pointer(home[6, 0]), home[6, 1], np.float64),
        carray(pointer(home[7, 0]), home[7, 1], np.float64),
        carray(pointer(home[8, 0]), home[8, 1], np.int64),
        carray(pointer(home[9, 0]), home[9, 1], np.int64),
    )


@inner
def home_at(address: int) -> Ints:
    """The array that says where the others are, by its address."""
    home: Ints = carray(pointer(address), (ARRAYS, 4), np.int64)
    return home


@inner
def feed_at(address: int) -> Feed:
    """A feed, by its address."""
    feed: Feed = carray(pointer(address), 1, FEED)[0]
    return feed


@inner
def whole_numbers(address: int, count: int) -> Ints:
    """An array of whole numbers, by its address."""
    numbers: Ints = carray(pointer(address), count, np.int64)
    return numbers


@inner
def next_due(address: int) -> float:
    """When the next request of a feed comes; inf = none, or no feed, -inf = it is not at hand. [s]"""
    if address == 0:
        return math.inf
    feed = feed_at(address)
    if feed.next >= feed.requests:
        return -math.inf if feed.more == 1 else math.inf
    time: float = carray(pointer(feed.times_at), feed.requests, np.float64)[feed.next]
    return time


@inner
def ranking_at(addresses: tuple[int, int, int], groups: int, width: int, instances: int) -> tuple[Floats, Ints, Floats]:
    """The arrays of a ranking, see ``ranking.ranking``."""
    trees = carray(pointer(addresses[0]), (groups, width), np.float64)
    present = carray(pointer(addresses[2]), instances, np.float64)
    return trees, whole_numbers(addresses[1], instances + 1), present


@inner
def post_s(feed: Feed, sender: int, receiver: int, instances: int) -> float:
    """Time of a descriptor between two instances of a feed. [s]"""
    kind = whole_numbers(feed.kind_at, instances)
    time: float = carray(pointer(feed.post_at), (feed.kinds, feed.kinds), np.float64)[kind[sender], kind[receiver]]
    return time
