"""Cut prompts into chunks, and lay the chunks of many prompts out one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.physics.distinct import distinct
from disagg_sim.physics.operators import Tokens
from disagg_sim.physics.work import Numeric

#: Numbers that are added up at once, as measured: few enough for the cache, many enough to hide numpy's overhead. [1]
BLOCK_CHUNKS = 2**16


class ChunkPlan(NamedTuple):
    """How a prompt is cut: equal chunks and a last one that may be shorter."""

    chunks: Numeric  # [1]
    size: Numeric  # of all chunks but the last [token]
    last: Numeric  # [token]


def chunk_plan(isl: Numeric, chunk_tokens: Numeric) -> ChunkPlan:
    """Cut ``isl`` tokens into chunks of ``chunk_tokens``.

    >>> [float(x) for x in chunk_plan(1000, 512)]
    [2.0, 512.0, 488.0]
    """
    size = np.minimum(chunk_tokens, isl)
    chunks = np.ceil(isl / size)
    return ChunkPlan(chunks, size, isl - (chunks - 1) * size)


def most_chunks(new: Numeric, chunks: Numeric) -> Numeric:
    """Find the most chunks that prompts of the same length are cut into, at any row or column.

    Parameters
    ----------
    new, chunks
        Tokens of the prompts and chunks of each; they broadcast. [token], [1]

    Returns
    -------
    ndarray
        Of their shape. [1]

    Examples
    --------
    >>> most_chunks(np.array([[1024.0], [2048.0], [1024.0]]), np.array([[2.0], [4.0], [1.0]])).tolist()
    [[2.0], [4.0], [2.0]]
    """
    values, place = distinct(np.broadcast_to(new, np.shape(chunks)))
    most = np.zeros(values.size)
    np.maximum.at(most, place, chunks)
    return most[place]


class Chunks:
    """Chunks of the prompts of a table, those of one row of it one after the other.

    A row is one of the distinct degrees of the table where its prompts are alike at all levels, else one point. Takes
    ``others`` [1], [token] and ``most`` (None = the most of any row).
    """

    def __init__(self, plan: ChunkPlan, others: Sequence[Numeric], most: Numeric | None = None) -> None:
        shape = np.broadcast_shapes(*map(np.shape, (*plan, *others)))
        by_row = np.ndim(plan.chunks) == 2 and np.shape(plan.chunks)[1] == 1
        self._points = None if by_row else shape
        rows = shape[0] if by_row else int(np.prod(shape))

        def laid(values: Numeric) -> Any:
            """A number, a row over the levels, or of shape (rows, columns)."""
            if np.ndim(values) == 0:
                return values
            if by_row:
                return (
                    values if np.shape(values)[0] == 1 < rows else np.broadcast_to(values, (rows, np.shape(values)[1]))
                )
            return np.broadcast_to(values, shape).reshape(rows, 1)

        self._plan, self._others = ChunkPlan(*map(laid, plan)), [laid(each) for each in others]
        self._columns = shape[1] if by_row else 1
        self._count = np.broadcast_to(self._plan.chunks, (rows, 1))[:, 0].astype(np.intp)
        own = np.max(self._count) if most is None else laid(most)
        self._most = np.broadcast_to(own, (rows, 1))[:, 0].astype(np.intp)

    def blocks(self) -> Iterator[slice]:
        """Rows that are laid out at once."""
        step = max(1, BLOCK_CHUNKS // (int(self._most.max()) * self._columns))
        yield from (slice(at, at + step) for at in range(0, self._most.size, step))

    def of(self, rows: slice) -> ChunkRows:
        """Chunks of some rows."""

        def of_rows(values: Any) -> Any:
            return values[rows] if np.ndim(values) and len(values) == self._count.size else values

        count = self._count[rows]
        first = np.cumsum(count) - count
        row = np.repeat(np.arange(count.size), count)
        step = (np.arange(row.size) - first[row])[:, None]

        def of_chunks(values: Any) -> Any:
            mine = of_rows(values)
            return mine[row] if np.ndim(mine) and len(mine) == count.size else mine

        tp, dcp, pcp, prompts, prefix = map(of_chunks, self._others)
        size, last = of_chunks(self._plan.size), of_chunks(self._plan.last)
        tokens = Tokens(
            prompts=prompts,
            new=np.where(step < count[row, None] - 1, size, last),
            past=prefix + step * size,
            latent=np.where(step == 0, prefix, 0.0),
            dcp=dcp,
            pcp=pcp,
        )
        full, last = first + np.maximum(count - 2, 0), first + count - 1
        return ChunkRows(tp, tokens, row, step[:, 0], full, last, self._most[rows])

    def joined(self, parts: Sequence[Any]) -> Any:
        """What was found of blocks of rows, one after the other, in the shape of the table."""
        columns = max(part.shape[1] for part in parts)
        found = np.concatenate([np.broadcast_to(part, (len(part), columns)) for part in parts])
        return found if self._points is None else found.reshape(self._points)[()]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Chunks of some rows, one after the other; arrays of shape (chunks, columns)."""

    tp: Numeric
    tokens: Tokens
    row: Any  # (chunks,) number of its row
    step: Any  # (chunks,) its number in the row
    full: Any  # (rows,) place of the last chunk of full size
    last: Any  # (rows,) place of the last chunk
    most: Any  # (rows,) chunks over which it is added up [1]

    def at(self, values: Numeric, where: Any) -> Any:
        """Values of one chunk of each row."""
        return np.broadcast_to(values, (self.row.size, np.shape(values)[-1] if np.ndim(values) else 1))[where]

    def summed(self, values: Numeric) -> Any:
        """Sum over the chunks of each row, (rows, columns)."""
        columns = np.shape(values)[-1] if np.ndim(values) else 1
        laid = np.zeros((self.last.size, columns, int(self.most.max())), dtype=np.result_type(values, float))
        laid[self.row, :, self.step] = values
        if self.most.min() == self.most.max():
            return laid.sum(axis=-1)
        found = np.empty(laid.shape[:-1], dtype=laid.dtype)
        for most in np.unique(self.most).tolist():
            rows = self.most == most
            found[rows] = laid[rows, :, :most].sum(axis=-1)
        return found
