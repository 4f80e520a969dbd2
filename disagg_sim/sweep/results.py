"""From stored blocks to the tables of a sweep: frontier, what was infeasible and why, and the manifest.

Blocks are read one by one in plan order and the frontier grows from block frontiers, so memory does not
grow with the number of points and the tables do not depend on who computed what, or when.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.errors import InfeasibleError, StoreError
from disagg_sim.facts import load
from disagg_sim.search.setting import setting
from disagg_sim.serving.points import pareto_front
from disagg_sim.sweep.compute import ABOVE_FTL, ABOVE_NIC, ABOVE_TTL, OUT_OF_MEMORY
from disagg_sim.sweep.plan import Case, CasePlan, SweepPlan, code_digest, spec_digests
from disagg_sim.sweep.store import Store
from disagg_sim.sweep.tally import Removal, Tally, add_up
from disagg_sim.units import GB

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, eq=False)
class CaseResult:
    """What the blocks of one case add up to."""

    plan: CasePlan
    frontier: pd.DataFrame  # columns of ``points/`` and ``inherited_fits``
    prefill: Tally
    decode: Tally
    fits: tuple[str, ...]  # provenance of every fit behind its times

    @property
    def total(self) -> Tally:
        """Both phases."""
        return add_up((self.prefill, self.decode))

    @property
    def inherited_fits(self) -> tuple[str, ...]:
        """The fits that were made on another system than the case's."""
        return tuple(fit for fit in self.fits if "inherited from" in fit)

    @property
    def verdict(self) -> str:
        """Empty when the case has results; else what stands in the way, and by how much."""
        return "" if len(self.frontier) else _verdict(self)


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
        import pandas as pd

        fronts = [case.frontier for case in self.cases if len(case.frontier)]
        return pd.concat(fronts, ignore_index=True) if fronts else pd.DataFrame()

    def require(self) -> None:
        """Raise ``InfeasibleError``, with the reason of each case, when no case has a result."""
        verdicts = [f"{case.plan.case.name}: {case.verdict}" for case in self.cases if case.verdict]
        if len(verdicts) == len(self.cases):
            head, sep = ("", "") if len(verdicts) == 1 else ("no case has a result:", "\n  - ")
            raise InfeasibleError(head + sep + sep.join(verdicts))


def collect(plan: SweepPlan, store: Store) -> SweepResult:
    """Read every block of a finished sweep."""
    return SweepResult(plan=plan, cases=tuple(_collect_case(case, store) for case in plan.cases))


def fits_used(case: Case) -> tuple[str, ...]:
    """Provenance of every fit behind the case's times; empty for a profile without fits."""
    model = load.load_model(case.model)
    return setting(model, case.system, case.precision, case.profile, case.engine or None).rates.fits


def write_tables(result: SweepResult, root: Path, *, seconds: float) -> None:
    """Write ``frontier.csv``, ``infeasible.csv`` and ``manifest.json`` into ``root``.

    Parameters
    ----------
    seconds : float
        Wall time of this run. [s]
    """
    found = any(len(case.frontier) for case in result.cases)
    write_text(root / "infeasible.csv", _infeasible_csv(result))
    write_text(root / "manifest.json", json.dumps(_manifest(result, seconds), indent=1) + "\n")
    if found:
        text = result.frontier.to_csv(index=False, float_format="%.10g", lineterminator="\n")
        write_text(root / "frontier.csv", text)
    else:
        (root / "frontier.csv").unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot write: {error.strerror or error}") from None


def _collect_case(plan: CasePlan, store: Store) -> CaseResult:
    import pandas as pd

    fronts: list[pd.DataFrame] = []
    for block in plan.decode:
        points = store.read(block.key)
        if len(points):
            fronts = [pareto_front(pd.concat([*fronts, pareto_front(points)], ignore_index=True))]
    fits = fits_used(plan.case)
    frontier = fronts[0] if fronts else pd.DataFrame()
    result = CaseResult(
        plan=plan,
        frontier=frontier,
        prefill=add_up(Tally.from_json(store.note(block.key)) for block in plan.prefill),
        decode=add_up(Tally.from_json(store.note(block.key)) for block in plan.decode),
        fits=fits,
    )
    return replace(result, frontier=frontier.assign(inherited_fits="; ".join(result.inherited_fits)))


def _verdict(result: CaseResult) -> str:
    case = result.plan.case
    if not result.plan.mappings:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in result.plan.refused)
        return f"{case.model} has no allowed mapping on {case.system}: {reasons}"
    for phase, tally in (("prefill", result.prefill), ("decode", result.decode)):
        if not tally.feasible:
            short = _closest(tally, phase, OUT_OF_MEMORY)
            return (
                f"{case.model} fits on no allowed mapping of {case.system} ({phase}): "
                f"the closest lacks {short / GB:.1f} GB per GPU"
            )
    if not result.prefill.rows:
        if (over := _closest(result.prefill, "prefill", ABOVE_FTL)) < math.inf and not _has(result.prefill, ABOVE_NIC):
            limit = case.limits.ftl_s
            return f"no prefill configuration meets the FTL limit of {limit:g} s; the best FTL is {limit + over:.4g} s"
        over = _closest(result.prefill, "prefill", ABOVE_NIC) / GB
        limit = case.limits.nic_limit / GB
        return f"no prefill configuration stays below {limit:g} GB/s of KV egress; the least is {limit + over:.4g} GB/s"
    if _has(result.decode, ABOVE_TTL) and not _has(result.decode, ABOVE_NIC) and result.decode.rows == 0:
        left = result.decode.feasible - sum(r.count for r in result.decode.removals if r.reason == ABOVE_TTL)
        if not left:
            limit = case.limits.ttl_s
            over = _closest(result.decode, "decode", ABOVE_TTL)
            return f"no decode configuration meets the TTL limit of {limit:g} s; the best TTL is {limit + over:.4g} s"
    reasons = ", ".join(f"{r.reason} ({r.count})" for r in result.decode.removals)
    return f"no decode point has a match; decode points removed: {reasons}; gpu_cap is {case.limits.gpu_cap}"


def _has(tally: Tally, reason: str) -> bool:
    return any(item.reason == reason for item in tally.removals)


def _closest(tally: Tally, phase: str, reason: str) -> float:
    found = [item.shortfall for item in tally.removals if (item.phase, item.reason) == (phase, reason)]
    return min(found, default=math.inf)


def _infeasible_csv(result: SweepResult) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", "reason", "count", "closest_shortfall", "unit", "phase", "detail"])
    for case in result.cases:
        name, limits = case.plan.case.name, case.plan.case.limits
        if case.verdict:
            writer.writerow([name, "no result", case.total.computed, "", "", "", case.verdict])
        for item in (*case.prefill.removals, *case.decode.removals):
            known = math.isfinite(item.shortfall)
            shortfall = f"{item.shortfall:.10g}" if known else ""
            detail = _detail(item, limits.ftl_s, limits.ttl_s, limits.nic_limit) if known else ""
            unit = item.unit if known else ""
            writer.writerow([name, item.reason, item.count, shortfall, unit, item.phase, detail])
        for reason, count in case.plan.refused:
            writer.writerow([name, reason, count, "", "", "mapping", ""])
    return text.getvalue()


def _detail(item: Removal, ftl: float, ttl: float, nic: float) -> str:
    if item.reason == OUT_OF_MEMORY:
        return f"the closest lacks {item.shortfall / GB:.3g} GB per GPU"
    if item.reason == ABOVE_NIC:
        return f"the closest needs {(nic + item.shortfall) / GB:.4g} GB/s, limit {nic / GB:g} GB/s"
    limit = ftl if item.reason == ABOVE_FTL else ttl
    return f"the closest takes {limit + item.shortfall:.6g} s, limit {limit:g} s"


def _manifest(result: SweepResult, seconds: float) -> dict[str, Any]:
    spec, total = result.plan.spec, result.total
    specs: dict[str, str] = {}
    for case in result.cases:
        specs |= spec_digests(case.plan.case)
    versions = {name: version(name) for name in ("disagg-sim", "numpy", "pandas", "pyarrow")}
    return {
        "name": spec.name,
        "source": Path(spec.source).name,
        "versions": {"python": platform.python_version(), **versions},
        "code": code_digest(),
        "specs": dict(sorted(specs.items())),
        "points": {"enumerated": result.plan.points, "computed": total.computed, "feasible": total.feasible},
        "blocks": len(result.plan.blocks),
        "wall_seconds": round(seconds, 3),
        "compute_seconds": round(total.seconds, 3),
        "points_per_compute_second": round(total.computed / total.seconds) if total.seconds else 0,
        "cases": [_case_entry(case) for case in result.cases],
    }


def _case_entry(case: CaseResult) -> dict[str, Any]:
    total = case.total
    return {
        "case": case.plan.case.name,
        "digest": case.plan.digest,
        "mappings": case.plan.mappings,
        "points": {"enumerated": case.plan.points, "computed": total.computed, "feasible": total.feasible},
        "matched": case.decode.rows,
        "frontier": len(case.frontier),
        "compute_seconds": round(total.seconds, 3),
        "points_per_compute_second": round(total.computed / total.seconds) if total.seconds else 0,
        "fits": case.fits,
        "verdict": case.verdict,
    }
