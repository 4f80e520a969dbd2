"""The trace type: its invariants and cuts; traces joined and brought to another rate."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.workload.request_columns import Labels, PrefixBlocks
from disagg_sim.workload.scaling import at_rate, units
from disagg_sim.workload.trace import Trace, concatenate

MICROSECONDS = st.integers(0, 10**8).map(lambda count: count * 1e-6)
GAPS = st.lists(MICROSECONDS, min_size=1, max_size=30)


def trace_of(gaps: list[float], name: str = "t") -> Trace:
    """Arrivals at the running sum of gaps; request i has i + 1 input tokens."""
    n = len(gaps)
    return Trace(arrival=np.cumsum(gaps), input_tokens=np.arange(1, n + 1), output_tokens=np.full(n, 3), name=name)


def with_blocks(arrival: list[float], blocks: list[list[int]], name: str = "t") -> Trace:
    offsets = np.cumsum([0] + [len(each) for each in blocks])
    prefix = PrefixBlocks(offsets=offsets, ids=np.array([i for each in blocks for i in each]), block_tokens=512)
    ones = [1] * len(blocks)
    return Trace(arrival=arrival, input_tokens=ones, output_tokens=ones, prefix=prefix, name=name)


def blocks_of(trace: Trace) -> list[list[int]]:
    assert trace.prefix is not None
    return [each.tolist() for each in np.split(trace.prefix.ids, trace.prefix.offsets[1:-1])]


def test_arrays_refuse_writing():
    trace = trace_of([0.0, 1.0])
    for array in (trace.arrival, trace.input_tokens, trace.output_tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("arrival", "inputs", "outputs", "said"),
    [([], [], [], "has no request"), ([1.0, 0.5], [1, 1], [1, 1], "ascend"), ([0.0], [0], [1], "below 1 token")],
)
def test_what_is_no_trace_is_refused(arrival, inputs, outputs, said):
    with pytest.raises(InputError, match=said):
        Trace(arrival=arrival, input_tokens=inputs, output_tokens=outputs)


@pytest.mark.parametrize(
    ("names", "number", "said"),
    [(("a", "a"), [0], "a name is given twice"), (("a", "b"), [0, 2], "numbers from 0 to 1, one a request")],
)
def test_labels_are_places_among_names_that_differ(names, number, said):
    with pytest.raises(InputError, match=said):
        Labels(names=names, number=number)


@given(GAPS, st.floats(0.01, 100))
def test_scaling_divides_times_and_leaves_lengths(gaps, factor):
    trace = trace_of(gaps)
    scaled = trace.scaled(factor)
    np.testing.assert_allclose(scaled.arrival * factor, trace.arrival, rtol=1e-12)
    assert scaled.input_tokens.tolist() == trace.input_tokens.tolist()
    if 0 < trace.duration < np.inf:
        assert scaled.rate == pytest.approx(trace.rate * factor)


@given(GAPS, st.floats(0, 1500), st.floats(0, 1500))
def test_cutting_at_a_time_loses_no_request(gaps, cut, end):
    trace = trace_of(gaps)
    parts = []
    for t0, t1 in ((0.0, cut), (cut, cut + end), (cut + end, np.inf)):
        inside = [t for t in trace.arrival.tolist() if t0 <= t < t1]
        if inside:
            part = trace.between(t0, t1)
            assert part.arrival.tolist() == pytest.approx([t - t0 for t in inside])
            parts += part.input_tokens.tolist()
        else:
            with pytest.raises(InputError, match="no request from"):
                trace.between(t0, t1)
    assert parts == trace.input_tokens.tolist()


def test_head_takes_what_there_is():
    trace = trace_of([0.0, 1.0, 1.0])
    assert [len(trace.head(n)) for n in (1, 3, 10)] == [1, 3, 3]
    with pytest.raises(InputError):
        trace.head(0)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=2, max_size=8), st.data())
def test_blocks_follow_their_requests(blocks, data):
    trace = with_blocks(list(range(len(blocks))), blocks)
    rows = sorted(data.draw(st.sets(st.integers(0, len(blocks) - 1), min_size=1)))
    assert blocks_of(trace.take(np.array(rows))) == [blocks[row] for row in rows]


@given(st.lists(MICROSECONDS.map(lambda gap: gap + 0.01), min_size=2, max_size=20), st.integers(1, 5))
def test_repeating_keeps_the_rate_and_every_gap(gaps, n):
    trace = trace_of(gaps)
    repeated = concatenate([trace] * n)
    assert len(repeated) == n * len(trace)
    assert repeated.rate == pytest.approx(trace.rate)
    for copy in range(n):
        part = repeated.arrival[copy * len(trace) : (copy + 1) * len(trace)]
        np.testing.assert_allclose(np.diff(part), np.diff(trace.arrival), atol=1e-9)


def test_copies_of_a_trace_share_no_block():
    trace = with_blocks([0.0, 2.0], [[7, 8], [7, 9]])
    assert blocks_of(concatenate([trace] * 2)) == [[0, 1], [0, 2], [3, 4], [3, 5]]


def test_nothing_follows_a_single_request():
    single = trace_of([1.0])
    assert single.rate == 0
    assert trace_of([1.0, 0.0]).rate == math.inf
    with pytest.raises(InputError, match="single request"):
        concatenate([single] * 2)
    assert concatenate([trace_of([0.0, 1.0]), single]).arrival.tolist() == [0.0, 1.0, 2.0]


def test_other_lengths_leave_arrivals_and_drop_blocks():
    changed = with_blocks([0.0, 2.0], [[7, 8], [7, 9]]).with_lengths(100, [5, 6])
    assert (changed.arrival.tolist(), changed.input_tokens.tolist()) == ([0.0, 2.0], [100, 100])
    assert changed.output_tokens.tolist() == [5, 6]
    assert changed.prefix is None


RATES = st.floats(0.05, 6.0)

SEEDS = st.integers(0, 10)


@st.composite
def traces(draw) -> Trace:
    """At least 20 requests, input i + 1 tokens of the i-th, so that each can be told apart."""
    gaps = draw(st.lists(st.floats(0.0, 30.0), min_size=20, max_size=60))
    n = len(gaps)
    return Trace(arrival=np.cumsum(gaps), input_tokens=np.arange(1, n + 1), output_tokens=np.full(n, 3))


@given(trace=traces(), rate=RATES, seed=SEEDS)
def test_the_number_of_requests_is_scaled_and_the_time_is_not(trace, rate, seed):
    found = at_rate(trace, rate, "requests", seed=seed)
    assert abs(len(found) - rate * len(trace)) <= 0.5  # every request is a unit: a random choice, no random number
    assert trace.arrival[0] <= found.arrival[0]
    assert found.arrival[-1] <= trace.arrival[0] + trace.period + 1e-9
    assert found.name == trace.name


@given(trace=traces(), low=RATES, high=RATES, seed=SEEDS)
def test_a_lower_rate_is_part_of_every_higher_one(trace, low, high, seed):
    """So a search over rates adds requests and never swaps them."""
    few, many = (at_rate(trace, rate, "requests", seed=seed) for rate in sorted((low, high)))
    told = [Counter(zip(each.arrival.tolist(), each.input_tokens.tolist(), strict=True)) for each in (few, many)]
    assert not told[0] - told[1]


@given(trace=traces(), rate=st.floats(0.05, 0.999), seed=SEEDS)
def test_thinning_keeps_times_and_order(trace, rate, seed):
    found = at_rate(trace, rate, "requests", seed=seed)
    assert np.all(np.diff(found.input_tokens) > 0)
    assert np.array_equal(found.arrival, trace.arrival[found.input_tokens - 1])


def test_copies_are_rotated_by_less_than_the_shift_and_stay_apart():
    trace = Trace(arrival=np.arange(0.0, 3600.0, 10.0), input_tokens=np.arange(1, 361), output_tokens=np.ones(360))
    found = at_rate(trace, 3.0, "requests", seed=4)
    assert set(np.bincount(found.input_tokens)[1:]) == {3}  # every request three times
    late = (found.arrival - trace.arrival[found.input_tokens - 1]) % trace.period
    shifts = np.unique(np.round(late, 6))
    assert shifts.size == 3
    assert shifts[0] == 0
    assert shifts[-1] < 60
    together = at_rate(trace, 3.0, "requests", seed=4, shift_s=0.0)
    assert np.array_equal(together.arrival, np.repeat(trace.arrival, 3))


def conversations(count: int, turns: int) -> Trace:
    """Turn t of conversation c has the system prompt 0, then t + 1 blocks of its own; one turn a minute."""
    rows = sorted((c * 7.0 + 60.0 * t, c, t) for c in range(count) for t in range(turns))
    blocks = [[0, *(1 + 100 * c + k for k in range(t + 1))] for _, c, t in rows]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in blocks])])
    prefix = PrefixBlocks(offsets=offsets, ids=np.concatenate(blocks), block_tokens=16)
    inputs = 16 * np.diff(offsets)
    return Trace(
        arrival=[at for at, *_ in rows], input_tokens=inputs, output_tokens=[c + 1 for _, c, _ in rows], prefix=prefix
    )


@given(rate=RATES, seed=SEEDS)
def test_conversations_stay_whole_and_in_order_and_copies_share_no_block(rate, seed):
    trace = conversations(count=30, turns=4)
    assert np.array_equal(np.unique(units(trace), return_counts=True)[1], np.full(30, 4))
    found = at_rate(trace, rate, "requests", seed=seed)
    offsets = found.prefix.offsets
    told: dict[int, list[int]] = {}  # first own block of a conversation -> lengths of its prompts in order
    for row in range(len(found)):
        first = int(found.prefix.ids[offsets[row] + 1])
        told.setdefault(first, []).append(int(found.input_tokens[row]))
    assert all(lengths == [32, 48, 64, 80] for lengths in told.values())
    assert abs(len(told) - rate * 30) <= 0.5 + 1e-9
    heads = {int(found.prefix.ids[offset]) for offset in offsets[:-1]}
    assert len(heads) == int(np.ceil(round(len(told) / 30, 9)))  # each copy has a system prompt of its own


def test_a_system_prompt_does_not_make_one_conversation():
    """Prompts that end where all others go on are units of their own, too."""
    offsets = np.arange(0, 101)
    same = PrefixBlocks(offsets=offsets, ids=np.zeros(100), block_tokens=16)
    trace = Trace(arrival=np.arange(100.0), input_tokens=np.full(100, 9), output_tokens=np.ones(100), prefix=same)
    assert len(set(units(trace).tolist())) == 100
    assert len(at_rate(trace, 0.31, "requests")) == 31


@pytest.mark.parametrize(
    ("rate", "how", "said"),
    [
        (0.0, {}, "rate must be above 0"),
        (2.0, {"by": "requests", "shift_s": -1.0}, "shift_s -1.0 is out of range"),
        (1e6, {"by": "requests"}, "too many"),
    ],
)
def test_impossible_rates_are_refused_in_one_line(rate, how, said):
    trace = Trace(arrival=np.arange(20.0), input_tokens=np.ones(20), output_tokens=np.ones(20))
    with pytest.raises(InputError, match=said):
        at_rate(trace, rate, **how)
