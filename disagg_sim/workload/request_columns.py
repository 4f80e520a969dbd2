"""What a trace may know of its requests beside arrival and lengths: prefix blocks, sessions, classes, models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, whole_number

Tokens = NDArray[np.int64]


def read_only(values: ArrayLike, dtype: type[Any]) -> NDArray[Any]:
    """The values as a contiguous read-only array."""
    array = np.ascontiguousarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrefixBlocks:
    """Ids of the blocks of every prompt; prompts with equal leading ids share that prefix.

    Request ``i`` has ``ids[offsets[i]:offsets[i + 1]]``, its prompt cut into pieces of ``block_tokens``, of which
    the last may be short. No ids means that nothing is known of the prompt: it shares nothing.
    """

    offsets: Tokens  # (requests + 1,) from 0, ascending [1]
    ids: Tokens  # (blocks of all requests,) [1]
    block_tokens: int  # [token]

    def __post_init__(self) -> None:
        """``InputError`` unless the offsets cut the ids into one piece a request."""
        object.__setattr__(self, "offsets", read_only(self.offsets, np.int64))
        object.__setattr__(self, "ids", read_only(self.ids, np.int64))
        whole_number("block_tokens", self.block_tokens)
        ends = self.offsets[[0, -1]].tolist() if self.offsets.ndim == 1 and self.offsets.size else []
        if ends != [0, self.ids.size] or np.any(np.diff(self.offsets) < 0):
            raise InputError(f"offsets of prefix blocks must ascend from 0 to {self.ids.size}, the number of ids")

    def take(self, rows: NDArray[np.intp]) -> PrefixBlocks:
        """The blocks of some requests, in the order of ``rows``."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return replace(self, offsets=offsets, ids=self.ids[place])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sessions:
    """Which requests are turns of one session: a turn comes when the one before it has ended and its user has thought.

    Turns of a session are in the order of the rows. Its first turn arrives as the trace says.
    """

    session: Tokens  # (requests,) number of the session of each [1]
    think_s: Floats  # (requests,) from the end of the turn before to this turn: people read, tools run [s]

    def __post_init__(self) -> None:
        """``InputError`` unless each request has a session and a finite time of 0 or more."""
        object.__setattr__(self, "session", read_only(self.session, np.int64))
        object.__setattr__(self, "think_s", read_only(self.think_s, np.float64))
        if self.session.ndim != 1 or self.session.shape != self.think_s.shape:
            raise InputError(f"sessions of shapes {self.session.shape} and {self.think_s.shape} do not pair up")
        if not (np.all(self.think_s >= 0) and np.all(np.isfinite(self.think_s))):
            raise InputError("think times of sessions must be finite, and 0 s or more")

    def take(self, rows: NDArray[np.intp]) -> Sessions:
        """Those of some requests, in the order of ``rows``."""
        return Sessions(session=self.session[rows], think_s=self.think_s[rows])

    def previous(self) -> NDArray[np.intp]:
        """(requests,) row of the turn before each; -1 of first turns. [1]"""
        order = np.argsort(self.session, kind="stable")
        follows = np.diff(self.session[order]) == 0
        found = np.full(order.size, -1)
        found[order[1:][follows]] = order[:-1][follows]
        return found

    def first(self) -> NDArray[np.intp]:
        """(requests,) row of the first turn of the session of each. [1]"""
        _, begin, place = np.unique(self.session, return_index=True, return_inverse=True)
        return begin[place]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Labels:
    """A word for every request: its class of service, such as interactive or batch, or the model that it asks for."""

    names: tuple[str, ...]
    number: Tokens  # (requests,) place of the word of each among ``names`` [1]

    def __post_init__(self) -> None:
        """``InputError`` unless each request has one of the names, which differ."""
        object.__setattr__(self, "number", read_only(self.number, np.int64))
        if len(set(self.names)) < len(self.names):
            raise InputError(f"labels {', '.join(self.names)}: a name is given twice")
        if self.number.ndim != 1 or np.any((self.number < 0) | (self.number >= len(self.names))):
            raise InputError(f"labels of requests must be numbers from 0 to {len(self.names) - 1}, one a request")

    def take(self, rows: NDArray[np.intp]) -> Labels:
        """Those of some requests, in the order of ``rows``."""
        return replace(self, number=self.number[rows])
