"""``manifest.json``: what a sweep's tables were made of, and the checksums that tell whether they are as written."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.errors import InputError
from disagg_sim.sweep.inputs import Change, differences
from disagg_sim.sweep.plan import ROOMS, spec_digests
from disagg_sim.sweep.store import code_digest

if TYPE_CHECKING:
    from disagg_sim.sweep.results import CaseResult, Effort, ModeResult, SweepResult
    from disagg_sim.sweep.spec import SweepSpec

MANIFEST, FRONTIER_FILE = "manifest.json", "frontier.csv"


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """What the manifest of a finished sweep says; empty where it says nothing, as one of an older version may."""

    name: str
    cases: tuple[str, ...]
    tables: Mapping[str, str]  # file -> SHA-256 of its bytes
    inputs: Mapping[str, Any]  # see ``inputs.Inputs``
    made_by: Mapping[str, Any]  # versions and options
    code: str  # digest of the sources

    def changes(self, new: Manifest) -> list[Change]:
        """What differs from this manifest to a ``new`` one: spec files value by value, options, versions, code."""
        found = differences(self.inputs, new.inputs) + differences(self.made_by, new.made_by)
        if self.code != new.code and not any(change.key == "disagg-sim" for change in found):
            found.append(Change("disagg-sim itself", "sources", self.code[:12], new.code[:12]))
        return found


def manifest_text(result: SweepResult, tables: Mapping[str, str], effort: Effort) -> str:
    """The manifest of a result whose ``tables`` are given as file -> text. Only ``run`` depends on the machine."""
    spec, total = result.plan.spec, result.total
    specs: dict[str, str] = {}
    for case in result.cases:
        specs |= spec_digests(case.plan.case)
    versions = {name: version(name) for name in ("disagg-sim", "numpy", "pandas", "pyarrow")}
    head = {
        "name": spec.name,
        "source": Path(spec.source).name,
        "versions": {"python": platform.python_version(), **versions},
        "code": code_digest(ROOMS),
        "options": _options(spec),
        "specs": dict(sorted(specs.items())),
        "tables": {name: _checksum(text.encode()) for name, text in tables.items()},
        "points": {"enumerated": result.plan.points, "computed": total.computed, "feasible": total.feasible},
        "blocks": len(result.plan.blocks),
        "run": {
            "blocks": effort.blocks,
            "points": effort.points,
            "compute_seconds": round(effort.seconds, 3),
            "points_per_compute_second": round(effort.points / effort.seconds) if effort.seconds else 0,
            "wall_seconds": round(effort.wall_seconds, 3),
        },
        "cases": [_case_entry(case) for case in result.cases],
    }
    return json.dumps(head, indent=1)[:-2] + f',\n "inputs": {{\n{_inputs_text(result.plan.inputs)}\n }}\n}}\n'


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of the sweep that was finished in a directory; None where there is none.

    Raises
    ------
    InputError
        One line: it cannot be read, or is no manifest.
    """
    path = root / MANIFEST
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        made_by = {f"the {name}": dict(held[name]) for name in ("options", "versions") if name in held}
        return Manifest(
            name=str(held.get("name", "")),
            cases=tuple(str(entry["case"]) for entry in held["cases"]),
            tables={str(file): str(checksum) for file, checksum in held.get("tables", {}).items()},
            inputs={str(file): dict(content) for file, content in held.get("inputs", {}).items()},
            made_by=made_by,
            code=str(held.get("code", "")),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: damaged: not the manifest of a sweep; run the sweep again") from None


def held_sweep(root: Path) -> tuple[str, tuple[str, ...]]:
    """Name and cases of the sweep that was finished in a directory; both empty where there is none to be read."""
    try:
        manifest = read_manifest(root)
    except InputError:
        return "", ()
    return (manifest.name, manifest.cases) if manifest else ("", ())


def is_as_written(manifest: Manifest, data: bytes) -> bool:
    """Whether these are the bytes of the frontier that the manifest was written for."""
    return manifest.tables.get(FRONTIER_FILE) == _checksum(data)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
        "fits": case.fits,
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
