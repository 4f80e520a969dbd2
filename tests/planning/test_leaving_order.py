"""A pass leaves a pipeline after those before it: by hand, by the recursion played, and as simulated."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.planning.leaving_order import StageTimes, behind, blocking_one_by_one
from disagg_sim.planning.limits import Limit
from disagg_sim.planning.queueing import share_that_waits
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
    """Equal prompts, one a pass: the delay is that without a pipeline."""
    flat = prefill_of(work_of(Limit(1.0)))
    deep = replace(flat, ftl=flat.ftl * 2, stages=StageTimes(flat.ftl, flat.ftl))
    flat = replace(flat, ftl=flat.ftl * 2)
    for rate, instances in ((3.0, 1), (8.0, 1), (30.0, 4)):
        for share in (0.5, 0.9, 0.99):
            known = flat.delay(rate, instances).at(share)
            assert deep.delay(rate, instances).at(share) == pytest.approx(known, rel=1e-14)


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
