"""Write the tables of a sweep: frontier, infeasible points with reasons, manifest."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import csv_text, write_text
from disagg_sim.certainty import trust
from disagg_sim.certainty.extrapolation import OUTSIDE
from disagg_sim.errors import InfeasibleError, StoreError
from disagg_sim.serving.points import INTERACTIVITY
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.cases import Case, origin_of
from disagg_sim.sweep.digests import code_digest
from disagg_sim.sweep.gather import Gathered
from disagg_sim.sweep.keys import Key
from disagg_sim.sweep.labels import labels
from disagg_sim.sweep.manifest import FRONTIER_FILE, MANIFEST, checksum
from disagg_sim.sweep.origins import Fronts, with_origins
from disagg_sim.sweep.plan import ROOMS, CasePlan, ModePlan, SweepPlan
from disagg_sim.sweep.spec import SweepSpec
from disagg_sim.sweep.tally import Tally, add_up
from disagg_sim.sweep.told import OWN_COLUMNS
from disagg_sim.sweep.used_fits import UsedFit, fits_used, inherited
from disagg_sim.sweep.verdicts import detail, is_partial, verdict

POOLS_FILE = "pools.csv"  # frontiers over further pools
_UNTOLD = pd.Series(dtype=object)
NOTHING = "-"  # in a column of texts: there is none; no word that reads back as empty


@dataclass(frozen=True, kw_only=True, eq=False)
class ModeResult:
    """What the blocks of one case in one mode add up to."""

    plan: ModePlan
    frontier: (
        pd.DataFrame
    )  # columns of ``points/``, of ``cases.axis_columns``, ``inherited_fits`` or "-", evidence, trust
    prefill: Tally  # empty in the co-located modes
    points: Tally  # of decode, or of the co-located instances
    verdict: str  # empty when there is a frontier; else what stands in the way, and by how much
    outside: pd.Series  # where each point of the frontier leaves the range of its fits; empty where not asked for

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return self.plan.mode

    def at(self, interactivity: float) -> dict[str, Any] | None:
        """The point of highest throughput with at least this interactivity, by column name; None where none has it.

        Parameters
        ----------
        interactivity
            inf = the point of highest interactivity. [token/s]
        """
        if not len(self.frontier):
            return None
        reached = self.frontier[INTERACTIVITY].to_numpy()  # rises
        place = len(reached) - 1 if math.isinf(interactivity) else int(np.searchsorted(reached, interactivity))
        return self._row(place) if place < len(reached) else None

    @cached_property
    def _row(self) -> Callable[[int], dict[str, Any]]:
        columns = {str(name): values.array for name, values in self.frontier.items()}
        return cache(lambda place: {name: values[place] for name, values in columns.items()})

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

    @property
    def total(self) -> Tally:
        """All blocks."""
        return add_up(case.total for case in self.cases)

    @cached_property
    def frontier(self) -> pd.DataFrame:
        """The frontiers of all cases below one another."""

        fronts = [mode.frontier for case in self.cases for mode in case.found]
        return pd.concat(fronts, ignore_index=True) if fronts else pd.DataFrame()

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
    fronts = with_origins(bare, nothing=NOTHING)
    told = dict(zip(fronts, labels(list(fronts.values()), outside=outside, jobs=jobs), strict=True))
    labelled = {key: front.assign(**{trust.COLUMN: told[key][trust.COLUMN]}) for key, (_, front) in fronts.items()}
    beyond = {key: words[OUTSIDE] for key, words in told.items() if OUTSIDE in words}
    return tuple(
        SweepResult(
            plan=plan,
            cases=tuple(
                _collect_case(case, gathered, failed, _own(labelled, case, plan.spec), beyond) for case in plan.cases
            ),
            failed=failed,
        )
        for plan, gathered, failed in arrived
    )


@dataclass(frozen=True, slots=True)
class Effort:
    """What one run did: it depends on the machine, and on what was stored before."""

    blocks: int = 0  # computed by this run [1]
    points: int = 0  # design points of these [1]
    seconds: float = 0.0  # spent on them, of all processes [s]
    wall_seconds: float = 0.0  # of the whole run [s]

    def and_of(self, points: int, seconds: float) -> Effort:
        """With one more block."""
        return replace(self, blocks=self.blocks + 1, points=self.points + points, seconds=self.seconds + seconds)


def write_tables(result: SweepResult, root: Path, *, effort: Effort) -> None:
    """Write ``infeasible.csv``, ``frontier.csv`` and, last, the ``manifest.json`` that holds their checksums."""
    tables = {"infeasible.csv": _infeasible_csv(result)}
    if any(case.found for case in result.cases):
        tables[FRONTIER_FILE] = csv_text(result.frontier, digits=10)
    else:
        (root / FRONTIER_FILE).unlink(missing_ok=True)
    if len(pools := result.pools):
        tables[POOLS_FILE] = csv_text(pools, digits=10)
    else:
        (root / POOLS_FILE).unlink(missing_ok=True)
    for name, text in tables.items():
        write_text(root / name, text)
    write_text(root / MANIFEST, _manifest_text(result, tables, effort))


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
        if any(block.key in failed for block in mode.blocks):
            return _not_computed(mode, failed)
        key = plan.digest, mode.mode
        front, outside = fronts.get(key, pd.DataFrame()), beyond.get(key, _UNTOLD)
        return _collect_mode(plan.case, mode, gathered, front, outside)

    modes = tuple(map(collected, plan.modes))
    return CaseResult(plan=plan, modes=modes, fits=fits_used(plan.case), pools=gathered.table(plan.pools))


def _own(
    fronts: Mapping[tuple[str, str], pd.DataFrame], plan: CasePlan, spec: SweepSpec
) -> Mapping[tuple[str, str], pd.DataFrame]:
    """The frontiers of a case with the columns that its sweep asks for."""
    if spec.told == OWN_COLUMNS:
        return fronts
    keys = [(plan.digest, mode.mode) for mode in plan.modes]
    prices, origin = dict(spec.prices), origin_of(plan.case)
    return {key: spec.told.added(fronts[key], prices, origin) for key in keys if key in fronts}


def _not_computed(plan: ModePlan, failed: Mapping[Key, str]) -> ModeResult:
    """A mode without a frontier: that of its other blocks would be too low."""
    why = [failed[block.key] for block in plan.blocks if block.key in failed]
    said = f"not computed: {len(why)} of {len(plan.blocks)} blocks failed: {why[0]}"
    return ModeResult(
        plan=plan, frontier=pd.DataFrame(), prefill=add_up(()), points=add_up(()), verdict=said, outside=_UNTOLD
    )


def _collect_mode(
    case: Case, plan: ModePlan, gathered: Gathered, front: pd.DataFrame, outside: pd.Series
) -> ModeResult:
    prefill, points = (gathered.tally(blocks) for blocks in (plan.prefill, plan.points))
    said = "" if len(front) else verdict(case, plan, prefill, points)
    return ModeResult(plan=plan, frontier=front, prefill=prefill, points=points, verdict=said, outside=outside)


def _infeasible_csv(result: SweepResult) -> str:
    """Reasons by case and mode, and by how much the closest point misses each.

    ``closest_shortfall`` is ``inf`` where there is no such number (a mapping that does not exist, several limits
    at once), so that the column stays one of numbers; the columns of texts then hold ``-``.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", "reason", "count", "closest_shortfall", "unit", "phase", "detail", "mode"])
    for case in result.cases:
        name, limits = case.plan.case.name, case.plan.case.limits
        for mode in case.modes:
            if mode.verdict:
                row = [name, "no result", mode.total.computed, math.inf, NOTHING, NOTHING, mode.verdict, mode.mode]
                writer.writerow(row)
            for item in (*mode.prefill.removals, *mode.points.removals):
                known = math.isfinite(item.shortfall) and (bool(mode.verdict) or not is_partial(item))
                shortfall = f"{item.shortfall:.10g}" if known else math.inf
                said, unit = (detail(item, limits), item.unit) if known else (NOTHING, NOTHING)
                writer.writerow([name, item.reason, item.count, shortfall, unit, item.phase, said, mode.mode])
            for reason, count in mode.plan.refused:
                writer.writerow([name, reason, count, math.inf, NOTHING, "mapping", NOTHING, mode.mode])
        for left, why in case.plan.left_out:
            writer.writerow([name, why, 0, math.inf, NOTHING, NOTHING, NOTHING, left])
    return text.getvalue()


def _manifest_text(result: SweepResult, tables: Mapping[str, str], effort: Effort) -> str:
    """The manifest of a result whose ``tables`` are given as file -> text. Only ``run`` depends on the machine."""
    spec, total = result.plan.spec, result.total
    specs: dict[str, str] = {}
    for case in result.cases:
        specs |= case.plan.specs
    versions = {name: version(name) for name in ("disagg-sim", "numpy", "pandas", "duckdb")}
    head = {
        "name": spec.name,
        "source": Path(spec.source).name,
        "versions": {"python": platform.python_version(), **versions},
        "code": code_digest(ROOMS),
        "options": _options(spec),
        "specs": dict(sorted(specs.items())),
        "tables": {name: checksum(text.encode()) for name, text in tables.items()},
        "points": {"enumerated": result.plan.points, "computed": total.computed, "feasible": total.feasible},
        "blocks": len(result.plan.blocks),
        "run": {
            "keep": result.plan.keep,
            "blocks": effort.blocks,
            "points": effort.points,
            "compute_seconds": round(effort.seconds, 3),
            "points_per_compute_second": round(effort.points / effort.seconds) if effort.seconds else 0,
            "wall_seconds": round(effort.wall_seconds, 3),
        },
        "cases": [_case_entry(case) for case in result.cases],
    }
    return json.dumps(head, indent=1)[:-2] + f',\n "inputs": {{\n{_inputs_text(result.plan.inputs)}\n }}\n}}\n'


def _inputs_text(inputs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each key of each file: short, and a change of a value is a change of one line."""
    files = []
    for name, content in inputs.items():
        lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(_plain(value))}" for key, value in content.items())
        files.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    return ",\n".join(files)


def _options(spec: SweepSpec) -> dict[str, Any]:
    """All that a sweep file and the options of the command line say."""
    return {key: _plain(value) for key, value in asdict(spec).items() if key not in ("name", "source")}


def _plain(value: Any) -> Any:
    """A value as JSON knows it: fractions and infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Fraction) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _case_entry(case: CaseResult) -> dict[str, Any]:
    total = case.total
    return {
        "case": case.plan.case.name,
        "digest": case.plan.digest,
        "points": {"enumerated": case.plan.points, "computed": total.computed, "feasible": total.feasible},
        "modes": {mode.mode: _mode_entry(mode) for mode in case.modes},
        "fits": [fit.text for fit in case.fits],
        "verdict": case.verdict,
    }


def _mode_entry(mode: ModeResult) -> dict[str, Any]:
    total = mode.total
    return {
        "mappings": mode.plan.mappings,
        "computed": total.computed,
        "feasible": total.feasible,
        "removed": mode.removed,
        "rows": mode.points.rows,
        "frontier": len(mode.frontier),
        "verdict": mode.verdict,
    }
