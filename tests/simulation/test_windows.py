"""Requests that come in windows: a run does not depend on them, and holds no more than it needs."""

import mmap
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pieces import AT, SLO, parts, requests

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_traffic
from disagg_sim.simulation import pieces
from disagg_sim.simulation.admission import PredictedTtft
from disagg_sim.simulation.clients import WIDTH, RequestWindow, SparseColumn
from disagg_sim.simulation.policies.arrow.policy import GlobalScheduler
from disagg_sim.simulation.records import Requests, RunResult
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
