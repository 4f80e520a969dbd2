"""Instances, nodes and links that fail: what becomes of the requests there."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import PLAIN, SIMPLE, deployment, served
from test_conservation import BLOCKS, OPTIONS, REQUESTS, TABLE

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.records import Outcome
from disagg_sim.techniques.availability.play import FailureEvent, Failures, gpus_of_instances

EVERYTHING = deployment(prefill=2, decode=2, colocated=4, pairs=4)
NEVER = math.inf


def failing(*events, options=PLAIN, **more):
    """Options of a run in which instances fail: (time, number), for 10 s."""
    made = tuple(FailureEvent(at_s=time, kind="instance", number=number) for time, number in events)
    return replace(options, failures=Failures(events=made, **({"restart_s": 10.0} | more)))


def events_of(kind, numbers, lasts_s, **more):
    """Failures of one kind at any time of the first four seconds."""
    drawn = {"at_s": st.floats(0, 4), "number": st.integers(0, numbers - 1), "lasts_s": st.sampled_from(lasts_s)}
    return st.builds(FailureEvent, kind=st.just(kind), **drawn, **more)


LASTS = (0.01, 0.5, 3.0)
EVENTS = st.lists(
    events_of("instance", 4, LASTS)
    | events_of("gpu", 1, LASTS)
    | events_of("node", 1, LASTS)
    | events_of("link", 4, (0.7,), share=st.sampled_from([0.0, 0.1])),
    min_size=1,
    max_size=4,
)
FAILURES = st.builds(
    Failures,
    events=EVENTS.map(tuple),
    restart_s=st.just(1.0),
    gpu_mtbf_s=st.sampled_from([math.inf, 20.0]),
    migration_limit=st.sampled_from([0, 1, 100]),
)


@settings(max_examples=120)
@given(name=st.sampled_from(sorted(policies())), requests=REQUESTS, options=OPTIONS, failures=FAILURES)
def test_every_request_ends_once_whatever_fails(name, requests, options, failures):
    result = served(requests, name, EVERYTHING, table=TABLE, blocks=BLOCKS, options=replace(options, failures=failures))
    r = result.requests
    too_large = r.input_tokens + r.output_tokens > 16 * BLOCKS
    done, lost = r.status == Outcome.COMPLETED, r.status == Outcome.FAILED
    assert np.array_equal(r.status == Outcome.REJECTED, too_large)
    assert (done | lost | too_large).all()
    if failures.migration_limit == 100:
        assert not lost.any()
    assert (r.migrations <= failures.migration_limit).all()
    assert sum(each.lost for each in result.failures) <= lost.sum()
    assert np.isnan(r.finish_s[~done]).all()
    assert (r.first_token_s[done] >= r.arrival_s[done]).all()
    assert (r.finish_s >= r.first_token_s)[done].all()
    assert ((r.finish_s > r.first_token_s) == (r.output_tokens > 1))[done].all()
    emitted = result.itl_counts.sum()
    assert emitted >= (r.output_tokens - 1)[done].sum()
    if not lost.any():
        assert emitted == (r.output_tokens - 1)[done].sum()


def one_each(requests, options, policy="vllm", **parts):
    """A run on as many instances as the parts have; a step takes 10 ms, 1 ms a decode, 0.1 ms a prompt token."""
    return served(requests, policy, deployment(**(parts or {"colocated": 2})), table=SIMPLE, options=options)


def test_a_request_of_a_failed_instance_is_lost():
    result = one_each([(0.0, 100, 50), (0.0, 100, 50)], failing((0.1, 0)))
    assert result.requests.status.tolist() == [Outcome.FAILED, Outcome.COMPLETED]
    failure = result.failures[0]
    assert (failure.time_s, failure.kind, failure.instances, failure.until_s) == (0.1, "instance", (0,), 10.1)
    assert (failure.lost, failure.migrated) == (1, 0)


def test_a_migrated_request_computes_prompt_and_tokens_again_and_gives_none_twice():
    """Prefill ends at 20 ms, then steps of 11 ms: at 60 ms the user has 1 + 3 tokens, the last since 53 ms. The other
    instance computes 104 tokens in 20.4 ms, which emits the fifth at 80.4 ms; 6 more steps end at 146.4 ms.
    """
    result = one_each([(0.0, 100, 11)], failing((0.06, 0), migration_limit=1))
    r = result.requests
    assert r.status[0] == Outcome.COMPLETED
    assert r.first_token_s[0] == pytest.approx(0.020)
    assert r.finish_s[0] == pytest.approx(0.0804 + 6 * 0.011)
    assert (r.migrations[0], r.prefill_instance[0], r.decode_instance[0]) == (1, 0, 1)
    assert result.instances.prefill_tokens.tolist() == [100, 104]
    gaps = np.repeat(result.itl_edges[:-1], result.itl_counts)
    assert gaps.size == 10
    assert 0.9 * 0.0274 < gaps.max() <= 0.0274  # from 53 ms to 80.4 ms; a bin is at most a twelfth wide
    assert summary(result, Slo(ttft=1.0, tpot=1.0)).migrated == 1


def test_requests_wait_at_the_front_end_until_an_instance_serves_again():
    """The only instance fails at 1 s and serves again, empty, at 11 s: what came at 2 s has its first token then."""
    requests = [(0.0, 100, 1), (2.0, 100, 1)]
    r = one_each(requests, failing((1.0, 0)), colocated=1).requests
    assert r.first_token_s == pytest.approx([0.020, 11.020])
    r = one_each(requests, failing((1.0, 0), restart_s=NEVER), colocated=1).requests
    assert r.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


@pytest.mark.parametrize("policy", ["disaggregated", "arrow"])
def test_arrow_replaces_the_last_instance_of_a_phase_by_one_of_the_other(policy):
    """Static roles wait 10 s for the prefill instance; Arrow turns one of its two decode instances to prefill."""
    options = failing((1.0, 0))
    result = one_each([(0.0, 100, 1), (2.0, 100, 1)], options, policy, prefill=1, decode=2)
    first = result.requests.first_token_s[1] - 2.0
    assert first == pytest.approx(0.020 if policy == "arrow" else 9.020)
    assert [(each.kind, each.instance, each.wish) for each in result.decisions] == [
        ("failure", 0, "instance 0 failed"),
        *([("flip", 1, "flip of instance 1 to prefill")] if policy == "arrow" else []),
    ]


def test_a_request_between_two_instances_leaves_with_either():
    """Its cache of 1,000 tokens moves from 110 ms to 1,110 ms; prefill is instance 0, decode 1 or 2."""
    for number in (0, 1):
        options = failing((0.5, number), migration_limit=1, restart_s=0.1)
        r = one_each([(0.0, 1000, 3)], options, "disaggregated", prefill=1, decode=2).requests
        assert (r.status[0], r.migrations[0], r.transferred_tokens[0]) == (Outcome.COMPLETED, 1, 1000 + 1)


def test_a_node_takes_all_its_instances_with_it():
    """H100 has eight GPUs in a node: instances of the second node go on."""
    event = FailureEvent(at_s=0.1, kind="node", number=1, lasts_s=5.0)
    options = replace(PLAIN, failures=Failures(events=(event,)))
    result = one_each([(0.0, 100, 50)] * 12, options, colocated=12)
    assert result.failures[0].instances == (8, 9, 10, 11)
    assert (result.requests.status == Outcome.FAILED).sum() == 4
    assert result.instances.failed_s == pytest.approx([0.0] * 8 + [result.duration_s - 0.1] * 4)
    assert summary(result, Slo(ttft=1.0, tpot=1.0)).availability < 1.0


@pytest.mark.parametrize(("share", "landed"), [(0.0, 1.31), (0.5, 1.21)])
def test_a_failed_link_holds_up_what_is_on_its_way(share, landed):
    """1,000 tokens leave at 110 ms at 1,000 tokens/s; from 0.3 s to 0.5 s the link keeps a share of that."""
    event = FailureEvent(at_s=0.3, kind="link", number=0, lasts_s=0.2, share=share)
    options = replace(PLAIN, failures=Failures(events=(event,)))
    r = one_each([(0.0, 1000, 2)], options, "disaggregated", prefill=1, decode=1).requests
    assert r.decode_start_s[0] == pytest.approx(landed)


@pytest.mark.parametrize(
    "failures", [{"link_mtbf_s": 5.0}, {"events": (FailureEvent(at_s=4.5, kind="link", number=0),)}]
)
def test_a_run_ends_where_a_link_is_down_for_good(failures):
    """What the other pair serves is completed; caches that wait for the link are never handed over."""
    options = replace(PLAIN, failures=Failures(link_down_s=NEVER, **failures))
    result = one_each([(float(second), 100, 4) for second in range(12)], options, "round_robin", prefill=2, decode=2)
    assert set(result.requests.status.tolist()) == {Outcome.COMPLETED, Outcome.UNFINISHED}
    assert result.failures[0].until_s == NEVER


@pytest.mark.parametrize(
    ("numbers", "policy", "parts", "more"),
    [
        ((0,), "dopd", {"prefill": 1, "decode": 1}, {}),  # nothing takes from the shared queue any more
        ((0, 1), "dopd", {"prefill": 1, "decode": 1}, {}),
        ((0,), "vllm", {"colocated": 1}, {"migration_limit": 9, "options": replace(PLAIN, concurrency=4)}),
    ],
)
def test_a_run_ends_where_no_instance_comes_back(numbers, policy, parts, more):
    """Requests wait when the only prefill instance, or every instance, fails for good."""
    options = failing(*((0.05, number) for number in numbers), restart_s=NEVER, **more)
    status = one_each([(0.0, 1000, 5)] * 40, options, policy, **parts).requests.status
    assert (status == Outcome.UNFINISHED).any()
    assert status[-1] != Outcome.COMPLETED


def test_no_instance_starts_on_gpus_that_have_failed():
    """Both nodes of 16 GPUs fail for good; before, planners put new instances on the 14 that were free."""
    events = tuple(FailureEvent(at_s=at, kind="node", number=node) for node, at in enumerate((20.0, 30.0)))
    options = replace(PLAIN, failures=Failures(events=events, restart_s=NEVER, migration_limit=9))
    small = replace(deployment(prefill=1, decode=1), gpus=16)
    requests = [(0.03 * n, 1000, 20) for n in range(2000)]
    result = served(requests, "dynamo_load", small, table=SIMPLE, options=options)
    late = result.instances.start_s > 30.0
    assert not late.any()
    assert not (result.requests.finish_s > 30.0).any()


def test_an_instance_starts_on_a_free_gpu_that_is_back():
    """GPUs 2 to 7 fail at 1 s for 5 s; dynamo_load wants a third instance at 5 s, and gets it at its next look."""
    events = tuple(FailureEvent(at_s=1.0, kind="gpu", number=number, lasts_s=5.0) for number in range(2, 8))
    options = replace(PLAIN, failures=Failures(events=events))
    small = replace(deployment(prefill=1, decode=1), gpus=8)
    requests = [(0.05 * n, 1000, 5) for n in range(400)]
    result, calm = (served(requests, "dynamo_load", small, table=SIMPLE, options=each) for each in (options, PLAIN))
    assert calm.instances.start_s[2] == 5.0
    assert result.instances.start_s[2] == 10.0


def test_gpus_fail_at_the_rate_that_is_asked_for():
    """Of 8 GPUs with a mean time of 40 s between failures, some one fails every 5 s."""
    requests = [(second, 10, 2) for second in range(2000)]
    options = replace(PLAIN, failures=Failures(gpu_mtbf_s=40.0, restart_s=0.5))
    found = one_each(requests, options, colocated=8)
    times = np.array([each.time_s for each in found.failures])
    assert len(times) == pytest.approx(400, abs=3 * math.sqrt(400))
    other = one_each(requests, options, "round_robin", prefill=4, decode=4)
    assert np.array_equal(times, [each.time_s for each in other.failures])
    assert [each.number for each in found.failures] == [each.number for each in other.failures]


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=12))
def test_instances_share_no_gpu_and_small_ones_stay_in_a_node(sizes):
    starts, nan = np.zeros(len(sizes)), np.full(len(sizes), np.nan)
    held = gpus_of_instances(sizes, starts, nan, node_of=np.arange(sum(sizes) + 64) // 8)
    assert np.unique(np.concatenate(held)).size == sum(sizes) == sum(each.size for each in held)
    assert all(size > 8 or np.unique(each // 8).size == 1 for size, each in zip(sizes, held, strict=True))


def test_a_failure_of_an_instance_that_is_not_there_is_told_in_one_line():
    with pytest.raises(InputError, match="instance 7 is none of this run; allowed: 0 to 1"):
        one_each([(0.0, 10, 2)], failing((0.1, 7)))
    with pytest.raises(InputError, match="link_down_s is missing"):
        Failures(events=(FailureEvent(at_s=1.0, kind="link", number=0),))
