"""What the two co-located modes have in common: axes, limits, the choice among options, the table.

A mode scores options (how prefill and decode share an instance) at every mapping and batch. Of the
options of one (mapping, batch) only those stay that no other beats in both TTL and throughput, so the
frontier over the rows is the frontier over all options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import BOUNDS, Mapping
from disagg_sim.errors import InfeasibleError, InputError, above_zero, nearest
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, unique_gpus
from disagg_sim.physics.layer import check_form
from disagg_sim.physics.memory import Prefilling, colocated_bytes, decode_residents, prompt_residents
from disagg_sim.physics.phases import Degrees
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.grid import BLOCK_POINTS, batch_axis_at, check_lengths, degree_columns, given_sizes
from disagg_sim.search.mappings import MappingTable, mappings_for
from disagg_sim.serving.candidates import least
from disagg_sim.serving.points import slot_wait, table_of_points

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: What ``ttl_s`` means: the mean over the tokens, or the largest gap between two of them.
TTL_MEASURES = ("mean", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One co-located study: a setting, its lengths and its limits, all checked."""

    at: Setup
    isl: int  # [token]
    osl: int  # [token]
    ftl_limit: float  # inclusive [s]
    ttl_limit: float  # inclusive; inf = none [s]
    ttl_measure: str  # of ``TTL_MEASURES``

    def memory_bytes(self, degrees: Degrees, batch: Any, *, prompts: Any, new: Any, mixed: bool, expanded: bool) -> Any:
        """Bytes on the fullest GPU; see ``physics.memory.colocated_bytes``. [B]"""
        return colocated_bytes(
            self.at,
            degrees,
            batch,
            cached=decode_residents(self.isl, self.osl),
            prefilling=Prefilling(prompts=prompts, prompt=prompt_residents(self.isl), new=new, mixed=mixed),
            mla_form="cached" if expanded else "auto",
        )

    def forms(self, form: str) -> tuple[str, ...]:
        """MLA forms of a chunk to try: a free one may also keep the up-projected past."""
        return ("auto", "cached") if form == "auto" and self.at.model.is_mla else (form,)


def checked_case(
    model: ModelSpec | str,
    system: SystemSpec | str,
    *,
    precision: str,
    profile: str,
    engine: str | None,
    isl: int,
    osl: int,
    ftl_limit: float,
    ttl_limit: float | None,
    ttl_measure: str,
    mla_form: str,
    allow_long_context: bool,
) -> Case:
    """The arguments that both modes take, checked; ``InputError`` or ``UnknownNameError`` for a wrong one."""
    at = setup(model, system, precision, profile, engine)
    check_lengths(at.model, isl, osl, allow_long_context=allow_long_context)
    check_form(mla_form)
    ftl = above_zero("ftl_limit", ftl_limit, "s")
    ttl = np.inf if ttl_limit is None else above_zero("ttl_limit", ttl_limit, "s")
    if ttl_measure not in TTL_MEASURES:
        raise InputError(
            f"ttl_measure {ttl_measure!r} is not one of {', '.join(TTL_MEASURES)}{nearest(ttl_measure, TTL_MEASURES)}"
        )
    return Case(at=at, isl=isl, osl=osl, ftl_limit=ftl, ttl_limit=ttl, ttl_measure=ttl_measure)


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Mappings of one attention DP degree, all with a pipeline or all without, and their batch axis."""

    table: MappingTable
    batch: Ints  # (batches,) requests of an instance [request]
    dp: int  # [1]
    deep: bool  # with a pipeline

    @property
    def degrees(self) -> Degrees:
        """Degrees as columns of shape (rows, 1). [1]"""
        return degree_columns(self.table)

    def blocks(self, columns: int) -> Iterator[slice]:
        """Slices of rows of about ``BLOCK_POINTS`` points."""
        step = max(1, BLOCK_POINTS // max(columns, 1))
        return (slice(i, i + step) for i in range(0, len(self.table), step))


def groups(case: Case, mappings: MappingTable | Mapping | list[Mapping], batch: Any) -> Iterator[Group]:
    """Mappings by DP degree and pipeline; batches up to the memory limit of each group unless given. [request]"""
    table = mappings_for(case.at.model, case.at.system, mappings)
    if not len(table):
        raise InputError("mappings is empty; allowed: one mapping or more")
    for dp in np.unique(table.dp_attn):
        for deep in (False, True):
            part = table[(table.dp_attn == dp) & ((table.pp > 1) == deep)]
            if not len(part):
                continue
            if batch is None:
                sizes = batch_axis_at(case.at, part, phase="decode", isl=case.isl, osl=case.osl)
            else:
                sizes = given_sizes("batch", batch)
            yield Group(table=part, batch=sizes, dp=int(dp), deep=deep)


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """Scored options of some rows of a group; a column is one (batch, option).

    Two-dimensional arrays have shape (rows, columns).
    """

    batch_index: Ints  # (columns,) place in the batch axis
    ttl_mean: Floats  # [s]
    largest_gap: Floats  # [s]
    ftl: Floats  # of a prompt from the start of its prefill [s]
    memory: Floats  # [B]
    group: Floats  # (columns,) prompts that start together [request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a search looked at and what its limits left out."""

    design_points: int = 0  # (mapping, batch, option) scored [1]
    feasible: int = 0  # of them, those that fit in memory [1]
    above_ftl_limit: int = 0  # feasible, but too slow to the first token [1]
    above_ttl_limit: int = 0  # and of the others, too slow from token to token [1]
    least_shortfall: float = np.inf  # memory that the closest infeasible point lacks [B]
    best_ftl_s: float = np.inf  # lowest of the feasible points, the wait for a slot included [s]
    best_ttl_s: float = np.inf  # lowest of the feasible points within the FTL limit [s]

    def plus(self, other: Tally) -> Tally:
        """Both together: counts add, bests are the lower ones."""
        joined = {
            f.name: (sum if f.type == "int" else min)((getattr(self, f.name), getattr(other, f.name)))
            for f in fields(self)
        }
        return Tally(**joined)


def choose(case: Case, batch: Ints, options: Options) -> tuple[Ints, Ints, Tally]:
    """Rows and columns of the options worth a row in the table, and the tally.

    The FTL limit acts on the first token of a request that waits for a slot: ``ftl + b/(2*X)`` with the b prompts
    that start together and the instance's rate X = B/(mean TTL*(OSL-1)).

    Of the options of one (mapping, batch) within the limits: those that no other beats in TTL and
    throughput. With the mean as measure that is one, since throughput is proportional to 1/mean there;
    equal ones go to the first option.
    """
    fits = options.memory <= case.at.memory_limit
    rate = batch[options.batch_index] / (options.ttl_mean * (case.osl - 1))
    first = options.ftl + slot_wait(options.group, rate)
    fast = fits & (first <= case.ftl_limit)
    measured = options.ttl_mean if case.ttl_measure == "mean" else options.largest_gap
    usable = fast & (measured <= case.ttl_limit)
    tally = Tally(
        design_points=fits.size,
        feasible=int(fits.sum()),
        above_ftl_limit=int(fits.sum() - fast.sum()),
        above_ttl_limit=int(fast.sum() - usable.sum()),
        least_shortfall=least(options.memory - case.at.memory_limit, ~fits),
        best_ftl_s=least(first, fits),
        best_ttl_s=least(measured, fast),
    )
    place = _columns_of_batches(options.batch_index)

    def laid_out(values: Floats) -> Floats:
        """Shape (rows, batches, options), infinite where there is no usable option."""
        padded = np.full((values.shape[0], values.shape[1] + 1), np.inf)
        padded[:, :-1] = np.where(usable, values, np.inf)
        return padded[:, place]

    mean = laid_out(options.ttl_mean)
    if case.ttl_measure == "mean":
        best = np.argmin(mean, axis=-1)
        row, batch = np.nonzero(np.isfinite(np.take_along_axis(mean, best[..., None], axis=-1)[..., 0]))
        return row, place[batch, best[row, batch]], tally
    order = np.lexsort((mean, laid_out(options.largest_gap)), axis=-1)
    rising = np.take_along_axis(mean, order, axis=-1)
    keep = np.isfinite(rising)
    keep[..., 1:] &= rising[..., 1:] < np.minimum.accumulate(rising, axis=-1)[..., :-1]
    row, batch, rank = np.nonzero(keep)
    return row, place[batch, order[row, batch, rank]], tally


def _columns_of_batches(batch_index: Ints) -> Ints:
    """Columns of every batch, (batches, most options); the number of columns where a batch has fewer."""
    order = np.argsort(batch_index, kind="stable")
    count = np.bincount(batch_index)
    rank = np.arange(order.size) - np.repeat(np.cumsum(count) - count, count)
    place = np.full((count.size, int(count.max())), batch_index.size)
    place[batch_index[order], rank] = order
    return place


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen:
    """Chosen points of some rows of a group, one entry a point."""

    mapping: MappingTable
    batch: Ints  # [request]
    prefill_batch: Ints  # prompts of a pass or of a mixed step [request]
    group: Floats  # prompts that start together [request]
    chunk_tokens: Ints  # CPP; 0 = whole prompt [token]
    mixed_chunk: Floats  # [token]
    mixed_share: Floats  # [1]
    ttl_mean: Floats  # [s]
    largest_gap: Floats  # [s]
    ftl: Floats  # [s]
    memory: Floats  # [B]
    prefill_rate: Floats  # if the instance did nothing but prefill [request/s]
    decode_rate: Floats  # if it did nothing but decode [request/s]
    bound: NDArray[np.int8]  # index into ``BOUNDS``


def points_table(case: Case, mode: str, chosen: list[Chosen], tally: Tally, *, allow_empty: bool) -> pd.DataFrame:
    """The table of points (``points.COLUMNS``) of a co-located mode, the tally in ``attrs``.

    ``throughput = B*OSL/(G*(OSL-1)*mean TTL)`` tokens/s/GPU in every co-located mode (physics page,
    section 8): the OSL tokens of B residents in the time in which all of them are replaced once.
    """
    import pandas as pd

    if not allow_empty:
        _require(case, tally)
    columns: dict[str, Any] = {
        f.name: np.concatenate([getattr(c, f.name) for c in chosen]) for f in fields(Chosen) if f.name != "mapping"
    }
    degrees = {
        name: np.concatenate([getattr(c.mapping, name) for c in chosen])
        for name in ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp")
    }
    at, batch, mean = case.at, columns["batch"], columns["ttl_mean"]
    gpus = degrees["tp_attn"] * degrees["dp_attn"] * degrees["pp"]
    rate = batch / (mean * (case.osl - 1))
    ttl = mean if case.ttl_measure == "mean" else columns["largest_gap"]
    distinct = unique_gpus(at.model, Degrees(**{name: value.astype(float) for name, value in degrees.items()}))
    values: dict[str, Any] = {
        "model": at.model.name,
        "system": at.system.name,
        "precision": at.precision.name,
        "profile": at.profile.name,
        "engine": at.engine,
        "mode": mode,
        "matching": "none",
        "isl": case.isl,
        "osl": case.osl,
        "tokens_per_s_per_user": 1 / ttl,
        "tokens_per_s_per_gpu": rate * case.osl / gpus,
        "ftl_s": columns["ftl"],
        "ttl_s": ttl,
        **{f"{phase}_{name}": value for phase in ("prefill", "decode") for name, value in degrees.items()},
        "prefill_chunk_tokens": columns["chunk_tokens"],
        "prefill_batch": columns["prefill_batch"],
        "prefill_instances": 0,
        "prefill_gpus": gpus,
        "decode_microbatches": np.minimum(degrees["pp"], batch),
        "decode_batch": batch,
        "decode_instances": 1,
        "decode_gpus": gpus,
        "total_gpus": gpus,
        "ctx_gen_gpu_ratio": 0.0,
        "request_rate_per_s": rate,
        "kv_egress_bytes_per_s_per_gpu": 0.0,
        "kv_ingress_bytes_per_s_per_gpu": 0.0,
        "prefill_memory_bytes": columns["memory"],
        "decode_memory_bytes": columns["memory"],
        "decode_bound": pd.Categorical.from_codes(columns["bound"], categories=pd.Index(BOUNDS)),
        "prefill_request_rate_per_s": columns["prefill_rate"],
        "decode_request_rate_per_s": columns["decode_rate"],
        "prefill_unique_gpus": np.asarray(distinct).astype(np.int64),
        "decode_unique_gpus": np.asarray(distinct).astype(np.int64),
        "kv_bytes_per_request": kv_bytes_per_request(at.model, at.precision, case.isl),
        "ftl_with_slot_wait_s": columns["ftl"] + slot_wait(columns["group"], rate),
        "ttl_mean_s": mean,
        "ttl_largest_gap_s": columns["largest_gap"],
        "mixed_chunk_tokens": columns["mixed_chunk"],
        "mixed_step_share": columns["mixed_share"],
    }
    table = table_of_points(values, batch.size)
    table.attrs = {"ttl_measure": case.ttl_measure, **{f.name: getattr(tally, f.name) for f in fields(tally)}}
    return table


def _require(case: Case, tally: Tally) -> None:
    """Raise ``InfeasibleError`` with what binds where memory or the FTL limit leaves nothing."""
    where = f"{case.at.model.name} on {case.at.system.name}"
    if not tally.feasible:
        raise InfeasibleError(
            f"{where}: no co-located mapping fits in memory; the closest lacks {tally.least_shortfall:.4g} B per GPU"
        )
    if tally.feasible == tally.above_ftl_limit:
        raise InfeasibleError(
            f"{where}: no co-located configuration meets the FTL limit of {case.ftl_limit:g} s; "
            f"the best FTL, with the wait for a slot, is {tally.best_ftl_s:.4g} s"
        )
