"""Co-located instances that serve one long request at a time: by hand, and against simulation."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.planning.loads import Loads
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.sizing import designs_at

RATE, OSL = 0.2, 512


@pytest.fixture(scope="module")
def long_prompts():
    """Llama 70B, 120,000 tokens; a prompt of another beside a decode costs more than the limit of 25 ms leaves."""
    asked = ds.lengths(120_000, OSL)
    return ds.plan("llama_3_1_70b", "h200_sxm", asked, ttft="120 s", tpot="25 ms", rate=RATE)


def alone(plan):
    found = [design for design in designs_at(plan.cases[0], RATE) if design.mode == ServingMode.COLOCATED]
    return next(design for design in found if isinstance(design.pools[0].choice, OneByOne))


def test_tokens_take_a_step_of_one_request_and_the_seat_is_taken_for_prefill_and_decode(long_prompts):
    design = alone(long_prompts)
    choice = design.pools[0].choice
    tp = choice.mapping.tp_attn
    step = float(
        decode_step(choice.at, Sharding(tp_attn=float(tp), tp_ffn=float(tp)), batch=1.0, context=120_256.0).ttl
    )
    assert design.tpot["p99"] == pytest.approx(step, rel=1e-6)
    prefill = choice.ttft(1e-9, 1, 0.5)  # nobody waits
    assert choice.service.mean == pytest.approx(prefill + (OSL - 1) * step, rel=1e-3)
    assert choice.most == pytest.approx(0.85 / choice.service.mean)
    assert design.pools[0].utilisation == pytest.approx(design.rate * choice.service.mean / design.pools[0].instances)
    assert choice.occupied(0.5 / choice.service.mean, 1).mean == pytest.approx(0.5)
    assert not choice.holds(1.01 / choice.service.mean, 1)


def test_requests_in_flight_wait_for_their_first_token_or_decode(long_prompts):
    """Little's law; the seat is taken by prefill and decode, and prefill is before the first token."""
    design = alone(long_prompts)
    pool = design.pools[0]
    delay = pool.choice._delay(RATE, pool.instances)
    waits = RATE * sum(delay.at((place + 0.5) / 2000) for place in range(2000)) / 2000
    assert RATE * pool.choice.mean_ttft(RATE, pool.instances) == pytest.approx(waits, rel=0.02)
    assert design.in_flight == pytest.approx(waits + RATE * (OSL - 1) * design.tpot["p50"], rel=0.02)
    assert design.in_flight < waits + pool.instances * pool.sequences


def test_a_past_below_hbm_comes_before_the_prompt(long_prompts):
    """The time that it takes the link, and the latency of its tier."""
    choices = long_prompts.cases[0].colocated
    shared = next(each for each in choices if not isinstance(each, OneByOne) and each.loads is None)
    ones = np.ones(shared.steps.prompts.new.size)
    loads = Loads(link=0.2 * ones, latency=0.05 * ones, tiers=("ssd",) * ones.size, weights=shared.weights, ranks=1)
    before, after = (OneByOne.of(replace(shared, loads=each)).passes for each in (None, loads))
    assert after - before == pytest.approx(0.25 * ones)


def test_prompts_of_one_step_are_served_as_before():
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(16_384, 256), tpot="20 ms", rate=5)
    assert not any(isinstance(choice, OneByOne) for choice in found.cases[0].colocated)


@pytest.fixture(scope="module")
def million():
    asked = ds.lengths(1_000_000, 2000)
    return ds.plan("deepseek_v4_pro", "gb200_nvl72", asked, ttft="600 s", tpot="40 ms", rate=0.05)


def test_one_prompt_goes_through_a_pipeline_in_chunks_and_its_tokens_pass_all_stages(million):
    choice = million.other.pools[0].choice
    assert isinstance(choice, OneByOne)
    mapping = choice.mapping
    assert mapping.pp > 1
    assert mapping.dp_attn == 1
    pass_ = chunked_prefill_pass(choice.at, mapping, batch=1, isl=1_000_000, chunk_tokens=mapping.chunk_tokens)
    assert choice.passes == pytest.approx(float(pass_.ftl) + choice.host)
    step = float(decode_step(choice.at, replace(mapping, chunk_tokens=0), batch=1.0, context=1_001_000.0).ttl)
    assert choice.tpot(1e-9, 1, 0.99) == pytest.approx(step)
    assert choice.service.mean == pytest.approx(float(choice.passes[0]) + 1999 * step)
