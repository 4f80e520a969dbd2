"""From stored blocks to the tables of a sweep: frontier, what was infeasible and why, and the manifest.

Blocks are read one by one in plan order and the frontier grows from block frontiers, so memory does not
grow with the number of points and the tables do not depend on who computed what, or when.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import csv_text, write_text
from disagg_sim.domain import Mode
from disagg_sim.errors import InfeasibleError
from disagg_sim.facts import load
from disagg_sim.physics.setup import setup
from disagg_sim.serving.points import COST_COLUMNS, THROUGHPUT, pareto_front
from disagg_sim.sweep.cases import Case, axis_columns
from disagg_sim.sweep.compute import ABOVE_FTL, ABOVE_NIC, ABOVE_TTL, OUT_OF_MEMORY, SHARED, Removal, Tally, add_up
from disagg_sim.sweep.manifest import FRONTIER_FILE, MANIFEST, manifest_text
from disagg_sim.sweep.plan import CasePlan, ModePlan, SweepPlan
from disagg_sim.sweep.spec import Limits
from disagg_sim.sweep.store import Store
from disagg_sim.units import GB

NOTHING = "-"  # in a column of texts: there is none; no word that reads back as empty


@dataclass(frozen=True, kw_only=True, eq=False)
class ModeResult:
    """What the blocks of one case in one mode add up to."""

    plan: ModePlan
    frontier: pd.DataFrame  # columns of ``points/``, of ``cases.axis_columns``, and ``inherited_fits`` or "-"
    prefill: Tally  # empty in the co-located modes
    points: Tally  # of decode, or of the co-located instances
    verdict: str  # empty when there is a frontier; else what stands in the way, and by how much

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return self.plan.mode

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
    fits: tuple[str, ...]  # provenance of every fit behind its times

    @property
    def total(self) -> Tally:
        """All blocks of all modes."""
        return add_up(mode.total for mode in self.modes)

    @property
    def inherited_fits(self) -> tuple[str, ...]:
        """The fits that were made on another system than the case's."""
        return _inherited(self.fits)

    @property
    def found(self) -> tuple[ModeResult, ...]:
        """The modes that have a frontier."""
        return tuple(mode for mode in self.modes if len(mode.frontier))

    @property
    def verdicts(self) -> tuple[tuple[str, str], ...]:
        """(mode, what stands in its way) of the modes without a frontier; one entry, mode "", where all agree."""
        told = tuple((mode.mode, mode.verdict) for mode in self.modes if mode.verdict)
        texts = dict.fromkeys(text for _, text in told)
        return (("", next(iter(texts))),) if len(told) == len(self.modes) and len(texts) == 1 else told

    @property
    def verdict(self) -> str:
        """Empty when a mode has results; else what stands in the way of all, and by how much."""
        return "" if self.found else "; ".join(f"{mode}: {text}" if mode else text for mode, text in self.verdicts)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResult:
    """All cases of a sweep, in plan order."""

    plan: SweepPlan
    cases: tuple[CaseResult, ...]

    @property
    def total(self) -> Tally:
        """All blocks."""
        return add_up(case.total for case in self.cases)

    @property
    def frontier(self) -> pd.DataFrame:
        """The frontiers of all cases below one another."""

        fronts = [mode.frontier for case in self.cases for mode in case.found]
        return pd.concat(fronts, ignore_index=True) if fronts else pd.DataFrame()

    def require(self) -> None:
        """Raise ``InfeasibleError``, with the reason of each case, when no case has a result."""
        verdicts = [f"{case.plan.case.name}: {case.verdict}" for case in self.cases if case.verdict]
        if len(verdicts) == len(self.cases):
            head, sep = ("", "") if len(verdicts) == 1 else ("no case has a result:", "\n  - ")
            raise InfeasibleError(head + sep + sep.join(verdicts))


def throughput_column(per: str) -> str:
    """The column that a frontier is taken in: output tokens per GPU and second, per USD or per joule."""
    return COST_COLUMNS[per][-1].name if COST_COLUMNS[per] else THROUGHPUT


def collect(plan: SweepPlan, store: Store) -> SweepResult:
    """Read every block of a finished sweep."""
    return SweepResult(plan=plan, cases=tuple(_collect_case(case, store) for case in plan.cases))


def fits_used(case: Case) -> tuple[str, ...]:
    """Provenance of every fit behind the case's times; empty for a profile without fits."""
    model, pools = load.load_model(case.model), case.pools
    sides = ((case.prefill_system, pools.prefill_precision), (case.decode_system, pools.precision))
    fits = [setup(model, *side, case.profile, case.engine or None).rates.fits for side in sides]
    if pools.alike:
        return fits[0]
    names = (pools.prefill_system, pools.system)
    return tuple(f"{name}, {fit}" for name, found in zip(names, fits, strict=True) for fit in found)


@dataclass(frozen=True, slots=True)
class Effort:
    """What one run did: it depends on the machine, and on what was stored before."""

    blocks: int  # computed by this run [1]
    points: int  # design points of these [1]
    seconds: float  # spent on them, of all processes [s]
    wall_seconds: float  # of the whole run [s]


def write_tables(result: SweepResult, root: Path, *, effort: Effort) -> None:
    """Write ``infeasible.csv``, ``frontier.csv`` and, last, the ``manifest.json`` that holds their checksums."""
    tables = {"infeasible.csv": _infeasible_csv(result)}
    if any(case.found for case in result.cases):
        tables[FRONTIER_FILE] = csv_text(result.frontier, digits=10)
    else:
        (root / FRONTIER_FILE).unlink(missing_ok=True)
    for name, text in tables.items():
        write_text(root / name, text)
    write_text(root / MANIFEST, manifest_text(result, tables, effort))


def _collect_case(plan: CasePlan, store: Store) -> CaseResult:
    fits = fits_used(plan.case)
    own = {**axis_columns(plan.case), "inherited_fits": "; ".join(_inherited(fits)) or NOTHING}
    modes = tuple(_collect_mode(plan.case, mode, store, own) for mode in plan.modes)
    return CaseResult(plan=plan, modes=modes, fits=fits)


def _inherited(fits: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(fit for fit in fits if "inherited from" in fit)


def _collect_mode(case: Case, plan: ModePlan, store: Store, own: dict[str, Any]) -> ModeResult:

    throughput = throughput_column(case.per)
    front = pd.DataFrame()
    for block in plan.points:
        points = store.read(block.key)
        if len(points):
            best = pareto_front(points, throughput=throughput)
            joint = pd.concat([front, best], ignore_index=True) if len(front) else best
            front = pareto_front(joint, throughput=throughput)
    prefill, points_tally = (
        add_up(Tally.from_json(store.note(block.key)) for block in blocks) for blocks in (plan.prefill, plan.points)
    )
    found = bool(len(front))
    return ModeResult(
        plan=plan,
        frontier=front.assign(**own) if found else front,
        prefill=prefill,
        points=points_tally,
        verdict="" if found else verdict(case, plan, prefill, points_tally),
    )


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


def verdict(case: Case, plan: ModePlan, prefill: Tally, points: Tally) -> str:
    """One clause that names what binds, for a mode of a case whose frontier is empty.

    Parameters
    ----------
    prefill, points : Tally
        What prefill removed, and what decode (or the co-located instances) removed.
    """
    if plan.mode != Mode.DISAGGREGATED:
        return _of_instances(case, plan, points)
    for name, phase, tally in ((case.prefill_system.name, "prefill", prefill), (case.system, "decode", points)):
        if not tally.computed:
            return _no_mapping(case, name, plan)
        if not tally.feasible:
            return _fits_nowhere(case, name, phase, tally)
    if not prefill.rows:
        return _no_prefill(case, prefill)
    if _has(points, ABOVE_TTL) and not _has(points, ABOVE_NIC) and points.rows == 0:
        left = points.feasible - sum(r.count for r in points.removals if r.reason == ABOVE_TTL)
        if not left:
            return _too_slow("decode configuration", "TTL", case.limits.ttl_s, _closest(points, ABOVE_TTL))
    reasons = ", ".join(f"{r.reason} ({r.count})" for r in points.removals)
    return f"no decode point has a match; decode points removed: {reasons}; gpu_cap is {case.limits.gpu_cap}"


def detail(item: Removal, limits: Limits) -> str:
    """By how much the closest of the removed points misses; its shortfall is finite."""
    if item.reason == OUT_OF_MEMORY:
        return f"the closest lacks {item.shortfall / GB:.3g} GB per GPU"
    if item.reason == ABOVE_NIC:
        needed, allowed = _told_apart((limits.nic_limit + item.shortfall) / GB, limits.nic_limit / GB)
        return f"the closest needs {needed} GB/s, limit {allowed} GB/s"
    limit = limits.ftl_s if item.reason == ABOVE_FTL else limits.ttl_s
    taken, allowed = _told_apart(limit + item.shortfall, limit)
    return f"the closest takes {taken} s, limit {allowed} s"


def is_partial(item: Removal) -> bool:
    """Whether the shortfall is of the blocks alone in which nothing passes, so not always that of the closest point."""
    return item.phase == SHARED and item.reason != OUT_OF_MEMORY


def _of_instances(case: Case, plan: ModePlan, points: Tally) -> str:
    """What binds co-located instances."""
    if not points.computed:
        return _no_mapping(case, case.system, plan)
    if not points.feasible:
        return _fits_nowhere(case, case.system, plan.mode, points)
    if points.feasible == sum(r.count for r in points.removals if r.reason == ABOVE_FTL):
        return _too_slow(f"{plan.mode} configuration", "FTL", case.limits.ftl_s, _closest(points, ABOVE_FTL))
    over = _closest(points, ABOVE_TTL)
    return _too_slow(f"{plan.mode} configuration within the FTL limit", "TTL", case.limits.ttl_s, over)


def _no_mapping(case: Case, system: str, plan: ModePlan) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in plan.refused)
    return f"{case.model} has no allowed mapping on {system}: {reasons}"


def _fits_nowhere(case: Case, system: str, phase: str, tally: Tally) -> str:
    short = _closest(tally, OUT_OF_MEMORY) / GB
    return f"{case.model} fits on no allowed mapping of {system} ({phase}): the closest lacks {short:.1f} GB per GPU"


def _no_prefill(case: Case, prefill: Tally) -> str:
    if (over := _closest(prefill, ABOVE_FTL)) < math.inf and not _has(prefill, ABOVE_NIC):
        return _too_slow("prefill configuration", "FTL", case.limits.ftl_s, over)
    least, limit = _told_apart((case.limits.nic_limit + _closest(prefill, ABOVE_NIC)) / GB, case.limits.nic_limit / GB)
    return f"no prefill configuration stays below {limit} GB/s of KV egress; the least is {least} GB/s"


def _too_slow(what: str, latency: str, limit: float, over: float) -> str:
    best, allowed = _told_apart(limit + over, limit)
    return f"no {what} meets the {latency} limit of {allowed} s; the best {latency} is {best} s"


def _told_apart(value: float, limit: float) -> tuple[str, str]:
    """A value above its limit, and the limit, as texts: 4 and 6 digits, more where these hide which is larger."""
    texts = [(f"{value:.{digits}g}", f"{limit:.{max(digits, 6)}g}") for digits in range(4, 18)]
    return next((pair for pair in texts if float(pair[0]) > float(pair[1])), texts[0])


def _has(tally: Tally, reason: str) -> bool:
    return any(item.reason == reason for item in tally.removals)


def _closest(tally: Tally, reason: str) -> float:
    return min((item.shortfall for item in tally.removals if item.reason == reason), default=math.inf)
