"""Kinds of layouts counted from runs made by hand."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
from made_loads import made_run

from disagg_sim.domain import Sharding
from lab.calibration.served.kinds import checked_kinds, evidence_text, write_evidence
from lab.calibration.served.rows import UNKNOWN_LENGTHS, ServingRow, WorkerGroup


def run(row: str, workers: WorkerGroup, prefill: WorkerGroup | None = None) -> ServingRow:
    return made_run(row, model="deepseek_r1", system="gb200_nvl72", workers=workers, prefill=prefill)


def line(row: str, point: str, error: float, *, quantity: str = "tpot", saturated: bool = False) -> dict[str, object]:
    own = {"file": "runs.csv", "row": row, "point": point, "relative_error": error, "quantity": quantity}
    return {**own, "evaluated": True, "reason": "", "saturated": saturated, "load": "closed_loop"}


WIDE = WorkerGroup(mapping=Sharding(dp_attn=16, ep=16))
NARROW = WorkerGroup(count=2, mapping=Sharding(tp_attn=4, tp_ffn=4))
ROWS = [run("a", WIDE, NARROW), run("b", WIDE), run("c", WIDE), run("d", NARROW), run("e", NARROW)]
#: Runs b and c repeat one operating point; run e is beyond saturation.
TABLE = pd.DataFrame(
    [
        line("a", "one", -0.1),
        line("b", "two", 0.2),
        line("c", "two", 0.4),
        line("d", "three", 0.5),
        line("e", "four", 9.0, saturated=True),
        line("e", "four", 9.0, quantity="throughput", saturated=True),
    ]
)


def test_runs_points_sizes_and_errors_of_each_kind():
    """DP, EP: points one (0.1) and two (median 0.3), 3/4 below 0.25; TP: point one of its prefill and three: 0.4."""
    wide, narrow = checked_kinds(ROWS, TABLE)
    assert (wide.layout, wide.most_gpus, wide.rows, wide.points) == ("DP, EP", 16, 3, 2)
    assert (wide.judged_by, wide.error, wide.files) == ("tpot", 0.25, {"runs.csv": 3})
    assert (narrow.layout, narrow.most_gpus, narrow.rows, narrow.points, narrow.error) == ("TP", 4, 3, 3, 0.4)


def test_sequences_on_a_gpu_are_of_decoding_workers_below_saturation():
    """96 in flight on 2 workers of 16 GPUs: 3 a GPU; prompts of prefill workers and 900 that wait do not count."""
    two = WorkerGroup(count=2, mapping=WIDE.mapping)
    rows = [
        replace(run("a", two, NARROW), concurrency=96.0),
        replace(run("d", NARROW), batch=4.0, concurrency=math.nan),
        replace(run("e", NARROW), concurrency=900.0),
    ]
    wide, narrow = checked_kinds(rows, TABLE)
    assert (wide.most_sequences, narrow.most_sequences) == (3.0, 0.5)
    assert checked_kinds([rows[1]], TABLE[TABLE["row"] == "e"].assign(row="d"))[0].most_sequences is None


def test_a_run_of_unknown_lengths_counts_where_no_other_run_of_its_kind_does():
    unknown = TABLE["row"].isin(["a", "d", "e"])
    table = TABLE.assign(evaluated=~unknown, reason=np.where(unknown, UNKNOWN_LENGTHS, ""))
    wide, narrow = checked_kinds(ROWS, table)
    assert (wide.points, wide.error, narrow.points, narrow.judged_by, narrow.error) == (1, 0.3, 3, "nothing", None)
    assert len(checked_kinds(ROWS, table.assign(reason="the model may be changed"))) == 1


def test_the_file_reads_back_as_what_was_counted(tmp_path):
    kinds = checked_kinds(ROWS, TABLE)
    spec = write_evidence(tmp_path / "own.yaml", evidence_text(kinds, date="2026-11-21"))
    assert spec.kinds == kinds
    assert spec.source.endswith("data of 2026-11-21")
