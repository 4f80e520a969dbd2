"""Designs that closed forms flatter are simulated before they are told."""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.errors import MissingExtraError
from disagg_sim.planning.answer import answer
from disagg_sim.planning.prove import DRAWS, RATE_STEP, ProofRun, _holding, checked, prove, resized


@pytest.fixture(scope="module")
def found():
    """Eight ranks with attention each for itself serve prompts and tokens: as planned on half of the GPUs."""
    return ds.plan("kimi_k2", "h100_sxm", ds.lengths(8192, 256), ttft="1 s", tpot="50 ms", rate=1.2)


def flattered(plan):
    return next(each for each in plan.runners_up if each.mode == ServingMode.COLOCATED)


def test_attention_dp_holds_under_every_draw_and_not_with_one_instance_fewer(found):
    design = flattered(found)
    assert design.flattered
    assert design.simulated is not None
    assert all(prove(found, design, adapt=False, seed=seed).planned.holds for seed in DRAWS)
    fewer = resized(found, design, tuple(pool.instances - 1 for pool in design.pools), design.rate)
    assert not all(prove(found, fewer, adapt=False, seed=seed).planned.holds for seed in DRAWS)


def test_a_check_adds_gpus_never_takes_them_away(found):
    planned = answer(replace(found, best=None), lambda design: design).best
    assert planned.simulated is None
    assert planned.gpus < flattered(found).gpus
    larger = resized(found, planned, tuple(3 * pool.instances for pool in planned.pools), planned.rate)
    assert checked(found, larger, {}) is larger


def test_what_no_counts_hold_is_not_told(found):
    planned = flattered(found)
    strict = replace(planned.work, tpot=replace(planned.work.tpot, seconds=planned.work.tpot.seconds / 100))
    assert checked(found, replace(planned, work=strict, simulated=None), {}) is None


def test_with_gpus_given_the_rate_gives_way_and_not_the_counts():
    """Of two instances that hold up to 8 requests/s: asked for 10, they serve nearly 8; asked for 6, 6."""

    class Runs:
        done = 0

        def at(self, counts, rate):
            self.done += 1
            times = dict.fromkeys(("p50", "p90", "p99"), 1.0)
            return ProofRun(
                counts=counts, rate=rate, requests=1000, ttft=times, tpot=times, hand_over=0.0, lost=0,
                holds_ttft=rate <= 4.0 * counts[0], holds_tpot=True,
            )  # fmt: skip

    found = _holding(Runs(), (2,), 10.0, by_rate=False)
    assert found.counts == (2,)
    assert 8.0 / (1.0 + RATE_STEP) <= found.rate <= 8.0
    assert _holding(Runs(), (2,), 6.0, by_rate=False).rate == 6.0


def test_the_capacity_of_a_simulated_design_is_that_of_one_instance_more(found):
    design = flattered(found)
    count = design.pools[0].instances
    assert design.rate <= design.capacity <= design.rate * count / (count - 1)


def test_others_are_told_as_planned_and_without_the_simulator(monkeypatch):
    def missing(*_):
        raise MissingExtraError("simulation needs numba")

    monkeypatch.setattr("disagg_sim.planning.prove.checked", missing)
    constant = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="20 ms", rate=40)
    assert constant.best.simulated is None
    assert not constant.best.flattered
    varied = ds.load_traffic("azure_2023_conversation").cases[0]
    assert ds.plan("llama_3_1_8b", "h100_sxm", varied, rate=40).best.flattered
