"""What it means that a limit holds: ten requests by hand, the percentile that was asked for, surges, exact queues."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.planning.kv_links import handing, linked, running_steps
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.plan import unevenness
from disagg_sim.planning.pools import Cache, DecodeChoice, PrefillChoice
from disagg_sim.planning.prove import deployed, judged, prove
from disagg_sim.planning.queueing import without_queue
from disagg_sim.planning.replayed import policy_of, requests_of, run_options
from disagg_sim.simulation.kv_link import Wire
from disagg_sim.simulation.simulate import simulate

#: Of ten requests: arrival, first token, end [s] and output tokens. TTFT is 0.1 to 1.0 s. TPOT is 10 ms of eight, and
#: of the two shortest, which have few of the tokens, 40 and 50 ms.
TEN = pd.DataFrame(
    {
        "arrival_s": np.arange(10.0),
        "first_token_s": np.arange(10.0) + np.array([0.3, 0.1, 1.0, 0.2, 0.5, 0.4, 0.9, 0.6, 0.8, 0.7]),
        "output_tokens": [101, 101, 101, 101, 101, 101, 101, 101, 11, 5],
        "status": "completed",
    }
)
TEN["finish_s"] = TEN["first_token_s"] + np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.4, 0.2])
TEN["prefill_end_s"] = TEN["first_token_s"] - 0.01


def judge(ttft, tpot, table=TEN, begin=-1.0):
    work = Demand(lengths=ds.lengths(100, 100), ttft=ttft, tpot=tpot)
    design = SimpleNamespace(work=work, rate=1.0, pools=(SimpleNamespace(instances=1),))
    return judged(design, SimpleNamespace(frame=lambda: table), begin)


@pytest.mark.parametrize(
    ("share", "just"),
    [(0.5, 0.55), (0.9, 0.91), (0.99, 0.991)],  # between the fifth and the sixth; a tenth from ninth to tenth; ...
)
def test_ttft_of_ten_requests(share, just):
    loose = Limit(1.0, 0.5)
    assert judge(Limit(just + 1e-9, share), loose).holds
    late = judge(Limit(just - 1e-3, share), loose)
    assert (late.holds_ttft, late.holds_tpot, late.holds) == (False, True, False)


@pytest.mark.parametrize(("share", "just"), [(0.5, 0.010), (0.9, 0.041), (0.99, 0.0491)])
def test_tpot_is_of_each_request_however_many_tokens_it_has(share, just):
    """By tokens it would be 10 ms at p90."""
    loose = Limit(2.0, 0.99)
    assert judge(loose, Limit(just + 1e-9, share)).holds
    late = judge(loose, Limit(just - 1e-4, share))
    assert (late.holds_ttft, late.holds_tpot, late.holds) == (True, False, False)


def test_percentiles_are_told_by_their_names():
    found = judge(Limit(1.0), Limit(1.0))
    assert found.ttft == pytest.approx({"p50": 0.55, "p90": 0.91, "p99": 0.991})
    assert found.tpot == pytest.approx({"p50": 0.010, "p90": 0.041, "p99": 0.0491})
    assert found.requests == 10


def test_requests_before_the_system_is_full_are_not_judged_and_lost_ones_break_the_limits():
    found = judge(Limit(0.9, 0.99), Limit(1.0), begin=3.0)  # the request of 1.0 s came before
    assert (found.requests, found.holds) == (7, True)
    lost = TEN.assign(status=["rejected" if place == 4 else "completed" for place in range(10)])
    found = judge(Limit(2.0), Limit(1.0), lost)
    assert (found.lost, found.holds_ttft, found.holds) == (1, True, False)


@pytest.mark.parametrize(("which", "ttft", "tpot"), [("best", 0.5, 0.99), ("other", 0.99, 0.5)])
def test_a_proof_checks_the_percentiles_of_the_question(which, ttft, tpot):
    """Requests are played again, and counted by hand."""
    names = {0.5: "p50", 0.9: "p90", 0.99: "p99"}
    found = ds.plan(
        "llama_3_1_8b",
        "h100_sxm",
        ds.lengths(2048, 64),
        ttft=f"1 s@{names[ttft]}",
        tpot=f"20 ms@{names[tpot]}",
        rate=40,
    )
    design = getattr(found, which)
    trace, begin = requests_of(found, design, 0)
    table = simulate(deployed(design), trace, policy_of(design), options=run_options(design, None)).frame()
    table = table[table["arrival_s"] >= begin]
    first = np.sort((table["first_token_s"] - table["arrival_s"]).to_numpy())
    each = np.sort(((table["finish_s"] - table["first_token_s"]) / 63).to_numpy())
    shares = [float(np.quantile(values, share)) for values, share in ((first, ttft), (each, tpot))]
    run = prove(found, design, adapt=False).planned
    assert run.ttft[names[ttft]] == pytest.approx(shares[0])
    assert run.tpot[names[tpot]] == pytest.approx(shares[1])
    assert run.holds is (shares[0] <= 1.0 and shares[1] <= 0.02)


# Queues of which everything is known.


def work_of(ttft, tpot=None, **more):
    return Demand(lengths=ds.lengths(1024, 101), ttft=ttft, tpot=tpot or Limit(0.05), **more)


def prefill_of(work, *, time=0.1, hand_over=0.02, link_rate=math.inf):
    """An instance that prefills one prompt at a time."""
    return PrefillChoice(
        at=None,
        mapping=ds.Sharding(),
        work=work,
        batch=np.ones(1),
        busy=np.array([time]),
        ftl=np.array([[time]]),
        spread=0.0,
        weights=np.ones(1),
        host=0.005,
        hand_over=without_queue(np.array([hand_over]), np.ones(1)),
        link_rate=link_rate,
        memory=0.0,
        bound="",
    )


def decode_of(work, seats=64, step=0.02, more=0.0002, link_rate=math.inf):
    """An instance whose step takes a little longer with each sequence."""
    batch = np.arange(1.0, seats + 1)
    return DecodeChoice(
        at=None,
        mapping=ds.Sharding(),
        work=work,
        seats=seats,
        batch=batch,
        step=step + more * batch,
        link_rate=link_rate,
        memory=0.0,
        memory_seats=seats,
        bound="",
    )


def waits_of_one_server(gaps, service):
    """Lindley's recursion, unrolled: waits of requests at one server, first come, first served. [s]"""
    walk = np.concatenate([[0.0], np.cumsum(service - gaps)])
    return walk - np.minimum.accumulate(walk)


def queue(load, *, time=0.1, spread=1.0, count=400_000):
    """Waits at one server that is used for a share of the time, gaps of a squared variation. [s]"""
    gaps = np.random.default_rng(7).gamma(1 / spread, spread * time / load, count)
    return waits_of_one_server(gaps, time)[count // 20 :]


@pytest.mark.parametrize("load", [1 / 3, 2 / 3])
def test_ttft_is_its_terms(load):
    """Host, queue (Pollaczek and Khinchine), own pass, transfer and first step; p90 by a played queue."""
    choice = prefill_of(work_of(Limit(1.0)))
    waited = load * 0.1 / (2 * (1 - load))
    assert choice.mean_ttft(load / 0.1, 1) == pytest.approx(0.005 + waited + 0.1 + 0.02, rel=0.001)
    played = 0.125 + queue(load)
    assert choice.mean_ttft(load / 0.1, 1) == pytest.approx(played.mean(), rel=0.03)
    assert choice.ttft(load / 0.1, 1, 0.9) == pytest.approx(np.quantile(played, 0.9), rel=0.03)
    assert choice.ttft(load / 0.1, 1, 0.5) == pytest.approx(np.quantile(played, 0.5), rel=0.03)


def trace_of(times):
    size = times.size
    return ds.Trace(arrival=times, input_tokens=np.full(size, 2048), output_tokens=np.full(size, 256))


def test_a_trace_whose_rate_doubles_is_planned_at_the_higher_rate():
    """1,000 s at 20 requests/s, then 1,000 s at 60: three quarters of the requests see 60, 1.5 times the mean."""
    times = np.concatenate([np.arange(0, 1000, 1 / 20), np.arange(1000, 2000, 1 / 60)])
    trace = trace_of(times)
    assert unevenness(trace, trace.rate, 2.0, 0.9) == pytest.approx((1.0, 1.5), rel=0.01)
    bursty = ds.plan("llama_3_1_8b", "h100_sxm", trace, tpot="20 ms", rate=trace.rate)
    steady = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="20 ms", rate=1.5 * trace.rate)
    assert [pool.instances for pool in bursty.best.pools] == [pool.instances for pool in steady.best.pools]
    assert bursty.best.gpus == steady.best.gpus
    assert bursty.best.ttft["p90"] == pytest.approx(steady.best.ttft["p90"], rel=0.01)
    assert bursty.best.tpot["p99"] == pytest.approx(steady.best.tpot["p99"], rel=0.01)


def test_few_requests_tell_of_no_bursts_and_a_surge_lasts_ten_limits():
    """400 requests at least are a surge: 800 are two, of which the second, 600 in a tenth of the time, is seen."""
    assert unevenness(trace_of(np.array([0.0, 3.0])), 1.0, 2.0, 0.9) == pytest.approx((1.0, 1.0))
    two = np.concatenate([np.linspace(0.0, 10.0, 200, endpoint=False), np.linspace(10.0, 20.0, 600)])
    assert unevenness(trace_of(two), 40.0, 1.0, 0.9)[1] == pytest.approx(600 / 400)
    assert unevenness(trace_of(two), 40.0, 1.0, 0.2)[1] == pytest.approx(1.0)  # 0.5 of the mean, and never below it
    assert unevenness(trace_of(two), 40.0, 2.0, 0.9)[1] == pytest.approx(1.0)  # one surge: ten limits are 800 requests
    silent = np.concatenate([np.arange(0.0, 20.0, 0.025), np.arange(60.0, 80.0, 0.025)])  # 800, none, none, 800
    assert unevenness(trace_of(silent), 20.0, 1.0, 0.9) == pytest.approx((1.0, 800 / 400))


AT = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")


def ahead(steps):
    """An engine that forms so many steps ahead."""
    return replace(AT, overheads=replace(AT.overheads, steps_ahead=steps))


def handed(transfer, steps):
    """Hand-over where 10 requests/s of 2 s each decode, so that 20 run on average (Poisson); each adds 0.5 ms."""
    taker = replace(decode_of(work_of(Limit(1.0)), step=0.01, more=0.0005), at=ahead(steps))
    sender = replace(prefill_of(work_of(Limit(1.0))), at=AT)
    wire = Wire(bandwidth=1e30, latency_s=transfer, descriptor_s=0.0, inside=False)
    (made,), (taken,) = linked([sender], [taker], Cache(1.0, 0.0), wire)
    return handing(made, taken, 10.0, 1).hand_over, running_steps(taken, 10.0, 1)


@pytest.mark.parametrize("transfer", [0.0, 0.2])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_hand_over_is_that_of_requests_that_come_anywhere_in_a_step(transfer, steps):
    """It waits for what is left of a step, is seen after a step or what is left of one, and takes a step."""
    found, (times, weights) = handed(transfer, steps)
    rng = np.random.default_rng(1)
    step, first, second = rng.choice(times, 200_000, p=weights), *rng.uniform(size=(2, 200_000))
    drawn = step * (1 + steps + first) + (step if not transfer else transfer + step * second)
    assert found.mean == pytest.approx(drawn.mean(), rel=1e-3)
    for share in (0.5, 0.9, 0.95, 0.99):
        assert found.at(share) == pytest.approx(np.quantile(drawn, share), rel=0.01)


@pytest.mark.parametrize(
    ("sends", "takes", "slower", "steps"), [(1, 2, 1, 0), (2, 1, 1, 1), (2, 4, 2, 1), (4, 4, 4, 0)]
)
def test_a_hand_over_takes_as_long_as_the_slower_end_and_the_first_step(sends, takes, slower, steps):
    """Of 0.2 GB over links of 0.5 GB/s of each GPU, and two steps of 30 ms, or three where one is formed ahead.

    Half a step passes until room is reserved, half a one until the cache is seen: all of one where it comes within it.
    """
    work = work_of(Limit(1.0))
    sender = replace(prefill_of(work, hand_over=0.0), at=AT, mapping=ds.Sharding(tp_attn=sends, tp_ffn=sends))
    at, joined = ahead(steps), 0.06 + 0.03 * steps
    taker = replace(decode_of(work, step=0.03, more=0.0), at=at, mapping=ds.Sharding(tp_attn=takes, tp_ffn=takes))
    wire = Wire(bandwidth=0.5e9, latency_s=0.003, descriptor_s=0.0, inside=False)
    (made,), (taken,) = linked([sender], [taker], Cache(0.2e9, 0.0), wire)
    slow, moved = handing(made, taken, 1.0, 1), 0.003 + 0.4 / slower
    assert slow.hand_over.mean == pytest.approx(moved + joined)
    (near,), _ = linked([sender], [taker], Cache(0.2e9, 0.0), wire._replace(bandwidth=1e12))
    assert handing(near, replace(taken, link_rate=1e9), 1.0, 1).hand_over.mean == pytest.approx(0.015 + joined)
    assert slow.mean_ttft(1.0, 1) == pytest.approx(made.mean_ttft(1.0, 1) + moved + joined)
    assert made.link_rate == pytest.approx(2.5 * sends)
    assert taken.link_rate == pytest.approx(2.5 * takes)
    assert not replace(made, batch=np.ones(1), busy=np.array([1e-6])).holds(2.6 * sends, 1)
    assert taken.holds(2.4, 1)
    assert not replace(taken, link_rate=2.3).holds(2.4, 1)
