"""A pass leaves a pipeline after those before it: by hand, by the recursion played, and as simulated."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.planning.leaving_order import StageTimes, behind, blocking_one_by_one, blocking_passes
from disagg_sim.planning.limits import Limit
from disagg_sim.planning.passes import passes
from disagg_sim.planning.prove import deployed
from disagg_sim.planning.queueing import share_that_waits
from disagg_sim.planning.replayed import policy_of, slo_of
from disagg_sim.simulation.simulate import simulate
from disagg_sim.workload.synthetic import synthetic_trace
from tests.planning.test_what_holds import prefill_of, work_of

#: Prompts of 1 s a stage and, one in ten, of 10 s; two stages.
UNLIKE, WEIGHTS = StageTimes(*np.array([[[1.0], [10.0]]] * 2)), np.array([0.9, 0.1])


def test_what_is_left_of_unlike_prompts_by_hand():
    """One server, 0.1 requests/s: used by 0.19.

    Nothing above 1 s is in a busy period with G = 0.9*exp(-0.1*(1 - G)) = 0.89017, and before a request that waits with
    (0.81/0.19)*(0.9 - G)/0.1 = 0.419. What is left of earlier busy periods is above y with 1 - exp(-0.1*(1 - G)*(10 -
    y)) for y of 1 to 10 s: 11/12 find 10 + ln(11/12)/(0.1*(1 - G)) = 2.08 s at most, 3/4 nothing. Those who wait find
    1 s at most with 0.419*exp(-0.9*(1 - G)) = 0.380: two of six.
    """
    found = blocking_one_by_one(UNLIKE, WEIGHTS, 0.1, 1, 0.19)
    assert found.idle.tolist() == [0.0] * 5 + [pytest.approx(2.077, abs=0.001)]
    assert found.queued.tolist() == [[1.0, 1.0, 10.0, 10.0, 10.0, 10.0]]


def test_passes_that_all_leave_alike_wait_for_none():
    """Equal prompts, one a pass: the delay is that without a pipeline, to the bit."""
    flat = prefill_of(work_of(Limit(1.0)))
    deep = replace(flat, ftl=flat.ftl * 2, stages=StageTimes(flat.ftl, flat.ftl))
    flat = replace(flat, ftl=flat.ftl * 2)
    for rate, instances in ((3.0, 1), (8.0, 1), (30.0, 4)):
        for share in (0.5, 0.9, 0.99):
            assert deep.delay(rate, instances).at(share) == flat.delay(rate, instances).at(share)


def arrivals(rate, count=60_000, seed=5):
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def left_behind(found, later, weights):
    """Mean time that passes of a length [s] wait at the last stage, those of idle and of busy stages."""
    return [float(weights @ behind(0.0, later[:, None], each).mean(axis=1)) for each in (found.idle, found.queued[0])]


@pytest.mark.parametrize(("used", "servers", "near"), [(0.2, 1, 0.05), (0.5, 1, 0.1), (0.8, 1, 0.1), (0.7, 4, 0.12)])
def test_what_is_left_before_prompts_one_by_one_is_that_of_the_recursion(used, servers, near):
    """Y = max(O, Y - I), each request to the server with the fewest; four stages, three lengths."""
    first, weights = np.array([0.5, 1.0, 4.0]), np.array([0.3, 0.5, 0.2])
    rate = used * servers / float(weights @ first)
    kinds = np.random.default_rng(6).choice(3, 60_000, p=weights)
    ends, free, left, found = [[] for _ in range(servers)], np.zeros(servers), np.zeros(servers), []
    for now, kind in zip(arrivals(rate), kinds, strict=True):
        queues = [[end for end in queue if end > now] for queue in ends]
        at = min(range(servers), key=lambda server, queues=queues: len(queues[server]))
        end = max(now, free[at]) + first[kind]
        leaves = max(end + 3 * first[kind], left[at] + first[kind])
        found.append((free[at] > now, leaves - end - 3 * first[kind]))
        ends, free[at], left[at] = queues, end, leaves
        ends[at].append(end)
    waits, behind_others = np.array(found).T
    law = blocking_one_by_one(StageTimes(first[:, None], 3 * first[:, None]), weights, rate / servers, servers, used)
    share = share_that_waits(servers, used)
    idle, queued = left_behind(law, 3 * first, weights)
    assert (1 - share) * idle + share * queued == pytest.approx(behind_others.mean(), rel=near)
    assert queued == pytest.approx(behind_others[waits > 0].mean(), rel=near)


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_what_is_left_before_passes_of_several_is_that_of_the_recursion(load):
    """One server takes all who wait, up to 12 of 0.2 s beside 0.4 s; four stages: a small pass follows a large one.

    The size of a request's own pass is taken at its mean, which is why the law has up to 14 % less.
    """
    batch = np.arange(1.0, 13.0)
    busy = 0.4 + 0.2 * batch
    rate, free, left, found, place = load / 0.25, 0.0, 0.0, [], 0
    came = arrivals(rate)
    while place < came.size:
        start = max(free, came[place])
        size = min(max(int(np.searchsorted(came, start, side="right")) - place, 1), 12)
        end = start + busy[size - 1]
        leaves = max(end + 3 * busy[size - 1], left + busy[size - 1])
        found += [leaves - end - 3 * busy[size - 1]] * size
        free, left, place = end, leaves, place + size
    stages, law = StageTimes(busy[None], 3 * busy[None]), passes(rate, batch, busy)
    before = blocking_passes(stages, np.ones(1), batch, rate, 1, law)
    own = partial(np.interp, xp=batch, fp=3 * busy)
    queued = behind(0.0, own(law.beside)[:, None], before.queued).mean(axis=1)
    mean = (1 - law.meets) * behind(0.0, own(1.0), before.idle).mean() + law.meets * law.share @ queued
    assert mean == pytest.approx(np.mean(found), rel=0.15)


@pytest.mark.long
def test_a_pool_of_pipelines_is_as_fast_as_its_simulation():
    """Six pipelines of four stages, at 0.8 of their load: without the order of leaving means are planned 0.75 times."""
    pytest.importorskip("numba")
    found = ds.plan("glm_4_5", "gb200_nvl72", ds.lengths(2048, 256), ttft="500 ms", tpot="25 ms", rate=275)
    design = next(each for each in (found.best, *found.runners_up) if each.mode.value == "disaggregated")
    choice, instances = replace(design.first.choice, hand_over=0.0), design.first.instances
    assert choice.mapping.pp > 1
    takers = replace(design.pools[1], instances=3 * design.pools[1].instances)
    sized = replace(design, pools=(design.pools[0], takers))
    trace = synthetic_trace(rate=275, requests=8_000, lengths=(2048, 256), seed=3)
    table = simulate(deployed(sized), trace, policy_of(sized), slo=slo_of(sized)).frame()[500:]
    taken = (table["prefill_end_s"] - table["arrival_s"]).to_numpy()
    law, apart = (each.delay(275, instances) for each in (choice, replace(choice, stages=None)))
    assert law.mean == pytest.approx(taken.mean(), rel=0.1)
    assert [law.at(share) for share in (0.5, 0.9)] == pytest.approx(np.quantile(taken, (0.5, 0.9)), rel=0.1)
    assert apart.mean < 0.85 * taken.mean()
