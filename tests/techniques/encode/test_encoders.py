"""Encoding of images by hand, and an encode pool before prefill: its queue and its rate in a full run."""

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
from disagg_sim.facts.model import EncoderSpec
from disagg_sim.planning.run_energy import run_energy
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.encode.physics import encoder_operators
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
    assert (pool.instances, pool.step.each_s) == (2, 0.5 * ds.encode_step(at, images=2, height=1120, width=1120).time)


KIMI = EncoderSpec(layers=27, hidden=1152, width=4304, patch=14, merge=2)


def test_weights_and_patches_by_hand():
    """27*(4*1152^2 + 2*1152*4304) = 411e6 weights; 1120 pixels are 80 patches or 40 tokens, 1121 are 41 tokens."""
    assert KIMI.matmul_params == 27 * (4 * 1152**2 + 2 * 1152 * 4304) == 411_070_464
    assert KIMI.patches(1120, 1120) == 6400
    assert KIMI.tokens(1120, 1120) == 1600
    assert KIMI.tokens(1121, 1120) == 41 * 40


def test_work_of_an_image_by_hand():
    """2*P_v*N = 5.26e12 in the matrices of the layers, 4*L*d*N^2 = 5.10e12 in attention."""
    flops = {op.name: op.work.flops * runs for op, runs in encoder_operators(KIMI, 7168, 6400)}
    matrices = sum(flops[name] for name in ("query, key, value", "output", "up", "down"))
    assert matrices == 2 * KIMI.matmul_params * 6400
    assert matrices == pytest.approx(5.26e12, rel=1e-3)
    assert flops["attention"] == pytest.approx(5.10e12, rel=1e-3)
    assert flops["join"] + flops["project"] == 2 * 1600 * 4608 * (4608 + 7168)


def test_embeddings_of_a_request_are_its_tokens_in_two_bytes():
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    step = ds.encode_step(at, images=1, height=1120, width=1120)
    assert step.embedding_bytes == 1600 * 7168 * 2 == pytest.approx(23e6, rel=0.01)
    assert step.transfer == pytest.approx(step.embedding_bytes / 50e9, rel=0.01)


def test_images_repeat_and_a_cache_multiplies_the_rate():
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    one, half = (ds.encode_step(at, images=2, height=560, width=560, cached=share) for share in (0.0, 0.5))
    assert half.request_rate == pytest.approx(2 * one.request_rate)
    assert half.latency == one.latency  # of a request whose images are new
    four = ds.encode_step(at, images=4, height=560, width=560)
    assert four.time == pytest.approx(2 * one.time)


def test_faults_name_what_is_wrong():
    text = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    with pytest.raises(InputError, match="llama_3_1_8b has no encoder"):
        ds.encode_step(text, images=1, height=560, width=560)
    at = ds.setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    with pytest.raises(InputError, match="images"):
        ds.encode_step(at, images=0, height=560, width=560)
    with pytest.raises(InputError, match="is out of range"):
        ds.encode_step(at, images=1, height=560, width=560, cached=1.0)
