"""Co-located instances that serve one long request at a time: by hand, and against simulation."""

import pytest

import disagg_sim as ds
from disagg_sim.domain import Mapping, Mode
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.planning.one_by_one import OneByOne
from disagg_sim.planning.prove import prove
from disagg_sim.planning.sizing import designs_at

RATE, OSL = 0.2, 512


@pytest.fixture(scope="module")
def long_prompts():
    """Llama 70B, 120,000 tokens; a prompt of another beside a decode costs more than the limit of 25 ms leaves."""
    asked = ds.lengths(120_000, OSL)
    return ds.plan("llama_3_1_70b", "h200_sxm", asked, ttft="120 s", tpot="25 ms", rate=RATE)


def alone(plan):
    found = [design for design in designs_at(plan.cases[0], RATE) if design.mode == Mode.COLOCATED]
    return next(design for design in found if isinstance(design.pools[0].choice, OneByOne))


def test_tokens_take_a_step_of_one_request_and_the_seat_is_taken_for_prefill_and_decode(long_prompts):
    design = alone(long_prompts)
    choice = design.pools[0].choice
    tp = choice.mapping.tp_attn
    step = float(decode_step(choice.at, Mapping(tp_attn=float(tp), tp_ffn=float(tp)), batch=1.0, context=120_256.0).ttl)
    assert design.tpot["p99"] == pytest.approx(step, rel=1e-6)
    prefill = choice.ttft(1e-9, 1, 0.5)  # nobody waits
    assert choice.service.mean == pytest.approx(prefill + (OSL - 1) * step, rel=1e-3)
    assert choice.most == pytest.approx(1 / (1.03 * choice.service.mean))
    assert choice.occupied(0.5 / choice.service.mean, 1).mean == pytest.approx(0.5)
    assert not choice.holds(1.01 / choice.service.mean, 1)


def test_prompts_of_one_step_are_served_as_before():
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(16_384, 256), tpot="20 ms", rate=5)
    assert not any(isinstance(choice, OneByOne) for choice in found.cases[0].colocated)


@pytest.mark.long
def test_simulated_requests_keep_the_limits(long_prompts):
    design = alone(long_prompts)
    run = prove(long_prompts, design, adapt=False).planned
    assert run.holds
    assert run.tpot["p90"] == pytest.approx(design.tpot["p90"], rel=0.01)
    assert run.ttft["p90"] == pytest.approx(design.ttft["p90"], rel=0.25)
