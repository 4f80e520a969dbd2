"""Score co-located serving with piggybacking: prompts are prefilled in chunks inside decode steps (section 8)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mapping, Mode
from disagg_sim.physics.kv_tiers import load_time, tier_of
from disagg_sim.physics.passes.decode import decode_lookups
from disagg_sim.physics.passes.mixed import MixedStep, mixed_lookups
from disagg_sim.physics.passes.mixed_layers import Chunk
from disagg_sim.physics.residents import prefilling_in_pieces
from disagg_sim.physics.roofline import AnySums, Sums, chosen_sums, sums_at
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import Lookups, evaluate, side_by_side
from disagg_sim.search.blocks import bound_codes
from disagg_sim.search.grid import form_code
from disagg_sim.serving.colocation import (
    Case,
    Chosen,
    Colocation,
    Found,
    Group,
    Options,
    Tally,
    choose,
    drafted_groups,
    found,
)
from disagg_sim.workload.lengths import Lengths

#: Prefill tokens of one attention rank in a mixed step that are tried beside the balance. [token]
RANK_CHUNK_TOKENS = tuple(2**k for k in range(4, 16))
DEFAULT = Colocation()


def piggyback(
    at: Setup,
    mappings: Mapping | list[Mapping],
    lengths: Lengths,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    options: Colocation = DEFAULT,
) -> pd.DataFrame:
    r"""Score in-flight batching with steps that contain decodes and a chunk of prefill.

    Each request brings ISL prefill tokens (those that no cache holds) per OSL-1 decode steps, so B residents need
    :math:`c_{bal} = B \cdot ISL/(OSL-1)` of them a step. With chunks of :math:`c \ge c_{bal}` tokens (over all DP
    ranks) the share :math:`\varphi = c_{bal}/c` of the steps is mixed:

    .. math:: \overline{TTL} = \varphi\,T_{mix}(B, c) + (1-\varphi)\,T_d(B),\quad
              y = \frac{B \cdot OSL}{G\,(OSL-1)\,\overline{TTL}},\quad
              FTL = \max\left(\frac{ISL}{c/dp}, 1\right) T_{mix}

    The largest gap is T_mix. Every DP rank works on a prompt of its own at c/dp tokens a step, hence
    the FTL; more than ISL of them are several prompts in a step. T_mix is the mean over the chunks of a
    prompt, taken at their mean past (``physics.passes.mixed``), in the largest gap too. The search runs over
    every mapping, its batches and its chunks. A balance below one token a step becomes one token in
    some of the steps.

    Under a length distribution ISL and OSL are the means in the balance, decode runs at the length-biased context, and
    T_mix is the mean over the chunks of all prompts (a prompt has as many as it has tokens), in the FTL over the
    prompts; the largest gap is made by the chunks of a prompt that 99 of 100 do not exceed.

    Parameters
    ----------
    at, mappings, lengths, ftl_limit, ttl_limit
        As in ``colocated``.
    options : Colocation
        Batches and chunks to try, interference of the phases, measure of TTL, and the form of MLA in a chunk: "naive"
        re-projects the past, "absorbed" works in latent space, "cached" keeps the up-projected past in memory, "auto"
        takes the fastest that fits.

    Returns
    -------
    DataFrame
        Columns as ``points.COLUMNS``. One row per (mapping, B) with the chunk of the lowest mean TTL; under
        "p99" every chunk of a (mapping, B) that no other beats in TTL and throughput. ``decode_bound`` is
        of the mean step.

    Raises
    ------
    InfeasibleError
        When nothing fits in memory, or nothing meets the FTL limit.
    InputError
        Values out of range, mappings that the model cannot take.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> points = piggyback(at, Mapping(), lengths(2048, 256), options=Colocation(batch=(16, 64)))
    >>> points["decode_batch"].tolist()
    [16, 64]
    """
    case = Case(at=at, lengths=lengths, ftl_limit=ftl_limit, ttl_limit=ttl_limit, options=options)
    return search_piggyback(case, mappings).require().points


def search_piggyback(case: Case, mappings: Mapping | list[Mapping]) -> Found:
    """Find the points of ``piggyback`` within the limits, none if so it is, and count what was looked at.

    Parameters
    ----------
    case, mappings
        Setup, lengths, limits and options; mappings to search.

    Returns
    -------
    Found
        Table of points, and a tally of what the limits left out.

    Raises
    ------
    InputError
        Mappings that the model cannot take, or none at all.

    Examples
    --------
    With the same number of prompt tokens in every step all steps are mixed:

    >>> import disagg_sim as ds
    >>> from disagg_sim.serving.colocation import Colocation
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> options = Colocation(batch=(16, 64), every_step_mixed=True)
    >>> case = Case(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=options)
    >>> search_piggyback(case, Mapping()).points[["mixed_chunk_tokens", "mixed_step_share"]].round(1).values.tolist()
    [[128.5, 1.0], [514.0, 1.0]]
    """
    blocks = [block for own, group in drafted_groups(case, mappings) for block in _blocks(own, group)]
    return found(case, Mode.PIGGYBACK, evaluate(side_by_side(blocks)))


def count_piggyback(case: Case, mappings: Mapping) -> int:
    """Count the design points that ``piggyback`` scores: (mapping, batch, chunk, form of MLA). [1]

    Parameters
    ----------
    case, mappings
        Setup, lengths, limits and options; mappings to search.

    Returns
    -------
    int
        Before any limit acts. [1]

    Examples
    --------
    A batch of 16 takes in 16 x 2048/255 = 128 prompt tokens a step: as many in every step, or 512 in every fourth.
    Chunks of 64 would be too few:

    >>> import disagg_sim as ds
    >>> from disagg_sim.serving.colocation import Colocation
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> options = Colocation(batch=(16,), rank_chunk_tokens=(64, 512))
    >>> count_piggyback(Case(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=options), Mapping())
    2
    """
    return sum(
        len(group.table) * _chunks(own, group)[0].size * len(case.forms)
        for own, group in drafted_groups(case, mappings)
    )


def _chunks(case: Case, group: Group) -> tuple[Ints, Floats, Floats]:
    """Place in the batch axis, chunk over all DP ranks [token] and share of mixed steps [1] of every column."""
    sizes = np.array(case.options.rank_chunk_tokens or RANK_CHUNK_TOKENS)
    if case.options.every_step_mixed:
        sizes = sizes[:0]
    lengths = case.lengths
    tokens = group.accepted(case) * group.batch  # that a step emits
    balance = tokens * (lengths.mean_new / lengths.gaps)  # tokens of prefill a step, on average
    chunks = np.concatenate(
        [np.maximum(balance, 1.0)[:, None], np.broadcast_to(group.dp * sizes, (balance.size, sizes.size))], axis=1
    )
    worth = np.concatenate([np.ones((balance.size, 1), dtype=bool), chunks[:, 1:] > chunks[:, :1]], axis=1)
    batch_index, size = np.nonzero(worth)
    chunk = chunks[batch_index, size]
    return batch_index, chunk, balance[batch_index] / chunk


def _blocks(case: Case, group: Group) -> list[Lookups[tuple[Chosen, Tally]]]:
    """Score every (batch, chunk) of the rows of a group, in blocks, and keep the best."""
    chunks = _chunks(case, group)
    return [_block(case, group, rows, *chunks) for rows in group.blocks(chunks[0].size * len(case.forms))]


class _Mixed(NamedTuple):
    """Mixed steps under the distribution of the prompts, (rows, columns)."""

    step: MixedStep  # the mean over the chunks of all prompts
    ftl: Floats  # the mean over the prompts [s]
    long_time: Floats  # a step with a chunk of a long prompt [s]
    load: Floats  # of the cached past of a prompt on every rank into HBM, the mean [s]


def _mixed(case: Case, mapping: Mapping, residents: Floats, chunk: Floats, dp: int) -> Lookups[list[_Mixed]]:
    """Mixed steps of each form of MLA; a column is one (batch, chunk)."""
    at, lengths = case.at, case.lengths

    held = lengths.on_ranks(residents, mapping.dp_attn)
    known: dict[tuple[float, float], list[MixedStep]] = {}

    def every(isl: float, past: float) -> Lookups[list[MixedStep]]:
        if (isl, past) not in known:
            known[isl, past] = yield from mixed_lookups(
                at,
                mapping,
                batch=residents,
                context=held.context,
                chunk=Chunk(chunk[None, :], isl, past=past),
                forms=case.forms,
                interference=case.options.interference,
                rank_batch=held.batch,
            )
        return known[isl, past]

    nodes = lengths.prompt_nodes()
    new, weights = nodes.new, nodes.weight
    time: list[Any] = [np.zeros(1)] * len(case.forms)
    ftl, sums = time, [Sums()] * len(case.forms)
    of_tokens = weights * new / (weights @ new)  # a token of prefill is of this prompt
    load: Any = np.zeros(1)
    for (isl, past, weight, tier), share in zip(nodes.each(), of_tokens.tolist(), strict=True):
        steps, lies_in = (yield from every(isl, past)), tier_of(at.system, tier)
        load = load + weight * load_time(at, mapping, batch=mapping.dp_attn, past=past, tier=lies_in)
        in_chunks = weight * np.maximum(dp * (isl - past) / chunk, 1.0)
        time = [before + share * step.time for before, step in zip(time, steps, strict=True)]
        sums = [before.plus(step.sums, share) for before, step in zip(sums, steps, strict=True)]
        ftl = [before + in_chunks * step.time for before, step in zip(ftl, steps, strict=True)]
    long_time = time
    if not lengths.constant:
        long_steps = yield from every(*lengths.long_prompt)
        long_time = [np.maximum(step.time, mean) for step, mean in zip(long_steps, time, strict=True)]
    loads = np.broadcast_to(load, np.shape(time[0]))
    return [
        _Mixed(MixedStep(mean, total), first + load, longest, loads)
        for mean, total, first, longest in zip(time, sums, ftl, long_time, strict=True)
    ]


def _block(
    case: Case, group: Group, rows: slice, batch_index: Ints, chunk: Floats, share: Floats
) -> Lookups[tuple[Chosen, Tally]]:
    """Score some rows of a group; a column is one (batch, chunk), forms of MLA one after the other."""
    at, part, forms, new = case.at, group.table[rows], case.forms, case.lengths.mean_new
    mapping, axis = part.for_grid(), group.batch[None, :].astype(float)
    load = case.lengths.on_ranks(axis, mapping.dp_attn)
    decode = yield from decode_lookups(at, mapping, batch=axis, context=load.context, rank_batch=load.batch)
    step, residents = decode.ttl[:, batch_index], group.batch[batch_index].astype(float)[None, :]
    prompts = group.dp * np.maximum(np.ceil(chunk / (group.dp * new)), 1.0)  # in progress, over all DP ranks
    prefilling = prefilling_in_pieces(mapping, prompts, case.lengths.prompt, chunk, residents)
    under = yield from _mixed(case, mapping, residents, chunk, group.dp)
    mixed = [each.step for each in under]
    memory = [case.memory_bytes(mapping, residents, prefilling, expanded=form == "cached") for form in forms]
    time = np.concatenate([each.time for each in mixed], axis=1)
    index, step = np.tile(batch_index, len(forms)), np.tile(step, len(forms))
    chunk, share, prompts = (np.tile(values, len(forms)) for values in (chunk, share, prompts))
    loads = np.concatenate([each.load for each in under], axis=1)
    mean = share * time / group.accepted(case) + (1.0 - share) * step
    mean = np.maximum(mean, group.batch[index] / (group.dp * case.lengths.gaps) * loads)  # as fast as pasts are loaded
    options = Options(
        batch_index=index,
        ttl_mean=mean,
        tpot=mean,
        largest_gap=np.concatenate([each.long_time for each in under], axis=1),
        ftl=np.concatenate([each.ftl for each in under], axis=1),
        memory=np.concatenate(memory, axis=1),
        group=np.where(chunk > group.dp * new, chunk / new, 1.0),
    )
    row, column, tally = choose(case, group.batch, options)
    of_mixed, of_decode = np.divmod(column, batch_index.size), (row, index[column])
    inside: AnySums = sums_at(mixed[0].sums, (row, of_mixed[1]))
    for form, each in enumerate(mixed[1:], start=1):
        inside = chosen_sums(of_mixed[0] == form, sums_at(each.sums, (row, of_mixed[1])), inside)
    sums = Sums().plus(inside, share[column]).plus(sums_at(decode.sums, of_decode), 1.0 - share[column])
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
        largest_gap=options.largest_gap[row, column],
        tpot=options.tpot[row, column],
        ftl=options.ftl[row, column],
        memory=options.memory[row, column],
        prefill_rate=chunk[column] / (new * time[row, column]),
        decode_rate=case.lengths.request_rate(batch, step[row, column]),
        bound=bound_codes(sums),
        mla_form=np.array([form_code(at, form) for form in forms])[of_mixed[0]],
    )
    return chosen, tally
