"""Co-located serving by in-flight batching: a pass of prefill stops decode (physics page, section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Mapping
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.chunked import chunked_prefill_pass
from disagg_sim.physics.phases import decode_step, prefill_pass
from disagg_sim.search.grid import CHUNK_TOKENS, bound_codes, given_sizes
from disagg_sim.search.mappings import MappingTable
from disagg_sim.serving.shared_instances import (
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
    model: ModelSpec | str, system: SystemSpec | str, mappings: MappingTable | Mapping | list[Mapping], *, isl: int,
    osl: int, precision: str, profile: str = "measured", engine: str | None = None, batch: Any = None,
    prefill_batch: Any = None, ftl_limit: float = 10.0, ttl_limit: float | None = None, ttl_measure: str = "mean",
    mla_form: str = "auto", allow_long_context: bool = False,
) -> pd.DataFrame:  # fmt: skip
    r"""In-flight batching without piggyback: whole prompts are prefilled b at a time, and decode waits.

    While all B residents are replaced once, an instance makes OSL-1 decode steps and B/b passes of
    prefill. With t_p = pass time / b per prompt

    .. math:: cycle = (OSL-1)\,T_d(B) + B\,t_p,\quad \overline{TTL} = T_d + \frac{B\,t_p}{OSL-1},\quad
              y = \frac{B \cdot OSL}{G \cdot cycle}

    The largest gap between two tokens is T_d and one pass; FTL is the pass, without a queue. Searched
    are every mapping, its batches B, the prompts b of a pass and, with a pipeline, whether the pass is
    cut into chunks (CPP) and of what size. Memory holds the residents and the prompts in prefill.

    Parameters
    ----------
    isl, osl
        Input and output length. [token]
    precision, profile, engine
        Names of a recipe, a profile and, optionally, the engine whose fits come first.
    batch
        Batch sizes B; by default four a doubling up to the memory limit. [request]
    prefill_batch
        Prompts b of a pass, none above B; by default one a DP rank and its doublings. [request]
    ftl_limit, ttl_limit
        Largest latencies, inclusive; the FTL limit acts on ``ftl_s``, which has no queue. [s]
    ttl_measure : {"mean", "p99"}
        What ``ttl_s`` is: the mean, or the largest gap.
    mla_form
        Form of MLA in the chunks of CPP; "auto" takes the fastest that fits.

    Returns
    -------
    DataFrame
        Columns as ``points.COLUMNS``. One row per (mapping, B) with the b of the lowest mean TTL; under
        "p99" every b of a (mapping, B) that no other beats in TTL and throughput. ``attrs`` holds the
        counts of ``shared_instances.Tally``.

    Raises
    ------
    InfeasibleError
        When nothing fits in memory, or nothing meets the FTL limit.
    """
    case = checked_case(
        model, system, precision=precision, profile=profile, engine=engine, isl=isl, osl=osl, ftl_limit=ftl_limit,
        ttl_limit=ttl_limit, ttl_measure=ttl_measure, mla_form=mla_form, allow_long_context=allow_long_context,
    )  # fmt: skip
    sizes = None if prefill_batch is None else given_sizes(prefill_batch)
    tally, chosen = Tally(), []
    for group in groups(case, mappings, batch):
        for part, seen in _search(case, group, sizes, mla_form):
            chosen.append(part)
            tally = tally.plus(seen)
    return points_table(case, "colocated", chosen, tally)


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to make a pass: whole prompts, or chunks of CPP."""

    chunk_tokens: int  # 0 = whole prompts [token]
    expanded: bool  # MLA keeps the up-projected past
    time: Floats  # of a pass, (rows, passes) [s]


def _cuts(case: Case, group: Group, passes: Ints, form: str) -> list[_Cut]:
    at, degrees, prompts = case.at, group.degrees, passes[None, :].astype(float)
    whole = prefill_pass(at.model, at.rates, degrees, batch=prompts, isl=case.isl, mla_form=form)
    cuts = [_Cut(0, False, whole.ftl)]
    for size in (s for s in CHUNK_TOKENS if group.deep and s < case.isl):
        for each in case.forms(form):
            chunked = chunked_prefill_pass(
                at.model, at.rates, degrees, batch=prompts, isl=case.isl,
                chunk_tokens=np.full((len(group.table), 1), float(size)), mla_form=each,
            )  # fmt: skip
            cuts.append(_Cut(size, each == "cached", chunked.ftl))
    return cuts


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
    at, degrees = case.at, group.degrees
    prompts = _pass_sizes(group, sizes)
    batch_index, step = np.nonzero(prompts)
    if not batch_index.size:
        return []
    passes, which = np.unique(prompts[batch_index, step], return_inverse=True)
    cuts = _cuts(case, group, passes, form)
    decode = decode_step(
        at.model, at.rates, degrees, batch=group.batch[None, :].astype(float), context=case.isl + case.osl / 2
    )
    bound = np.broadcast_to(bound_codes(decode.sums), decode.ttl.shape)
    residents = group.batch[batch_index].astype(float)[None, :]
    together = passes[which].astype(float)[None, :]
    found = []
    for rows in group.blocks(batch_index.size * len(cuts)):
        part = group.table[rows]
        part_degrees = Group(table=part, batch=group.batch, dp=group.dp, deep=group.deep).degrees
        own = np.ceil(together / group.dp)
        times = np.concatenate([cut.time[rows][:, which] for cut in cuts], axis=1)
        memory = np.concatenate(
            [
                case.memory_bytes(
                    part_degrees, residents, prompts=together, mixed=False, expanded=cut.expanded,
                    new=own * cut.chunk_tokens if cut.chunk_tokens
                    else np.ceil(own / np.minimum(part_degrees.pp, own)) * case.isl,
                )
                for cut in cuts
            ],
            axis=1,
        )  # fmt: skip
        index, count = np.tile(batch_index, len(cuts)), np.tile(together[0], len(cuts))
        step_time = decode.ttl[rows][:, index]
        options = Options(
            batch_index=index,
            ttl_mean=step_time + group.batch[index] * (times / count) / (case.osl - 1),
            largest_gap=step_time + times,
            ftl=times,
            memory=memory,
        )
        row, column, tally = choose(case, options)
        of_cut, b = column // batch_index.size, count[column]
        chosen = Chosen(
            mapping=part[row],
            batch=group.batch[index[column]],
            prefill_batch=b.astype(np.int64),
            group=b,
            chunk_tokens=np.array([cut.chunk_tokens for cut in cuts], dtype=np.int64)[of_cut],
            mixed_chunk=np.zeros(row.size),
            mixed_share=np.zeros(row.size),
            ttl_mean=options.ttl_mean[row, column],
            largest_gap=options.largest_gap[row, column],
            ftl=times[row, column],
            memory=memory[row, column],
            prefill_rate=b / times[row, column],
            decode_rate=group.batch[index[column]] / (step_time[row, column] * (case.osl - 1)),
            bound=bound[rows][row, index[column]],
        )
        found.append((chosen, tally))
    return found
