"""An encode pool before prefill: its queue against one event after the other, and its rate in a full run."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.cli.main import run as command
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.planning.run_energy import run_energy
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.encode.play import Encoders

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


def parts(encode=None, prefill=8, decode=4):
    pools = {
        "prefill": (Replicas(mapping=ds.Sharding(), instances=prefill, batch=4, token_budget=32768),),
        "decode": (Replicas(mapping=ds.Sharding(), instances=decode, batch=64),),
    }
    return ServedDeployment(name="images", gpus=prefill + decode, setup=AT, encode=encode, **pools)


def ran(trace, encode, **more):
    pytest.importorskip("numba")
    return ds.simulate(parts(encode), trace, slo=SLO, options=RunOptions(**more))


def test_a_request_alone_waits_for_its_images():
    trace = ds.Trace(arrival=[0.0], input_tokens=[4096], output_tokens=[8])
    plain, with_images = (ran(trace, each).records.requests for each in (None, Encoders(step=STEP, instances=1)))
    added = with_images.first_token_s - with_images.arrival_s - (plain.first_token_s - plain.arrival_s)
    assert added == pytest.approx(STEP.latency)
    assert with_images.arrival_s == pytest.approx([0.0])


def test_what_an_encode_pool_cannot_stand_before_is_one_line():
    pool, trace = Encoders(step=STEP, instances=1), ds.synthetic_trace(rate=1.0, requests=10, lengths=(4096, 8))
    short = ds.synthetic_trace(rate=1.0, requests=10, lengths=(1000, 8))
    other = ds.encode_step(ds.setup("kimi_k2_5", "h200_sxm", "fp8"), images=1, height=560, width=560)
    for asked, said in (
        ((trace, pool, {"concurrency": 4}), "no concurrency"),
        ((trace, pool, {"records": "none"}), "'images': encode: needs the records of all requests, not 'none'"),
        ((short, pool, {}), "more than a prompt of 1000"),
        ((trace, Encoders(step=other, instances=1), {}), "its images are for kimi_k2_5"),
    ):
        *given_trace, more = asked
        with pytest.raises(InputError, match=said):
            ran(*given_trace, **more)
    with pytest.raises(InputError, match="instances of encode"):
        Encoders(step=STEP, instances=0)


def test_gpus_of_encoders_count():
    """GPU-hours, utilisation and energy are those of the other pools and of the three GPUs that encode."""
    trace = ds.synthetic_trace(rate=20.0, requests=100, lengths=(4096, 16), seed=1)
    pool = Encoders(step=STEP, instances=3)
    found = ran(trace, pool)
    held, use = found.records.instances, found.records.encode
    assert use.busy_s == pytest.approx(100 * STEP.time)
    assert use.held_s == found.records.duration_s
    whole = held.gpu_s.sum() + 3 * use.held_s
    row = found.summary()
    assert row.gpu_hours * 3600.0 == pytest.approx(whole)
    assert row.utilisation == pytest.approx((held.busy_s.sum() + use.busy_s) / whole)
    assert found.samples()["gpus"].tolist() == [15] * len(found.samples())
    energy = run_energy(found)
    assert energy["role"].tolist() == ["prefill"] * 8 + ["decode"] * 4 + ["encode"]
    encode = energy.iloc[-1]
    tdp, wait = 700.0, encode["waiting_joules"] / (3 * use.held_s - use.busy_s)
    assert 0 < wait < 0.3 * tdp
    assert wait < (encode["joules"] - encode["waiting_joules"]) / use.busy_s <= tdp


SCENARIO = """
{name: images, model: qwen3_5_35b_a3b, system: h200_sxm, precision: fp8, slo: {ttft_s: 9, tpot_s: 1},
 trace: {kind: synthetic, name: even, lengths: {isl: 4096, osl: 8}, rate_per_s: 10, requests: 40},
 policies: [disaggregated],
 deployments: {one: {encode: {ENCODE}, prefill: {instances: 2}, decode: {instances: 1}}}}
"""
POOL = "instances: 2, images: 2, height: 1120, width: 1120, cached: 0.5"


def test_a_scenario_has_an_encode_pool(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("ENCODE", POOL))
    assert command(["simulate", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert "2 GPUs encode, busy" in capsys.readouterr().out
    pool = load_scenario(str(tmp_path / "s.yaml")).deployments[0].encode
    at = ds.setup("qwen3_5_35b_a3b", "h200_sxm", "fp8")
    assert (pool.instances, pool.each_s) == (2, 0.5 * ds.encode_step(at, images=2, height=1120, width=1120).time)
