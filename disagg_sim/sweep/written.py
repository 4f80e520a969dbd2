"""Write the tables of a sweep: frontier, infeasible points with reasons, manifest."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

from disagg_sim.atomic import csv_text, remove, write_text
from disagg_sim.sweep.digests import code_digest
from disagg_sim.sweep.manifest import FRONTIER_FILE, MANIFEST, checksum
from disagg_sim.sweep.plan import ROOMS
from disagg_sim.sweep.results import NOTHING, CaseResult, ModeResult, SweepResult
from disagg_sim.sweep.spec import SweepSpec
from disagg_sim.sweep.tally import OUT_OF_MEMORY, SHARED, detail

POOLS_FILE = "pools.csv"  # frontiers over further pools


@dataclass(slots=True)
class Effort:
    """Work of one run, which depends on the machine and on stored results."""

    blocks: int = 0  # computed by this run [1]
    points: int = 0  # design points of these [1]
    seconds: float = 0.0  # spent on them, of all processes [s]
    wall_seconds: float = 0.0  # of the whole run [s]


def write_tables(result: SweepResult, root: Path, *, effort: Effort) -> None:
    """Write ``infeasible.csv``, ``frontier.csv`` and, last, the ``manifest.json`` that holds their checksums."""
    tables = {"infeasible.csv": _infeasible_csv(result)}
    if any(case.found for case in result.cases):
        tables[FRONTIER_FILE] = csv_text(result.frontier, digits=10)
    else:
        remove(root / FRONTIER_FILE)
    if len(pools := result.pools):
        tables[POOLS_FILE] = csv_text(pools, digits=10)
    else:
        remove(root / POOLS_FILE)
    for name, text in tables.items():
        write_text(root / name, text)
    write_text(root / MANIFEST, _manifest_text(result, tables, effort))


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
                # counts only blocks without a feasible point, so it may not be of the closest point
                partial = item.phase == SHARED and item.reason != OUT_OF_MEMORY
                known = math.isfinite(item.shortfall) and (bool(mode.verdict) or not partial)
                shortfall = f"{item.shortfall:.10g}" if known else math.inf
                explained, unit = (detail(item, limits), item.unit) if known else (NOTHING, NOTHING)
                writer.writerow([name, item.reason, item.count, shortfall, unit, item.phase, explained, mode.mode])
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
    """List the options of a sweep file and of the command line."""
    return {key: _plain(value) for key, value in asdict(spec).items() if key not in ("name", "source")}


def _plain(value: Any) -> Any:
    """Convert to types of JSON: fractions and infinities to text."""
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
