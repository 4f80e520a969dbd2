"""DOPD by hand: sizes, batches by length, ultra-short prompts, resizing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from sites import SIMPLE, deployment, served, site

from disagg_sim.physics.setup import setup
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.policies.dopd.sizes import LengthAware, Profile, kingman_wait, matching_prefill
from disagg_sim.simulation.policies.loads import least_uncached
from disagg_sim.simulation.policies.pools import Sizes
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from lab.studies.dopd.claims import decode_concurrency, prefill_decode_ratio

#: 10 ms a step, 1 ms a sequence that decodes, 0.1 ms a prompt token; 22,000 tokens of memory.
PROFILE = Profile(prefill=SIMPLE, decode=SIMPLE, tokens=22_000.0, graph=256)


@pytest.mark.parametrize(
    ("rule", "load", "outputs", "sizes"),
    [
        ("mended", 50, 200, Sizes(2, 3)),  # 16.7 on each of three, a step of 17 takes 27 ms: 50 * 0.110/(200 * 0.027)
        ("printed", 50, 200, Sizes(2, 3)),  # a step of 50 takes 60 ms: 50 * 0.110/(200 * 0.060) = 0.46, times three
        ("published", 50, 200, Sizes(1, 3)),  # a step of 20 takes 30 ms: 20 * 0.110/(200 * 0.030) = 0.37, whatever n_d
        ("published", 500, 200, Sizes(1, 25)),
        ("published", 50, 20, Sizes(4, 3)),  # 21 * 0.110/(20 * 0.031) = 3.7
        ("little", 9.0, 200, Sizes(1, 3)),  # a decode instance ends 3.33 requests a second, one of prefill 9.1
        ("little", 10.1, 200, Sizes(2, 4)),
    ],
)
def test_sizes_by_hand(rule, load, outputs, sizes):
    """cc = 22,000/1,100 = 20, so that 50 requests take 3 decode instances; a prompt takes 110 ms."""
    assert PROFILE.concurrency(1000, 200) == 20
    assert PROFILE.sizes(load, 1000, outputs, rule=rule) == sizes
    assert matching_prefill(50, 3, prefill_s=0.11, step_s=0.06, outputs=200, rule="printed") == pytest.approx(1.375)


def test_sizes_agree_with_the_ratio_of_the_analytic_model():
    ratio = prefill_decode_ratio(120.0, prefill_time=0.1, step_time=0.04, osl=150.0)
    found = matching_prefill(3 * 120.0, 3, prefill_s=0.1, step_s=0.04, outputs=150.0, rule="mended")
    assert found == pytest.approx(3 * ratio)


def test_a_correction_acts_on_the_times():
    assert PROFILE.sizes(50, 1000, 200, correction=(2.0, 1.0)) == Sizes(3, 3)
    assert PROFILE.sizes(50, 1000, 200, correction=(2.0, 2.0)) == Sizes(2, 3)


def test_little_load_and_much_memory_still_take_one_each():
    assert PROFILE.sizes(0.0, 1000, 200) == Sizes(1, 1)
    assert PROFILE.concurrency(10, 2) == PROFILE.graph


# --- equations (11) to (15) of the paper: 68.45e9 weights in fp8 and two tables of 1.05e9 in 2 B are 72.65 GB ----

PAPER = setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv")


def test_memory_is_what_the_weights_leave_of_two_gpus():
    found = decode_concurrency(PAPER, isl=1000, osl=150)
    assert found.memory_bytes == pytest.approx(2 * 0.9 * 79.65 * 2**30 - 72.65e9, rel=1e-3)
    assert found.bandwidth_bytes == pytest.approx(0.08 * 0.6 * 2 * 3.35e12)
    assert found.requests == pytest.approx(found.memory_bytes / (1075 * 327_680))
    assert found.memory_bound


def test_bandwidth_limits_a_tight_token_limit():
    tight = decode_concurrency(PAPER, isl=1000, osl=150, tpot_limit=0.01)
    assert not tight.memory_bound


def test_the_ratio_balances_both_sides():
    """100 requests decode 50 tokens in 50 * 20 ms = 1 s; a prefill of 30 ms serves 33.3 of them in that time: 3."""
    assert prefill_decode_ratio(100, prefill_time=0.03, step_time=0.02, osl=50) == pytest.approx(3.0)
    assert prefill_decode_ratio(1000, prefill_time=0.03, step_time=0.02, osl=50) == pytest.approx(2.56 * 3.0)


# --- batches --------------------------------------------------------------------------------------------------------


def kept(tokens, *, arrivals=None, now=0.0):
    """What a batch former looks at."""
    return SimpleNamespace(
        input_tokens=tokens, arrival_s=arrivals or [0.0] * len(tokens), now=now, total_blocks=np.array([100])
    )


def former(batches="knapsack", threshold=1000, wait=0.4):
    here = site(Engine(), deployment(prefill=1, decode=1), table=SIMPLE)
    found = LengthAware(here, batches, threshold)
    found.wait_s = wait
    found.waiting_tokens(kept([]))
    return found


def formed(forming, view, waiting):
    return forming.form(view, 0, tuple(waiting)).requests


def test_short_prompts_run_together_up_to_the_threshold():
    """400 + 300 + 200 fit; with 500 more the batch is full, and the densest go: 200, 300, 400; 500 is passed over."""
    view = kept([400, 300, 200, 500, 600])
    assert formed(former(), view, [0, 1, 2]) == (2, 1, 0)
    assert formed(former(), view, [0, 1, 2, 3, 4]) == (2, 1, 0)


def test_a_prompt_that_waits_is_worth_more():
    """600 tokens after 3 s of a limit of 2 s: 2.5/600 beats 1/400."""
    view = kept([400, 600, 500], arrivals=[3.0, 0.0, 3.0], now=3.0)
    assert formed(former(), view, [1, 0, 2]) == (1, 0)


def test_a_long_prompt_runs_alone_and_the_batch_stays_until_its_time_is_up():
    """The batch began at 1.0 s; half of the queueing time is 0.2 s."""
    tokens = [100, 1500, 1600, 1700]
    forming = former()
    assert formed(forming, kept(tokens, now=1.0, arrivals=[1.0] * 4), [0, 1, 2, 3]) == (1,)
    assert formed(forming, kept(tokens, now=1.15, arrivals=[1.0] * 4), [0, 2, 3]) == (2,)
    assert formed(forming, kept(tokens, now=1.21, arrivals=[1.0] * 4), [0, 3]) == (0,)
    assert formed(forming, kept(tokens, now=1.3, arrivals=[1.0] * 4), [3]) == (3,)


def test_a_batch_also_runs_while_it_can_be_in_time():
    """Arrived at 0, limit 2 s, a full batch takes 0.11 s: from 1.89 s on it goes before a long prompt."""
    tokens, forming = [100, 1500], former(wait=math.inf)
    assert formed(forming, kept(tokens, now=1.8), [0, 1]) == (1,)
    assert formed(former(wait=math.inf), kept(tokens, now=1.9), [0, 1]) == (0,)


def test_batches_in_order_stop_at_the_threshold_and_hold_one_at_least():
    view = kept([100, 1500, 300, 600, 200])
    assert formed(former("fifo"), view, [1, 0]) == (1,)
    assert formed(former("fifo"), view, [0, 2, 3, 4]) == (0, 2, 3)
    assert formed(former("fifo"), view, [0, 1]) == (0,)


def test_waiting_tokens_are_counted():
    forming = former()
    for tokens in (400, 300, 1500):
        forming.arrived(0, tokens)
    formed(forming, kept([400, 300, 1500]), [0, 1, 2])
    assert forming.waiting_tokens(kept([])).tolist() == [700]
    formed(forming, kept([400, 300]), [0, 1])
    assert forming.waiting_tokens(kept([])).tolist() == [0]


def test_kingman_by_hand():
    """Gaps of 1 and 3 s, c_a^2 = 0.25; services of 1 s: rho 0.5, so 1 * 0.125 * 1 s; two servers: rho 0.25, 0.5 s."""
    assert kingman_wait([1.0, 3.0], np.ones(3), servers=1) == pytest.approx(0.125)
    assert kingman_wait([1.0, 3.0], np.ones(3), servers=2) == pytest.approx(0.25 / 0.75 * 0.125 * 0.5)
    assert kingman_wait([0.5, 0.5], np.ones(3), servers=1) == math.inf
    assert kingman_wait([], np.ones(1), servers=1) == math.inf


# --- runs -----------------------------------------------------------------------------------------------------------

PAIR = deployment(prefill=1, decode=1)
ROOM = deployment(prefill=1, decode=1, colocated=6)


def test_an_ultra_short_prompt_stays_on_the_decode_instance():
    """128 tokens in a step of 10 + 12.8 ms there; 129 go to the prefill instance and over the link, 1,000 tokens/s."""
    result = served([(0.0, 128, 3), (0.0, 129, 3)], "dopd", PAIR, table=SIMPLE)
    assert result.requests.prefill_instance.tolist() == [1, 0]
    assert result.requests.transfer_s.tolist() == pytest.approx([0.0, 0.129])
    assert result.requests.first_token_s[0] == pytest.approx(0.0228)


def test_short_prompts_that_wait_come_together():
    """The first prompt runs alone for 60 ms; three that came meanwhile run in one pass of 10 + 90 ms."""
    requests = [(0.0, 500, 2), (0.01, 300, 2), (0.02, 300, 2), (0.03, 300, 2)]
    result = served(requests, "dopd", PAIR, table=SIMPLE)
    assert result.requests.first_token_s.tolist() == pytest.approx([0.06, 0.16, 0.16, 0.16])


def test_a_prompt_goes_to_the_prefill_instance_that_is_free_first():
    """2,000 tokens take 210 ms and 1,500 take 160 ms: instance 1 begins the third prompt, 0 the fourth."""
    requests = [(0.0, 2000, 2), (0.0, 1500, 2), (0.0, 1600, 2), (0.0, 1200, 2)]
    r = served(requests, "dopd", deployment(prefill=2, decode=1), table=SIMPLE, link_bandwidth=1e15).requests
    assert r.prefill_instance.tolist() == [0, 1, 1, 0]
    assert r.prefill_start_s.tolist() == pytest.approx([0.0, 0.0, 0.16, 0.21])


@pytest.mark.parametrize(("decode_at", "chosen"), [("prefill", [1, 1, 2]), ("arrival", [1, 2, 1])])
def test_the_decode_instance_is_chosen_at_arrival_or_when_the_prefill_is_done(decode_at, chosen):
    """The second prompt takes from 0.1 to 0.31 s, and the first answer ends between: at its arrival instance 1 has 107
    tokens, when it is computed none. The third arrives before that, and 2,000 tokens are promised to instance 2.
    """
    requests = [(0.0, 100, 20), (0.1, 2000, 30), (0.11, 100, 20)]
    policy = policy_named("dopd", decode_at=decode_at, local_tokens=0)
    r = served(requests, policy, deployment(prefill=1, decode=2), table=SIMPLE, link_bandwidth=1e15).requests
    assert r.decode_instance.tolist() == chosen


def test_a_request_decodes_where_the_fewest_of_its_tokens_have_to_be_computed():
    """500 and 100 tokens in decode; of a prompt of 1,000 the first instance remembers 640: 860 against 1,100."""
    cached = {0: 640, 1: 0}
    view = SimpleNamespace(
        input_tokens=[1000],
        decode=np.array([0, 1]),
        remembers=True,
        refresh=lambda: None,
        cached_everywhere=lambda request: np.array([cached[0], cached[1]]),
        running_tokens=np.array([500, 100]),
        running_requests=np.array([1, 1]),
        coming_tokens=np.zeros(2, int),
        queued_requests=np.zeros(2, int),
        seats=np.array([10, 10]),
    )
    assert least_uncached(view, 0) == 0
    cached[0] = 384  # 1,116
    assert least_uncached(view, 0) == 1


def test_pools_follow_the_load_and_new_instances_take_their_time():
    busy = [(k * 0.05, 800, 20) for k in range(1200)]
    policy = policy_named("dopd", window_s=5.0, action_s=10.0, check_s=1.0)
    result = served(busy, policy, ROOM, table=SIMPLE, options=RunOptions(start_up_s=2.0), link_bandwidth=1e15)
    first = result.decisions[0]
    assert (first.time_s, first.kind) == (10.0, "start")
    started = result.instances.start_s > 0
    assert result.instances.role[started].min() == 0
    assert (result.requests.status == Outcome.COMPLETED).all()
    for k in np.flatnonzero(started):
        mine = result.requests.prefill_instance == k
        if mine.any():
            assert result.requests.prefill_start_s[mine].min() >= result.instances.start_s[k] + 2.0
    assert result.samples.gpus.max() <= ROOM.gpus


def test_pools_shrink_when_the_load_is_gone():
    calm = [(k * 1.0, 300, 10) for k in range(40)]
    wide = deployment(prefill=3, decode=3)
    result = served(calm, policy_named("dopd", window_s=5.0, action_s=10.0), wide, table=SIMPLE)
    assert [decision.kind for decision in result.decisions] == ["stop"] * 4
    assert (result.requests.status == Outcome.COMPLETED).all()
