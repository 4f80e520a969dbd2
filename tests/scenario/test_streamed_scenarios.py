"""A scenario whose requests leave in pieces has the tables of one that keeps everything."""

import gc
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from disagg_sim.errors import StoreError
from disagg_sim.parquet import write_parquet
from disagg_sim.scenario.plan import REQUESTS, plan_scenario
from disagg_sim.scenario.run import LOG, ScenarioResult, log_timing, run_scenario
from disagg_sim.scenario.spec import load_scenario
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
