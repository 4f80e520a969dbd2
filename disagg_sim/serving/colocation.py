"""Share code of the two co-located modes: axes, limits, choice among options, table.

A mode scores options (how prefill and decode share an instance) at every mapping and batch. Of one (mapping, batch)
it keeps the options that no other beats in both TTL and throughput, so that the frontier of the kept rows is that of
all options.

Several groups of mappings are searched together, their rows stacked in one table.

Past 400 lines: what both modes share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import SHARDING, ByValue, ServingMode, Sharding
from disagg_sim.errors import InfeasibleError, InputError, above_zero, check_kinds, check_word
from disagg_sim.physics.blocks import check_form, chunk_forms
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.memory import colocated_bytes_of
from disagg_sim.physics.residents import Prefilling
from disagg_sim.physics.setup import Setup
from disagg_sim.search.axes import batch_axes, draft_choices, drafting
from disagg_sim.search.blocks import given_sizes, row_blocks
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.serving.points import Delivered, Side, names_of, points_table, slot_wait
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths

#: What ``ttl_s`` means. tpot: mean over the tokens of a request, as engines report it. mean: mean over the time of a
#: slot, the prefill of the request's own prompt included. p99: the largest gap between two tokens.
TTL_MEASURES = ("tpot", "mean", "p99")
#: Options whose throughputs differ by less are equal. [1]
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocation:
    """How the two co-located modes are searched, and what their results mean."""

    batch: tuple[int, ...] | None = None  # residents of an instance; None = four a doubling up to memory [request]
    prefill_batch: tuple[int, ...] | None = None  # ``colocated``: prompts that a pass may take, none above the batch;
    # None = one a DP rank, and its doublings where so many seats become free together [request]
    hold_steps: tuple[int, ...] | None = ()  # ``colocated``: waits to try beside none; None = see ``pass_columns`` [1]
    rank_chunk_tokens: tuple[int, ...] | None = None  # ``piggyback``: chunks of a DP rank to try beside the balance,
    # where they exceed it, at most a prompt; None = the powers of two from 16 to 32,768 [token]
    every_step_mixed: bool = False  # ``piggyback``: the balance alone, as the piggybacked curve of arXiv 2506.05508
    ttl_measure: str = "tpot"  # what ``ttl_s`` is, of ``TTL_MEASURES``
    mla_form: str = "auto"  # of MLA in prefill; "auto" takes the fastest that fits. Decodes are absorbed
    allow_long_context: bool = False  # score requests beyond the model's context limit instead of refusing them

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range."""
        for name in ("batch", "prefill_batch", "hold_steps", "rank_chunk_tokens"):
            if (given := getattr(self, name)) is not None and (name != "hold_steps" or np.size(given)):
                object.__setattr__(self, name, tuple(given_sizes(name, given).tolist()))
        check_kinds(self)
        check_form(self.mla_form)
        check_word("ttl_measure", self.ttl_measure, TTL_MEASURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedCase:
    """One co-located search: setup, lengths, limits and options, all checked."""

    at: Setup
    lengths: Lengths
    ftl_limit: float  # inclusive; acts on ``ftl_with_slot_wait_s`` [s]
    ttl_limit: float | None = None  # inclusive; None = none [s]
    options: Colocation

    def __post_init__(self) -> None:
        """``InputError`` for a limit out of range, or requests beyond the model's context."""
        object.__setattr__(self, "lengths", lengths := self.lengths.at_checkpoints(self.at))
        self.at.check_context(lengths.mean_isl, lengths.mean_osl, allow_long=self.options.allow_long_context)
        above_zero("ftl_limit", self.ftl_limit, "s")
        if self.ttl_limit is not None:
            above_zero("ttl_limit", self.ttl_limit, "s")

    def memory_bytes(self, mapping: Sharding, batch: Any, prefilling: Prefilling, forms: Sequence[str]) -> list[Any]:
        """Bytes on the fullest GPU under each form of MLA; see ``physics.memory.colocated_bytes_of``. [B]"""
        return colocated_bytes_of(
            self.at, mapping, batch, cached=self.lengths.resident, prefilling=prefilling, mla_forms=forms
        )

    @property
    def forms(self) -> tuple[str, ...]:
        """MLA forms of a chunk to try: "auto" also tries to keep the up-projected past in memory."""
        return chunk_forms(self.at.model, self.options.mla_form)


@dataclass(frozen=True, eq=False, kw_only=True)
class Group(ByValue):
    """Mappings of one attention DP degree, all with a pipeline or all without, and their batch axis."""

    table: Sharding
    batch: Ints  # (batches,) requests of an instance [request]
    dp: int  # [1]
    deep: bool  # with a pipeline

    @property
    def mapping(self) -> Sharding:
        """Degrees as columns of shape (rows, 1). [1]"""
        return self.table.for_grid()

    @property
    def drafts(self) -> int:
        """Draft tokens of a sequence in a step, the same in all rows. [token]"""
        return int(np.max(self.table.draft_tokens))

    def accepted(self, case: ColocatedCase) -> float:
        """Tokens that a step emits for a sequence. [token]"""
        return float(np.max(case.at.accepted_length(self.table.draft_tokens)))

    def blocks(self, columns: int) -> list[slice]:
        """Slices of rows; see ``search.blocks.row_blocks``."""
        return row_blocks(len(self.table), columns)


def groups(case: ColocatedCase, mappings: Sharding | list[Sharding]) -> Iterator[Group]:
    """Mappings by DP degree and pipeline; batches up to the memory limit of each group unless given. [request]"""
    given = case.options.batch
    table = without_pcp(mappings_for(case.at, mappings))
    if not len(table):
        raise InputError("mappings is empty; allowed: one mapping or more")
    kinds = 2 * table.dp_attn + (table.pp > 1)
    numbers = np.unique(kinds)
    axes = batch_axes(case.at, table, case.lengths, kinds) if given is None else [np.array(given)] * numbers.size
    for number, sizes in zip(numbers.tolist(), axes, strict=True):
        yield Group(table=table[kinds == number], batch=sizes, dp=number // 2, deep=bool(number % 2))


def drafted_groups(case: ColocatedCase, mappings: Sharding | list[Sharding]) -> Iterator[tuple[ColocatedCase, Group]]:
    """Groups at every number of draft tokens that the search tries, each with the setup of its instances."""
    for group in groups(case, mappings):
        for drafts in draft_choices(case.at):
            at, table = drafting(case.at, group.table, drafts)
            yield replace(case, at=at), replace(group, table=table)


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """Scored options of some rows of a group, (rows, columns); a column is one (batch, option)."""

    batch_index: Ints  # (columns,) place in the batch axis
    ttl_mean: Floats  # [s]
    largest_gap: Callable[[Any], Floats]  # of the options at some places, rows and columns [s]
    tpot: Floats  # [s]
    ftl: Floats  # of a prompt from the start of its prefill [s]
    memory: Floats  # [B]
    group: Floats  # prompts that start together, (columns,) or of every row [request]
    tried: NDArray[np.bool_] | None = None  # which columns are options of a row; None = all of every row

    def measured(self, measure: str) -> Floats:
        """What a user's TTL is, (rows, columns). [s]"""
        if measure == "p99":
            return self.largest_gap(np.ix_(*(np.arange(size) for size in self.ttl_mean.shape)))
        return self.ttl_mean if measure == "mean" else self.tpot

    def at(self, row: Ints, column: Ints) -> dict[str, Floats]:
        """Take the fields of ``Chosen`` that are scored for every option, at the chosen ones."""
        group = np.broadcast_to(self.group, self.ttl_mean.shape)
        scored = {name: getattr(self, name)[row, column] for name in ("ttl_mean", "tpot", "ftl", "memory")}
        return {**scored, "largest_gap": self.largest_gap((row, column)), "group": group[row, column]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTally:
    """What a search looked at and what its limits left out."""

    design_points: int = 0  # (mapping, batch, option) scored [1]
    feasible: int = 0  # of them, those that fit in memory [1]
    above_ftl_limit: int = 0  # feasible, but too slow to the first token [1]
    above_ttl_limit: int = 0  # within the FTL limit, but too slow from token to token [1]
    least_shortfall: float = np.inf  # memory that the closest infeasible point lacks [B]
    best_ftl_s: float = np.inf  # lowest of the feasible points, the wait for a slot included [s]
    best_ttl_s: float = np.inf  # lowest of the feasible points within the FTL limit [s]

    def plus(self, other: SearchTally) -> SearchTally:
        """Both together: counts add, bests are the lower ones."""
        joined = {
            f.name: (sum if f.type == "int" else min)((getattr(self, f.name), getattr(other, f.name)))
            for f in fields(self)
        }
        return SearchTally(**joined)


def choose(case: ColocatedCase, batch: Ints, options: Options) -> tuple[Ints, Ints, SearchTally]:
    """Rows and columns of the options worth a row in the table, and their tally.

    The FTL limit acts on the first token of a request that waits for a slot: ``ftl + b/(2*X)`` with the b prompts
    that start together and the instance's rate X = B/(mean TTL*(OSL-1)).

    Of the options of one (mapping, batch) within the limits those stay that no other beats in TTL and throughput. If
    TTL is "tpot" or "mean", that is one option, since the less time prompts take, the better are TTL and throughput
    (of "tpot" nearly); of equal options it is the first.
    """
    fits = options.memory <= case.at.memory_limit
    lacks = ~fits
    if options.tried is not None:
        fits, lacks = fits & options.tried, lacks & options.tried
    rate = case.lengths.request_rate(batch[options.batch_index], options.ttl_mean)
    first = options.ftl + slot_wait(options.group, rate)
    fast = fits & (first <= case.ftl_limit)
    measured = options.measured(case.options.ttl_measure)
    usable = fast & (measured <= (np.inf if case.ttl_limit is None else case.ttl_limit))

    def least(values: Floats, mask: NDArray[np.bool_]) -> float:
        """The smallest that counts, infinite where none does."""
        return float(np.where(mask, values, np.inf).min(initial=np.inf))

    feasible, within = int(fits.sum()), int(fast.sum())
    tally = SearchTally(
        design_points=feasible + int(lacks.sum()),
        feasible=feasible,
        above_ftl_limit=feasible - within,
        above_ttl_limit=within - int(usable.sum()),
        least_shortfall=least(options.memory - case.at.memory_limit, lacks),
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
    if case.options.ttl_measure != "p99":
        best = np.argmin(mean, axis=-1)
        row, batch = np.nonzero(np.isfinite(np.take_along_axis(mean, best[..., None], axis=-1)[..., 0]))
        return row, place[batch, best[row, batch]], tally
    order = np.lexsort((mean, laid_out(measured)), axis=-1)
    rising = np.take_along_axis(mean, order, axis=-1)
    keep = np.isfinite(rising)
    keep[..., 1:] &= rising[..., 1:] < np.minimum.accumulate(rising, axis=-1)[..., :-1] * (1.0 - _ROUNDING)
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

    mapping: Sharding
    batch: Ints  # [request]
    prefill_batch: Ints  # prompts of a pass or of a mixed step [request]
    hold_steps: Ints  # that prompts are held back at most [1]
    group: Floats  # prompts that start together [request]
    chunk_tokens: Ints  # CPP; 0 = whole prompt [token]
    mixed_chunk: Floats  # [token]
    mixed_share: Floats  # [1]
    ttl_mean: Floats  # [s]
    largest_gap: Floats  # [s]
    tpot: Floats  # [s]
    ftl: Floats  # [s]
    memory: Floats  # [B]
    prefill_rate: Floats  # if the instance did nothing but prefill [request/s]
    decode_rate: Floats  # if it did nothing but decode [request/s]
    bound: NDArray[np.int8]  # index into ``BOUNDS``
    mla_form: NDArray[np.int8]  # of prefill, index into ``CHOSEN_FORMS``

    def part(self, points: Any) -> Chosen:
        """Some of the points."""
        return Chosen(**{f.name: getattr(self, f.name)[points] for f in fields(self)})


@dataclass(frozen=True, eq=False, slots=True)
class ColocatedPoints:
    """The points of a co-located search and the options that it tried."""

    case: ColocatedCase
    points: pd.DataFrame  # columns as ``points.COLUMNS``
    tally: SearchTally

    def require(self) -> ColocatedPoints:
        """Itself; ``InfeasibleError`` with what binds where memory or the FTL limit leaves nothing."""
        case, tally = self.case, self.tally
        where = f"{case.at.model.name} on {case.at.system.name}"
        if not tally.feasible:
            raise InfeasibleError(
                f"{where}: no co-located mapping fits in memory; "
                f"the closest lacks {tally.least_shortfall / GB:.4g} GB per GPU"
            )
        if tally.feasible == tally.above_ftl_limit:
            raise InfeasibleError(
                f"{where}: no co-located configuration meets the FTL limit of {case.ftl_limit:g} s; "
                f"the best FTL, with the wait for a slot, is {tally.best_ftl_s:.4g} s"
            )
        return self


def _fastest_drafts(degrees: dict[str, Any], columns: dict[str, Any], measure: str) -> Ints:
    """Rows with the number of drafts that gives a (mapping, batch) the most throughput; with "p99" all rows."""
    if measure == "p99":
        return np.arange(columns["batch"].size)
    keys = [columns["batch"], *(degrees[name] for name in SHARDING)]
    order = np.lexsort((columns["ttl_mean"], *keys))
    first = np.ones(order.size, dtype=bool)
    first[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    return np.sort(order[first])


def points_of_search(
    case: ColocatedCase, mode: ServingMode, chosen: list[Chosen], tally: SearchTally
) -> ColocatedPoints:
    """The table of points (``points.COLUMNS``) of a co-located mode from what its search chose.

    ``throughput = B*OSL/(G*(OSL-1)*mean TTL)`` tokens/s/GPU in every co-located mode (physics page,
    section 8): the OSL tokens of B residents in the time in which all of them are replaced once.
    """
    columns: dict[str, Any] = {
        f.name: np.concatenate([getattr(c, f.name) for c in chosen]) for f in fields(Chosen) if f.name != "mapping"
    }
    degrees: dict[str, Any] = {
        name: np.concatenate([np.broadcast_to(getattr(c.mapping, name), c.batch.shape) for c in chosen])
        for name in (*SHARDING, "draft_tokens")
    }
    if case.at.speculation is not None:
        kept = _fastest_drafts(degrees, columns, case.options.ttl_measure)
        columns, degrees = ({name: each[kept] for name, each in part.items()} for part in (columns, degrees))
    at, lengths, mean = case.at, case.lengths, columns["ttl_mean"]
    mapping, distinct = Sharding(**degrees), unique_gpus(at.model, Sharding(**degrees))
    # one instance does both phases and is counted as one of decode; no cache leaves it
    both = Side(
        names=names_of(at),
        mapping=mapping,
        batch=columns["batch"],
        instances=1,
        memory_bytes=columns["memory"],
        request_rate=columns["decode_rate"],
        unique_gpus=np.asarray(distinct).astype(np.int64),
        kv_rate=0.0,
    )
    prefill = replace(
        both,
        mapping=replace(mapping, chunk_tokens=columns["chunk_tokens"]),
        batch=columns["prefill_batch"],
        instances=0,
        request_rate=columns["prefill_rate"],
    )
    served = Delivered(
        mode=mode,
        model=at.model.name,
        matching="none",
        lengths=lengths,
        kv_bytes_per_request=lengths.mean_over_prompts(at.handed_bytes),
        speculation=at.speculation,
        techniques=at.techniques,
        prefill=prefill,
        decode=both,
        microbatches=np.minimum(mapping.pp, columns["batch"]),
        bound=columns["bound"],
        mla_form=columns["mla_form"],
        ftl=columns["ftl"],
        ttl={"mean": mean, "p99": columns["largest_gap"], "tpot": columns["tpot"]}[case.options.ttl_measure],
        ttl_mean=mean,
        largest_gap=columns["largest_gap"],
        request_rate=lengths.request_rate(columns["batch"], mean),
        group=columns["group"],
        mixed_chunk=columns["mixed_chunk"],
        mixed_share=columns["mixed_share"],
        hold_steps=columns["hold_steps"],
    )
    return ColocatedPoints(case, points_table(served), tally)


#: The points chosen of groups, each with the place of its group, the rows of a group in order; what was looked at.
Found = tuple[list[tuple[int, Chosen]], SearchTally]


def searched(
    search: Callable[[ColocatedCase, Sequence[Group]], Found], case: ColocatedCase, mappings: Sharding | list[Sharding]
) -> tuple[list[Chosen], SearchTally]:
    """Search groups of mappings, those of one number of draft tokens together; points in the order of the groups."""
    asked = list(drafted_groups(case, mappings))
    alike: dict[tuple[ColocatedCase, int], list[int]] = defaultdict(list)
    for place, (own, group) in enumerate(asked):
        alike[own, group.drafts].append(place)
    points: list[list[Chosen]] = [[] for _ in asked]
    tally = SearchTally()
    for (own, _), places in alike.items():
        found, seen = search(own, [asked[place][1] for place in places])
        tally = tally.plus(seen)
        for place, chosen in found:
            points[places[place]].append(chosen)
    return [chosen for of_group in points for chosen in of_group], tally


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Rows of several groups that are timed together, over the longest of their batch axes."""

    members: tuple[tuple[int, slice], ...]  # place of a group in those of the search, and its rows
    table: Sharding
    batch: Ints  # (batches,) [request]
    batches: Ints  # (rows, 1) of these, those of the row's group, from the first [1]

    @classmethod
    def of(cls, groups: Sequence[Group], members: Sequence[tuple[int, slice]]) -> Rows:
        """Rows of groups, one group after the other."""
        tables = [groups[place].table[rows] for place, rows in members]
        counts = [groups[place].batch.size for place, _ in members]
        return cls(
            members=tuple(members),
            table=Sharding.joined(tables),
            batch=max((groups[place].batch for place, _ in members), key=len),
            batches=np.repeat(counts, [len(table) for table in tables])[:, None],
        )

    @property
    def places(self) -> list[tuple[int, slice]]:
        """Place of each group in those of the search, and its rows in these."""
        sizes = [rows.stop - rows.start for _, rows in self.members]
        stops = np.cumsum(sizes).tolist()
        return [
            (place, slice(stop - size, stop)) for (place, _), size, stop in zip(self.members, sizes, stops, strict=True)
        ]


def of_one_depth(groups: Sequence[Group]) -> list[list[int]]:
    """Places of the groups without a pipeline, and of those with one."""
    split = [[place for place, group in enumerate(groups) if group.deep == deep] for deep in (False, True)]
    return [places for places in split if places]
