"""Plans equal those of a plain planner (``plain_planner``), on random questions about pools of given times."""

from dataclasses import replace

import numpy as np
import pytest
from plain_planner import Decode, Prefill, Question, holds, most_rate, plan

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.planning.counts import NARROW
from disagg_sim.planning.limits import limit_of
from disagg_sim.planning.queueing import without_queue
from disagg_sim.planning.sizing import designs_at, fewest
from disagg_sim.planning.sizing import most_rate as planned_rate

HOST, FIRST_GAP, PRICES = 0.02, 0.03, {"h100_sxm": 2.0, "h200_sxm": 3.5}  # [s], [s], of a GPU
OUTPUT, DOMAIN = 256, 8  # tokens of a request; GPUs of an NVLink domain of H100
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@pytest.fixture(scope="module")
def cases():
    """A case whose prefill runs on another system, and one of one system."""
    options = ds.PlanOptions(prefill_system="h200_sxm")
    return ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, OUTPUT), rate=5, options=options).cases


def drawn(seed, cases):
    """A random question: as the package takes it, as plain numbers, its rate and its GPUs."""
    draw = np.random.default_rng(seed)
    names = [str(draw.choice(list(SHARES))) for _ in range(2)]
    limits = [round(float(draw.uniform(*span)), 2) for span in ((150, 1500), (8, 40))]  # TTFT, TPOT [ms]
    surge, headroom = float(draw.choice([1.0, 1.25, 1.6])), float(draw.choice([0.0, 0.03, 0.2]))
    rate, budget = float(np.exp(draw.uniform(np.log(1.0), np.log(40.0)))), int(draw.integers(4, 21))
    case = cases[int(draw.integers(2))]
    alone = case.prefill_at is case.at
    ttft, tpot = (limit_of(f"{limit} ms@{name}", "limit") for limit, name in zip(limits, names, strict=True))
    work = replace(case.work, ttft=ttft, tpot=tpot, surge=surge, headroom=headroom)
    seats, pass_s = int(draw.integers(8, 33)), float(draw.uniform(0.03, 0.3))
    base_s, each_s = float(draw.uniform(0.004, 0.02)), float(draw.uniform(1e-4, 2e-3))
    times = []
    for gpus in (1, 2, 4):  # an instance of more GPUs is faster, by a little more or less than their number
        faster = gpus ** float(draw.uniform(0.4, 1.1))
        variation = float(draw.choice([0.0, 0.3]))
        steps = [(base_s + each_s * n) / faster for n in range(1, seats + 1)]
        times.append((gpus, pass_s / faster, variation, steps))
    places, sides = [], []
    nic, nvlink = (float(np.exp(draw.uniform(*span))) for span in ((-0.5, 2.5), (1.0, 6.0)))  # of a GPU [request/s]
    for room, link in ((DOMAIN, nvlink), (1000, nic)):
        pools = [], []
        plain = [], []
        for gpus, seconds, variation, steps in times:
            mapping = replace(case.across[1][0].mapping, tp_attn=gpus, tp_ffn=gpus, pp=1)
            shared = {"mapping": mapping, "work": work, "link_rate": gpus * link}
            prefill = replace(
                case.across[0][0],
                batch=np.ones(1),
                busy=np.array([seconds]),
                ftl=np.array([[seconds]]),
                spread=variation,
                weights=np.ones(1),
                host=HOST,
                link=None,
                hand_over=without_queue(np.array([FIRST_GAP + 1.0 / (gpus * link)]), np.ones(1)),
                **shared,
            )
            batch = np.arange(1.0, len(steps) + 1)
            decode = replace(case.across[1][0], seats=len(steps), batch=batch, step=np.array(steps), **shared)
            pools[0].append(prefill)
            pools[1].append(decode)
            first = HOST + seconds + FIRST_GAP + 1.0 / (gpus * link)
            plain[0].append(Prefill(gpus, first, seconds, variation, gpus * link))
            plain[1].append(Decode(gpus, steps, gpus * link))
        sides.append(pools)
        places.append((room, *plain))
    sides, places = (sides, places) if alone else (sides[1:] * 2, places[1:])
    prices = (PRICES["h100_sxm" if alone else "h200_sxm"], PRICES["h100_sxm"])
    shares = [SHARES[name] for name in names]
    asked = Question(limits[0], shares[0], limits[1], shares[1], headroom, surge, OUTPUT - 1, prices, places)
    made = replace(case, work=work, colocated=(), inside=sides[0], across=sides[1], costs=PRICES)
    return made, asked, rate, budget


def planned(case, rate, budget):
    """The answer of the package in the form of the plain one, with the cost beside."""
    found = designs_at(case, rate, budget)
    if not found:
        return None
    return (found[0].cost, *((pool.gpus // pool.instances, pool.instances) for pool in found[0].pools))


def test_plans_are_those_of_every_count_tried(cases):
    """Costs, layouts and counts of 300 questions; both those with an answer and those without are many."""
    different, answered = [], 0
    for seed in range(300):
        case, asked, rate, budget = drawn(seed, cases)
        expected = plan(asked, rate, budget)
        answered += expected is not None
        cost = fewest(case, ServingMode.DISAGGREGATED, rate, budget)
        if planned(case, rate, budget) != expected or cost != (expected[0] if expected else np.inf):
            different.append((seed, expected, planned(case, rate, budget), cost))
    assert different == []
    assert 100 < answered < 250


def test_pools_hold_that_hold_in_the_plain_one(cases):
    """One to eight instances of every layout, also fewer than any search would try."""
    different, held, count = [], 0, 0
    for seed in range(2000, 2100):
        case, asked, rate, _ = drawn(seed, cases)
        layouts = [*asked.places[-1][1], *asked.places[-1][2]]
        for layout, choice in zip(layouts, [*case.across[0], *case.across[1]], strict=True):
            count = count % 8 + 1
            expected = holds(layout, asked, rate, count)
            held += expected
            if choice.holds(rate, count) != expected:
                different.append((seed, layout, count, expected))
    assert different == []
    assert 150 < held < 450


def test_the_most_rate_is_that_of_every_count_tried(cases):
    """On the GPUs of 50 questions."""
    different, served = [], 0
    for seed in range(1000, 1050):
        case, asked, _, budget = drawn(seed, cases)
        expected, found = most_rate(asked, budget), planned_rate(case, budget, ServingMode.DISAGGREGATED)
        served += expected > 0
        if found != pytest.approx(expected, rel=NARROW):
            different.append((seed, expected, found))
    assert different == []
    assert served > 30
