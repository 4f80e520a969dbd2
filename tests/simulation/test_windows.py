"""Requests that come in windows change no run; metrics of runs that were written by hand."""

import math
import mmap
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import made_requests, made_run
from sites import SIMPLE, deployment
from sites import served as served_at
from test_pieces import AT, SLO, parts, requests

import disagg_sim as ds
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_traffic
from disagg_sim.simulation import pieces
from disagg_sim.simulation.admission import PredictedTtft
from disagg_sim.simulation.clients import WIDTH, RequestWindow, SparseColumn
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import COLUMNS, histogram_percentile, summary
from disagg_sim.simulation.policies.arrow.policy import GlobalScheduler
from disagg_sim.simulation.records import Requests, RunResult, latencies
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.workload.arrivals import Mmpp
from disagg_sim.workload.stream import Piece, TraceStream

STREAM = RunOptions(records="stream", sample_s=0.5)


@dataclass(frozen=True, slots=True, eq=False)
class InMemoryStream:
    """The requests of a trace in memory."""

    trace: ds.Trace

    def pieces(self, most: int) -> Iterator[Piece]:
        """See ``RequestSource``."""
        trace = self.trace
        for begin in range(0, len(trace), most):
            rows = slice(begin, begin + most)
            yield Piece(trace.arrival[rows], trace.input_tokens[rows], trace.output_tokens[rows])


def windows_of(trace: ds.Trace, window: int) -> TraceStream:
    return TraceStream(name=trace.name, window=window, source=InMemoryStream(trace))


def served(trace: ds.Trace | TraceStream, policy: str, options: RunOptions = STREAM) -> tuple[bytes, RunResult]:
    """All records, column by column, and the rest of a run."""
    left: list[Requests] = []
    result = run(trace, parts(), policy, at=AT, slo=SLO, options=options, sink=left.append)
    left.sort(key=lambda piece: int(piece.request[0]))
    names = [each.name for each in fields(left[0]) if getattr(left[0], each.name) is not None]
    return b"".join(np.concatenate([getattr(piece, name) for piece in left]).tobytes() for name in names), result


def said(result: RunResult) -> bytes:
    """What a run says beside its records, but for the time that it took."""
    return pickle.dumps(vars_of(replace(result, wall_s=0.0, cpu_s=0.0)))


def vars_of(value: object) -> object:
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: vars_of(getattr(value, each.name)) for each in fields(value)}
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


CASES = {
    "co-located": ("vllm", {}),
    "arrow": ("arrow", {}),
    "batches of a policy": ("dopd", {}),
    "cut short": ("disaggregated", {"until_s": 12.0, "transfer": "buffer"}),
    "admission": ("least_load", {"admission": PredictedTtft(share=0.2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_does_not_depend_on_windows(monkeypatch, case):
    """Byte for byte: records, totals, samples, instances, decisions, gaps between tokens."""
    policy, options = CASES[case]
    monkeypatch.setattr(pieces, "PIECE", 30)
    trace = requests(200)
    records, whole = served(trace, policy, replace(STREAM, **options))
    for window in (1, 37):
        again, streamed = served(windows_of(trace, window), policy, replace(STREAM, **options))
        assert again == records, window
        assert said(streamed) == said(whole), window


@settings(max_examples=10)
@given(window=st.integers(1, 130), seed=st.integers(0, 3), bursts=st.booleans())
def test_drawn_requests_do_not_depend_on_windows(window, seed, bursts):
    """A run of requests that are drawn window by window is that of the trace that is drawn at once."""
    process = Mmpp(contrast=3.0, burst_share=0.25, burst_s=1.0) if bursts else None
    drawn = {"rate": 30.0, "requests": 120, "seed": seed, "name": "drawn"}
    drawn |= {"lengths": load_traffic("azure_2023_conversation").cases[0]}
    drawn |= {"arrivals_as": process} if process else {}
    trace, stream = ds.synthetic_trace(**drawn), ds.synthetic_stream(**drawn, window=window)
    for column in ("arrival", "input_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(stream.whole(), column), getattr(trace, column))
    whole, streamed = served(trace, "vllm"), served(stream, "vllm")
    assert (streamed[0], said(streamed[1])) == (whole[0], said(whole[1]))


def held(left: pieces.Pieces) -> int:
    """The first request whose columns are there."""
    return int(np.flatnonzero(left._cluster.state.coming.tokens)[0])


@pytest.mark.parametrize("policy", ["vllm", "arrow"])
def test_requests_that_have_left_are_held_no_more(monkeypatch, policy):
    """Where a request no longer is, its columns read 0: at the end of 5,000 all but the last few."""
    monkeypatch.setattr(pieces, "PIECE", 300)
    monkeypatch.setattr(mmap, "PAGESIZE", 64)
    monkeypatch.setattr(SparseColumn, "release", lambda self, before: self.values[:before].fill(0))
    seen, arrow = [], []
    close = pieces.Pieces.close
    monkeypatch.setattr(pieces.Pieces, "close", lambda self: seen.append(held(self)) or close(self))
    begun = GlobalScheduler.forget_before
    monkeypatch.setattr(GlobalScheduler, "forget_before", lambda self, n: (arrow.append(self), begun(self, n)))
    options = RunOptions(records="none", sample_s=0.5)
    run(windows_of(requests(5000), 100), parts(), policy, at=AT, slo=SLO, options=options)
    assert seen[0] > 4000
    assert policy == "vllm" or np.flatnonzero(arrow[-1].choices.ends)[0] > 4000


def test_columns_give_their_pages_back():
    """2 million numbers of 8 bytes are 16 MB; of these only what is behind the mark takes memory."""
    column = SparseColumn(2_000_000, np.int64)
    column.values[:] = 1
    column.release(1_999_000)
    page = mmap.PAGESIZE // WIDTH
    assert np.count_nonzero(column.values) < 1000 + page
    longer = column.longer(3_000_000)
    np.testing.assert_array_equal(longer.values[:2_000_000], column.values)


LOST = Failures(restart_s=1.0, events=(FailureEvent(at_s=0.5, kind="instance", number=0),))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("vllm", RunOptions(sample_s=0.5)),
        ("vllm", replace(STREAM, concurrency=3)),
        ("disaggregated", replace(STREAM, failures=LOST)),
        ("dynaserve", STREAM),
    ],
)
def test_what_needs_all_requests_holds_them(policy, options):
    trace = requests(20)
    whole, streamed = served(trace, policy, options), served(windows_of(trace, 5), policy, options)
    assert (streamed[0], said(streamed[1])) == (whole[0], said(whole[1]))


def test_requests_out_of_order_are_refused():
    """Two windows, each in order, and not one after the other."""

    class Twice(InMemoryStream):
        def pieces(self, most):
            yield from [*super().pieces(most), *super().pieces(most)]

    stream = TraceStream(name="twice", window=9, source=Twice(requests(9)))
    with pytest.raises(InputError, match=r"request 10 arrives at .* allowed: in the order of arrival"):
        RequestWindow(stream, 0.0)


LIMITS = Slo(ttft=2.0, tpot=0.1)

# arrival, first token, finish, output: TTFT 1, 2, 3, -, 1 s; TPOT 0.1, 0.2, 0.05, -, 0 s
FIVE = made_requests(
    arrival=[10, 20, 30, 40, 50],
    first=[11, 22, 33, np.nan, 51],
    finish=[12, 24, 33.5, np.nan, 51],
    output=[11, 11, 11, 11, 1],
    status="cccrc",
    transfer=[0.0, 0.2, 0.4, 0.0, 0.0],
)


def test_latencies_are_those_of_completed_requests():
    ttft, tpot = latencies(made_run(FIVE).requests)
    assert ttft == pytest.approx([1, 2, 3, 1])
    assert tpot == pytest.approx([0.1, 0.2, 0.05, 0.0])  # one token has no gap


def test_attainment_counts_the_rejected_against_it_and_the_limits_as_inside():
    # the first and the last: the second is too slow in tokens, the third late, the fourth rejected
    assert summary(made_run(FIVE), LIMITS).slo_attainment == pytest.approx(2 / 5)
    assert summary(made_run(FIVE), Slo(ttft=2.0, tpot=0.3)).slo_attainment == pytest.approx(3 / 5)


def test_the_summary_of_five_requests():
    row = summary(made_run(FIVE), LIMITS, rate_scale=1.5)
    assert (row.policy, row.deployment, row.trace, row.rate_scale, row.seed) == ("vllm", "two", "made", 1.5, 7)
    assert (row.requests, row.completed, row.rejected, row.unfinished, row.failed) == (5, 4, 1, 0, 0)
    assert row.duration_s == pytest.approx(41)  # 10 s to 51 s
    assert row.goodput_requests_per_s == pytest.approx(2 / 41)
    assert row.goodput_tokens_per_s == pytest.approx(12 / 41)
    assert row.throughput_requests_per_s == pytest.approx(4 / 41)
    assert row.throughput_tokens_per_s == pytest.approx(34 / 41)
    assert row.ttft_p50_s == pytest.approx(1.5)
    assert row.gpu_hours == pytest.approx(400 / 3600)
    assert row.utilisation == pytest.approx(150 / 400)  # 2 GPUs for 50 s and for 25 s
    assert row.mfu == pytest.approx(8e15 / (400 * 1e14))
    assert (row.queued_mean, row.queued_max, row.kv_use_max) == (2.0, 4.0, 0.5)
    assert (row.flips, row.transfers) == (3, 2)
    assert row.transfer_mean_s == pytest.approx(0.3)
    assert row.exposed_transfer_mean_s == pytest.approx(0.15)
    assert row.requests_per_cpu_s == pytest.approx(20)


def test_nothing_completed_is_no_number():
    lost = made_requests(arrival=[0, 1], first=[np.nan] * 2, finish=[np.nan] * 2, output=[5, 5], status="ur")
    row = summary(made_run(lost), LIMITS)
    assert (row.completed, row.unfinished, row.rejected, row.slo_attainment) == (0, 1, 1, 0.0)
    assert all(math.isnan(value) for value in (row.ttft_p99_s, row.tpot_p50_s, row.itl_p99_s))
    assert row.goodput_requests_per_s == row.goodput_tokens_per_s == 0.0


def test_the_first_columns_are_those_that_readers_rely_on():
    assert COLUMNS[:21] == (
        *("policy", "deployment", "trace", "rate_scale", "requests", "completed", "rejected", "slo_attainment"),
        *("goodput_requests_per_s", "goodput_tokens_per_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
        *("tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "itl_p99_s", "gpu_hours", "utilisation"),
        *("wall_s", "requests_per_cpu_s"),
    )


def test_a_percentile_of_a_histogram_divides_its_bin():
    edges, counts = np.array([0.0, 1.0, 2.0, 4.0]), np.array([0, 2, 2])
    assert histogram_percentile(edges, counts, 0.25) == pytest.approx(1.5)
    assert histogram_percentile(edges, counts, 0.5) == pytest.approx(2.0)
    assert histogram_percentile(edges, counts, 0.75) == pytest.approx(3.0)
    assert histogram_percentile(edges, counts, 0.0) == pytest.approx(1.0)
    assert histogram_percentile(edges, counts, 1.0) == pytest.approx(4.0)


def test_a_bin_without_an_end_gives_its_beginning():
    assert histogram_percentile(np.array([0.0, 1.0, np.inf]), np.array([1, 99]), 0.99) == 1.0


@given(gaps=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=300), share=st.floats(0.0, 1.0))
def test_a_percentile_of_a_histogram_is_that_of_its_tokens_to_a_bin(gaps, share):
    edges = np.geomspace(1e-3, 10.0 * (1 + 1e-9), 120)
    counts, _ = np.histogram(gaps, edges)
    exact = np.sort(gaps)[max(math.ceil(share * len(gaps)) - 1, 0)]  # nearest rank
    found = histogram_percentile(edges, counts, share)
    width = edges[1] / edges[0]
    assert exact / width * (1 - 1e-9) <= found <= exact * width * (1 + 1e-9)


def test_late_gaps_of_a_request_by_hand():
    """A step takes 11 ms; the prompt that comes at 0.03 s makes one of 111 ms, which the first request alone decodes
    through; the second one is alone from its fifth token on.
    """
    options = RunOptions(gap_limit_s=0.05)
    result = served_at(
        [(0.0, 100, 8), (0.03, 1000, 12)], "vllm", deployment(colocated=1), table=SIMPLE, options=options
    )
    assert result.requests.late_gaps.tolist() == result.frame()["late_gaps"].tolist() == [1, 0]
    # steps of 10 ms and 1 ms a cached token: behind a prompt of ten, gaps of 21 to 27 ms
    longer, options = StepTable.affine(step=0.010, per_context=0.001), RunOptions(gap_limit_s=0.0245)
    alone = served_at([(0.0, 10, 8)], "vllm", deployment(colocated=1), table=longer, options=options)
    assert alone.requests.late_gaps.tolist() == [3]
    assert served_at([(0.0, 100, 8)], "vllm", deployment(colocated=1), table=SIMPLE).requests.late_gaps is None
