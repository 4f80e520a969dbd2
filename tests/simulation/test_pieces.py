"""Requests that leave a run in pieces change nothing of it; sketches are as near as they say."""

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.simulation import pieces
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.metrics import MEASURED, summary
from disagg_sim.simulation.policies import loads
from disagg_sim.simulation.policies.arrow.policy import GlobalScheduler
from disagg_sim.simulation.records import RELATIVE_ERROR, Sketch, Totals, added, frame_of
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions

SLO = ds.Slo(ttft=0.5, tpot=0.02)
AT = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")


def parts(**limits: int) -> ServedDeployment:
    two = (ds.Replicas(mapping=ds.Sharding(), instances=2, **limits),)
    return ServedDeployment(name="four", gpus=4, prefill=two, decode=two, colocated=two, pairs=two)


def requests(n: int = 400, rate: float = 20.0, **columns: object) -> ds.Trace:
    rng = np.random.default_rng(1)
    lengths = {"input_tokens": rng.integers(50, 3000, n), "output_tokens": rng.integers(1, 200, n)}
    return ds.Trace(arrival=np.cumsum(rng.exponential(1 / rate, n)), **lengths, **columns)


def sessions(n: int = 400) -> Sessions:
    return Sessions(session=np.arange(n) // 2 % 100, think_s=np.full(n, 0.5))


def prompts(n: int = 400) -> PrefixBlocks:
    """Blocks of prompts that begin as some others do."""
    blocks = requests(n).input_tokens // 512
    ids = np.concatenate([40 * (number % 30) + np.arange(count) for number, count in enumerate(blocks)])
    return PrefixBlocks(offsets=np.append(0, np.cumsum(blocks)), ids=ids, block_tokens=512)


KEPT = {"gap_limit_s": 0.02, "prefix_cache": True, "tiers": ("dram",)}
LOST = tuple(FailureEvent(at_s=at, kind="instance", number=each) for at, each in ((3.0, 0), (6.0, 3), (9.0, 1)))
FAILING = {"failures": Failures(restart_s=4.0, migration_limit=2, events=LOST)}
CASES = {
    "short of memory": ("vllm", {}, {"batch": 6, "token_budget": 512}, {}),
    "three instances fail": ("disaggregated", FAILING, {}, {}),
    "sessions": ("disaggregated", {}, {}, {"sessions": sessions()}),
    "closed loop": ("arrow", {"concurrency": 40}, {}, {}),
    "batches of a policy": ("dopd", {}, {}, {}),
    "numbers of segments kept": ("dynaserve", {}, {}, {}),
    "cut short": ("disaggregated", {"until_s": 12.0, "transfer": "buffer"}, {}, {}),
    "late gaps, tiers": ("vllm", KEPT, {}, {"prefix": prompts()}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_in_pieces_is_the_same_run(monkeypatch, case):
    """Request by request, sample by sample; the records leave in the order of the trace."""
    policy, options, limits, columns = CASES[case]
    monkeypatch.setattr(pieces, "PIECE", 30)
    trace, deployment, left = requests(**columns), parts(**limits), []
    known = RunOptions(sample_s=0.5, **options)
    whole = run(trace, deployment, policy, at=AT, slo=SLO, options=known)
    streamed = run(
        trace, deployment, policy, at=AT, slo=SLO, options=replace(known, records="stream"), sink=left.append
    )
    assert len(left) > 3
    assert not len(streamed.requests.request)
    found = pd.concat([frame_of(piece) for piece in left], ignore_index=True)
    pd.testing.assert_frame_equal(found, whole.frame(), check_exact=True)
    for part in ("samples", "instances"):
        for each in fields(getattr(whole, part)):
            a, b = (getattr(getattr(result, part), each.name) for result in (whole, streamed))
            np.testing.assert_array_equal(a, b, err_msg=each.name)
    assert (whole.decisions, whole.duration_s) == (streamed.decisions, streamed.duration_s)
    exact, near = (vars_of(summary(result, SLO)) for result in (whole, streamed))
    assert exact == pytest.approx(near, rel=RELATIVE_ERROR, nan_ok=True)
    counted = [name for name in exact if not name.startswith(("ttft", "tpot", "transfer", "exposed"))]
    assert [exact[name] for name in counted] == pytest.approx([near[name] for name in counted], rel=1e-12, nan_ok=True)


def vars_of(row: object) -> dict[str, float]:
    found = {each.name: getattr(row, each.name) for each in fields(row) if each.name not in MEASURED}
    return {name: value for name, value in found.items() if not isinstance(value, str)}


def test_the_kernel_forgets(monkeypatch):
    """400 requests of two segments each: those that are left at the end are those that came after the last piece."""
    monkeypatch.setattr(pieces, "PIECE", 30)
    kept, close = [], pieces.Pieces.close
    monkeypatch.setattr(
        pieces.Pieces, "close", lambda self: kept.append(len(self._cluster.fleet.segments)) or close(self)
    )
    run(requests(), parts(), "disaggregated", at=AT, slo=SLO, options=RunOptions(sample_s=0.5, records="none"))
    assert kept[0] < 100


@pytest.mark.parametrize("policy", ["vllm", "disaggregated", "least_load", "arrow"])
def test_the_kernel_places_requests_as_the_policy_does(monkeypatch, policy):
    """Also where a request comes with a sample, with others, or is too large, and where the run is cut."""
    trace = requests()
    arrival = np.round(trace.arrival * 4) / 4
    inputs = np.where(np.arange(len(trace)) % 50 == 7, 10**6, trace.input_tokens)
    trace = replace(trace, arrival=arrival, input_tokens=inputs)
    options = RunOptions(sample_s=0.5, until_s=15.25)
    fed = run(trace, parts(), policy, at=AT, slo=SLO, options=options)
    monkeypatch.setattr(loads, "placing_of", lambda *_: None)
    monkeypatch.setattr(GlobalScheduler, "chooser", lambda *_: None)
    asked = run(trace, parts(), policy, at=AT, slo=SLO, options=options)
    assert fed.decisions == asked.decisions
    pd.testing.assert_frame_equal(fed.frame(), asked.frame(), check_exact=True)
    for part in ("samples", "instances"):
        for each in fields(getattr(fed, part)):
            a, b = (getattr(getattr(result, part), each.name) for result in (fed, asked))
            np.testing.assert_array_equal(a, b, err_msg=each.name)
    assert set(fed.requests.status) == {0, 1, 3}


def test_a_window_beyond_what_is_kept_is_refused(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 30)
    own = {"records": "none", "sample_s": 0.5}
    result = run(requests(), parts(), "vllm", at=AT, slo=SLO, options=RunOptions(**own))
    with pytest.raises(InputError, match="records of the requests are gone; allowed: the limits of the run"):
        summary(result, ds.Slo(ttft=1.0, tpot=1.0))


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=50), st.integers(0, 50), st.floats(0.0, 1.0))
def test_sketches_keep_their_error_and_add_up(values, cut, share):
    """In any split; a percentile between two ranks is as near as both ranks are."""
    some, rest = np.array(values[:cut]), np.array(values[cut:])
    sketch = Sketch().counted(some) + Sketch().counted(rest)
    assert sketch.percentile(share) == pytest.approx(float(np.quantile(values, share)), rel=1.001 * RELATIVE_ERROR)
    np.testing.assert_array_equal(sketch.counts, Sketch().counted(np.array(values)).counts)


def test_sketches_of_zeros_and_of_nothing():
    assert Sketch().counted(np.zeros(3)).percentile(0.9) == 0.0
    assert np.isnan(Sketch().percentile(0.5))
    assert added(Totals(last_finish_s=2.0), Totals(transfers=1)).last_finish_s == 2.0
