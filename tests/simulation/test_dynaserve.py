"""DynaServe: the predictor against hand-worked passes and against the kernel, the bisection, and legs of requests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sites import ONE, SIMPLE, deployment, served, site

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.dynaserve import book, predictor
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.view import locked

PAIR = deployment(pairs=2)


#: The same steps, each of which verifies two drafts that are always accepted: three tokens.
THREE = StepTable.affine(step=0.010, per_sequence=0.001, per_token=0.0001, accepted=(1.0, 1.0))


def fleet_of(mode=Mode.CHUNKED, limit=np.inf, table=SIMPLE):
    spec = InstanceSpec(table=table, blocks=100_000, mode=mode, step_limit_s=limit)
    return Fleet([spec, spec])


def book_of(*requests):
    """Of (prompt, expected, split, first, second); nothing has come yet."""
    return np.array([(*request, -1, -1, -1, -1) for request in requests], book.BOOK)


def kept_of(fleet, entries=None, promised=()):
    """The book where some of its requests were promised to instances 0 and 1."""
    kept = book.Book(book_of() if entries is None else entries, 2)
    for request in promised:
        one = {name: int(kept.entries[name][request]) for name in kept.entries.dtype.names}
        lengths = one["tokens"], one["expected"], one["split"]
        book.commit(locked(fleet.home), kept.home, request, lengths, one["first"], one["second"])
    return kept


def ask(fleet, prompt, expected, *, entries=None, promised=(), now=0.0, watch=True, **search):
    """Split and times of a new request on instances 0 and 1; ``search`` has rounds and a tolerance."""
    how = predictor.Search(search.get("rounds", 0), search.get("tolerance", 0.0), 0.0, watch)
    wanted = predictor.SplitRequest(prompt, expected, 0, 1)
    kept = kept_of(fleet, entries, promised)
    return predictor.finish_times(locked(fleet.home), kept.home, wanted, now, how)


def test_plain_disaggregation_on_an_idle_pair():
    # 10 ms + 100 tokens of 0.1 ms; then 10 tokens at 11 ms
    assert ask(fleet_of(), 100, 110) == (100, pytest.approx(0.020), pytest.approx(0.110))


@pytest.mark.parametrize(
    ("rounds", "tolerance", "split"),
    [
        (1, 0.0, 105),  # phi 0.9545: 64 and 55 ms, which differ by 14 % of the later
        (2, 0.0, 103),  # 0.9318
        (3, 0.0, 104),  # 0.9432
        (6, 0.0, 104),  # 0.9489 and 0.9460: 105; 0.9446: 104
        (6, 0.15, 105),
    ],
)
def test_bisection_by_hand(rounds, tolerance, split):
    """The first part takes 20 ms and 11 ms a token, the second 11 ms a token."""
    first, second = 0.020 + (split - 101) * 0.011, (110 - split) * 0.011
    found = ask(fleet_of(), 100, 110, rounds=rounds, tolerance=tolerance)
    assert found == (split, pytest.approx(first), pytest.approx(second))


def test_drafts_come_as_their_mean():
    """10 tokens of the second part take four steps of three; of drafts accepted by halves, 1.5 a step, seven."""
    assert ask(fleet_of(table=THREE), 100, 110)[1:] == (pytest.approx(0.020), pytest.approx(4 * 0.011))
    halves = StepTable.affine(step=0.010, per_sequence=0.001, per_token=0.0001, accepted=(0.5,))
    assert ask(fleet_of(table=halves), 100, 110)[2] == pytest.approx(7 * 0.011)


def test_a_split_behind_the_prompt_is_where_drafts_of_both_parts_end_together():
    """At 100: 20 and 44 ms. At 105, 4 and 5 tokens are two steps each: 42 and 22. At 103, one and three: 31 and 33."""
    split, first, second = ask(fleet_of(table=THREE), 100, 110, rounds=6, tolerance=0.3)
    assert (split, first, second) == (103, pytest.approx(0.020 + 0.011), pytest.approx(3 * 0.011))


def test_behind_a_pass_in_progress_and_a_decode():
    fleet = fleet_of()
    fleet.submit(0, 0, (0, 200, 50), 0.0)
    fleet.run_until(0.0)
    entries = book_of((200, 250, 250, 0, -1))
    # 30 ms of its prefill, then one decode beside 100 tokens: 10 + 1 + 10 ms
    assert ask(fleet, 100, 110, entries=entries)[1] == pytest.approx(0.051)
    # of the 50 tokens 1 ends its prefill, 1 came beside the new prompt, 48 steps of 11 ms are left
    assert ask(fleet, 100, 110, entries=entries, watch=False)[1] == pytest.approx(0.051 + 48 * 0.011)


def test_slo_aware_passes_stay_within_the_limit():
    # 50 ms hold 400 tokens: 400 + 400 + 200
    assert ask(fleet_of(Mode.SLO_AWARE, 0.050), 1000, 1010)[1] == pytest.approx(0.050 + 0.050 + 0.030)


def test_promised_parts_count():
    entries = book_of((300, 320, 300, 0, 1))
    # its prompt shares the pass of the new one: 10 + 40 ms; its 20 decodes run beside the 10 new ones, 12 ms a step
    split, first, second = ask(fleet_of(), 100, 110, entries=entries, promised=(0,))
    assert (split, first, second) == (100, pytest.approx(0.050), pytest.approx(10 * 0.012))


REQUESTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=40)
@example(requests=[(1, 1), (1, 1), (1, 1), (488, 7), (5000, 1)], mode=Mode.SLO_AWARE, when=0.625, table=SIMPLE)
@given(
    requests=REQUESTS,
    mode=st.sampled_from([Mode.CHUNKED, Mode.SLO_AWARE]),
    when=st.floats(0.0, 2.0),
    table=st.sampled_from([SIMPLE, THREE]),
)
def test_predictor_and_kernel_agree_when_lengths_and_what_is_accepted_are_known(requests, mode, when, table):
    fleet = fleet_of(mode, 0.10005, table)  # half a token from any step: rounding decides nothing
    for request, (prompt, output) in enumerate(requests):
        fleet.submit(1, request, (0, prompt, output), 0.0)
    fleet.run_until(when)
    fleet.refresh(when)
    entries = book_of(*((prompt, prompt + output, prompt + output, 1, -1) for prompt, output in requests))
    left = ask(fleet, 10, 10, entries=entries, now=when, watch=False)[2]  # nothing of the new request on instance 1
    fleet.run_until(1e9)
    finish = fleet.segments.finish_s.max()
    assert when + left == pytest.approx(max(finish, when), abs=1e-9)


@pytest.mark.parametrize("there", [True, False])
def test_what_is_behind_those_that_are_played_goes_at_their_pace(there):
    """200 prompts of 1,000 tokens, which wait or were promised, and the new one: 200,100 tokens at 0.1 ms and 98 steps
    of 10 ms are 20.99 s."""
    fleet, entries = fleet_of(), book_of(*[(1000, 1001, 1001, 0, -1)] * 200)
    for request in range(200 if there else 0):
        fleet.submit(0, request, (0, 1000, 1), 0.0)
    promised = () if there else range(200)
    assert ask(fleet, 100, 101, entries=entries, promised=promised)[1] == pytest.approx(20.99, rel=0.005)


def test_a_split_in_the_prompt_leaves_the_rest_to_the_second_instance():
    policy = policy_named("dynaserve", ratio=0.5, length_error=0.0, margin=0, overhead_s=0.0)
    options = RunOptions(link=LinkSpec(latency_s=0.0))
    found = served([(0.0, 100, 50)], policy, PAIR, table=SIMPLE, options=options).requests
    assert (found.segments[0], found.transferred_tokens[0]) == (2, 75)
    assert (found.prefill_instance[0], found.decode_instance[0]) == (1, 1)
    # 75 tokens: 17.5 ms; 1,000 tokens/s: 75 ms; 25 tokens: 12.5 ms; 49 steps
    assert found.first_token_s[0] == pytest.approx(0.105)
    assert found.finish_s[0] == pytest.approx(0.105 + 49 * 0.011)


def test_first_request_is_plain_disaggregation_after_the_overhead():
    policy = policy_named("dynaserve", overhead_s=0.015)
    found = served([(0.0, 100, 50)], policy, PAIR, table=SIMPLE).requests
    assert (found.prefill_instance[0], found.decode_instance[0], found.transferred_tokens[0]) == (0, 1, 100)
    assert found.first_token_s[0] == pytest.approx(0.015 + 0.020)


@pytest.mark.parametrize("options", [{}, {"balance": "all"}, {"alpha": "least_loaded", "slo_aware": False}])
def test_outputs_longer_and_shorter_than_predicted_end_where_they_do(options):
    requests = [(0.01 * k, 50 + 7 * k, 1 + 5 * k) for k in range(20)]
    for error in (0.0, 500.0):
        policy = policy_named("dynaserve", length_error=error, **options)
        found = served(requests, policy, PAIR, table=SIMPLE)
        assert (found.requests.status == 0).all()
        assert found.itl_counts.sum() == sum(output - 1 for _, _, output in requests)


def test_steps_hold_the_limit():
    # 900 tokens fill a step of 100 ms, 2,048 one of 215 ms; every request decodes a part on each instance
    late = {}
    for aware in (True, False):
        policy = policy_named("dynaserve", slo_aware=aware, ratio=0.99)
        result = served([(0.02 * k, 3000, 100) for k in range(30)], policy, PAIR, table=SIMPLE, blocks=20_000)
        late[aware] = int(result.itl_counts[result.itl_edges[:-1] > 0.1].sum())
    assert late[True] <= 30 < late[False]  # at most the token after each transfer


@pytest.mark.parametrize(("least", "ttft"), [(1, 1000 * 0.1901), (256, 4 * 0.19 + 0.1)])
def test_where_no_step_keeps_the_limit_a_prompt_still_goes_on_in_pieces(least, ttft):
    """Every step takes 190 ms, the limit is 100 ms: 1,000 tokens one by one, or in pieces of 256, 256, 256 and 232."""
    slow = StepTable.affine(step=0.190, per_token=0.0001)
    policy = policy_named("dynaserve", least_piece=least, overhead_s=0.0)
    assert served([(0.0, 1000, 2)], policy, PAIR, table=slow).requests.first_token_s[0] == pytest.approx(ttft)


def test_beside_many_decodes_a_piece_may_be_smaller_than_the_least():
    """50 + 40 ms of 40 decodes leave 10 ms, 100 tokens; alone 256 tokens would take 76 ms, so that waiting helps."""
    table = StepTable.affine(step=0.050, per_sequence=0.001, per_token=0.0001)
    spec = InstanceSpec(table=table, blocks=10_000, mode=Mode.SLO_AWARE, step_limit_s=0.10005, least_prefill=256)
    fleet = Fleet([spec])
    for request in range(40):
        fleet.submit(0, request, (10, 0, 50), 0.0)
    fleet.submit(0, 40, (0, 1000, 2), 0.0)
    fleet.run_until(0.11)
    assert fleet.views.prefill_tokens[0] == 100


def test_a_step_of_drafts_may_take_as_long_as_the_tokens_that_it_emits():
    at = setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp")
    for drafts, tokens in ((0, 1.0), (1, 1.0 + at.speculation.acceptance[0])):
        pair = (Replicas(mapping=Sharding(draft_tokens=drafts), instances=2),)
        here = site(Engine(0), ServedDeployment(name="pair", gpus=2, pairs=pair), table=SIMPLE)
        steps = policy_named("dynaserve").build(replace(here, setup=at)).steps
        assert steps.usual.decode.step_limit_s == pytest.approx(0.1 * tokens)


def test_an_odd_instance_has_no_partner():
    three = ServedDeployment(name="three", gpus=3, pairs=(Replicas(mapping=ONE, instances=3),))
    with pytest.raises(InputError, match="an even number"):
        served([(0.0, 10, 10)], "dynaserve", three, table=SIMPLE)
