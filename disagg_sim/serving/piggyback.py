"""Score co-located serving with piggybacking: prompts are prefilled in chunks inside decode steps (section 8).

Past 400 lines: the columns of a search and what is timed at them are one idea.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, MixedStep, mixed_step_by_form
from disagg_sim.physics.residents import prefilling_in_pieces
from disagg_sim.physics.roofline import Sums, sums_at
from disagg_sim.physics.setup import Setup
from disagg_sim.search.blocks import BLOCK_POINTS, bound_codes
from disagg_sim.search.phase_grid import form_code
from disagg_sim.serving.colocation import (
    Chosen,
    ColocatedCase,
    ColocatedPoints,
    Colocation,
    Found,
    Group,
    Options,
    Rows,
    SearchTally,
    choose,
    drafted_groups,
    of_one_depth,
    points_of_search,
    searched,
)
from disagg_sim.serving.step_mixing import MixedShares, mixed_steps, own_step, time_of_others
from disagg_sim.workload.lengths import Lengths

#: Prefill tokens of one attention rank in a mixed step that are tried beside the balance. [token]
RANK_CHUNK_TOKENS = tuple(2**k for k in range(4, 16))


def _balance(case: ColocatedCase, accepted: float, batch: Ints) -> Floats:
    """Find the mean prefill tokens a step that keep each batch full. [token]"""
    tokens: Floats = accepted * batch.astype(float)  # output tokens of a step
    return tokens * (case.lengths.mean_new / case.lengths.gaps)


def _rank_chunks(case: ColocatedCase) -> Floats:
    """List the chunk sizes of a rank to try beside the balance: none waits for a second prompt. [token]"""
    sizes = np.array(case.options.rank_chunk_tokens or RANK_CHUNK_TOKENS, dtype=float)
    most = float(case.lengths.prompt_nodes().new.max())
    return sizes[:0] if case.options.every_step_mixed else np.unique(np.minimum(sizes, most))


def worth_trying(case: ColocatedCase, group: Group) -> NDArray[np.bool_]:
    """Tell which chunk sizes a group tries: the balance, and the sizes above it, (batches, 1 + sizes)."""
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
        """Make the columns of some rows of groups."""
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

    Constant lengths have blocks of twice ``BLOCK_POINTS``. A law of lengths has blocks of half of it, because its
    tables have a column for each of several prompts: measured as fast, in two thirds of the memory.
    """
    most = 2 * BLOCK_POINTS if case.lengths.constant else BLOCK_POINTS // 2
    for places in of_one_depth(groups):
        held: list[tuple[int, slice]] = []
        count, tried = 0, np.zeros((0, 1 + _rank_chunks(case).size), dtype=bool)  # rows of these, and their columns
        for place in places:
            own = worth_trying(case, groups[place])
            for rows in groups[place].blocks(int(np.count_nonzero(own)) * BLOCK_POINTS // most):
                wider = _either(tried, own)
                more = rows.stop - rows.start
                if held and (count + more) * np.count_nonzero(wider) > most:
                    yield ChunkColumns.of(case, groups, held)
                    held, count, wider = [], 0, own
                held.append((place, rows))
                count, tried = count + more, wider
        yield ChunkColumns.of(case, groups, held)


def _either(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which chunks at least one of two groups tries, over the longer of their batch axes."""
    shorter, longer = sorted((one, other), key=len)
    found = longer.copy()
    found[: len(shorter)] |= shorter
    return found


DEFAULT = Colocation()


def piggyback(
    at: Setup,
    mappings: Sharding | list[Sharding],
    lengths: Lengths,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    options: Colocation = DEFAULT,
) -> pd.DataFrame:
    r"""Score in-flight batching with steps that contain decodes and a chunk of prefill.

    Each request brings ISL prefill tokens (those that no cache holds) per OSL-1 decode steps, so B residents need
    :math:`c_{bal} = B \cdot ISL/(OSL-1)` of them a step. With chunks of :math:`c \ge c_{bal}` tokens (over all DP
    ranks) a rank has a piece of a prompt in the share :math:`\varphi = c_{bal}/c` of its steps, ranks apart from each
    other (``step_mixing.mixed_steps``). With r ranks that have one, T(0) = T_d and

    .. math:: \overline{TTL} = E[T(r)],\ r \sim Bin(dp, \varphi),\quad
              y = \frac{B \cdot OSL}{G\,(OSL-1)\,\overline{TTL}},\quad
              FTL = \max\left(\frac{ISL}{c/dp}, 1\right) E[T(r) \mid own]

    where "own" is that the rank itself has one. With one rank the mean is
    :math:`\varphi\,T_{mix} + (1-\varphi)\,T_d`. Tokens of a request do not meet the steps of its own prompt,

    .. math:: TPOT = \overline{TTL} - \frac{\varphi\,dp}{B}\,(E[T(r) \mid own] - \overline{TTL})

    The largest gap is a step with a piece on every rank. Every DP rank
    works on a prompt of its own at c/dp tokens a step, hence the FTL; if c/dp exceeds ISL, a step has several prompts.
    T_mix is the mean over the chunks of a prompt, taken at their mean past (``physics.passes.mixed``), in the largest
    gap too. The search runs over every mapping, its batches and its chunks, whole prompts at most where the balance is
    less: no engine waits for a second one. A balance below one token a step becomes
    one token in some of the steps.

    Under a length distribution ISL and OSL are the means in the balance, decode runs at the length-biased context, and
    T_mix is the mean over the chunks of all prompts (a prompt has as many as it has tokens), in the FTL over the
    prompts; the largest gap is made by the chunks of a prompt that 99 of 100 do not exceed.

    Parameters
    ----------
    at, mappings, lengths, ftl_limit, ttl_limit
        As in ``colocated``.
    options : Colocation
        Batches and chunks to try, measure of TTL, and the form of MLA in a chunk: "naive"
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
    >>> points = piggyback(at, Sharding(), lengths(2048, 256), options=Colocation(batch=(16, 64)))
    >>> points["decode_batch"].tolist()
    [16, 64]
    """
    case = ColocatedCase(at=at, lengths=lengths, ftl_limit=ftl_limit, ttl_limit=ttl_limit, options=options)
    return search_piggyback(case, mappings).require().points


def search_piggyback(case: ColocatedCase, mappings: Sharding | list[Sharding]) -> ColocatedPoints:
    """Find the points of ``piggyback`` within the limits, perhaps none, and count the points that were scored.

    With the same number of prompt tokens in every step all steps are mixed:

    >>> import disagg_sim as ds
    >>> from disagg_sim.serving.colocation import Colocation
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> options = Colocation(batch=(16, 64), every_step_mixed=True)
    >>> case = ColocatedCase(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=options)
    >>> search_piggyback(case, Sharding()).points[["mixed_chunk_tokens", "mixed_step_share"]].round(1).values.tolist()
    [[128.5, 1.0], [514.0, 1.0]]
    """
    return points_of_search(case, ServingMode.PIGGYBACK, *searched(_search, case, mappings))


def count_piggyback(case: ColocatedCase, mappings: Sharding) -> int:
    """Count the design points that ``piggyback`` scores before limits act: (mapping, batch, chunk, form of MLA). [1]

    A batch of 16 takes in 16 x 2048/255 = 128 prompt tokens a step: as many in every step, or 512 in every fourth.
    Chunks of 64 would be too few:

    >>> import disagg_sim as ds
    >>> from disagg_sim.serving.colocation import Colocation
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> options = Colocation(batch=(16,), rank_chunk_tokens=(64, 512))
    >>> count_piggyback(ColocatedCase(at=at, lengths=ds.lengths(2048, 256), ftl_limit=10.0, options=options),
    ...     Sharding())
    2
    """
    return sum(
        len(group.table) * int(np.count_nonzero(worth_trying(own, group))) * len(case.forms)
        for own, group in drafted_groups(case, mappings)
    )


def _search(case: ColocatedCase, groups: Sequence[Group]) -> Found:
    """Score every (batch, chunk) of the rows of all groups, in blocks, and keep the best."""
    points, tally = list[tuple[int, Chosen]](), SearchTally()
    for columns in blocks(case, groups):
        of_block, seen = _block(case, columns)
        points += of_block
        tally = tally.plus(seen)
    return points, tally


class _Mixed(NamedTuple):
    """Mixed steps under the distribution of the prompts, (rows, columns)."""

    step: MixedStep  # mean over all chunks: columns with a piece on every rank, then, if several, with one on one
    ftl: Floats  # mean over the prompts of the time of their steps alone [s]
    long_time: Floats  # time of a step with a chunk of a long prompt [s]
    load: Floats | float  # mean time to load the cached past of a prompt on every rank into HBM; 0 if in HBM [s]


def _of_prompts(
    case: ColocatedCase,
    mapping: Sharding,
    prompts: list[tuple[float, float]],
    residents: Floats,
    pieces: Floats,
    ranks: Floats | None,
) -> dict[tuple[float, float], list[MixedStep]]:
    """Mixed steps by length and past of the prompts, of each form; a column of their table is a prompt and a piece."""
    held, wide, one = case.lengths.on_ranks(residents, mapping.dp_attn), pieces.shape[1], len(prompts) == 1

    def of_all(values: Any) -> Any:
        return values if np.ndim(values) < 2 or one else np.tile(values, len(prompts))

    isl, past = (each[0] if one else np.repeat(each, wide)[None, :] for each in zip(*prompts, strict=True))
    steps = mixed_step_by_form(
        case.at,
        mapping,
        batch=of_all(residents),
        context=of_all(held.context),
        chunk=Chunk(of_all(pieces), isl, of_all(ranks), past),
        forms=case.forms,
        rank_batch=of_all(held.batch),
    )
    if one:
        return {prompts[0]: steps}
    return {each: [step.columns(place * wide, wide) for step in steps] for place, each in enumerate(prompts)}


def _mixed(case: ColocatedCase, columns: ChunkColumns, mapping: Sharding, residents: Floats) -> list[_Mixed]:
    """Mixed steps of each form of MLA; a column is one (batch, chunk)."""
    at, lengths, dp, chunk = case.at, case.lengths, mapping.dp_attn, columns.chunk
    several = bool(np.any(dp > 1)) and bool(np.any(columns.share < 1.0))
    pieces, ranks, count = chunk, np.broadcast_to(dp, chunk.shape), chunk.shape[1]
    if several:  # then with a piece on one rank
        pieces = np.concatenate([chunk, np.maximum(chunk / dp, 1.0)], axis=1)
        ranks = np.concatenate([ranks, np.ones_like(chunk)], axis=1)
        residents = np.tile(residents, 2)

    nodes, loads = lengths.prompt_nodes(), lengths.pieces_on_ranks
    uneven = loads is not None and bool(np.any(dp > 1))
    prompts = [(isl, past) for isl, past, _, _ in nodes.each()]
    prompts += [(isl, 0.0) for isl in loads.ends] if loads is not None and uneven else []
    prompts += [] if lengths.constant else [lengths.long_prompt]
    known = _of_prompts(case, mapping, list(dict.fromkeys(prompts)), residents, pieces, ranks if several else None)
    new, weights = nodes.new, nodes.weight
    of_tokens = weights * new / (weights @ new)  # a token of prefill is of this prompt
    load: Any = 0.0
    parts: list[tuple[list[MixedStep], Any, Any]] = []  # steps, their share of the mean, chunks of the prompt in them
    for (isl, past, weight, tier), share in zip(nodes.each(), of_tokens.tolist(), strict=True):
        lies_in = at.system.tier(tier)
        load = load + weight * load_time(at, mapping, batch=mapping.dp_attn, past=past, tier=lies_in)
        parts.append((known[isl, past], share, weight * np.maximum(dp * (isl - past) / chunk, 1.0)))
    if loads is not None and uneven:  # the slowest piece comes after a longer past than the mean one
        further = loads.further(np.maximum(chunk / dp, 1.0), columns.share, dp)
        pieces_of_all = sum(w * np.maximum(dp * each / chunk, 1.0) for each, w in zip(new, weights, strict=True))
        for isl, sign in zip(loads.ends, (-further, further), strict=True):
            both = np.concatenate([sign, sign], axis=1) if several else sign
            parts.append((known[isl, 0.0], both, sign * pieces_of_all))
    time: list[Any] = [np.zeros(1)] * len(case.forms)
    ftl, sums = time, [Sums()] * len(case.forms)
    for steps, share, in_chunks in parts:
        time = [before + share * step.time for before, step in zip(time, steps, strict=True)]
        sums = [before.plus(step.sums, share) for before, step in zip(sums, steps, strict=True)]
        seen = [step.time for step in steps]
        if several:
            halves = [np.split(each, 2, axis=1) for each in seen]
            seen = [own_step(one, every, columns.share) for every, one in halves]
        ftl = [before + in_chunks * step for before, step in zip(ftl, seen, strict=True)]
    long_time = time
    if not lengths.constant:
        long_time = [step.time for step in known[lengths.long_prompt]]

    return [
        _Mixed(MixedStep(mean, total), first, longest[:, :count], load)
        for mean, total, first, longest in zip(time, sums, ftl, long_time, strict=True)
    ]


def _sums_of_forms(mixed: list[MixedStep], form: Ints, points: tuple[Ints, Ints]) -> Sums:
    """Sums of mixed steps at points, under the form of each."""
    if len(mixed) == 1:
        return sums_at(mixed[0].sums, points)
    found = np.empty((4, form.size))
    for index, each in enumerate(mixed):
        if (here := np.flatnonzero(form == index)).size:
            parts = sums_at(each.sums, (points[0][here], points[1][here]))
            for whole, part in zip(found, parts, strict=True):
                whole[here] = part
    return Sums(*found)


def _block(case: ColocatedCase, columns: ChunkColumns) -> Found:
    """Score the rows of a block, forms of MLA one after the other."""
    at, part, forms, new = case.at, columns.rows.table, case.forms, case.lengths.mean_new
    batches, batch_index, chunk = columns.rows.batch, columns.batch_index, columns.chunk
    mapping, axis = part.for_grid(), batches[None, :].astype(float)
    load = case.lengths.on_ranks(axis, mapping.dp_attn)
    decode = decode_step(at, mapping, batch=axis, context=load.context, rank_batch=load.batch)
    step, residents = decode.ttl[:, batch_index], batches[batch_index].astype(float)[None, :]
    prompts = mapping.dp_attn * np.maximum(np.ceil(chunk / (mapping.dp_attn * new)), 1.0)  # in progress, on all ranks
    few = mapping.narrowed()
    prefilling = prefilling_in_pieces(few, prompts, case.lengths.prompt, chunk, residents)
    under = _mixed(case, columns, mapping, residents)
    mixed, shape = [each.step for each in under], (len(part), len(forms), batch_index.size)

    def of_forms(values: Any) -> Any:
        """Columns of every form, one after the other; values of (rows, forms, columns), or the same of all forms."""
        return np.broadcast_to(values, shape).reshape(len(part), -1)

    time = np.stack([each.time for each in mixed], axis=1)
    steps, count = mixed_steps(columns.share, mapping.dp_attn), batch_index.size
    several = time.shape[-1] > count
    of_all = MixedShares(*(each[:, None] for each in steps))
    one, every = time[..., -count:], time[..., :count]
    mean = of_all.mean(step[:, None], one, every, columns.accepted)
    loaded = own_step(one, every, np.where(mapping.dp_attn > 1, columns.share, 1.0)[:, None]) / columns.accepted
    tpot = time_of_others(mean, loaded, (columns.share * mapping.dp_attn / residents)[:, None])
    first = np.stack([each.ftl for each in under], axis=1)
    if any(np.ndim(each.load) for each in under):
        loads = np.stack([np.broadcast_to(each.load, step.shape) for each in under], axis=1)
        waits = residents / (mapping.dp_attn * case.lengths.gaps)
        mean, tpot = (np.maximum(each, waits[:, None] * loads) for each in (mean, tpot))  # as fast as pasts are loaded
        first = first + loads
    mean = of_forms(mean)

    def largest_gap(places: Any) -> Floats:
        longest = of_forms(np.stack([each.long_time for each in under], axis=1))
        return np.asarray(np.maximum(longest[places], mean[places]))

    options = Options(
        batch_index=np.tile(batch_index, len(forms)),
        ttl_mean=mean,
        tpot=of_forms(tpot),
        largest_gap=largest_gap,
        ftl=of_forms(first),
        memory=of_forms(np.stack(case.memory_bytes(few, residents, prefilling, forms), axis=1)),
        group=of_forms(np.where(chunk > mapping.dp_attn * new, chunk / new, 1.0)[:, None]),
        tried=of_forms(columns.tried[:, None]),
    )
    row, column, tally = choose(case, batches, options)
    form, own = np.divmod(column, batch_index.size)

    mixed_share, batch = columns.share[row, own], batches[batch_index[own]]
    sums = Sums().plus(_sums_of_forms(mixed, form, (row, own)), steps.full[row, own])
    if several:
        sums = sums.plus(_sums_of_forms(mixed, form, (row, own + count)), steps.alone[row, own])
    sums = sums.plus(sums_at(decode.sums, (row, batch_index[own])), steps.plain[row, own])
    chosen = Chosen(
        mapping=part[row],
        batch=batch,
        prefill_batch=prompts[row, own].astype(np.int64),
        hold_steps=np.zeros(row.size, dtype=np.int64),
        chunk_tokens=np.zeros(row.size, dtype=np.int64),
        mixed_chunk=chunk[row, own],
        mixed_share=mixed_share,
        **options.at(row, column),
        prefill_rate=chunk[row, own] / (new * time[row, form, own]),
        decode_rate=case.lengths.request_rate(batch, np.broadcast_to(step[:, None], shape)[row, form, own]),
        bound=bound_codes(sums),
        mla_form=np.array([form_code(at, each) for each in forms])[form],
    )
    of_groups = []
    for place, rows in columns.rows.places:
        points = slice(*np.searchsorted(row, [rows.start, rows.stop]).tolist())
        of_groups.append((place, chosen.part(points)))
    return of_groups, tally
