"""What plans say of queues, of ranks and of the requests that they are judged by, against what is simulated."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.planning.choices import prompts_of_ranks
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.prove import prove
from disagg_sim.planning.replayed import drawn_requests


@pytest.mark.parametrize("rate", [1.85, 40.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_many_requests_are_judged_as_the_rate_says(rate, seed):
    work = Demand(lengths=ds.lengths(2048, 256), ttft=Limit(1.0), tpot=Limit(0.05))
    trace, begin = drawn_requests(work, (2048, 256), rate, seed)
    judged = trace.arrival[trace.arrival >= begin]
    assert len(judged) >= 2_000
    assert (len(judged) - 1) / (judged[-1] - judged[0]) == pytest.approx(rate, rel=1e-9)
    gaps = np.diff(judged)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1.0, abs=0.1)  # Poisson


def test_ranks_of_a_pass_wait_for_the_longest_prompt():
    """Of two prompts of a pass the longer counts: a pool that is sized for even ranks has a queue without end."""
    chat, same = ds.lengths("log_normal_4096_512"), ds.lengths(4096, 512)
    at, wide = ds.setup("llama_4_maverick", "gb200_nvl72", "fp8"), ds.Sharding(dp_attn=4, ep=4)
    even, own = (ds.prefill_grid(at, wide, law, batch=[4]).request_rate[0, 0] for law in (chat, prompts_of_ranks(chat)))
    assert own < 0.7 * even
    assert prompts_of_ranks(same).rank_loads is None
    said = ds.lengths("log_normal_4096_512", rank_imbalance="random")
    assert prompts_of_ranks(said) is said


def test_prompts_of_one_rank_wait_behind_others_that_come_at_once():
    """Requests go where the fewest are in flight, of whom nearly all decode: prompts meet by chance all the same."""
    found = ds.plan("qwen3_32b", "mi300x", ds.lengths(4096, 512), ttft="500 ms", tpot="100 ms", rate=19.7)
    design = next(each for each in (found.best, *found.runners_up) if each.mode.value == "colocated")
    run = prove(found, design, adapt=False).planned
    assert run.holds
    assert run.ttft["p90"] == pytest.approx(design.ttft["p90"], rel=0.3)
