"""Arrow on unequal instances by hand, and that on equal ones every choice is the paper's."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import SIMPLE, deployment, site
from test_arrow import BLOCKS, SLO, WHOLE, D, P, View, begun, look, scheduler

from disagg_sim.domain import Sharding
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.ledger import hand_over, place
from disagg_sim.simulation.policies.arrow.policy import Arrow, GlobalScheduler
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.wishes import Limits, Move

SMALL, LARGE = Sharding(), Sharding(tp_attn=4, tp_ffn=4)
#: A quarter of the time of ``SIMPLE``: 400 tokens take 12.5 ms in place of 50.
FAST = StepTable.affine(step=0.0025, per_sequence=0.00025, per_token=0.000025)
#: Every step takes 60 ms, more than the TPOT limit of 50.
SLOW = StepTable.affine(step=0.060, per_sequence=0.001, per_token=0.0001)


def ordered(arrow, view):
    """The choices of a scheduler, with instances in the order of what the view shows."""
    arrow.choices.renew(view.prefill, view.decode)
    return arrow.choices


def unequal_site(served_by, *, small=SIMPLE, slo=SLO, engine=None):
    """Instances of one GPU have 16,000 tokens, those of four GPUs four times as many and ``FAST``."""
    here = site(engine or Engine(0), served_by, table=SIMPLE, blocks=BLOCKS, slo=slo, link_bandwidth=1e12)
    return replace(
        here,
        tables=lambda mapping, sequences: FAST if mapping.gpus == 4 else small,
        blocks=lambda mapping, limits: mapping.gpus * BLOCKS,
    )


def unequal(*mappings, small=SIMPLE, **options):
    """A scheduler of such instances."""
    limits = Limits(token_budget=WHOLE)
    here = unequal_site(deployment(prefill=1, decode=1), small=small)
    return GlobalScheduler(Arrow(**options), here, ByRole(prefill=limits, decode=limits), mappings)


def test_a_prompt_goes_where_it_is_done_first_and_not_to_the_shortest_queue():
    """Instance 0 is idle and takes 50 ms; instance 1 is busy for 20 ms more and takes 12.5: done after 32.5."""
    arrow, view = unequal(SMALL, LARGE, SMALL), View([P, P, D])
    arrow.ledger["free_s"][1], view.queued_prompt_tokens[1] = 0.020, 100
    assert arrow.place(view, 0).instance == 1
    assert arrow.ledger["free_s"][1] == pytest.approx(0.0325)
    arrow.ledger["free_s"][1] = 0.040
    assert arrow.place(view, 1).instance == 0


def test_a_late_prompt_flips_an_instance_only_where_it_is_done_sooner():
    """In P it is done after 110 ms, limit 100; of D the small one with a queue would need 120: it stays."""
    arrow, view = unequal(SMALL, SMALL, LARGE, SMALL), View([P, D, D, D], queued_prompt_tokens=[400, 400, 0, 0])
    arrow.ledger["free_s"][:2] = 0.060, 0.070
    view.running_tokens[2] = 5000
    assert arrow.place(view, 0).wishes[0][:2] == (3, P)  # pool D, the least share
    arrow, view.running_tokens[3] = unequal(SMALL, SMALL, LARGE, SMALL), 5000
    arrow.ledger["free_s"][:2] = 0.060, 0.070
    assert arrow.place(view, 0).wishes[0][:2] == (2, P)


def test_decode_goes_where_the_request_leaves_the_least_share_taken():
    """Instance 1 has 3,000 + 400 of 16,000 tokens, instance 2 9,000 + 400 of 64,000."""
    arrow, view = unequal(SMALL, SMALL, LARGE), View([P, D, D], running_tokens=[0, 3000, 9000])
    begun(arrow, view, 0, 1)
    assert arrow.proceed(view, 0, 0).instance == 2
    view.running_tokens[2] = 16_000
    assert arrow.proceed(view, 1, 0).instance == 1


def test_an_instance_that_never_decodes_in_time_does_so_only_where_all_are_so():
    """Steps of 60 ms against a limit of 50: the small ones keep to prefill."""
    arrow, view = unequal(SMALL, SMALL, LARGE, small=SLOW), View([P, D, D], running_tokens=[0, 0, 60_000])
    assert arrow.ledger["held"][:].tolist() == [-1.0, -1.0, 64_000.0]
    begun(arrow, view, 0)
    assert arrow.proceed(view, 0, 0).instance == 2
    view = View([P, P, D], running_tokens=[0, 0, 70_000], prefill_tokens=[0, 0, 0])
    begun(arrow, view, 1)
    assert arrow.proceed(view, 1, 0).wishes == ()  # too much for instance 2, and nobody who could help
    assert look(arrow, view, 0.045) == []
    alike = unequal(SMALL, SMALL, small=SLOW)
    assert alike.ledger["held"][:].tolist() == [0.0, 0.0]


def test_the_mean_interval_counts_an_instance_by_what_it_decodes():
    """60 ms on one of 16,000 tokens and 20 ms on one of 64,000: (60 + 4 * 20) / 5 = 28 ms."""
    arrow, view = unequal(SMALL, SMALL, LARGE), View([P, D, D])
    view.now, view.decode_steps[1:], view.decode_time[1:] = 1.0, (10, 30), (0.6, 0.6)
    arrow.flips(view)
    assert arrow._mean_interval == pytest.approx(0.028)


def test_steps_that_are_slow_by_nature_are_no_call_for_help():
    """Every 45 ms a token, above 0.8 of the limit: help at 9,000 of 16,000 tokens, none at 7,000."""
    for tokens, helped in ((9000, True), (7000, False)):
        arrow = unequal(SMALL, LARGE, SMALL)
        view = View([P, P, D], running_tokens=[0, 0, tokens], prefill_tokens=[0, 5, 0])
        assert bool(look(arrow, view, 0.045)) == helped


def waits(arrow, view, instance, requests, start):
    """Let prompts wait on an instance behind one that ends at ``start`` [s]."""
    arrow.ledger["free_s"][instance], view.queued_prompt_tokens[instance] = start, 1
    for request in requests:
        start += 0.010 + 0.0001 * view.input_tokens[request]
        arrow.ledger["free_s"][instance] = start
        arrow.choices.book(request, start)
        view.queued_prompt_tokens[instance] += view.input_tokens[request]
    view.waiting[instance] = requests


def test_prompts_that_wait_late_move_from_the_tail_to_an_instance_that_is_free():
    """Six behind one that lasts until 5 s; the large one is free and takes 12.5 ms each, from the last on."""
    arrow, view = unequal(SMALL, LARGE, SMALL), View([P, P, D], prefill_tokens=[1, 1, 0])
    waits(arrow, view, 0, [0, 1, 2, 3, 4, 5], 5.0)
    view.now = 1.0
    moves = arrow.flips(view)
    assert [wish[:3] for wish in moves] == [(request, 0, 1) for request in (5, 4, 3, 2, 1, 0)]
    assert all(isinstance(wish, Move) for wish in moves)
    assert arrow.ledger["free_s"][0] == pytest.approx(5.0)
    assert arrow.choices.ends[0] == pytest.approx(1.0 + 6 * 0.0125)


def test_no_more_prompts_move_than_a_look_lasts_and_none_that_is_in_time_or_gains_less():
    arrow, view = unequal(SMALL, LARGE, SMALL), View([P, P, D], prefill_tokens=[1, 1, 0])
    view.input_tokens = [10_300] * 20  # 1.04 s on the small one, 0.26 on the large one: the fifth would wait 1.04 s
    waits(arrow, view, 0, list(range(20)), 5.0)
    view.now = 1.0
    assert len(arrow.flips(view)) == 4
    for start, ttft in ((5.0, 9.0), (1.8, 0.1)):  # in time where they are; sooner by less than a look
        arrow, view = unequal(SMALL, LARGE, SMALL), View([P, P, D], prefill_tokens=[1, 1, 0])
        arrow._ttft, view.now = ttft, 1.0
        waits(arrow, view, 0, [0], start)
        assert arrow.flips(view) == []


def test_without_a_free_queue_an_instance_of_decode_flips_for_those_that_wait():
    arrow, view = unequal(SMALL, LARGE, SMALL), View([P, D, D])
    waits(arrow, view, 0, [0, 1], 5.0)
    view.now, arrow._computed = 1.0, np.array([0, 0, 0])
    flip, *moves = arrow.flips(view)
    assert flip[:2] == (1, P)
    assert [wish[:3] for wish in moves] == [(1, 0, 1), (0, 0, 1)]


def test_an_idle_instance_of_decode_takes_prompts_that_wait_even_when_the_others_are_full():
    """The load of decode is high on instance 1, instance 2 has nothing at all."""
    arrow, view = unequal(SMALL, SMALL, LARGE), View([P, D, D], running_tokens=[0, 40_000, 0])
    waits(arrow, view, 0, [0], 5.0)
    view.now = 1.0
    flip, move = arrow.flips(view)
    assert flip[:2] == (2, P)
    assert flip.reason == "idle, while prompts wait late on instance 0"
    assert move[:3] == (0, 0, 2)


@pytest.mark.parametrize(
    ("moves", "equal", "moved"),
    [("unequal", True, False), ("always", True, True), ("never", False, False), ("unequal", False, True)],
)
def test_the_option_says_between_which_instances_prompts_move(moves, equal, moved):
    arrow = scheduler(3, moves=moves) if equal else unequal(SMALL, LARGE, SMALL, moves=moves)
    view = View([P, P, D], prefill_tokens=[1, 1, 0])
    waits(arrow, view, 0, [0], 5.0)
    view.now = 1.0
    assert bool(arrow.flips(view)) == moved


def test_prompts_stay_where_instances_remember_prefixes():
    arrow, view = unequal(SMALL, LARGE, SMALL), View([P, P, D], prefill_tokens=[1, 1, 0])
    waits(arrow, view, 0, [0], 5.0)
    view.now, view.remembers = 1.0, True
    assert arrow.flips(view) == ()


def test_nobody_gets_a_prompt_that_its_memory_cannot_hold():
    arrow, view = unequal(SMALL, LARGE, SMALL, LARGE), View([P, P, D, D], queued_prompt_tokens=[0, 9, 0, 0])
    view.input_tokens, arrow.ledger["free_s"][1] = [16_000] * 2, 9.0
    assert arrow.place(view, 0).wishes[0][:2] == (3, P)
    view.running_tokens[3] = 40_000
    arrow.choices.book(1, 0.0)
    assert arrow.proceed(view, 1, 0).instance == 3


# --- equal instances: the paper -------------------------------------------------------------------------------------

COUNT = 4
NUMBERS = st.lists(st.integers(0, 5), min_size=COUNT, max_size=COUNT)
TIMES = st.lists(st.floats(0.0, 0.2), min_size=COUNT, max_size=COUNT)


@given(queued=NUMBERS, running=NUMBERS, free=TIMES, ahead=TIMES, tokens=st.integers(1, 3000))
def test_on_equal_instances_a_prompt_goes_to_the_least_delay_as_printed(queued, running, free, ahead, tokens):
    """Algorithm 1 in plain words: least delay of P if in time, else of D->P if in time, else of P."""
    arrow, view = scheduler(COUNT), View([P] * COUNT, queued_prompt_tokens=queued, running_requests=running)
    arrow.ledger["free_s"][:], arrow.ledger["ahead_s"][:] = free, ahead
    delay = [max(f + a - 0.05, 0.0) if q else 0.0 for f, a, q in zip(free, ahead, queued, strict=True)]
    pools = [[i for i in range(COUNT) if bool(running[i]) == mixed] for mixed in (False, True)]
    best = [min(pool, key=lambda i: delay[i]) for pool in pools if pool]
    time = 0.010 + 0.0001 * tokens
    in_time = [i for i in best if delay[i] + time <= SLO.ttft - 1e-9]
    if any(abs(delay[i] + time - SLO.ttft) < 1e-9 for i in best):
        return
    found, _, late = place(view.home, ordered(arrow, view).queues, arrow.ledger, tokens, SLO.ttft, 0.05)
    assert (found if found >= 0 else -1) == (in_time[0] if in_time else -1)
    assert late == (in_time or best)[0]


@given(
    running=st.lists(st.integers(0, 20_000), min_size=COUNT, max_size=COUNT),
    prompts=NUMBERS,
    interval=st.lists(st.sampled_from([0.0, 0.04, 0.06]), min_size=COUNT, max_size=COUNT),
    more=st.integers(1, 9000),
)
def test_on_equal_instances_decode_goes_to_the_fewest_tokens_as_printed(running, prompts, interval, more):
    """Algorithm 2: fewest tokens of D if within MaxRunningTokens and the TPOT limit, else of P->D; else the fewer."""
    arrow, view = scheduler(COUNT), View([D] * COUNT, running_tokens=running, queued_prompt_tokens=prompts)
    arrow.ledger["interval_s"][:] = interval
    pools = [[i for i in range(COUNT) if bool(prompts[i]) == mixed] for mixed in (False, True)]
    best = [min(pool, key=lambda i: running[i]) for pool in pools if pool]
    inside = [i for i in best if running[i] <= 16_000 and interval[i] <= SLO.tpot]
    orders = ordered(arrow, view).queues, arrow.choices.tokens
    found = hand_over(view.home, orders, arrow.ledger, more, SLO.tpot, view.now, 0)
    assert found == (inside[0] if inside else -1 - min(best, key=lambda i: running[i]))
