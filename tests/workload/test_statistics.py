"""Statistics of traces: by hand on small ones, and what is published on the real ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared_file

from disagg_sim import load_trace
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.statistics import prefix_hit_rate, trace_statistics
from disagg_sim.workload.trace import Trace


def test_statistics_by_hand():
    """Minutes 0, 1, 2 have 2, 0, 1 requests, 40, 0, 20 input and 4, 0, 8 output tokens."""
    found = trace_statistics(Trace(arrival=[30, 50, 150], input_tokens=[10, 30, 20], output_tokens=[2, 2, 8]))
    assert (found.requests, found.duration_s, found.peak_minute, found.prefix_hit_rate) == (3, 120, 2, None)
    assert found.rate_per_s == pytest.approx(3 / 180)  # 120 s and one mean gap of 60 s
    assert found.gap_cv == pytest.approx(40 / 60)  # gaps 20 and 100
    every, busy = found.every_minute, found.busy_minutes
    assert (every.minutes, busy.minutes) == (3, 2)
    assert every.requests_cv == every.input_cv == pytest.approx(math.sqrt(2 / 3))
    assert every.output_cv == pytest.approx(math.sqrt(2 / 3))
    assert every.correlation == pytest.approx(0.5)
    assert busy.input_cv == busy.output_cv == busy.requests_cv == pytest.approx(1 / 3)
    assert busy.correlation == pytest.approx(-1)
    assert (found.input_tokens.mean, found.input_tokens.p50, found.input_tokens.maximum) == (20, 20, 30)
    assert found.length_correlation == pytest.approx(0.0)


def test_a_single_request_has_no_variation():
    found = trace_statistics(Trace(arrival=[0.0], input_tokens=[5], output_tokens=[2]))
    assert (found.requests, found.duration_s) == (1, 0)
    assert all(map(math.isnan, (found.rate_per_s, found.gap_cv, found.length_correlation)))
    assert math.isnan(found.every_minute.correlation)


def hit_rate(blocks: list[list[int]]) -> float:
    offsets = np.cumsum([0] + [len(each) for each in blocks])
    return prefix_hit_rate(PrefixBlocks(offsets=offsets, ids=[i for each in blocks for i in each], block_tokens=16))


def test_only_a_leading_run_of_known_blocks_hits():
    assert hit_rate([[1, 2], [1, 2, 3], [4, 2], [5, 5]]) == pytest.approx(2 / 9)
    assert math.isnan(hit_rate([[], []]))


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=12).filter(any))
def test_hit_rate_equals_counting_one_by_one(blocks):
    seen: set[int] = set()
    hits = 0
    for each in blocks:
        for block in each:
            if block not in seen:
                break
            hits += 1
        seen |= set(each)
    assert hit_rate(blocks) == pytest.approx(hits / sum(map(len, blocks)))


def test_azure_code_is_what_is_published():
    """Wu et al., Arrow: c_v 0.80, correlation 0.95, 25.7K-1327.9K input and 0.25K-16.6K output a minute."""
    trace = load_trace(shared_file("traces/azure2023/AzureLLMInferenceTrace_code.csv"))
    found = trace_statistics(trace)
    note = "arrivals count from the first request, which is at TIMESTAMP 2023-11-16 18:17:03.9799600 in the file"
    assert (found.requests, found.notes) == (8819, (note,))
    assert found.busy_minutes.input_cv == pytest.approx(0.80, abs=0.03)
    assert found.busy_minutes.correlation == pytest.approx(0.95, abs=0.005)
    assert (found.every_minute.minutes, found.busy_minutes.minutes, found.peak_minute) == (58, 46, 632)
    minute = (trace.arrival // 60).astype(int)
    inputs, outputs = (np.bincount(minute, each) for each in (trace.input_tokens, trace.output_tokens))
    assert (inputs[inputs > 0].min(), inputs.max()) == (25_760, 1_327_909)
    assert (outputs[outputs > 0].min(), outputs.max()) == (257, 16_642)


@pytest.mark.parametrize(("name", "requests", "hits"), [("conversation", 12_031, 0.366), ("synthetic", 3_993, 0.640)])
def test_mooncake_prefixes_are_reused_as_published(name, requests, hits):
    trace = load_trace(shared_file(f"traces/mooncake/{name}_trace.jsonl.gz"))
    assert len(trace) == requests
    assert trace_statistics(trace).prefix_hit_rate == pytest.approx(hits, abs=5e-4)
    assert np.all(np.diff(trace.prefix.offsets) == np.ceil(trace.input_tokens / 512))


def test_spreading_moves_no_request_past_the_next_batch():
    path = shared_file("traces/mooncake/conversation_trace.jsonl.gz")
    spread, as_is = load_trace(path), load_trace(path, spread=False)
    assert spread.input_tokens.tolist() == as_is.input_tokens.tolist()
    moved = spread.arrival - as_is.arrival
    assert moved.min() == 0
    assert moved.max() < 3.0
    assert np.diff(spread.arrival).max() < 3.01
    assert trace_statistics(spread).gap_cv < 0.4
    assert trace_statistics(as_is).gap_cv > 2
