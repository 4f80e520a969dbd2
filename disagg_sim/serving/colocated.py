"""Co-located serving by in-flight batching: a pass of prefill stops decode (physics page, section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.chunked import chunked_prefill_pass
from disagg_sim.physics.phases import decode_step, prefill_pass
from disagg_sim.search.grid import CHUNK_TOKENS, bound_codes, degree_columns, given_sizes
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


def colocated(
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
    prefill_batch: Any = None,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    ttl_measure: str = "mean",
    mla_form: str = "auto",
    allow_long_context: bool = False,
    allow_empty: bool = False,
) -> pd.DataFrame:
    r"""In-flight batching without piggyback: whole prompts are prefilled b at a time, and decode waits.

    While all B residents are replaced once, an instance makes OSL-1 decode steps and B/b passes of
    prefill. With t_p = pass time / b per prompt

    .. math:: cycle = (OSL-1)\,T_d(B) + B\,t_p,\quad \overline{TTL} = T_d + \frac{B\,t_p}{OSL-1},\quad
              y = \frac{B \cdot OSL}{G \cdot cycle}

    The largest gap between two tokens is T_d and one pass (more where B/b exceeds OSL-1, so that several
    passes fall between two steps); FTL is the pass, without a queue. Searched are every mapping, its
    batches B, the prompts b of a pass and, with a pipeline, whether the pass is cut into chunks (CPP)
    and of what size. Memory holds the residents and the prompts in prefill.

    Parameters
    ----------
    model, system, mappings
        As in ``decode_grid``.
    isl, osl
        Input and output length. [token]
    precision, profile, engine
        Names of a recipe, a profile and, optionally, the engine whose fits come first.
    batch
        Batch sizes B; by default four a doubling up to the memory limit. [request]
    prefill_batch
        Prompts b of a pass, none above B; by default one a DP rank and its doublings. [request]
    ftl_limit, ttl_limit
        Largest latencies, inclusive; the FTL limit acts on ``ftl_with_slot_wait_s``. [s]
    ttl_measure : {"mean", "p99"}
        What ``ttl_s`` is: the mean, or the largest gap.
    mla_form
        Form of MLA in prefill; "auto" takes the fastest that fits. Decodes are absorbed.
    allow_long_context
        Score requests beyond the model's context limit instead of refusing them.
    allow_empty
        Where nothing fits or is fast enough, return an empty table whose ``attrs`` say why.

    Returns
    -------
    DataFrame
        Columns as ``points.COLUMNS``. One row per (mapping, B) with the b of the lowest mean TTL; under
        "p99" every b of a (mapping, B) that no other beats in TTL and throughput. ``attrs`` holds the
        counts of ``colocation.Tally``.

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
    sizes = None if prefill_batch is None else given_sizes("prefill_batch", prefill_batch)
    tally, chosen = Tally(), []
    for group in groups(case, mappings, batch):
        for part, seen in _search(case, group, sizes, mla_form):
            chosen.append(part)
            tally = tally.plus(seen)
    if sizes is not None and not tally.design_points:
        raise InputError(f"prefill_batch {sizes.tolist()} is above every batch; allowed: up to the requests of a batch")
    return points_table(case, "colocated", chosen, tally, allow_empty=allow_empty)


def count_colocated(case: Case, mappings: MappingTable, *, mla_form: str = "auto") -> int:
    """Design points that ``colocated`` scores by default: (mapping, batch, prompts of a pass, cut). [1]"""
    return sum(
        len(group.table) * int(np.count_nonzero(_pass_sizes(group, None))) * len(_cut_sizes(case, group, mla_form))
        for group in groups(case, mappings, None)
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to make a pass: whole prompts, or chunks of CPP."""

    chunk_tokens: int  # 0 = whole prompts [token]
    expanded: bool  # MLA keeps the up-projected past
    time: Floats  # of a pass, (rows, passes) [s]


def _cut_sizes(case: Case, group: Group, form: str) -> list[tuple[int, str]]:
    """Chunk tokens (0 = whole prompts) and MLA form of every cut of a group."""
    chunks = [size for size in CHUNK_TOKENS if group.deep and size < case.isl]
    return [(0, form), *((size, each) for size in chunks for each in case.forms(form))]


def _cuts(case: Case, group: Group, passes: Ints, form: str) -> list[_Cut]:
    at, degrees, prompts = case.at, group.degrees, passes[None, :].astype(float)

    def time(size: int, each: str) -> Any:
        if not size:
            return prefill_pass(at, degrees, batch=prompts, isl=case.isl, mla_form=each).ftl
        chunk = np.full((len(group.table), 1), float(size))
        return chunked_prefill_pass(at, degrees, batch=prompts, isl=case.isl, chunk_tokens=chunk, mla_form=each).ftl

    return [
        _Cut(size, bool(size) and each == "cached", time(size, each)) for size, each in _cut_sizes(case, group, form)
    ]


def _pass_sizes(group: Group, sizes: Ints | None) -> Ints:
    """Prompts of a pass worth trying, (batches, options), 0 where there are more than residents. [request]

    A pass below one prompt a rank takes as long as one, so the least is one a rank, or all residents.
    """
    batch = group.batch[:, None]
    if sizes is not None:
        return np.where(sizes <= batch, sizes, 0)
    steps = group.dp * 2 ** np.arange(max(int(group.batch[-1]) // group.dp, 1).bit_length())
    return np.where((steps <= batch) | (steps == group.dp), np.minimum(steps, batch), 0)


def _search(case: Case, group: Group, sizes: Ints | None, form: str) -> list[tuple[Chosen, Tally]]:
    """Score every (batch, cut, pass size) of the rows of a group, in blocks, and keep the best."""
    at, prompts = case.at, _pass_sizes(group, sizes)
    batch_index, step = np.nonzero(prompts)
    if not batch_index.size:
        return []
    passes, which = np.unique(prompts[batch_index, step], return_inverse=True)
    decode = decode_step(at, group.degrees, batch=group.batch[None, :].astype(float), context=case.isl + case.osl / 2)
    bound = np.broadcast_to(bound_codes(decode.sums), decode.ttl.shape)
    cuts = _cuts(case, group, passes, form)
    scored = _Scored(case, group, cuts, batch_index, passes[which], which, decode.ttl, bound)
    return [scored.block(rows) for rows in group.blocks(batch_index.size * len(cuts))]


@dataclass(frozen=True, eq=False)
class _Scored:
    """Passes and decode steps of a group, scored apart; columns are (batch, prompts of a pass)."""

    case: Case
    group: Group
    cuts: list[_Cut]
    batch_index: Ints  # (columns,) place in the batch axis
    together: Ints  # (columns,) prompts of a pass [request]
    which: Ints  # (columns,) place of that number in the times of the cuts
    decode_ttl: Floats  # (rows, batches) [s]
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``

    def block(self, rows: slice) -> tuple[Chosen, Tally]:
        """Join passes and steps of some rows, the cuts one after the other, and choose."""
        case, cuts, batch = self.case, self.cuts, self.group.batch
        part = self.group.table[rows]
        index, count = np.tile(self.batch_index, len(cuts)), np.tile(self.together, len(cuts))
        step = self.decode_ttl[rows][:, index]
        times = np.concatenate([cut.time[rows][:, self.which] for cut in cuts], axis=1)
        memory = np.concatenate([self._memory(part, cut) for cut in cuts], axis=1)
        passes_per_step = batch[index] / (count * (case.osl - 1))
        options = Options(
            batch_index=index,
            ttl_mean=step + passes_per_step * times,
            largest_gap=step + np.ceil(passes_per_step) * times,
            ftl=times,
            memory=memory,
            group=count.astype(float),
        )
        row, column, tally = choose(case, batch, options)
        batch_place, b, time = index[column], count[column], times[row, column]
        chosen = Chosen(
            mapping=part[row],
            batch=batch[batch_place],
            prefill_batch=b,
            group=b.astype(float),
            chunk_tokens=np.array([cut.chunk_tokens for cut in cuts])[column // self.batch_index.size],
            mixed_chunk=np.zeros(row.size),
            mixed_share=np.zeros(row.size),
            ttl_mean=options.ttl_mean[row, column],
            largest_gap=options.largest_gap[row, column],
            ftl=time,
            memory=memory[row, column],
            prefill_rate=b / time,
            decode_rate=batch[batch_place] / (step[row, column] * (case.osl - 1)),
            bound=self.bound[rows][row, batch_place],
        )
        return chosen, tally

    def _memory(self, part: MappingTable, cut: _Cut) -> Floats:
        degrees, together = degree_columns(part), self.together.astype(float)[None, :]
        own = np.ceil(together / self.group.dp)
        whole = np.ceil(own / np.minimum(degrees.pp, own)) * self.case.isl
        new = own * cut.chunk_tokens if cut.chunk_tokens else whole
        batch = self.group.batch[self.batch_index].astype(float)[None, :]
        held: Floats = self.case.memory_bytes(
            degrees, batch, prompts=together, new=new, mixed=False, expanded=cut.expanded
        )
        return held
