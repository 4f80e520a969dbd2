"""How requests come to one of several co-located instances: the laws beside simulations, and limits by hand."""

from __future__ import annotations

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.traffic import EmpiricalLength, TrafficCase
from disagg_sim.planning.evaluate import evaluate
from disagg_sim.planning.prompt_queue import PromptArrivals, prompt_delay
from disagg_sim.planning.prove import prove
from disagg_sim.planning.queueing import Occupancy
from disagg_sim.planning.shared_instances import (
    AT_RANDOM,
    arrivals_while_decoding,
    chance_of_close_ends,
    in_company,
    sent,
    unsteered_share,
    variance_while_decoding,
)
from disagg_sim.simulation.deployment import Replicas
from disagg_sim.techniques.ranks.physics_sums import RequestLaw


def at(number: float) -> Occupancy:
    """So many requests at an instance, always."""
    return Occupancy(np.array([number]), np.ones(1), 0.0)


def test_one_instance_is_given_all_its_requests_whatever_it_does() -> None:
    assert unsteered_share(at(7.3), 1) == 1.0
    assert sent(at(7.3), 1, 0.0) == sent(at(7.3), 1, 1.0) == AT_RANDOM
    assert AT_RANDOM.in_prefill(50.0) == 1.0


def test_many_instances_with_less_than_a_request_each_are_given_none_while_they_have_one() -> None:
    assert unsteered_share(at(0.7), 1000) == pytest.approx(1e-3)
    assert in_company(at(0.7)) == 0.0


def test_answers_of_one_length_keep_requests_together() -> None:
    one = ds.lengths(1000, 200).requests
    assert chance_of_close_ends(one, 1e-3) == 1.0
    assert sent(at(9.0), 8, 1.0).free == 1.0


def test_answers_that_differ_end_together_as_often_as_pairs_of_them_are_near() -> None:
    rng = np.random.default_rng(2)
    osl = np.sort(rng.uniform(100.0, 300.0, 400))
    law = RequestLaw(isl=osl, isl_weight=np.full(400, 1 / 400), osl=osl, osl_weight=np.full(400, 1 / 400), joint=True)
    for tokens in (1.0, 10.0, 100.0, 1000.0):
        assert chance_of_close_ends(law, tokens) == pytest.approx((np.abs(osl[:, None] - osl) < tokens).mean())


def test_equal_answers_vary_only_by_what_all_instances_share() -> None:
    assert variance_while_decoding(ds.lengths(1000, 200).requests, 8, 1.0) == 1 / 8
    assert variance_while_decoding(ds.lengths("log_normal_4096_512").requests, 10**6, 1.0) == pytest.approx(
        1.0, abs=1e-5
    )


@pytest.mark.parametrize("number", [0.4, 1.5, 6.25])
def test_a_request_meets_what_takes_the_places_of_the_others_at_its_instance(number) -> None:
    """Of a hundred instances those with one request more are counted by hand."""
    each = np.full(100, int(number))
    each[: round((number - int(number)) * 100)] += 1
    others = float(each @ (each - 1)) / each.sum()
    assert arrivals_while_decoding(at(number), 100, 1.0) == pytest.approx(max(others / number, 1e-6))


def test_an_instance_that_is_sent_nothing_while_it_prefills_has_no_queue() -> None:
    """A prompt waits for what is left of a step of decodes alone, 10 ms, then for its own, 1 s."""
    lengths, one = np.array([100.0]), np.ones(1)

    def step(tokens):
        return np.where(tokens > 0.0, 1.0, 0.01)

    [(times, chances)] = prompt_delay(PromptArrivals(0.5, sent=0.0), lengths, one, 100.0, step)
    assert times @ chances == pytest.approx(1.005, rel=0.01)
    [(later, shares)] = prompt_delay(PromptArrivals(0.5), lengths, one, 100.0, step)
    assert later @ shares > 1.4


@pytest.mark.parametrize("outputs", [(51.0, 205.0), (115.0, 141.0)])
def test_eight_instances_are_forecast_as_simulated(outputs) -> None:
    """TTFT p90 is 1.26 times, TPOT p50 1.03 times the simulated where requests come as at random."""
    work = TrafficCase(
        isl=EmpiricalLength(probabilities=(0.0, 1.0), tokens=(1229.0, 2867.0)),
        osl=EmpiricalLength(probabilities=(0.0, 1.0), tokens=outputs),
    )
    pools = {"colocated": Replicas(mapping=Sharding(tp_attn=2, tp_ffn=2), instances=8, batch=64)}
    found = evaluate("qwen3_32b", "h200_sxm", pools, work, rate=48.0, ttft="60 s", tpot="2 s")
    run = prove(found.given, found.design, adapt=False).planned
    assert found.ttft["p90"] == pytest.approx(run.ttft["p90"], rel=0.17)
    assert found.tpot["p50"] == pytest.approx(run.tpot["p50"], rel=0.05)
    assert found.tpot["p90"] == pytest.approx(run.tpot["p90"], rel=0.08)
