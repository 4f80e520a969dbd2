"""An encode pool before prefill: its queue against one event after the other, and its rate in a full run."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.encoders import Encoders
from disagg_sim.simulation.run import RunOptions

AT = ds.setup("qwen3_5_35b_a3b", "h200_sxm", "fp8", profile="ideal")
STEP = ds.encode_step(AT, images=2, height=1120, width=1120)
SLO = Slo(ttft=10.0, tpot=0.1)


def one_by_one(arrival, count, each):
    """Requests take the GPU that is free first."""
    free = [0.0] * count
    sent = []
    for come in arrival:
        begun = max(come, heapq.heappop(free))
        heapq.heappush(free, begun + each)
        sent.append(begun + each)
    return np.array(sent)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.integers(1, 7), st.sampled_from([0.0, 0.5]))
def test_the_queue_is_that_of_gpus_that_take_the_next_request_when_free(drawn, count, cached):
    arrival = np.sort(np.array(drawn))
    step = replace(STEP, cached=cached)
    sent = Encoders(step=step, instances=count).sent(arrival)
    assert sent == pytest.approx(one_by_one(arrival, count, step.time * (1 - cached)) + step.transfer)
    assert (np.diff(sent) >= -1e-12).all()


def parts(prefill=8, decode=4):
    pools = {
        "prefill": (Replicas(mapping=ds.Mapping(), instances=prefill, batch=4, token_budget=32768),),
        "decode": (Replicas(mapping=ds.Mapping(), instances=decode, batch=64),),
    }
    return ServedDeployment(name="images", gpus=prefill + decode, setup=AT, **pools)


def ran(trace, encoders, **more):
    pytest.importorskip("numba")
    return ds.simulate(parts(), trace, slo=SLO, options=RunOptions(encoders=encoders, **more))


def test_a_request_alone_waits_for_its_images():
    trace = ds.Trace(arrival=[0.0], input_tokens=[4096], output_tokens=[8])
    plain, with_images = (ran(trace, each).records.requests for each in (None, Encoders(step=STEP, instances=1)))
    added = with_images.first_token_s - with_images.arrival_s - (plain.first_token_s - plain.arrival_s)
    assert added == pytest.approx(STEP.latency)
    assert with_images.arrival_s == pytest.approx([0.0])


def test_a_full_queue_is_encoded_at_the_rate_of_the_plan():
    """Three GPUs encode what comes at once; prefill and decode could do more. Within 2 %."""
    requests, pool = 400, Encoders(step=STEP, instances=3)
    trace = ds.Trace(arrival=np.zeros(requests), input_tokens=[4096] * requests, output_tokens=[4] * requests)
    found = ran(trace, pool).records.requests
    first = np.sort(found.first_token_s)
    rate = (requests - 100) / (first[-1] - first[99])
    assert rate == pytest.approx(3 * STEP.request_rate, rel=0.02)
    free = np.sort(ran(trace, None).records.requests.first_token_s)
    assert free[-1] < 0.5 * first[-1]
    assert (found.arrival_s == 0.0).all()


def test_enough_encoders_add_the_latency_alone():
    trace = ds.synthetic_trace(rate=20.0, requests=200, lengths=(4096, 16), seed=1)
    pool = Encoders(step=STEP, instances=200)
    found, plain = (ran(trace, each).records.requests for each in (pool, None))
    added = (found.first_token_s - found.arrival_s) - (plain.first_token_s - plain.arrival_s)
    assert np.median(added) == pytest.approx(STEP.latency, rel=0.02)


def test_what_an_encode_pool_cannot_stand_before_is_one_line():
    pool, trace = Encoders(step=STEP, instances=1), ds.synthetic_trace(rate=1.0, requests=10, lengths=(4096, 8))
    with pytest.raises(InputError, match="no concurrency"):
        ran(trace, pool, concurrency=4)
    with pytest.raises(InputError, match="records 'stream' with encoders"):
        RunOptions(encoders=pool, records="stream")
    with pytest.raises(InputError, match="more than a prompt of 1000"):
        ran(ds.synthetic_trace(rate=1.0, requests=10, lengths=(1000, 8)), pool)
    with pytest.raises(InputError, match="encoders"):
        Encoders(step=STEP, instances=0)
    other = ds.encode_step(ds.setup("kimi_k2_5", "h200_sxm", "fp8"), images=1, height=560, width=560)
    with pytest.raises(InputError, match="encoders are of kimi_k2_5"):
        ran(trace, Encoders(step=other, instances=1))
