"""DOPD Table I and its ratios (claims D1-D3), DynaServe Table 1: what a calibrated simulator must land near.

Profiles go by the date of the software alone: DOPD is built on NVIDIA Dynamo (2025), whose vLLM is the V1 engine;
DynaServe states vLLM 0.7.2, the V0 engine. The decode columns of Table I are not judged:
read as one GPU they beat its memory bandwidth (the KV slope of 31.7 ns a token would need three times the peak).
"""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from lab.calibration.served.steady_state import (
    RowLengths,
    WorkerPool,
    at_rate,
    capacity,
    colocated,
    decode_time,
    disaggregated,
    prefill_time,
    served,
)
from lab.studies.dopd.claims import decode_concurrency, prefill_decode_ratio


def tensor_parallel(gpus) -> Sharding:
    """Degrees of an instance that shards attention and feed-forward part over its GPUs alike."""
    one = np.ones(np.shape(gpus))
    return Sharding(tp_attn=gpus * one, dp_attn=one, tp_ffn=gpus * one, ep=one, pp=one)


ONE = np.ones(1)
SINGLE = tensor_parallel(ONE)
V0 = load_engine("vllm_v0")
DOPD = served("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", load_engine("vllm"))
#: Table I, "a single H100": prompt length [token] -> prefill [s].
PREFILL = {100: 0.036, 200: 0.046, 700: 0.125, 1200: 0.193, 1700: 0.269}
#: Its decode columns: length [token] -> step [s] at 104, 200 and 248 requests in flight.
STEPS = {100: (28, 45, 47), 200: (31, 46, 49), 700: (33, 47, 53), 1200: (35, 50, 57), 1700: (37, 53, 61)}
#: ISL, OSL -> printed concurrency of a TP2 decode instance, printed ratio of prefill to decode instances.
RATIOS = {(1000, 150): (235, 4.58), (3000, 300): (78, 3.18)}


def test_dopd_prefill_column():
    """Each line within 15 %, but that of 100 tokens, 15 % slow: the stretch of prefill acts on reading weights, too."""
    errors = []
    for tokens, measured in PREFILL.items():
        ours = prefill_time(DOPD, SINGLE, tokens * ONE, ONE, RowLengths(tokens * ONE, ONE))[0]
        errors.append(ours / measured - 1)
    assert max(np.abs(errors[1:])) <= 0.15
    assert errors[0] == pytest.approx(0.148, abs=0.01)


@pytest.mark.parametrize("shape", RATIOS)
def test_d1_d2_concurrency_is_bound_by_memory(shape):
    found = decode_concurrency(DOPD.at, *shape)
    assert found.requests == pytest.approx(RATIOS[shape][0], rel=0.03)
    assert found.memory_bound


@pytest.mark.parametrize("shape", RATIOS)
def test_d3_ratio_with_the_times_of_the_table(shape):
    """Straight lines through Table I give t_p and t_d; the printed ratio is met within 8 %."""
    tokens = np.array(list(PREFILL))
    slope, start = np.polyfit(tokens, list(PREFILL.values()), 1)
    load = np.array([(1.0, cc, cc * s) for s in STEPS for cc in (104.0, 200.0, 248.0)])
    step, *_ = np.linalg.lstsq(load, np.array([t / 1000 for row in STEPS.values() for t in row]), rcond=None)
    (isl, osl), (concurrency, printed) = shape, RATIOS[shape]
    t_d = step @ np.array([1.0, concurrency, concurrency * (isl + osl / 2)])
    ratio = prefill_decode_ratio(concurrency, prefill_time=start + slope * isl, step_time=t_d, osl=osl)
    assert ratio == pytest.approx(printed, rel=0.08)


def own_ratio(shape: tuple[int, int]) -> float:
    """The ratio with our own t_p of one GPU and t_d of two at the printed concurrency. [1]"""
    (isl, osl), (concurrency, _) = shape, RATIOS[shape]
    lengths = RowLengths(np.array([float(isl)]), np.array([float(osl)]))
    t_p = prefill_time(DOPD, tensor_parallel(1), lengths.isl, np.ones(1), lengths)
    t_d = decode_time(DOPD, tensor_parallel(2), np.array([float(concurrency)]), lengths)
    return prefill_decode_ratio(concurrency, prefill_time=float(t_p[0]), step_time=float(t_d[0]), osl=osl)


def test_d3_ratio_with_our_own_times_at_3000_tokens():
    """Accepted: within 20 %."""
    assert own_ratio((3000, 300)) == pytest.approx(3.18, rel=0.2)


def test_d3_ratio_with_our_own_times_misses_at_1000_tokens():
    """Accepted: within 20 %; ours is 28 % high: 5.85 against 4.58.

    Our prefill of 158 ms is 5 % below the line through the table, our step of 42 ms for 235 sequences 22 % below its
    54 ms. By ``vllm_v0``, whose host works between steps, the ratios would be 23 and 22 % low.
    """
    assert own_ratio((1000, 150)) / 4.58 - 1 == pytest.approx(0.28, abs=0.02)


#: DynaServe Table 1, Qwen2.5-14B on two A100, chunks of 2048: P, D -> (requests/s, p50 TBT) apart and together.
DYNASERVE = {
    (8192, 32): ((0.83, 0.02270), (1.49, 0.30968)),
    (2048, 512): ((2.56, 0.04700), (2.83, 0.04686)),
    (219, 1467): ((1.68, 0.05063), (2.86, 0.04799)),
}
QWEN = served("qwen2_5_14b", "a100_sxm_80gb", "bf16", replace(V0, chunk_tokens=2048))


def request_rates(shape: tuple[int, int]) -> tuple[float, float]:
    """Of one GPU for prefill and one for decode, and of two co-located ones, with more in flight than fits. [1/s]"""
    lengths = RowLengths(shape[0] * ONE, shape[1] * ONE)
    many = 4 * capacity(QWEN, SINGLE, lengths)
    apart = disaggregated(QWEN, WorkerPool(SINGLE, ONE), WorkerPool(SINGLE, ONE), lengths, many).request_rate[0]
    return float(apart), float(2 * colocated(QWEN, SINGLE, lengths, many).request_rate[0])


@pytest.mark.parametrize("shape", DYNASERVE)
def test_dynaserve_request_rates_apart(shape):
    """What the memory of the decoding GPU, or prefill, allows; accepted: within 20 %."""
    assert request_rates(shape)[0] == pytest.approx(DYNASERVE[shape][0][0], rel=0.2)


def test_dynaserve_request_rates_together_where_prefill_leads():
    """Accepted: within 20 %."""
    shape = (8192, 32)
    assert request_rates(shape)[1] == pytest.approx(DYNASERVE[shape][1][0], rel=0.2)


@pytest.mark.parametrize(("shape", "error"), [((2048, 512), 0.208), ((219, 1467), 0.227)])
def test_dynaserve_request_rates_together_miss_twenty_percent_by_one_and_three_points(shape, error):
    """Accepted: within 20 %; ours are 21 and 23 % high.

    The steady state admits what the memory holds at all times; the printed rates are what a stream of requests was
    served at, whose arrivals leave part of that memory empty.
    """
    assert request_rates(shape)[1] / DYNASERVE[shape][1][0] - 1 == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize("shape", DYNASERVE)
def test_dynaserve_token_times_apart(shape):
    """p50 TBT is a decode step at the batch of Little's law, rate*(D-1)*TBT."""
    lengths = RowLengths(shape[0] * ONE, shape[1] * ONE)
    (rate, tbt), _ = DYNASERVE[shape]
    batch = max(rate * (shape[1] - 1) * tbt, 1.0)
    assert decode_time(QWEN, SINGLE, batch * ONE, lengths)[0] == pytest.approx(tbt, rel=0.2)


@pytest.mark.parametrize("shape", DYNASERVE)
def test_dynaserve_token_times_together(shape):
    """p50 TBT is a plain step at the batch of half the rate, or a mixed one where prefill takes most of the time."""
    prompt, out = shape
    lengths = RowLengths(prompt * ONE, out * ONE)
    _, (rate, tbt) = DYNASERVE[shape]
    batch = rate / 2 * (out - 1) * at_rate(QWEN, SINGLE, lengths, rate / 2 * ONE).tpot
    chunk = min(prompt, 2048)
    mixed = prefill_time(QWEN, SINGLE, chunk * ONE, ONE, lengths, decodes=batch)[0]
    prefill_share = rate / 2 * prompt / chunk * mixed
    median = mixed if prefill_share > 0.5 else decode_time(QWEN, SINGLE, batch, lengths)[0]
    assert median == pytest.approx(tbt, rel=0.2)
