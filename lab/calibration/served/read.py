"""Read files of serving measurements into rows.

``read_rows`` tells the form of a CSV by its columns and returns every row of it, in order: a row that no model of ours
can answer keeps its place with a reason. ``read_files`` takes several files and goes on where one cannot be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg_sim.errors import given_twice, nearest, quoted
from disagg_sim.facts.load import load_model
from disagg_sim.facts.yaml_files import shown
from disagg_sim.parquet import read_parquet
from disagg_sim.reading import read_file, read_table, unpacked
from disagg_sim.search.mappings import least_redundant_slots
from lab.calibration.kernels.tables import TableError, as_table_faults
from lab.calibration.served import forms
from lab.calibration.served.cells import text, version_in
from lab.calibration.served.launch_flags import FURTHER, MARKS, launched
from lab.calibration.served.rows import ServingRow, WorkerGroup

#: Why a run with drafts is not judged with the others.
SPECULATIVE = "speculative decoding: a step makes more than one token"
#: Digits of a file's SHA-256 by which an engine profile knows the data that it was fitted to. [1]
DIGEST = 12
#: Longest header of a CSV; those known have some 1,500. [character]
LONGEST_HEADER = 100_000
#: Form -> columns that tell it, and its reader.
FORMS: dict[str, tuple[set[str], Callable[[Any], ServingRow]]] = {
    "inferencex_dsr1": ({"tput_total_tok_s_gpu", "tpot_median_ms", "prefill_workers", "concurrency"}, forms.inferencex),
    "inferencex_dense": ({"tput_total_tok_s_gpu", "tpot_mean_ms", "inferencex_config_id"}, forms.inferencex),
    "inferencex_models": ({"ttft_mean_ms", "tpot_mean_ms", "moe_ep", "decode_moe_ep"}, forms.inferencex_models),
    "drafted_cells": ({"num_spec", "accept_pos0", "tpot_mean_ms"}, forms.drafted_cells),
    "nvidia_gap": ({"ttft_mean_ms", "tpot_mean_ms", "gemm_quant", "moe_ep"}, forms.nvidia_gap),
    "trtllm_docs": ({"scenario", "metric", "value", "parallelism_label"}, forms.trtllm_docs),
    "mlperf": ({"mlperf_id", "scenario", "samples_per_s"}, forms.mlperf),
    "argonne": ({"latency_s", "throughput_total_tok_s", "batch"}, forms.argonne),
    "splitwise": ({"prompt_time_ms", "token_time_ms", "batch"}, forms.splitwise),
    "published": ({"metric", "value", "batch_scope", "phase"}, forms.published),
}
#: Files beside the measurements that hold none.
LISTS = {"core points": {"row_id", "kind", "why"}, "manifest": {"file", "sha256"}, "launch flags": MARKS}


def columns_of(path: Path) -> list[str]:
    """Column names of a CSV."""
    with as_table_faults(path):
        content = unpacked(read_file(path))
        names = content[:LONGEST_HEADER].partition(b"\n")[0].decode("utf-8").rstrip("\r").split(",")
    if twice := given_twice(name for name in names if name):
        raise TableError(f"{shown(path)}: column {quoted(twice)} occurs twice in the header")
    return names


def read_rows(path: Path) -> list[ServingRow]:
    """Read every row of a file of measurements, in order, with a ``reason`` where no model of ours can answer it; none
    of a file that lists rows of others.
    """
    columns = set(columns_of(path))
    if any(marks <= columns for marks in LISTS.values()):
        return []
    form = next((name for name, (marks, _) in FORMS.items() if marks <= columns), "")
    if not form:
        known = {name: sorted(marks) for name, (marks, _) in FORMS.items()}
        close = max(known, key=lambda name: len(columns & set(known[name])))
        missing = sorted(set(known[close]) - columns)
        hint = nearest(missing[0], columns) if missing else ""
        raise TableError(
            f"{shown(path)}: no known form of serving measurements; closest is {close!r}, which needs column "
            f"{missing[0]!r}{hint}; forms: {', '.join(known)}"
        )
    lines = _lines(path)
    reader: Callable[[Any], ServingRow] = FORMS[form][1]
    digest = hashlib.sha256(read_file(path)).hexdigest()[:DIGEST]
    versions = [version_in(text(line, "image"), text(line, "framework_version")) for line in lines]
    return [
        replace(_placed(reader(line), path, form, number), version=version, digest=digest)
        for number, (line, version) in enumerate(zip(lines, versions, strict=True), start=2)
    ]


def read_files(paths: Sequence[Path]) -> tuple[list[ServingRow], list[str]]:
    """Read the rows of several files, in order, and a line for each file that cannot be read.

    Tables of launch flags among them have no rows, and say how those of the others were launched.
    """
    rows: list[ServingRow] = []
    faults: list[str] = []
    flags: dict[str, Any] = {}
    further: dict[str, Any] = {}
    for path in paths:
        try:
            if path.suffix == ".parquet":
                further |= _further(path)
            elif set(columns_of(path)) >= MARKS:
                flags |= {text(line, "row_id"): line for line in _lines(path)}
            else:
                rows += read_rows(path)
        except TableError as error:
            faults.append(str(error))
    if faults and len(faults) == len(paths):
        raise TableError("\n".join(faults))
    told = (launched(row, flags[row.row], further.get(row.row)) if row.row in flags else row for row in rows)
    return list(told), faults


def _further(path: Path) -> dict[str, Any]:
    """Lines of the long table of launch flags by row, of its columns ``FURTHER``."""
    with as_table_faults(path):
        told = read_parquet(path, columns=FURTHER)
    return {text(line, "row_id"): line for line in told.itertuples(index=False)}


def _lines(path: Path) -> list[Any]:
    """Lines of a CSV, the first of which names their columns."""
    with as_table_faults(path):
        return list(read_table(path, low_memory=False).itertuples(index=False))


def _placed(row: ServingRow, path: Path, form: str, number: int) -> ServingRow:
    """The row with its place in the file and the reasons that hold for every form."""
    row = replace(row, file=path.name, form=form, row=row.row or str(number))
    row = replace(row, workers=_with_slots(row, row.workers), prefill=_with_slots(row, row.prefill))
    if row.speculative:
        row = row.refused(SPECULATIVE)
    for what, name in (("model", row.model), ("system", row.system), ("engine profile", row.engine)):
        if not name:
            row = row.refused(f"no {what} for {row.framework!r}" if what == "engine profile" else f"no {what}")
    if not row.load:
        row = row.refused("states no load that can be evaluated")
    return row


def _with_slots(row: ServingRow, workers: WorkerGroup | None) -> WorkerGroup | None:
    """The workers; EP that does not divide the experts gets the fewest redundant slots where no source states any."""
    if not row.model or workers is None or workers.mapping.ep == 1:
        return workers
    least = least_redundant_slots(load_model(row.model), workers.mapping.ep) or 0
    slots = max(least, workers.mapping.redundant_slots)
    return replace(workers, mapping=replace(workers.mapping, redundant_slots=slots))
