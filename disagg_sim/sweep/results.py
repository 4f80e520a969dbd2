"""Add up what the blocks of a sweep found: frontiers with labels, counts, and verdicts.

Blocks are gathered while they arrive, in any order. Of each mode the frontier so far is held, and the counts of its
blocks: memory does not grow with the number of points, and the tables do not depend on who computed what, or when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty import trust
from disagg_sim.certainty.extrapolation import OUTSIDE
from disagg_sim.errors import InfeasibleError, StoreError
from disagg_sim.search.pareto import pareto_mask
from disagg_sim.serving.points import INTERACTIVITY
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import origin_of
from disagg_sim.sweep.compute import BlockResult
from disagg_sim.sweep.labels import Fronts, UsedFit, fits_used, inherited, kin_of, labels, with_origins
from disagg_sim.sweep.plan import POINTS, Block, CasePlan, ModePlan, SweepPlan
from disagg_sim.sweep.serving_options import OWN_COLUMNS
from disagg_sim.sweep.store import Key
from disagg_sim.sweep.tally import Tally, add_up, verdict

#: Tables of frontiers, and the rows of each, by digest and mode.
Labelled = dict[tuple[str, str], tuple[pd.DataFrame, slice]]

_UNTOLD = pd.Series(dtype=object)
NOTHING = "-"  # in a column of texts: there is none; no word that reads back as empty


#: Frontiers of blocks that wait to be merged: one merge costs as much as reading a block. [1]
WAITING = 64


class GatheredFront:
    """The frontier of the blocks of a mode that have arrived.

    Of equal points that of the first block of the plan stays, whatever the order of arrival.
    """

    def __init__(self, throughput: str) -> None:
        self._axes = INTERACTIVITY, throughput
        self._parts: list[pd.DataFrame] = []
        self._numbers: list[np.ndarray] = []

    def add(self, number: int, front: pd.DataFrame) -> None:
        """Take the frontier of block ``number`` of the plan."""
        if len(front):
            self._parts.append(front)
            self._numbers.append(np.full(len(front), number))
        if len(self._parts) > WAITING:
            joint, numbers, kept = self._kept()
            self._parts, self._numbers = [joint.take(kept)], [numbers[kept]]

    def rows(self) -> pd.DataFrame:
        """The frontier, interactivity rising; without columns where no block has a point."""
        if not self._parts:
            return pd.DataFrame()
        joint, _, kept = self._kept()
        rising = np.argsort(joint[self._axes[0]].to_numpy(dtype=float)[kept], kind="stable")
        return joint.take(kept[rising]).reset_index(drop=True)

    def _kept(self) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
        """All parts below one another, the number of the block of each row, and the rows that stay."""
        numbers = np.concatenate(self._numbers)
        order = np.argsort(numbers, kind="stable")
        joint = pd.concat(self._parts, ignore_index=True) if len(self._parts) > 1 else self._parts[0]
        x, y = (joint[axis].to_numpy(dtype=float)[order] for axis in self._axes)
        return joint, numbers, order[pareto_mask(x, y)]


class Gathered:
    """Frontiers and counts of the blocks of a plan that have arrived."""

    def __init__(self, plan: SweepPlan) -> None:
        self._tallies: dict[Key, Tally] = {}
        self._fronts: dict[Key, tuple[int, GatheredFront]] = {}
        self._tables: dict[Key, pd.DataFrame] = {}
        for case in plan.cases:
            for mode in case.modes:
                front = GatheredFront(case.case.throughput)
                self._fronts |= {block.key: (number, front) for number, block in enumerate(mode.points)}

    def add(self, key: Key, found: BlockResult) -> None:
        """Take what was found of a block."""
        self._tallies[key] = found.tally
        if key.table == POINTS:
            number, front = self._fronts[key]
            front.add(number, found.front)
        elif len(found.front):
            self._tables[key] = found.front

    def tally(self, blocks: Sequence[Block]) -> Tally:
        """Counts of blocks that have all arrived, added up in their order."""
        return add_up(self._tallies[block.key] for block in blocks)

    def front(self, blocks: Sequence[Block]) -> pd.DataFrame:
        """Frontier of all blocks of a mode, columns as stored; empty of none."""
        return self._fronts[blocks[0].key][1].rows() if blocks else pd.DataFrame()

    def table(self, blocks: Sequence[Block]) -> pd.DataFrame:
        """The table of the one block of further pools; empty of none."""
        return self._tables.get(blocks[0].key, pd.DataFrame()) if blocks else pd.DataFrame()


@dataclass(frozen=True, kw_only=True, eq=False)
class ModeResult:
    """What the blocks of one case in one mode add up to."""

    plan: ModePlan
    #: Columns of ``points/``, of ``cases.axis_columns``, ``inherited_fits`` or "-", evidence, trust.
    frontier: pd.DataFrame
    prefill: Tally  # empty in the co-located modes
    points: Tally  # of decode, or of the co-located instances
    verdict: str  # empty when there is a frontier; else what stands in the way, and by how much
    outside: pd.Series  # where each point of the frontier leaves the range of its fits; empty where not asked for

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return self.plan.mode

    def at(self, interactivity: float) -> dict[str, Any] | None:
        """The point of highest throughput with at least this interactivity [token/s]; None where none has it."""
        if not len(self.frontier):
            return None
        reached = self._reached
        place = len(reached) - 1 if math.isinf(interactivity) else int(np.searchsorted(reached, interactivity))
        return self._row(place) if place < len(reached) else None

    @cached_property
    def _reached(self) -> Floats:
        """Interactivities, which rise. [token/s]"""
        return self.frontier[INTERACTIVITY].to_numpy()

    @cached_property
    def _row(self) -> Callable[[int], dict[str, Any]]:
        names = [str(name) for name in self.frontier]
        return cache(lambda place: dict(zip(names, self.frontier.iloc[place, :].tolist(), strict=True)))

    @property
    def total(self) -> Tally:
        """All blocks."""
        return add_up((self.prefill, self.points))

    @property
    def removed(self) -> dict[str, dict[str, int]]:
        """Design points that each reason removed, by phase and reason. [1]"""
        counts: dict[str, dict[str, int]] = {}
        for item in self.total.removals:
            counts.setdefault(item.phase, {})[item.reason] = item.count
        return counts


@dataclass(frozen=True, kw_only=True, eq=False)
class CaseResult:
    """All modes of one case."""

    plan: CasePlan
    modes: tuple[ModeResult, ...]
    fits: tuple[UsedFit, ...]  # every fit behind its times
    pools: pd.DataFrame  # frontier over further pools, columns of ``serving.pool_frontier``; empty where not asked for

    @property
    def total(self) -> Tally:
        """All blocks of all modes."""
        return add_up(mode.total for mode in self.modes)

    @property
    def inherited_fits(self) -> tuple[str, ...]:
        """The fits that were made on another system than the case's."""
        return inherited(self.fits)

    @property
    def found(self) -> tuple[ModeResult, ...]:
        """The modes that have a frontier."""
        return tuple(mode for mode in self.modes if len(mode.frontier))

    @property
    def verdicts(self) -> tuple[tuple[str, str], ...]:
        """(mode, reason) of the modes without a frontier; one entry, mode "", if all agree."""
        told = tuple((mode.mode, mode.verdict) for mode in self.modes if mode.verdict)
        texts = dict.fromkeys(text for _, text in told)
        return (("", next(iter(texts))),) if len(told) == len(self.modes) and len(texts) == 1 else told

    @property
    def verdict(self) -> str:
        """Empty if a mode has results; else the reason why there are none, and how close the nearest point was."""
        return "" if self.found else "; ".join(f"{mode}: {text}" if mode else text for mode, text in self.verdicts)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResult:
    """All cases of a sweep, in plan order."""

    plan: SweepPlan
    cases: tuple[CaseResult, ...]
    failed: Mapping[Key, str]  # blocks that were given up, and why
    frontier: pd.DataFrame  # the frontiers of all cases below one another

    @property
    def total(self) -> Tally:
        """All blocks."""
        return add_up(case.total for case in self.cases)

    @property
    def pools(self) -> pd.DataFrame:
        """The frontiers over further pools of all cases below one another; without rows where none was asked for."""
        fronts = [case.pools for case in self.cases if len(case.pools)]
        return pd.concat(fronts, ignore_index=True) if fronts else pd.DataFrame()

    def require(self) -> None:
        """Raise ``InfeasibleError``, with the reason of each case, when no case has a result.

        Blocks that were given up are a ``StoreError``: what the tables hold is not the whole sweep.
        """
        if self.failed:
            count, total = len(self.failed), len(self.plan.blocks)
            raise StoreError(
                f"{count} of {total} blocks failed and their modes have no result (infeasible.csv says why); "
                "the same command computes them again"
            )
        verdicts = [f"{case.plan.case.name}: {case.verdict}" for case in self.cases if case.verdict]
        if len(verdicts) == len(self.cases):
            head, sep = ("", "") if len(verdicts) == 1 else ("no case has a result:", "\n  - ")
            raise InfeasibleError(head + sep + sep.join(verdicts))


def collect(
    arrived: Sequence[tuple[SweepPlan, Gathered, Mapping[Key, str]]], *, outside: bool, jobs: int | Workers = 1
) -> tuple[SweepResult, ...]:
    """Label what the blocks of sweeps add up to, but for modes with a block that was given up.

    A sweep is its plan, its blocks, and those that were given up with the reason. What two sweeps have in common is
    labelled once; ``jobs`` says where. ``outside`` says whether ``ModeResult.outside`` is wanted.
    """
    bare: Fronts = {}
    for plan, gathered, failed in arrived:
        for case in plan.cases:
            bare |= _frontiers(case, gathered, failed, known=bare)
    families = [with_origins(family, nothing=NOTHING) for family in kin_of(bare)]
    fronts: Labelled = {}
    beyond: dict[tuple[str, str], pd.Series] = {}
    for family, words in zip(families, labels(families, outside=outside, jobs=jobs), strict=True):
        table = family.table.assign(**{trust.COLUMN: words[trust.COLUMN]})
        for key, rows in family.parts:
            fronts[key] = table, rows
            if OUTSIDE in words:
                beyond[key] = pd.Series(words[OUTSIDE][rows])
    return tuple(_collect_sweep(*each, fronts, beyond) for each in arrived)


def _collect_sweep(
    plan: SweepPlan,
    gathered: Gathered,
    failed: Mapping[Key, str],
    fronts: Labelled,
    beyond: Mapping[tuple[str, str], pd.Series],
) -> SweepResult:
    told, prices = plan.spec.told, dict(plan.spec.prices)
    own: dict[tuple[str, str], pd.DataFrame] = {}
    for case in plan.cases:
        for key in ((case.digest, mode.mode) for mode in case.modes):
            if key in fronts:
                table, rows = fronts[key]
                front = table.iloc[rows].reset_index(drop=True)
                own[key] = front if told == OWN_COLUMNS else told.added(front, prices, origin_of(case.case))
    cases = tuple(_collect_case(case, gathered, failed, own, beyond) for case in plan.cases)
    found = [(case.plan.digest, mode.mode) for case in cases for mode in case.found]
    whole = pd.concat([own[key] for key in found], ignore_index=True) if found else pd.DataFrame()
    return SweepResult(plan=plan, cases=cases, failed=failed, frontier=whole)


def _frontiers(
    plan: CasePlan, gathered: Gathered, failed: Mapping[Key, str], known: Container[tuple[str, str]]
) -> Fronts:
    """Frontiers of a case that have points, by digest and mode."""
    whole = [mode for mode in plan.modes if failed.keys().isdisjoint(block.key for block in mode.blocks)]
    lacking = [mode for mode in whole if (plan.digest, mode.mode) not in known]
    found = {mode.mode: front for mode in lacking if len(front := gathered.front(mode.points))}
    return {(plan.digest, mode): (plan.case, front) for mode, front in found.items()}


def _collect_case(
    plan: CasePlan,
    gathered: Gathered,
    failed: Mapping[Key, str],
    fronts: Mapping[tuple[str, str], pd.DataFrame],
    beyond: Mapping[tuple[str, str], pd.Series],
) -> CaseResult:
    def collected(mode: ModePlan) -> ModeResult:
        if why := [failed[block.key] for block in mode.blocks if block.key in failed]:
            # the frontier of its other blocks would be too low
            said, none = f"not computed: {len(why)} of {len(mode.blocks)} blocks failed: {why[0]}", add_up(())
            return ModeResult(
                plan=mode, frontier=pd.DataFrame(), prefill=none, points=none, verdict=said, outside=_UNTOLD
            )
        key = plan.digest, mode.mode
        front, outside = fronts.get(key, pd.DataFrame()), beyond.get(key, _UNTOLD)
        prefill, points = (gathered.tally(blocks) for blocks in (mode.prefill, mode.points))
        said = "" if len(front) else verdict(plan.case, mode, prefill, points)
        return ModeResult(plan=mode, frontier=front, prefill=prefill, points=points, verdict=said, outside=outside)

    modes = tuple(map(collected, plan.modes))
    return CaseResult(plan=plan, modes=modes, fits=fits_used(plan.case), pools=gathered.table(plan.pools))
