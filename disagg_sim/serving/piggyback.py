"""Co-located serving with chunked-prefill piggybacking: prompts ride along with decode steps (section 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Mapping
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.mixed import NO_INTERFERENCE, Chunk, Interference, chunk_share, mixed_step
from disagg_sim.physics.phases import decode_step
from disagg_sim.physics.roofline import Sums
from disagg_sim.search.grid import bound_codes, degree_columns, given_sizes
from disagg_sim.search.mappings import MappingTable
from disagg_sim.serving.colocation import (
    Case,
    Chosen,
    Group,
    Options,
    Tally,
    checked_case,
    choose,
    groups,
    points_table,
)

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Prefill tokens of one attention rank in a mixed step that are tried beside the balance. [token]
RANK_CHUNK_TOKENS = tuple(2**k for k in range(4, 16))


def piggyback(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    isl: int,
    osl: int,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
    batch: Any = None,
    rank_chunk_tokens: Any = None,
    every_step_mixed: bool = False,
    interference: Interference = NO_INTERFERENCE,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    ttl_measure: str = "mean",
    mla_form: str = "auto",
    allow_long_context: bool = False,
    allow_empty: bool = False,
) -> pd.DataFrame:
    r"""In-flight batching in which steps carry a chunk of prefill beside the decodes.

    Each request brings ISL prefill tokens per OSL-1 decode steps, so B residents need
    :math:`c_{bal} = B \cdot ISL/(OSL-1)` of them a step. With chunks of :math:`c \ge c_{bal}` tokens (over all DP
    ranks) the share :math:`\varphi = c_{bal}/c` of the steps is mixed:

    .. math:: \overline{TTL} = \varphi\,T_{mix}(B, c) + (1-\varphi)\,T_d(B),\quad
              y = \frac{B \cdot OSL}{G\,(OSL-1)\,\overline{TTL}},\quad
              FTL = \max\left(\frac{ISL}{c/dp}, 1\right) T_{mix}

    The largest gap is T_mix. Every DP rank works on a prompt of its own at c/dp tokens a step, hence
    the FTL; more than ISL of them are several prompts in a step. T_mix is the mean over the chunks of a
    prompt, taken at their mean past (``physics.mixed``), in the largest gap too. The search runs over
    every mapping, its batches and its chunks. A balance below one token a step becomes one token in
    some of the steps.

    Parameters
    ----------
    model, system, mappings, isl, osl, precision, profile, engine, batch
        As in ``colocated``.
    ftl_limit, ttl_limit, ttl_measure, allow_long_context, allow_empty
        As in ``colocated``.
    rank_chunk_tokens
        Chunks of one DP rank, c/dp, to try beside the balance where they exceed it; by default the powers
        of two from 16 to 32,768. [token]
    every_step_mixed
        Only the balance: every step is mixed, which is what the piggybacked curve of arXiv 2506.05508 means.
    interference
        What the phases cost each other in a mixed step; neutral by default.
    mla_form
        Form of MLA in a chunk: "naive" re-projects the past, "absorbed" works in latent space, "cached"
        keeps the up-projected past in memory, "auto" takes the fastest that fits. Decodes are absorbed.

    Returns
    -------
    DataFrame
        Columns as ``points.COLUMNS``. One row per (mapping, B) with the chunk of the lowest mean TTL; under
        "p99" every chunk of a (mapping, B) that no other beats in TTL and throughput. ``decode_bound`` is
        of the mean step. ``attrs`` holds the counts of ``colocation.Tally``.

    Raises
    ------
    InfeasibleError
        When nothing fits in memory, or nothing meets the FTL limit.
    InputError, UnknownNameError
        Values out of range, unknown names.
    """
    case = checked_case(
        model,
        system,
        precision=precision,
        profile=profile,
        engine=engine,
        isl=isl,
        osl=osl,
        ftl_limit=ftl_limit,
        ttl_limit=ttl_limit,
        ttl_measure=ttl_measure,
        mla_form=mla_form,
        allow_long_context=allow_long_context,
    )
    sizes = _chunk_sizes(rank_chunk_tokens, every_step_mixed=every_step_mixed)
    tally, chosen = Tally(), []
    for group in groups(case, mappings, batch):
        for part, seen in _search(case, group, sizes, mla_form, interference):
            chosen.append(part)
            tally = tally.plus(seen)
    return points_table(case, "piggyback", chosen, tally, allow_empty=allow_empty)


def count_piggyback(
    case: Case, mappings: MappingTable, *, every_step_mixed: bool = False, mla_form: str = "auto"
) -> int:
    """Design points that ``piggyback`` scores by default: (mapping, batch, chunk, form of MLA). [1]"""
    sizes = _chunk_sizes(None, every_step_mixed=every_step_mixed)
    return sum(
        len(group.table) * _chunks(case, group, sizes)[0].size * len(case.forms(mla_form))
        for group in groups(case, mappings, None)
    )


def _chunk_sizes(rank_chunk_tokens: Any, *, every_step_mixed: bool) -> Ints:
    """Chunks of one DP rank to try beside the balance. [token]"""
    sizes = given_sizes("rank_chunk_tokens", RANK_CHUNK_TOKENS if rank_chunk_tokens is None else rank_chunk_tokens)
    return sizes[:0] if every_step_mixed else sizes


def _chunks(case: Case, group: Group, sizes: Ints) -> tuple[Ints, Floats, Floats]:
    """Place in the batch axis, chunk over all DP ranks [token] and share of mixed steps [1] of every column."""
    balance = group.batch * (case.isl / (case.osl - 1))  # tokens of prefill that a step needs on average
    chunks = np.concatenate(
        [np.maximum(balance, 1.0)[:, None], np.broadcast_to(group.dp * sizes, (balance.size, sizes.size))], axis=1
    )
    worth = np.concatenate([np.ones((balance.size, 1), dtype=bool), chunks[:, 1:] > chunks[:, :1]], axis=1)
    batch_index, size = np.nonzero(worth)
    chunk = chunks[batch_index, size]
    return batch_index, chunk, balance[batch_index] / chunk


def _search(case: Case, group: Group, sizes: Ints, form: str, interference: Interference) -> list[tuple[Chosen, Tally]]:
    """Score every (batch, chunk) of the rows of a group, in blocks, and keep the best."""
    forms = case.forms(form)
    batch_index, chunk, share = _chunks(case, group, sizes)
    return [
        _block(case, group, rows, batch_index, chunk, share, forms, interference)
        for rows in group.blocks(batch_index.size * len(forms))
    ]


def _block(
    case: Case,
    group: Group,
    rows: slice,
    batch_index: Ints,
    chunk: Floats,
    share: Floats,
    forms: tuple[str, ...],
    interference: Interference,
) -> tuple[Chosen, Tally]:
    """Score some rows of a group; a column is one (batch, chunk), forms of MLA one after the other."""
    at, part = case.at, group.table[rows]
    degrees, context = degree_columns(part), case.isl + case.osl / 2
    decode = decode_step(at, degrees, batch=group.batch[None, :].astype(float), context=context)
    step, residents = decode.ttl[:, batch_index], group.batch[batch_index].astype(float)[None, :]
    prompts = group.dp * np.maximum(np.ceil(chunk / (group.dp * case.isl)), 1.0)  # in progress, over all DP ranks
    new = chunk_share(chunk / np.minimum(degrees.pp, residents), group.dp)
    mixed = [
        mixed_step(
            at,
            degrees,
            batch=residents,
            context=context,
            chunk=Chunk(chunk[None, :], case.isl),
            mla_form=form,
            interference=interference,
        )
        for form in forms
    ]
    memory = [
        case.memory_bytes(degrees, residents, prompts=prompts, new=new, mixed=True, expanded=form == "cached")
        for form in forms
    ]
    time = np.concatenate([each.time for each in mixed], axis=1)
    index, step = np.tile(batch_index, len(forms)), np.tile(step, len(forms))
    chunk, share, prompts = (np.tile(values, len(forms)) for values in (chunk, share, prompts))
    options = Options(
        batch_index=index,
        ttl_mean=share * time + (1.0 - share) * step,
        largest_gap=time,
        ftl=np.maximum(group.dp * case.isl / chunk, 1.0) * time,
        memory=np.concatenate(memory, axis=1),
        group=np.where(chunk > group.dp * case.isl, chunk / case.isl, 1.0),
    )
    row, column, tally = choose(case, group.batch, options)
    of_mixed, of_decode = np.divmod(column, batch_index.size), (row, index[column])
    sums = []
    for name in Sums._fields:
        parts = [np.broadcast_to(getattr(each.sums, name), each.time.shape) for each in mixed]
        inside = np.stack(parts)[of_mixed[0], row, of_mixed[1]]
        outside = np.broadcast_to(getattr(decode.sums, name), decode.ttl.shape)[of_decode]
        sums.append(share[column] * inside + (1.0 - share[column]) * outside)
    batch = group.batch[index[column]]
    chosen = Chosen(
        mapping=part[row],
        batch=batch,
        prefill_batch=prompts[column].astype(np.int64),
        group=options.group[column],
        chunk_tokens=np.zeros(row.size, dtype=np.int64),
        mixed_chunk=chunk[column],
        mixed_share=share[column],
        ttl_mean=options.ttl_mean[row, column],
        largest_gap=time[row, column],
        ftl=options.ftl[row, column],
        memory=options.memory[row, column],
        prefill_rate=chunk[column] / (case.isl * time[row, column]),
        decode_rate=batch / (step[row, column] * (case.osl - 1)),
        bound=bound_codes(Sums(*sums)),
    )
    return chosen, tally
