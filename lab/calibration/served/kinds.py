"""Count the served runs behind each kind of layout, and write them as ``hw_specs/evidence/*.yaml``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from disagg_sim.facts.layouts import JUDGED_BY, CheckedKind, evidence_of
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.search.layouts import class_of, family_of, layouts_of
from lab.calibration.files import Writer
from lab.calibration.served.rows import UNKNOWN_LENGTHS, ServingRow

#: Share of the operating points that the error of a kind speaks of: a median hides that large batches are off. [1]
MOST = 0.75
#: What names a kind.
_KEY = ["family", "systems", "layout"]


def checked_kinds(rows: Sequence[ServingRow], table: pd.DataFrame) -> tuple[CheckedKind, ...]:
    """List every kind of layout that was run; a run counts for the kinds of both its sides. Runs beyond saturation are
    not in the errors, but for those with everything queued; those of unknown lengths count where no other is known.
    """
    used = table[table["evaluated"] | (table["reason"] == UNKNOWN_LENGTHS)]
    sides = pd.DataFrame(_sides(rows), columns=["file", "row", *_KEY, "gpus", "sequences"]).drop_duplicates()
    lines = used.merge(sides, on=["file", "row"], suffixes=("_run", ""))
    lines.loc[lines["saturated"], "sequences"] = np.nan  # some of them wait
    kinds = []
    for key, all_of_it in lines.groupby(_KEY, sort=True):
        family, systems, layout = map(str, key)
        mine = all_of_it[all_of_it["evaluated"]] if all_of_it["evaluated"].any() else all_of_it
        runs = mine.drop_duplicates(["file", "row"])
        judged_by, error = _judged(mine)
        kinds.append(
            CheckedKind(
                family=family,
                systems=systems,
                layout=layout,
                most_gpus=int(mine["gpus"].max()),
                most_sequences=None if mine["sequences"].isna().all() else round(float(mine["sequences"].max()), 1),
                rows=len(runs),
                points=int(runs["point"].nunique()),
                files={str(file): int(count) for file, count in runs.groupby("file").size().items()},
                judged_by=judged_by,
                error=error,
            )
        )
    return tuple(kinds)


def evidence_text(kinds: Sequence[CheckedKind], *, date: str) -> str:
    """Write the text of an evidence file. The same data give the same bytes."""
    lines = [
        "# Kinds of layouts that forecasts were compared with: served runs, distinct operating points, and the",
        "# absolute relative error that three quarters of these points stay below.",
        "title: Layouts with measured runs",
        f'source: "counted by disagg-sim calibrate layouts over the files named below; data of {date}"',
        "kinds:",
    ]
    for kind in kinds:
        files = ", ".join(f"{name}: {count}" for name, count in kind.files.items())
        lines += [
            f'  - {{family: {kind.family}, systems: "{kind.systems}", layout: "{kind.layout}",',
            f"     most_gpus: {kind.most_gpus}, most_sequences: {_number(kind.most_sequences)},",
            f"     rows: {kind.rows}, points: {kind.points},",
            f"     judged_by: {kind.judged_by}, error: {_number(kind.error)},",
            f"     files: {{{files}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _sides(rows: Sequence[ServingRow]) -> Iterator[tuple[object, ...]]:
    """File and row, kind, GPUs of an instance and sequences in flight a GPU of each side of every run."""
    for row in rows:
        for workers in (row.workers, row.prefill):
            if workers is not None and row.model and row.system:
                family, systems = family_of(load_model(row.model)), class_of(load_system(row.system))
                layout = str(layouts_of(workers.mapping)[0])
                flight = row.batch if math.isnan(row.concurrency) else row.concurrency
                each = flight / workers.gpus if workers is row.workers else math.nan  # prompts of a pass are not stated
                yield row.file, row.row, family, systems, layout, int(workers.mapping.gpus), each


def _judged(lines: pd.DataFrame) -> tuple[str, float | None]:
    """What a kind is judged by, and the error that most of its distinct operating points stay below. [1]"""
    below = lines[lines["evaluated"] & (~lines["saturated"] | (lines["load"] == "offline"))]
    error = below.groupby(["quantity", "point"])["relative_error"].median().abs()
    counts = error.groupby(level="quantity").size()
    known = [name for name in JUDGED_BY if name in counts]
    if not known:
        return JUDGED_BY[-1], None
    steady = [name for name in known if name in JUDGED_BY[:2]]
    name = max(steady, key=lambda each: int(counts[each])) if steady else known[0]
    return name, round(float(error[name].quantile(MOST)), 3)


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


#: Writes an evidence file.
write_evidence = Writer(lambda path, part: evidence_of(path, read_mapping(part), path.stem))
