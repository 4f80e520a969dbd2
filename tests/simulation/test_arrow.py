"""Arrow's algorithms by hand: pools, placements, flips and the monitor at chosen loads."""

from types import SimpleNamespace

import numpy as np
import pytest
from sites import SIMPLE, arrays_of, deployment, served, site

from disagg_sim.domain import Sharding, Slo
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.addresses import addresses_of
from disagg_sim.simulation.kernel.layout import InstanceRecord, dtype_of
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.account import Predictor, max_running_tokens
from disagg_sim.simulation.policies.arrow.policy import Arrow, GlobalScheduler
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.view import locked
from disagg_sim.simulation.wishes import LATER, Leg, Limits, Role, State

P, D = Role.PREFILL, Role.DECODE
WHOLE = 200_000  # a budget that no prompt exceeds, so that p is exactly linear [token]
SLO = Slo(ttft=0.1 * (1 + 1e-9), tpot=0.05)  # two prompts of 50 ms fit, however a processor rounds the fit of p
BLOCKS = 1000  # 16,000 tokens

#: Of ``ClusterView``: the loads of instances, which are the fields of their records.
COLUMNS = (
    *("queued_requests", "queued_prompt_tokens", "queued_context_tokens", "running_requests", "running_tokens"),
    *("coming_tokens", "decode_steps", "decode_time", "prefill_tokens"),
)


class View(SimpleNamespace):
    """Instances with these roles, and loads that a test sets: names of ClusterView, whose arrays are read-only, too."""

    def __init__(self, roles, **columns):
        count = len(roles)
        super().__init__(
            now=0.0,
            roles=list(roles),
            states=[State.READY] * count,
            input_tokens=[400] * 20,
            arrival_s=[0.0] * 20,
            remembers=False,
            waiting={},
            inst=np.zeros(count, dtype_of(InstanceRecord)),
        )
        self.arrays = arrays_of(self.inst)
        self.home = locked(addresses_of(self.arrays))
        for name in COLUMNS:
            setattr(self, name, self.inst[name.replace("_time", "_s")])
        for name, values in columns.items():
            getattr(self, name)[:] = values
        self.inst = locked(self.inst)

    @property
    def waiting_prompt_tokens(self):
        return self.queued_prompt_tokens.copy()

    def of(self, role):
        return locked(np.array([i for i, each in enumerate(self.roles) if each is role], np.intp))

    def refresh(self):
        """The loads are the present ones already."""

    def waiting_prompts(self, instance):
        """Requests that a test has let wait there."""
        return np.array(self.waiting.get(instance, []), np.int64)

    prefill = property(lambda self: self.of(P))
    decode = property(lambda self: self.of(D))


def scheduler(count, *, flip_s=0.0, **options):
    """At affine times: a prompt of 400 tokens takes 50 ms; an instance holds 16,000 tokens in decode."""
    more = {"table": SIMPLE, "blocks": BLOCKS, "slo": SLO, "options": RunOptions(flip_s=flip_s)}
    here = site(Engine(0), deployment(prefill=1, decode=1), **more)
    steps = ByRole(prefill=Limits(token_budget=WHOLE), decode=Limits(token_budget=WHOLE))
    return GlobalScheduler(Arrow(token_budget=WHOLE, **options), here, steps, [Sharding()] * count)


def test_the_predictor_fits_a_linear_law_exactly():
    found = Predictor.fit(SIMPLE, WHOLE)
    assert found == pytest.approx((0.010, 0.0001, 0.0), abs=1e-12)
    assert found(400) == pytest.approx(0.050)


def test_the_fit_is_of_relative_errors_over_two_lengths_a_doubling():
    """10 ms a step of 1,000 tokens and 0.1 ms a token: steps beyond the first fit no line."""
    lengths = np.array([round(32 * 2.0 ** (half / 2)) for half in range(25)])
    times = 0.01 * (-(-lengths // 1000)) + 1e-4 * lengths
    expected = np.polyfit(lengths, times, 2, w=1 / times)[::-1]
    assert Predictor.fit(SIMPLE, 1000) == pytest.approx(tuple(expected), rel=1e-6)


@pytest.mark.parametrize(("corrects", "late"), [(True, 0.030), (False, 0.0)])
def test_what_a_prompt_took_beyond_its_prediction_moves_the_clock_of_its_instance(corrects, late):
    """A prompt of 400 tokens is predicted to take 50 ms and takes 80."""
    arrow, view = scheduler(4, corrects=corrects), View([P, P, D, D])
    arrow.place(view, 0)
    view.now = 0.080
    arrow.proceed(view, 0, 0)
    assert arrow.ledger["ahead_s"].tolist() == pytest.approx([late, 0.0, 0.0, 0.0])


def test_max_running_tokens_is_bound_by_memory_or_by_the_limit():
    """A step of n at context c takes 10 + n + 0.001 n c ms: 50 ms at n c = 39,000 for n = 1, 36,000 for 4."""
    table = StepTable.affine(step=0.010, per_sequence=0.001, per_context=1e-6, max_sequences=4)
    assert max_running_tokens(table, 10_000, 4, 0.050) == pytest.approx(39_000, abs=1)
    assert max_running_tokens(table, 10_000, 4, 0.009) == 0
    assert max_running_tokens(table, 1000, 4, 0.050) == 16_000


def test_a_late_prompt_flips_the_lightest_that_still_prefills_else_the_lightest():
    full = {"queued_prompt_tokens": [400, 0, 0, 0], "running_tokens": [0, 30, 20, 10]}
    arrow, view = scheduler(4), View([P, D, D, D], **full)
    arrow.ledger["free_s"][0] = 1.0  # its queue lasts a second
    assert arrow.place(view, 0).wishes[0][:2] == (3, P)
    view.queued_prompt_tokens[1:3] = 5
    leg = arrow.place(view, 1)
    assert (leg.instance, leg.wishes[0][:2]) == (2, (2, P))


@pytest.mark.parametrize(
    ("roles", "loads"),
    [
        ([P, P, D], {}),  # the last of decode
        ([P, D, D], {"running_tokens": [0, 4000, 4001]}),  # 8,001 tokens on one of 16,000: more than half
        ([P, D, D], {"running_requests": [0, 64, 65]}),  # 129 sequences on one of 256
        ([P, D, D], {"running_tokens": [0, 4000, 0], "queued_context_tokens": [0, 0, 4001]}),
    ],
)
def test_without_an_instance_to_spare_a_prompt_is_late_in_the_pure_pool(roles, loads):
    arrow, view = scheduler(3), View(roles, queued_prompt_tokens=[400, 400, 0], **loads)
    arrow.ledger["free_s"][:2] = 1.0, 2.0
    assert arrow.place(view, 0) == Leg(0, 401, LATER, ())


def test_decode_stays_where_the_prefill_was_if_that_decodes_now():
    arrow, view = scheduler(3), View([P, D, D], running_tokens=[0, 500, 0])
    arrow.place(view, 0)
    view.roles[0] = D
    assert arrow.proceed(view, 0, 0) == Leg(0)


def begun(arrow, view, *requests):
    for request in requests:
        arrow.place(view, request)


def test_decode_goes_to_the_fewest_tokens_of_d_then_of_p_to_d():
    arrow, view = scheduler(4), View([P, D, D, D], running_tokens=[0, 300, 200, 100])
    begun(arrow, view, 0, 1, 2)
    view.queued_prompt_tokens[3] = 50  # P->D
    assert arrow.proceed(view, 0, 0).instance == 2
    view.coming_tokens[2] = 101
    assert arrow.proceed(view, 1, 0).instance == 1
    view.running_tokens[1:3] = 16_001
    assert arrow.proceed(view, 2, 0).instance == 3


def test_without_a_decode_instance_in_its_limits_one_of_prefill_flips_the_one_that_decodes_first():
    arrow, view = scheduler(4), View([P, P, P, D], running_tokens=[0, 0, 0, 20_000], running_requests=[0, 0, 1, 1])
    begun(arrow, view, 0, 1)
    leg = arrow.proceed(view, 0, 0)
    assert (leg.instance, leg.wishes[0][:2]) == (2, (2, D))
    view.roles[1] = view.roles[2] = D
    view.running_tokens[1:3] = 20_001, 20_002
    assert arrow.proceed(view, 1, 0) == Leg(3)  # the last of prefill is spared: the lightest


def test_the_printed_rule_does_not_see_what_waits():
    """16,001 tokens wait for 16,000 in memory, or all 256 sequences are taken: mended, an instance flips."""
    full = {"running_requests": [0, 0, 250], "queued_requests": [0, 0, 6]}
    for loads in ({"queued_context_tokens": [0, 0, 16_001]}, full):
        for mended in (True, False):
            arrow, view = scheduler(3, waiting_counts=mended), View([P, P, D], **loads)
            begun(arrow, view, 0)
            assert bool(arrow.proceed(view, 0, 0).wishes) == mended


def test_slow_flips_are_wished_once_and_not_used_at_once():
    arrow, view = scheduler(4, flip_s=10.0), View([P, D, D, D], queued_prompt_tokens=[400, 0, 0, 0])
    arrow.ledger["free_s"][0] = 1.0
    leg = arrow.place(view, 0)
    assert (leg.instance, leg.wishes[0][:2]) == (0, (1, P))
    view.roles[1], view.states[1] = P, State.FLIPPING
    view.__class__ = type("Ready", (View,), {"prefill": np.array([0]), "decode": np.array([2, 3])})
    assert arrow.place(view, 1).wishes == ()


def look(arrow, view, interval):
    """A second with decode steps of ``interval`` [s] on every instance of decode."""
    view.now += 1.0
    steps = round(1.0 / interval)
    view.decode_steps[view.decode] += steps
    view.decode_time[view.decode] += steps * interval
    return arrow.flips(view)


def test_late_tokens_in_three_looks_flip_an_instance_to_decode():
    arrow, view = scheduler(3, window_s=1.0), View([P, P, D], queued_prompt_tokens=[9, 9, 0])
    wishes = [look(arrow, view, interval) for interval in (0.1, 0.1, 0.01, 0.1, 0.1, 0.1)]
    assert [len(each) for each in wishes] == [0, 0, 0, 0, 0, 1]
    assert wishes[-1][0][:2] == (0, D)


def test_the_interval_is_a_mean_over_the_window():
    """Three looks of 20 ms and two of 100 ms: (150 steps, 3 s) and (20 steps, 2 s) are 5 s / 170 = 29.4 ms."""
    arrow, view = scheduler(2), View([P, D])
    for interval in (0.1, 0.02, 0.02, 0.02, 0.1, 0.1):
        look(arrow, view, interval)
    assert arrow.ledger["interval_s"][1] == pytest.approx(5 / 170)


def test_an_idle_instance_of_prefill_helps_a_busy_decode():
    """Tokens every 45 ms are above 0.8 of 50 ms; instance 1 computes, 0 and 2 do not, and 2 still decodes."""
    arrow, view = scheduler(4), View([P, P, P, D], running_requests=[0, 0, 2, 2])
    view.prefill_tokens[:] = 100, 100, 100, 0
    assert look(arrow, view, 0.045) == ()
    view.prefill_tokens[1] = 200
    (wish,) = look(arrow, view, 0.045)
    assert wish[:2] == (2, D)
    assert look(arrow, View([P, P, D], prefill_tokens=[0, 0, 0]), 0.035) == ()


def test_without_help_of_idle_instances_late_tokens_alone_flip_one():
    arrow, view = scheduler(4, idle_helps=False), View([P, P, P, D], running_requests=[0, 0, 2, 2])
    assert [look(arrow, view, 0.045) for _ in range(4)] == [()] * 4
    wishes = [look(arrow, view, 0.06) for _ in range(5)]
    assert [len(each) for each in wishes].count(1) == 1


def test_requests_that_wait_for_memory_are_a_reason_too():
    arrow, view = scheduler(3), View([P, P, D], queued_context_tokens=[0, 0, 1], prefill_tokens=[0, 5, 0])
    (wish,) = look(arrow, view, 0.01)
    assert wish[:2] == (0, D)


def test_the_reactive_variant_flips_after_a_late_first_token_and_not_before():
    arrow, view = scheduler(3, trigger="observed"), View([P, D, D], queued_prompt_tokens=[400, 0, 0])
    arrow.ledger["free_s"][0] = 1.0
    assert arrow.place(view, 0).wishes == ()
    assert look(arrow, view, 0.01) == ()
    view.now = 1.2
    arrow.proceed(view, 0, 0)  # its first token came 1.2 s after its arrival
    (wish,) = look(arrow, view, 0.01)
    assert wish[:2] == (1, P)


def test_a_burst_by_hand_from_arrival_to_flip():
    """Three prompts of 50 ms at once, limit 60 ms: one on 0, one on an instance that flips for it, then none can."""
    result = served(
        [(0.0, 400, 3)] * 3,
        policy_named("arrow", token_budget=2048),
        deployment(prefill=1, decode=2),
        table=StepTable.affine(step=0.0, per_sequence=0.001, per_token=0.000125),
        slo=Slo(ttft=0.06, tpot=0.1),
    )
    r = result.requests
    assert r.prefill_instance.tolist() == [0, 1, 0]
    assert [(each.time_s, each.instance) for each in result.decisions] == [(0.0, 1)]
    assert r.first_token_s == pytest.approx([0.05, 0.05, 0.1])
    assert (r.decode_instance == 2).all()
    assert (r.status == Outcome.COMPLETED).all()


def test_a_request_that_stays_is_not_transferred():
    """Decode instances are full after one request: the others decode on the instance that flips, their own."""
    result = served(
        [(0.0, 400, 200)] * 2 + [(0.06, 100, 200)] * 4,
        policy_named("arrow"),
        deployment(prefill=2, decode=1),
        table=SIMPLE,
        blocks=60,
        slo=Slo(ttft=2.0, tpot=0.1),
    )
    r = result.requests
    stayed = r.prefill_instance == r.decode_instance
    assert stayed.any()
    assert (r.transfer_s[stayed] == 0).all()
    assert (r.transfer_s[~stayed] > 0).all()
