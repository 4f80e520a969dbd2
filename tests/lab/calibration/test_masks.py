"""Runs that are set aside, by what was measured: above the peak of arithmetic, early images, jobs that stall."""

from dataclasses import replace

import pytest
from made_loads import latencies, made_run

from disagg_sim.facts.load import load_model, load_system
from lab.calibration.served.cells import instance
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.masks import MOST_OF_PEAK, masked, share_of_peak
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup


def loop(row: str, *, concurrency: float, tpot: float, **changed: object) -> ServingRow:
    """Llama-3.1-8B in fp8 on an H200: 900 tokens in, 101 out, TTFT 0.1 s."""
    sizes = {"isl": 899.0, "osl": 101.0, "concurrency": concurrency}
    return made_run(row, quantities=latencies(tpot=tpot, ttft=0.1), system="h200_sxm", **sizes, **changed)


def test_the_share_of_the_peak_by_littles_law():
    """100 in flight, 0.1 s + 100 * 10 ms each, 1,000 tokens: 90,909 tokens/s, times 2 operations a parameter."""
    row = loop("a", concurrency=100, tpot=0.01)
    peak, active = load_system("h200_sxm").peak_flops["fp8"], load_model("llama_3_1_8b").active_params
    share = 100 / 1.1 * 1000 * 2 * active / peak
    assert share_of_peak(row) == pytest.approx(share)
    assert share_of_peak(replace(row, workers=WorkerGroup(mapping=instance(2)))) == pytest.approx(share / 2)
    told = (Measurement(name="throughput", measured=90_909.09, basis="total"),)
    assert share_of_peak(replace(row, load="static", quantities=told)) == pytest.approx(share, rel=1e-6)
    assert share_of_peak(replace(row, load="decode")) == 0.0
    assert share_of_peak(replace(row, quantities=())) == 0.0


def test_a_run_above_the_peak_speaks_of_its_whole_job():
    """The second run is of the same server at another load, the third of another version."""
    rows = [
        loop("fast", concurrency=130, tpot=0.01),
        loop("calm", concurrency=1, tpot=0.006),
        loop("other", concurrency=1, tpot=0.006, version="0.18"),
    ]
    assert share_of_peak(rows[0]) > MOST_OF_PEAK
    reasons = [row.reason for row in masked(rows)]
    assert reasons == ["a run of this job multiplies above 75% of the peak of its GPUs"] * 2 + [""]
    table = evaluate(rows)
    assert table.groupby("row")["evaluated"].all().to_dict() == {"fast": False, "calm": False, "other": True}


def test_a_job_that_is_named_and_a_reason_that_stays():
    row = loop("a", concurrency=1, tpot=0.006, file="nvidia_gap_runs.csv", engine="trtllm", version="1.3")
    row = replace(row, model="qwen3_32b", system="gb200_nvl72")
    others = [replace(row, **told) for told in ({"version": "1.0"}, {"system": "b200_sxm"}, {"model": "llama_3_1_8b"})]
    stalls, *kept, refused = masked([row, *others, row.refused("no system")])
    assert stalls.reason.startswith("a job that stalls")
    assert [each.reason for each in (*kept, refused)] == ["", "", "", "no system"]
