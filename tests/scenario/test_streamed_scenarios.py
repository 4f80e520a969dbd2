"""A scenario whose requests leave in pieces has the tables of one that keeps everything; traces of scenarios."""

import gc
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import yaml

from disagg_sim.errors import SpecError, StoreError
from disagg_sim.parquet import write_parquet
from disagg_sim.scenario.plan import REQUESTS, plan_scenario
from disagg_sim.scenario.run import LOG, ScenarioResult, log_timing, run_scenario
from disagg_sim.scenario.spec import Scenario, load_scenario
from disagg_sim.simulation import pieces
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.metrics import MEASURED
from disagg_sim.sweep.store import PIECES

TEXT = """{name: tiny, model: llama_3_1_8b, system: h100_sxm, precision: fp8, slo: {ttft_s: 9, tpot_s: 9},
trace: {kind: synthetic, name: even, lengths: {isl: 100, osl: 10}, rate_per_s: 20, requests: 300,
        classes: {chat: 0.5, batch: 0.5}},
deployments: {four: {gpus: 4, colocated: {tp: 1, instances: 4}}}, policies: [vllm], run: RUN}"""


CLASSES = "classes: {chat: 0.5, batch: 0.5}"


def result_of(folder: Path, run: str, beside: str = CLASSES) -> ScenarioResult:
    path = folder / "tiny.yaml"
    path.write_text(TEXT.replace("RUN", run).replace(CLASSES, beside))
    plan = plan_scenario(load_scenario(str(path)))
    result = run_scenario(plan, folder / f"out{len(list(folder.glob('out*')))}", jobs=1, listener=Mock())
    assert not result.faults
    return result


def test_tables_are_the_same_whatever_is_kept(tmp_path, monkeypatch):
    """Rows of requests, classes and samples; no piece is left over. With ``none`` there is no table of requests."""
    monkeypatch.setattr(pieces, "PIECE", 20)
    runs = (f"{{records: {kept}, sample_s: 0.5}}" for kept in ("full", "stream", "none"))
    full, stream, none = (result_of(tmp_path, each) for each in runs)
    (run,) = full.plan.runs
    pd.testing.assert_frame_equal(full.requests(run), stream.requests(stream.plan.runs[0]))
    pd.testing.assert_frame_equal(full.classes, stream.classes)
    assert len(stream.classes) == 2
    assert not list(stream.store.root.glob("pieces/**/*"))
    drop = [*MEASURED, *(name for name in full.summary if name.startswith(("ttft", "tpot")))]
    for other in (stream, none):
        pd.testing.assert_frame_equal(full.summary.drop(columns=drop), other.summary.drop(columns=drop))
        pd.testing.assert_frame_equal(full.samples(run), other.samples(other.plan.runs[0]))
        assert other.summary["ttft_p90_s"][0] == pytest.approx(full.summary["ttft_p90_s"][0], rel=0.005)
    assert not list(none.store.root.glob("requests/**/*"))


def test_tables_are_the_same_whatever_the_window(tmp_path, monkeypatch):
    """Of 300 requests 7 are held at a time."""
    monkeypatch.setattr(pieces, "PIECE", 20)
    whole, windows = (result_of(tmp_path, "{records: stream}", f"window: {window}") for window in (0, 7))
    for table in ("requests", "samples"):
        first, second = (getattr(each, table)(each.plan.runs[0]) for each in (whole, windows))
        pd.testing.assert_frame_equal(first, second, check_exact=True)
    own = [each.summary.drop(columns=list(MEASURED)) for each in (whole, windows)]
    pd.testing.assert_frame_equal(*own, check_exact=True)


def clusters() -> int:
    """Clusters in memory; by their type, as ``isinstance`` asks weak proxies for what is gone."""
    return sum(type(each) is Cluster for each in gc.get_objects())


@pytest.mark.parametrize("records", ["stream", "none"])
def test_a_run_leaves_nothing_behind(tmp_path, records):
    """The cluster that served a run is gone with it."""
    gc.collect()
    before = clusters()
    gc.disable()  # which would free them at a time of its own
    try:
        result_of(tmp_path, f"{{records: {records}}}")
        assert clusters() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("run", "beside"),
    [("{}", "scale_by: time"), ("{records: none}", CLASSES), ("{records: none}", "scale_by: requests, rate_scale: 2")],
)
def test_what_needs_all_requests_holds_them(tmp_path, run, beside):
    found = [result_of(tmp_path, run, f"window: {window}, {beside}").summary for window in (7, 0)]
    pd.testing.assert_frame_equal(*(each.drop(columns=list(MEASURED)) for each in found), check_exact=True)


def test_a_file_in_windows_is_one_of_its_requests(tmp_path):
    """Lines of JSON, seven at a time, and the same requests as CSV."""
    rows = pd.DataFrame({"arrival_s": range(40), "input_tokens": range(100, 140), "output_tokens": 9})
    rows.to_csv(tmp_path / "day.csv", index=False)
    rows.to_json(tmp_path / "day.jsonl", orient="records", lines=True)
    text = TEXT.replace("RUN", "{records: none}").replace(f"\n        {CLASSES}", "")
    made = []
    for trace in ("path: day.csv", "path: day.jsonl, window: 7", "path: day.jsonl, window: 7, from_s: 0"):
        start, end = text.index("{kind"), text.index("},\ndeployments")
        (tmp_path / "of_file.yaml").write_text(f"{text[:start]}{{name: day, {trace}{text[end:]}")
        plan = plan_scenario(load_scenario(str(tmp_path / "of_file.yaml")))
        result = run_scenario(plan, tmp_path / f"of{len(made)}", jobs=1, listener=Mock())
        made.append(result.summary.drop(columns=list(MEASURED)))
    for other in made[1:]:
        pd.testing.assert_frame_equal(made[0], other, check_exact=True)


def test_pieces_may_lie_on_a_scratch_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 20)
    for place in ("scratch", "out0"):
        (tmp_path / place).mkdir()
    (tmp_path / "out0" / PIECES).symlink_to(tmp_path / "scratch")
    (tmp_path / "tiny.yaml").write_text(TEXT.replace("RUN", "{records: stream}"))
    plan = plan_scenario(load_scenario(str(tmp_path / "tiny.yaml")))
    assert len(run_scenario(plan, tmp_path / "out0", jobs=1, listener=Mock()).requests(plan.runs[0])) == 300
    assert (tmp_path / "out0" / PIECES).is_symlink()
    assert not list((tmp_path / "scratch").iterdir())


def test_the_log_of_times_is_no_link_to_another_file(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    (tmp_path / LOG).symlink_to(foreign)
    with pytest.raises(StoreError, match=f"{LOG}: cannot write: Too many levels of symbolic links"):
        log_timing(tmp_path, "a line")
    assert foreign.read_text() == "precious"


def test_pieces_of_a_run_that_was_cut_off_are_removed(tmp_path):
    """Whoever left them: the run begins anew, and its table is the same."""
    (tmp_path / "tiny.yaml").write_text(TEXT.replace("RUN", "{records: stream}"))
    plan = plan_scenario(load_scenario(str(tmp_path / "tiny.yaml")))
    (run,) = plan.runs
    key = run.key(REQUESTS)
    run_scenario(plan, tmp_path / "theirs", jobs=1, listener=Mock())
    (tmp_path / "theirs" / "requests" / f"{key.group}" / f"{key.name}.parquet").unlink()
    theirs = tmp_path / "theirs" / PIECES / key.group / key.name / key.digest
    theirs.mkdir(parents=True)
    write_parquet(pd.DataFrame({"request": [300]}), theirs / "0000000300.parquet", {})
    empty, found = (run_scenario(plan, tmp_path / each, jobs=1, listener=Mock()) for each in ("empty", "theirs"))
    pd.testing.assert_frame_equal(empty.requests(run), found.requests(run))


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
