"""Count the served runs behind each kind of layout, and write them as ``hw_specs/evidence/*.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from disagg_sim.calibration.files import write_sound
from disagg_sim.calibration.served.rows import ServingRow
from disagg_sim.facts.layouts import CheckedKind, EvidenceSpec, evidence_of
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.search.layouts import class_of, family_of, layouts_of

#: What names a kind.
_KEY = ["family", "systems", "layout"]


def checked_kinds(rows: Sequence[ServingRow], table: pd.DataFrame) -> tuple[CheckedKind, ...]:
    """Every kind of layout with runs that the forecast was compared with.

    A disaggregated run counts for the layout of its prefill workers and for that of its decode workers. Runs beyond
    saturation count as run, and not in the errors; a run with everything queued is meant to saturate.

    Parameters
    ----------
    rows
        As ``served.read.read_rows`` returns them.
    table
        Their evaluated lines, as ``served.evaluate.evaluate`` returns them.

    Returns
    -------
    tuple of CheckedKind
        By family, class of systems and layout.
    """
    used = table[table["evaluated"]]
    sides = pd.DataFrame(_sides(rows), columns=["file", "row", *_KEY, "gpus"]).drop_duplicates()
    lines = used.merge(sides, on=["file", "row"], suffixes=("_run", ""))
    kinds = []
    for key, mine in lines.groupby(_KEY, sort=True):
        family, systems, layout = map(str, key)
        runs = mine.drop_duplicates(["file", "row"])
        errors = {
            f"{name}_error": _median_error(mine[mine["quantity"] == name]) for name in ("tpot", "ttft", "throughput")
        }
        kinds.append(
            CheckedKind(
                family=family,
                systems=systems,
                layout=layout,
                most_gpus=int(mine["gpus"].max()),
                rows=len(runs),
                points=int(runs["point"].nunique()),
                files={str(file): int(count) for file, count in runs.groupby("file").size().items()},
                **errors,
            )
        )
    return tuple(kinds)


def evidence_text(kinds: Sequence[CheckedKind], *, date: str) -> str:
    """The text of an evidence file. The same data give the same bytes.

    Parameters
    ----------
    kinds
        As ``checked_kinds`` counts them.
    date
        Of the measurements, as it shall stand in the file.
    """
    lines = [
        "# Kinds of layouts that forecasts were compared with: served runs, distinct operating points, median errors.",
        "title: Layouts with measured runs",
        f'source: "counted by disagg-sim calibrate layouts over the files named below; data of {date}"',
        "kinds:",
    ]
    for kind in kinds:
        errors = (
            f"{name}: {_number(getattr(kind, name))}" for name in ("tpot_error", "ttft_error", "throughput_error")
        )
        files = ", ".join(f"{name}: {count}" for name, count in kind.files.items())
        lines += [
            f'  - {{family: {kind.family}, systems: "{kind.systems}", layout: "{kind.layout}",',
            f"     most_gpus: {kind.most_gpus}, rows: {kind.rows}, points: {kind.points},",
            f"     {', '.join(errors)},",
            f"     files: {{{files}}}}}",
        ]
    return "\n".join(lines) + "\n"


def write_evidence(path: Path, text: str) -> EvidenceSpec:
    """Write an evidence file if it reads back without a fault, and return what it says; as ``files.write_sound``."""
    return write_sound(path, text, lambda part: evidence_of(path, read_mapping(part), path.stem))


def _sides(rows: Sequence[ServingRow]) -> Iterator[tuple[object, ...]]:
    """File and row, kind and GPUs of each side of every run."""
    for row in rows:
        for workers in (row.workers, row.prefill):
            if workers is not None and row.model and row.system:
                family, systems = family_of(load_model(row.model)), class_of(load_system(row.system))
                layout = str(layouts_of(workers.mapping)[0])
                yield row.file, row.row, family, systems, layout, int(workers.mapping.gpus)


def _median_error(lines: pd.DataFrame) -> float | None:
    """Of the distinct operating points below saturation, each with the median of its runs. [1]"""
    below = lines[~lines["saturated"] | (lines["load"] == "offline")]
    if not len(below):
        return None
    return round(float(np.abs(below.groupby("point")["relative_error"].median()).median()), 3)


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"
