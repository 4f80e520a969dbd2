"""Co-located plans with DP attention against simulation: at light load and at that of the plan."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.mixed_steps import fullest_rank
from disagg_sim.planning.pools import ColocatedChoice


@pytest.fixture(scope="module")
def found():
    """Kimi K2: 16,384 tokens in 64 pieces of 256 a rank."""
    return ds.plan("kimi_k2", "gb200_nvl72", ds.lengths(16_384, 512), ttft="10 s", tpot="40 ms", rate=20)


@pytest.fixture(scope="module")
def design(found):
    """Two instances of 24 ranks, whose prompts take up more of the time than a plan lets them."""
    case = found.cases[0]
    choice = next(each for each in case.colocated if (each.ranks, each.budget) == (24, 24 * 256))
    pools = (PlannedPool(role="colocated", choice=choice, instances=2, rate=16),)
    return Design(mode=ServingMode.COLOCATED, pools=pools, rate=16, cost=48.0, work=case.work)


def test_the_rank_whose_prompt_has_come_furthest_sets_the_time_of_a_step(design):
    """Of j prompts evenly on their way the furthest has come j/(j+1), the only one half, on average.

    So where a step takes 1 s in the middle of a prompt and 1.5 s at its end, one that all ranks join takes
    0.5 + R/(R+1), 1.5 s of very many.
    """
    choice, ranks = design.pools[0].choice, design.pools[0].choice.ranks
    assert isinstance(choice, ColocatedChoice)
    flat = np.ones_like(choice.steps.mixed)
    known = replace(choice.steps, single=flat, mixed=flat, longer=flat / choice.steps.prompt)
    assert known.full == pytest.approx(0.5 + ranks / (ranks + 1), rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_prompts_of_the_fullest_rank_are_those_of_drawn_steps(ranks):
    draws = np.random.default_rng(5).poisson(np.array([[0.1], [0.5], [1.3], [4.0], [12.0]]) * ranks, (5, 200_000))
    expected = [np.ceil(each[each > 0] / ranks).mean() for each in draws]
    assert fullest_rank(np.array([0.1, 0.5, 1.3, 4.0, 12.0]) * ranks, ranks) == pytest.approx(expected, rel=5e-3)
