"""Counts of instances are those of a search that knows the highest rate of every choice, though few are computed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.planning.counts import SizedPool, best_rate, gpus_of, least, pools
from disagg_sim.planning.design import PlannedPool
from disagg_sim.planning.flips import _winner
from disagg_sim.planning.limits import Limit
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.mixed_steps import HALVINGS
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.queueing import ONE_CORE, Delay
from disagg_sim.planning.ranking import NEAR, SIMPLER, standing_of_pool
from disagg_sim.planning.sizing import BEST, CLOSE, FARTHEST, _sized, _worth_pairing, fewest

QUESTIONS = {
    "experts": ("mixtral_8x7b", "h100_sxm", ds.lengths(4096, 512), "2 s"),
    "lengths": ("llama_3_1_8b", "h100_sxm,h200_sxm", ds.load_traffic("azure_2023_conversation").cases[0], "1 s"),
    "one by one": ("llama_3_1_70b", "h200_sxm", ds.lengths(60_000, 64), "30 s"),
}


@pytest.fixture(scope="module", params=list(QUESTIONS))
def plan(request):
    model, system, lengths, ttft = QUESTIONS[request.param]
    return ds.plan(model, system, lengths, ttft=ttft, rate=0.5)


@pytest.fixture(scope="module")
def choice():
    found = ds.plan("mixtral_8x7b", "h100_sxm", ds.lengths(4096, 512), rate=1).cases[0].colocated
    return next(each for each in found if each.ranks == 4 and len(each.steps.waits) > 1)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 8]), st.floats(0.01, 100.0), st.floats(1.0, 40_000.0))
def test_no_rate_in_time_exceeds_the_bound_in_closed_form(choice, seed, ranks, slower, prompt):
    """Steps of any times, not even longer with more tokens: where a step with prefill is the faster one, too."""
    draw, shape = np.random.default_rng(seed), choice.steps.mixed.shape
    tables = {name: draw.uniform(0.5, 1.5, shape) * slower * choice.steps.mixed for name in ("mixed", "single")}
    waits, prompts = (0,) if ranks == 1 else (0, 1, 7, 300), PromptLengths(np.array([prompt]), np.zeros(1), np.ones(1))
    steps = replace(choice.steps, ranks=ranks, prompts=prompts, waits=waits, **tables)
    work = replace(choice.work, tpot=Limit(float(draw.uniform(0.001, 1.0))))
    every = rates_of_all_batches(steps)
    assert (every <= steps.bounds).all()
    for hold, rates in zip(waits, every, strict=True):
        some = replace(choice, steps=steps, work=work, hold_steps=hold)
        fast = rates >= steps.batch / (work.lengths.gaps * work.tpot.seconds)
        most = rates[fast].max(initial=0.0) / work.spare
        assert some.most == most <= some.ceiling


def test_no_instance_is_asked_for_more_than_its_most(choice):
    """Steps of times of any shape may keep up with a higher rate; these do not."""
    for hold in choice.steps.waits:
        some = replace(choice, hold_steps=hold)
        assert some.asks(some.most, 1) == 1
        assert all(some.asks(more * some.most, 1) is None for more in (1.001, 1.1, 1.5))


def rates_of_all_batches(steps):
    """The highest rates of every prefill delay and batch, (waits, batches). [request/s]"""
    found = []
    for wait in steps.waits:
        low, high = np.zeros(steps.batch.size), steps.batch / (steps.step * steps.each)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            mixing = steps.mixing(middle, wait)
            kept = (mixing.steps * steps.batch >= middle * steps.each) & (mixing.used < 1.0)
            low, high = np.where(kept, middle, low), np.where(kept, high, middle)
        found.append(low)
    return np.array(found)


def one_after_the_other(choices, rate, most, within):
    """As ``pools``: all choices in the order of the GPUs that they could do with."""
    usable = [each for each in choices if each.most > 0]
    best = most
    for each in sorted(usable, key=lambda each: math.ceil(rate / each.most) * gpus_of(each)):
        if math.ceil(rate / each.most) * gpus_of(each) > within(best, 0.0):
            return
        instances = least(each, rate, int(within(best, 0.0) // gpus_of(each)))
        if instances is not None:
            best = min(best, instances * gpus_of(each))
            yield SizedPool(each, instances)


@pytest.mark.parametrize("rate", [0.1, 3.0, 40.0])
def test_pools_are_those_of_all_choices_in_their_order(plan, rate):
    for case in plan.cases:
        for choices in (case.colocated, *case.across):
            for most, within in ((1000, lambda best, _: min(best * FARTHEST, 1000)), (41, lambda best, _: best - 1)):
                found = list(pools(choices, rate, most, within))
                assert found == list(one_after_the_other(choices, rate, most, within))
        assert best_rate(case.colocated) == max(each.most / gpus_of(each) for each in case.colocated)


def standing(role, pool, rate):
    return standing_of_pool(PlannedPool(role=role, choice=pool.choice, instances=pool.instances, rate=rate))


@pytest.mark.parametrize("rate", [0.1, 3.0, 40.0])
def test_larger_pools_than_the_next_best_layout_change_nothing(plan, rate):
    for case in plan.cases:
        for role, choices in (("colocated", case.colocated), ("prefill", case.across[0]), ("decode", case.across[1])):
            layouts = {}
            for each in _sized(choices, rate, 1000):
                alike = layouts.setdefault(replace(each.choice.mapping, chunk_tokens=0), [])
                if not alike or each.gpus == alike[0].gpus:
                    alike.append(each)
            best = [min(alike, key=lambda each: standing(role, each, rate)) for alike in layouts.values()]
            near = [each for each in best if each.gpus <= NEAR * best[0].gpus]
            order = sorted(near, key=lambda each: standing(role, each, rate))[:CLOSE]
            found = [*order, *best[len(near) :][: max(BEST - len(order), 1)]]
            assert _worth_pairing(role, choices, rate, 1000) == found


@pytest.mark.parametrize("rate", [0.1, 3.0, 40.0])
def test_the_cheapest_mode_is_that_of_both_counted_to_the_end(plan, rate):
    modes = (ServingMode.DISAGGREGATED, ServingMode.COLOCATED)
    costs = {(mode, case.at.system.name): fewest(case, mode, rate, 100_000) for case in plan.cases for mode in modes}
    for now in costs:
        _, system = min(costs, key=lambda key: (costs[key], key != now))
        apart, joint = (costs[mode, system] for mode in modes)
        (case,) = (each for each in plan.cases if each.at.system.name == system)
        alone = replace(case, colocated=[each for each in case.colocated if each.mapping.dp_attn == 1])
        simple = fewest(alone, ServingMode.COLOCATED, rate, 100_000) <= SIMPLER * apart
        mode = ServingMode.COLOCATED if joint < apart or simple else ServingMode.DISAGGREGATED
        assert _winner(plan.cases, rate, (*now, False)) == (mode, system, False)


@pytest.mark.parametrize("instances", [1, 7])
def test_what_queues_are_bound_by_is_more_than_they_take(plan, instances):
    for case in plan.cases:
        for each in case.across[0][::3]:
            rate = 0.8 * each.most * instances
            law = each.delay(rate, instances)
            for limit in np.geomspace(law.at(0.5), 4.0 * law.at(0.99), 6):
                assert each.late_at_most(rate, instances, limit) >= law.late(limit)
        for each in case.colocated[::3]:
            if each.ranks == 1 and not isinstance(each, OneByOne) and each.most > 0:
                rate = 0.8 * each.most * instances
                slots, _ = each._state(rate, instances)
                assert each._most_delay(rate / instances, slots.mean) >= each._delay(rate, instances).calm.max()


def test_a_size_needs_no_highest_rate(choice):
    case = ds.plan("mixtral_8x7b", "h100_sxm", ds.lengths(4096, 512), rate=1).cases[0]
    assert math.isfinite(fewest(case, ServingMode.COLOCATED, 20.0, 100_000))
    assert not any("most" in vars(each) for each in case.colocated)


def test_many_latencies_count_in_pieces():
    """Of 25,000 equal latencies, of which two fifths are held for 1 s more: 0.6 are late by none, 0.4 by exp(-1)."""
    count = 25_000
    assert count > 2 * ONE_CORE
    ones, share = np.ones(count), np.full(count, 1.0 / count)
    found = Delay(ones, 0.6 * share, ones, 0.4 * share, 1.0)
    assert found.late(2.0) == pytest.approx(0.4 * math.exp(-1.0), rel=1e-12)
    assert found.late(0.5) == pytest.approx(1.0, rel=1e-12)
