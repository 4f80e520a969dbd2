"""Steady state of an engine: limits that follow by hand, conservation, monotony."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from lab.calibration.served.steady_state import (
    ClosedLoopRun,
    RowLengths,
    ServedModel,
    WorkerPool,
    at_rate,
    capacity,
    colocated,
    decode_time,
    disaggregated,
    pieces_of,
    prefill_time,
    served,
    static_batch,
)

ENGINE = replace(
    load_engine("vllm"),
    step_host=0.0,
    sequence_host=0.0,
    rank_host=0.0,
    prefill_stretch=1.0,
    kernel_launch=0.0,
    request_host=0.0,
)


def tensor_parallel(gpus) -> Sharding:
    """Degrees of an instance that shards attention and feed-forward part over its GPUs alike."""
    one = np.ones(np.shape(gpus))
    return Sharding(tp_attn=gpus * one, dp_attn=one, tp_ffn=gpus * one, ep=one, pp=one)


ONE = np.ones(1)


def run_of(**changes: object):
    return served("llama_3_1_8b", "h100_sxm", "bf16", replace(ENGINE, **changes))


RUN = run_of()
DRAINS = run_of(mixed_steps=False)


def lengths(isl: float, osl: float) -> RowLengths:
    return RowLengths(isl * ONE, osl * ONE)


def test_a_single_request_sees_an_empty_engine():
    """With one in flight TPOT is a decode step of one sequence, TTFT its own prefill."""
    shape, one = lengths(1000, 500), tensor_parallel(ONE)
    state = colocated(RUN, one, shape, ONE)
    assert state.tpot == pytest.approx(decode_time(RUN, one, ONE, shape), rel=1e-9)
    assert state.ttft == pytest.approx(prefill_time(RUN, one, 1000 * ONE, ONE, shape, decodes=ONE), rel=1e-9)


def test_an_engine_that_drains_prompts_does_all_prefill_between_decode_steps():
    """In a cycle everybody decodes OSL-1 steps and every prompt is prefilled once: E2E = (OSL-1)*T_d(N) + N*t_p."""
    shape, one, n = lengths(2000, 400), tensor_parallel(ONE), 16.0
    chunk = ServedModel(replace(DRAINS.at, overheads=replace(DRAINS.engine, chunk_tokens=2000)))  # one prompt a pass
    state = colocated(chunk, one, shape, n * ONE, ClosedLoopRun(waves=10, spread=0.0))
    prompt = prefill_time(chunk, one, 2000 * ONE, ONE, shape)
    residual = decode_time(chunk, one, n * ONE, shape) / 2  # of the step that an arrival interrupts
    expected = 399 * decode_time(chunk, one, n * ONE, shape) + n * prompt + residual
    assert state.latency(shape) == pytest.approx(expected, rel=0.02)


def test_requests_that_start_together_wait_for_half_of_all_prompts():
    shape, one, n = lengths(2000, 2000), tensor_parallel(ONE), 32.0
    chunk = ServedModel(replace(DRAINS.at, overheads=replace(DRAINS.engine, chunk_tokens=2000)))
    together = colocated(chunk, one, shape, n * ONE, ClosedLoopRun(waves=10, spread=0.0))
    prompt = prefill_time(chunk, one, 2000 * ONE, ONE, shape)
    assert together.ttft == pytest.approx((n + 1) / 2 * prompt, rel=0.05)
    mixed = colocated(chunk, one, shape, n * ONE)
    assert together.tpot < mixed.tpot


@given(first=st.integers(1, 200), more=st.integers(1, 200))
@example(first=138, more=3)
@settings(max_examples=12)
def test_more_in_flight_is_never_faster_for_a_request_nor_slower_in_total(first, more):
    shape = RowLengths(500 * np.ones(2), 300 * np.ones(2))
    state = colocated(RUN, tensor_parallel(np.ones(2)), shape, np.array([first, first + more], float))
    latency = state.latency(shape)
    stairs = 0.03  # tiles and waves of matrix multiplies: 138 to 141 sequences begin a new tile, 2.2 %
    assert latency[1] >= latency[0] * (1 - stairs)
    assert state.request_rate[1] >= state.request_rate[0] * (1 - stairs)


def test_capacity_is_the_memory_that_weights_leave():
    """H100: 0.9 * 79.65 GiB less weights, runtime and activations, over 131,072 B a token at ISL + OSL/2 (by hand)."""
    held = capacity(RUN, tensor_parallel(ONE), lengths(2000, 1000))
    room = 0.9 * 79.65 * 2**30 - 2 * 8_030_261_248 - 3.9e9
    assert held[0] == pytest.approx(room / (131_072 * 2500), rel=0.02)  # activations of a pass take the rest
    whole = capacity(run_of(reserves_output=True), tensor_parallel(ONE), lengths(2000, 1000))
    assert whole[0] == pytest.approx(held[0] * 2500 / 3000, rel=0.01)


def test_what_does_not_fit_waits():
    shape, one = lengths(2000, 1000), tensor_parallel(ONE)
    room = capacity(RUN, one, shape)
    full, over = colocated(RUN, one, shape, room), colocated(RUN, one, shape, 3 * room)
    assert over.tpot == pytest.approx(full.tpot, rel=1e-9)
    assert over.request_rate == pytest.approx(full.request_rate, rel=1e-9)
    assert over.ttft == pytest.approx(full.ttft + 2 * room / full.request_rate, rel=1e-9)


def test_a_stream_and_a_closed_loop_agree_at_the_same_rate():
    shape, one = lengths(300, 3000), tensor_parallel(ONE)
    loop = colocated(RUN, one, shape, 40 * ONE)
    stream = at_rate(RUN, one, shape, loop.request_rate)
    assert stream.tpot == pytest.approx(loop.tpot, rel=0.05)


def test_a_static_batch_is_its_prefill_and_its_steps():
    shape, one = lengths(128, 100), tensor_parallel(ONE)
    state = static_batch(RUN, one, shape, 16 * ONE)
    total = prefill_time(RUN, one, 16 * 128 * ONE, ONE, shape) + 99 * decode_time(RUN, one, 16 * ONE, shape)
    assert state.request_rate == pytest.approx(16 / total, rel=1e-9)


def test_pieces_fill_the_token_budget():
    pieces, size, room = pieces_of(replace(ENGINE, chunk_tokens=2048), np.array([100.0, 2048.0, 2049.0, 10_000.0]))
    assert pieces.tolist() == [1, 1, 2, 5]
    assert size.tolist() == [100, 2048, 1024.5, 2000]
    assert room.tolist() == [20, 1, 1, 1]


AHEAD, POLL, GATHER = {"steps_ahead": 1}, {"poll_steps": 31}, {"gather_steps": 20}


@pytest.mark.parametrize(
    ("engine", "run", "isl", "count", "waits", "ttft_within", "tpot_within"),
    [
        (AHEAD, {}, 64, 16, 1, 0.05, 1e-3),
        (AHEAD | {"mixed_steps": False}, {}, 64, 16, 1, 0.05, 1e-3),
        (AHEAD, {}, 64, 1, 0, 0.05, 1e-3),
        ({"mixed_steps": False}, POLL, 512, 16, 15, 0.05, 0.02),  # half of the steps between two looks
        ({"mixed_steps": False}, POLL, 512, 1, 0, 0.05, 0.02),
        ({}, GATHER, 16, 1, 0, 0.1, 0.02),
        ({}, GATHER, 16, 2, 20, 0.1, 0.02),
        ({}, GATHER, 16, 200, 20 * (1 + 1) / (1 + 2), 0.1, 0.02),
    ],
)
def test_a_scheduler_that_looks_late_makes_prompts_wait_for_so_many_steps(
    engine, run, isl, count, waits, ttft_within, tpot_within
):
    """Nobody waits where nobody else is served. The first prompt that gathers others waits for all steps: one of 200
    requests ends every tenth step, so two come while it waits, for half of its steps on average.
    """
    at_once, late = run_of(**engine | {"steps_ahead": 0}), replace(run_of(**{"steps_ahead": 0} | engine), **run)
    now, then = (colocated(each, tensor_parallel(ONE), lengths(isl, 2000), count * ONE) for each in (at_once, late))
    assert then.ttft - now.ttft == pytest.approx(waits * then.tpot, rel=ttft_within)
    assert then.tpot == pytest.approx(now.tpot, rel=tpot_within)


@pytest.mark.parametrize(("steps_ahead", "poll_steps", "waits"), [(1, 1, 1), (0, 31, 15)])
def test_decode_workers_that_send_or_begin_late_give_the_first_token_late(steps_ahead, poll_steps, waits):
    shape, one = lengths(2000, 500), tensor_parallel(ONE)
    pools = WorkerPool(one, 4 * ONE), WorkerPool(one, ONE)
    runs = run_of(steps_ahead=0), replace(run_of(steps_ahead=steps_ahead), poll_steps=poll_steps)
    now, late = (disaggregated(run, *pools, shape, 8 * ONE) for run in runs)
    assert late.ttft - now.ttft == pytest.approx(waits * late.tpot, rel=0.02)
    assert late.request_rate * late.latency(shape) == pytest.approx(8, rel=1e-3)
