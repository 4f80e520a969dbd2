"""Traces of a scenario: headers and units of files, and limits on what is drawn."""

from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import yaml

from disagg_sim.errors import SpecError
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import Scenario, load_scenario

START = 1_700_000_000_000  # a clock time [ms]
ROWS = "ts,prompt_len,gen_len\n" + "".join(f"{START + 1000 * i},{100 + i},{10 + i}\n" for i in range(20))
COLUMNS = {"arrival": "ts", "input_tokens": "prompt_len", "output_tokens": "gen_len"}
SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "slo": {"ttft_s": 2.0, "tpot_s": 0.15},
    "deployments": {"one": {"colocated": {"instances": 1}}},
    "policies": ["vllm"],
}


def scenario(folder: Path, trace: object) -> Scenario:
    (folder / "log.csv").write_text(ROWS)
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump({**SCENARIO, "trace": trace}))
    return load_scenario(str(path))


def test_other_headers_and_units_of_a_file(tmp_path):
    trace = {"path": "log.csv", "columns": COLUMNS, "time_unit": "ms", "from_s": 5, "to_s": 8}
    found = scenario(tmp_path, trace)
    loaded = found.traces[0].load(0)
    assert loaded.arrival.tolist() == [0, 1, 2]  # from_s counts from the first request
    assert loaded.input_tokens.tolist() == [105, 106, 107]
    (note,) = plan_scenario(found).notes
    assert note.startswith("log: arrivals count from the first request, which is at ts 1700000000000 ms (2023-11-14T")
    with pytest.raises(
        SpecError, match="looks like a date in ms since 1970, and would be taken for s; say which: time_u"
    ):
        scenario(tmp_path, {"path": "log.csv", "columns": COLUMNS})


def test_the_first_request_may_arrive_later(tmp_path):
    """The first of the part from 2 s on is taken for 0, and 7 s are added."""
    rows = "".join(f"{i},9,9\n" for i in range(5))
    (tmp_path / "late.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    (source,) = scenario(tmp_path, {"path": "late.csv", "start_s": 7, "from_s": 2}).traces
    assert source.load(0).arrival.tolist() == [7.0, 8.0, 9.0]


def test_notes_of_the_traces_lie_beside_the_summary(tmp_path):
    trace = {"path": "log.csv", "columns": COLUMNS, "time_unit": "ms", "requests": 3}
    plan = plan_scenario(scenario(tmp_path, trace))
    run_scenario(plan, tmp_path / "out", jobs=1, listener=Mock())
    (line,) = (tmp_path / "out" / "notes.txt").read_text().splitlines()
    assert line == plan.notes[0]


def test_a_late_single_request_needs_no_period_of_samples(tmp_path):
    """A trace of one request has no duration to take a 200th of; its arrival counts for the number of samples."""
    trace = {"kind": "synthetic", "lengths": {"isl": 9, "osl": 9}, "rate_per_s": 1e-4, "requests": 1}
    plan = plan_scenario(scenario(tmp_path, trace))
    result = run_scenario(plan, tmp_path / "out", jobs=1, listener=Mock())
    assert result.summary["completed"].tolist() == [1]


def test_rates_by_requests_leave_the_time_of_a_trace_alone(tmp_path):
    trace = {"path": "log.csv", "columns": COLUMNS, "time_unit": "ms", "rate_scale": [0.5, 2.0], "scale_by": "requests"}
    source = scenario(tmp_path, trace).traces[0]
    half, twice = (source.at_rate(0, rate) for rate in source.rate_scales)
    assert (len(half), len(twice)) == (10, 40)
    assert set(half.arrival.tolist()) <= set(range(20))
    by_time = scenario(tmp_path, {**trace, "scale_by": "time"}).traces[0].at_rate(0, 2.0)
    assert (len(by_time), by_time.duration, round(twice.duration)) == (20, 9.5, 20)
    assert source.at_rate(1, 0.5).arrival.tolist() != half.arrival.tolist()  # another seed, another choice
    (note,) = (note for note in plan_scenario(scenario(tmp_path, trace)).notes if "unchanged" in note)
    assert note == "log: rates by fewer or more requests at unchanged time, seed 0"


def test_synthetic_sessions_are_served_turn_by_turn(tmp_path):
    trace = {"kind": "sessions", "traffic": "coding_agent", "sessions_per_s": 0.05, "sessions": 8, "rate_scale": [1, 2]}
    found = scenario(tmp_path, {**trace, "scale_by": "requests"})
    assert found.traces[0].name == "coding_agent"
    plan = plan_scenario(found)
    assert [run.requests for run in plan.runs] == [len(found.traces[0].load(0)), 2 * len(found.traces[0].load(0))]
    result = run_scenario(plan, tmp_path / "out", jobs=1, listener=Mock())
    requests = result.requests(plan.runs[0])
    previous = found.traces[0].load(0).sessions.previous()
    later = previous >= 0
    assert (requests["status"] == "completed").all()
    assert (requests["arrival_s"][later].to_numpy() >= requests["finish_s"][previous[later]].to_numpy()).all()


def test_classes_of_requests_have_limits_and_a_table_of_their_own(tmp_path):
    trace = {"kind": "synthetic", "lengths": {"isl": 500, "osl": 20}, "rate_per_s": 2, "requests": 60}
    promises = {"ttft_s": 2.0, "tpot_s": 0.15, "classes": {"batch": {"ttft_s": 60, "tpot_s": 1, "priority": -1}}}
    path = tmp_path / "trial.yaml"
    path.write_text(
        yaml.safe_dump({**SCENARIO, "slo": promises, "trace": {**trace, "classes": {"chat": 3, "batch": 1}}})
    )
    result = run_scenario(plan_scenario(load_scenario(str(path))), tmp_path / "out", jobs=1, listener=Mock())
    rows = pd.read_csv(tmp_path / "out" / "classes.csv")
    assert rows["class"].tolist() == ["batch", "chat"]
    assert rows["requests"].sum() == 60
    assert rows["slo_ttft_s"].tolist() == [60.0, 2.0]
    assert rows["priority"].tolist() == [-1, 0]
    assert result.requests(result.plan.runs[0])["class"].value_counts().to_dict() == dict(
        zip(rows["class"], rows["requests"], strict=True)
    )
    path.write_text(
        yaml.safe_dump({**SCENARIO, "slo": promises, "trace": {**trace, "classes": {"chat": 1, "batsh": 1}}})
    )
    with pytest.raises(SpecError, match="class 'batch' is none of trace synthetic, did you mean 'batsh'"):
        load_scenario(str(path))
