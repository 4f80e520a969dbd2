"""Ranks that wait for each other: the fullest of several, by hand and against draws."""

import numpy as np
import pytest

from disagg_sim.techniques.experts.physics import largest_normal
from disagg_sim.techniques.ranks.physics import RankLoads, even_groups
from disagg_sim.techniques.ranks.physics_sums import RequestLaw, prompt_sum, request_law

#: Prompts of 1000 or 5000 tokens, answers of 200 or 1000, independent.
LAW = request_law(np.array([1000.0, 1000.0, 5000.0, 5000.0]), np.array([200.0, 1000.0, 200.0, 1000.0]))


def test_the_longest_of_two_prompts():
    """Both short with chance 1/4, else the longest has 5000: 4000 of a mean of 3000."""
    assert prompt_sum(LAW, 1).largest(((1.0, 2),)) == pytest.approx(4000, rel=2e-3)
    assert prompt_sum(LAW, 1).largest(((1.0, 1),)) == pytest.approx(3000, rel=1e-3)


def test_a_remainder_fills_some_ranks_alone():
    """Three prompts on two ranks: the fuller one has two. It is behind the other only with 1000 and 1000 against 5000:
    chances 1/8; so E[max] = E[two] + 1/8*(5000 - 2000).
    """
    assert even_groups(3.0, 2) == ((2.0, 1), (1.0, 1))
    assert prompt_sum(LAW, 1).largest(even_groups(3.0, 2)) == pytest.approx(6000 + 375, rel=2e-3)


def test_requests_at_random_in_part_fill_the_fuller_of_two_ranks_by_that_part():
    """In turns a share is at random: of n such requests the fuller rank has E|X - n/2| = sqrt(n/4 * 2/pi) more."""
    turns = RankLoads(LAW, "round_robin")
    assert 0.1 < turns.at_random < 0.9
    more = np.sqrt(turns.at_random * 4000.0 / 4.0 * 2.0 / np.pi)
    assert turns.decode(4000.0, 2.0, 1.0).batch - 2000.0 == pytest.approx(more, rel=0.02)


def test_those_in_flight_at_a_random_step_stay_for_their_steps():
    """Answers of 2 and 4 tokens take a step and three: 1 to 3, whether prompts are drawn beside them or with them."""
    lengths = {"isl": np.array([8.0, 9.0]), "osl": np.array([2.0, 4.0])}
    half, later = np.array([0.5, 0.5]), [0.25, 0.75]
    for joint, weight in ((False, [0.5, 0.5]), (True, later)):
        found = RequestLaw(**lengths, isl_weight=half, osl_weight=half, joint=joint).at_steps()
        assert (found.isl_weight.tolist(), found.osl_weight.tolist()) == (weight, later)


def test_many_requests_are_nearly_normal():
    """Residents weigh answers by their steps: 1000 tokens with 999/1198. Var = 2000^2 + Var(age) of a cache."""
    share = 999.0 / 1198.0
    age = share * 500 + (1 - share) * 100
    square = (share * 1000**2 + (1 - share) * 200**2) / 3
    mean, deviation = 3000 + age, np.sqrt(2000**2 + square - age**2)
    load = RankLoads(LAW, "least_load").decode(8 * 400.0, 8.0, mean)
    assert load.batch is None
    assert load.context / mean == pytest.approx(1 + largest_normal(8) * deviation / (mean * 20), rel=2e-3)
