"""Columns of a piggybacked search: every batch with every chunk of prefill that a step may take along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.search.blocks import BLOCK_POINTS
from disagg_sim.serving.colocation import ColocatedCase, Group
from disagg_sim.serving.search_cache import Rows, of_one_depth

#: Prefill tokens of one attention rank in a mixed step that are tried beside the balance. [token]
RANK_CHUNK_TOKENS = tuple(2**k for k in range(4, 16))


def _balance(case: ColocatedCase, accepted: float, batch: Ints) -> Floats:
    """Tokens of prefill a step of every batch, on average. [token]"""
    tokens: Floats = accepted * batch.astype(float)  # that a step emits
    return tokens * (case.lengths.mean_new / case.lengths.gaps)


def _rank_chunks(case: ColocatedCase) -> Ints:
    """Chunks of a rank to try beside the balance. [token]"""
    sizes = np.array(case.options.rank_chunk_tokens or RANK_CHUNK_TOKENS)
    return sizes[:0] if case.options.every_step_mixed else sizes


def worth_trying(case: ColocatedCase, group: Group) -> NDArray[np.bool_]:
    """Say which chunks are tried of a group.

    The result has shape (batches, 1 + sizes): the balance, and sizes that exceed it.
    """
    balance = np.maximum(_balance(case, group.accepted(case), group.batch), 1.0)[:, None]
    sizes = group.dp * _rank_chunks(case)
    return np.concatenate([np.ones(balance.shape, dtype=bool), sizes > balance], axis=1)


@dataclass(frozen=True, eq=False, slots=True)
class ChunkColumns:
    """Columns of rows of several groups; one is a (batch, chunk) that some group tries."""

    rows: Rows
    accepted: float  # tokens that a step emits for a sequence [token]
    batch_index: Ints  # (columns,) place in the batch axis
    chunk: Floats  # (rows, columns) over all DP ranks [token]
    share: Floats  # (rows, columns) of mixed steps [1]
    tried: NDArray[np.bool_]  # (rows, columns) which are of the row's group

    @classmethod
    def of(cls, case: ColocatedCase, groups: Sequence[Group], members: Sequence[tuple[int, slice]]) -> ChunkColumns:
        """Of some rows of groups."""
        rows = Rows.of(groups, members)
        worth = np.zeros((len(members), rows.batch.size, 1 + _rank_chunks(case).size), dtype=bool)
        for own, (place, _) in zip(worth, members, strict=True):
            own[: groups[place].batch.size] = worth_trying(case, groups[place])
        batch_index, size = np.nonzero(worth.any(axis=0))
        accepted = groups[members[0][0]].accepted(case)
        balance = _balance(case, accepted, rows.batch)[batch_index]
        sizes = np.concatenate([[0.0], _rank_chunks(case)])[size]
        chunk = np.where(size == 0, np.maximum(balance, 1.0), rows.table.dp_attn[:, None] * sizes)
        tried = worth[:, batch_index, size].repeat([part.stop - part.start for _, part in members], axis=0)
        return cls(rows, accepted, batch_index, chunk, balance / chunk, tried)


def blocks(case: ColocatedCase, groups: Sequence[Group]) -> Iterator[ChunkColumns]:
    """Cut rows into blocks: of one group, or of several small ones of one depth, as long as they fill no block.

    Blocks of constant lengths are twice as large, as measured: a law of lengths has a table of several prompts.
    """
    size = 2 if case.lengths.constant else 1
    for places in of_one_depth(groups):
        held: list[tuple[int, slice]] = []
        count, tried = 0, np.zeros((0, 1 + _rank_chunks(case).size), dtype=bool)  # rows of these, and their columns
        for place in places:
            own = worth_trying(case, groups[place])
            for rows in groups[place].blocks(int(np.count_nonzero(own)) // size):
                wider = _either(tried, own)
                more = rows.stop - rows.start
                if held and (count + more) * np.count_nonzero(wider) > size * BLOCK_POINTS:
                    yield ChunkColumns.of(case, groups, held)
                    held, count, wider = [], 0, own
                held.append((place, rows))
                count, tried = count + more, wider
        yield ChunkColumns.of(case, groups, held)


def _either(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which chunks either of two groups tries, over the longer of their batch axes."""
    shorter, longer = sorted((one, other), key=len)
    found = longer.copy()
    found[: len(shorter)] |= shorter
    return found
