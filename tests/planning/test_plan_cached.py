"""Plans of prompts whose start is cached, and what simulation says of them."""

import disagg_sim as ds
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.planning.prove import prove

ASKED = {"ttft": "1 s", "tpot": "30 ms", "rate": 20}


def test_what_decode_holds_is_not_handed_over_in_simulation():
    runs = {}
    for held in (0.0, 0.9):
        reuse = Reuse(share=ConstantShare(share=0.9), in_decode=held)
        plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=reuse), **ASKED)
        design = next(each for each in (plan.best, plan.other) if len(each.pools) == 2)
        runs[held] = prove(plan, design, adapt=False).planned
    assert runs[0.9].hand_over < runs[0.0].hand_over
