"""Plans of prompts whose start is cached, and what simulation says of them."""

import pytest

import disagg_sim as ds
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.planning.prove import prove

ASKED = {"ttft": "1 s", "tpot": "30 ms", "rate": 20}


@pytest.fixture(scope="module")
def plan():
    return ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=0.9), **ASKED)


def test_a_cached_share_saves_gpus(plan):
    cold = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256), **ASKED)
    assert plan.best.gpus < cold.best.gpus


@pytest.mark.long
def test_the_plan_holds_in_simulation(plan):
    """All prompts begin alike, and instances remember that; TTFT and TPOT within the fifth that plans are off."""
    proof = prove(plan, adapt=False)
    assert proof.proven
    assert proof.planned.tpot["p90"] == pytest.approx(plan.best.tpot["p90"], rel=0.2)


def test_pasts_in_several_tiers_are_simulated_by_their_shares():
    """Half of the pasts come over 50 GB/s, half over a tenth of that: the slow ones are the tail of TTFT."""
    reuse = Reuse(share=ConstantShare(share=0.9), tiers=(("dram", 0.5), ("ssd", 0.5)))
    plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=reuse), **ASKED)
    alone = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=0.9), **ASKED)
    design, fast = (next(each for each in (p.best, p.other) if len(each.pools) == 2) for p in (plan, alone))
    both, hbm = prove(plan, design, adapt=False), prove(alone, fast, adapt=False)
    assert both.proven
    assert both.planned.ttft["p90"] > hbm.planned.ttft["p90"] + 0.05  # 0.48 GB at 5 GB/s, on many GPUs
    assert both.planned.tpot["p90"] == pytest.approx(design.tpot["p90"], rel=0.2)


def test_what_decode_holds_is_not_handed_over_in_simulation():
    runs = {}
    for held in (0.0, 0.9):
        reuse = Reuse(share=ConstantShare(share=0.9), in_decode=held)
        plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=reuse), **ASKED)
        design = next(each for each in (plan.best, plan.other) if len(each.pools) == 2)
        runs[held] = prove(plan, design, adapt=False).planned
    assert runs[0.9].hand_over < runs[0.0].hand_over
