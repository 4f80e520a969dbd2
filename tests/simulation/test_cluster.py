"""The life of a request, worked out by hand at affine step times."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from sites import SIMPLE, deployment, served

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, PolicyError
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.loads import ByRole, Handover, fewest_requests, least_decode
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.wishes import Batch, Flip, Limits, Move, Role, SetLimits, Start, Stop
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

BY_ROLE = ByRole(prefill=Limits(), decode=Limits())
SPLIT = deployment(prefill=1, decode=1)
PAIR = deployment(prefill=2, decode=2)


@dataclass(frozen=True)
class Scripted:
    """Plain disaggregation, and wishes at given ticks."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    wishes: tuple = ()
    period_s: float = 0.1
    routing: object = None
    forming: object = None
    watching: object = None
    steps: object = BY_ROLE

    def build(self, site):
        script = list(self.wishes)

        class Roles:
            period_s = self.period_s

            def flips(self, view):
                return script.pop(0) if script else ()

        return Parts(
            start=site.instances(("prefill", Role.PREFILL), ("decode", Role.DECODE)),
            routing=self.routing or Handover(fewest_requests, least_decode),
            steps=self.steps,
            roles=self.watching or (Roles() if self.wishes else None),
            forming=self.forming,
        )


def test_a_colocated_request_by_hand():
    """Arrives at 1; prefill of 100 tokens takes 20 ms, each of 4 decode steps 11 ms."""
    result = served([(1.0, 100, 5)], "vllm", deployment(colocated=1), table=SIMPLE)
    r = result.requests
    assert r.status.tolist() == [Outcome.COMPLETED]
    assert r.prefill_start_s[0] == 1.0
    assert r.first_token_s[0] == pytest.approx(1.020)
    assert r.finish_s[0] == pytest.approx(1.064)
    assert r.decode_start_s[0] == r.first_token_s[0]
    assert (r.transfer_s[0], r.exposed_transfer_s[0], r.segments[0]) == (0.0, 0.0, 1)
    assert result.itl_counts.sum() == 4
    assert result.duration_s == pytest.approx(1.064)


def test_a_disaggregated_request_by_hand():
    """The first token comes from prefill at 20 ms; 100 tokens of cache cross at 1,000 tokens/s in 100 ms."""
    r = served([(0.0, 100, 5)], "disaggregated", SPLIT, table=SIMPLE).requests
    assert r.first_token_s[0] == pytest.approx(0.020)
    assert r.exposed_transfer_s[0] == pytest.approx(0.100)
    assert r.decode_start_s[0] == pytest.approx(0.120)
    assert r.finish_s[0] == pytest.approx(0.120 + 4 * 0.011)
    assert (r.prefill_instance[0], r.decode_instance[0], r.segments[0]) == (0, 1, 2)
    assert r.transferred_tokens[0] == 100


def test_an_early_push_exposes_its_last_chunk():
    """A pass of 100 tokens, pushed in 4 pieces of 25 while it runs: 0.015 s hide 15 of 100 tokens."""
    policy = policy_named("disaggregated", early_push=True)
    options = RunOptions(link=LinkSpec(push="chunk", chunk_tokens=25))
    r = served([(0.0, 100, 5)], policy, SPLIT, table=SIMPLE, options=options).requests
    assert r.exposed_transfer_s[0] == pytest.approx(0.085)
    assert r.transfer_s[0] == pytest.approx(0.100)


def test_a_closed_loop_keeps_so_many_requests_there():
    """Two at a time; the third arrives when the first ends."""
    requests = [(9.0, 100, 5)] * 4
    r = served(requests, "vllm", deployment(colocated=2), table=SIMPLE, options=RunOptions(concurrency=2)).requests
    assert r.arrival_s.tolist()[:2] == [0.0, 0.0]
    assert sorted(r.arrival_s[2:]) == pytest.approx([0.064, 0.064])
    assert r.finish_s.max() == pytest.approx(0.128)


def test_a_run_that_is_cut_leaves_requests_unfinished():
    options = RunOptions(until_s=0.05)
    result = served([(0.0, 100, 5), (1.0, 100, 5)], "vllm", deployment(colocated=1), table=SIMPLE, options=options)
    assert result.requests.status.tolist() == [Outcome.UNFINISHED] * 2
    assert result.duration_s == 0.05


def test_a_flip_moves_work_and_is_logged():
    """Instance 0 becomes a decode instance at 0.1 s: later prompts go to instance 1 alone."""
    policy = Scripted(wishes=((Flip(0, Role.DECODE, "try it"),),))
    result = served([(0.0, 100, 5), (0.2, 100, 5), (0.2, 100, 5)], policy, PAIR, table=SIMPLE)
    assert result.requests.prefill_instance.tolist() == [0, 1, 1]
    assert [(each.kind, each.instance, each.reason) for each in result.decisions] == [("flip", 0, "try it")]
    assert result.decisions[0].time_s == pytest.approx(0.1)
    assert result.instances.flips.tolist() == [1, 0, 0, 0]


def test_a_flip_that_takes_time_leaves_the_instance_out_of_service():
    policy = Scripted(wishes=((Flip(0, Role.DECODE, "slow"),), (), (), ()))
    requests = [(0.05, 100, 50), (0.2, 100, 5), (1.5, 100, 5)]
    options = RunOptions(flip_s=1.0)
    r = served(requests, policy, PAIR, table=SIMPLE, options=options).requests
    assert r.prefill_instance.tolist() == [0, 1, 1]
    assert r.decode_instance[1] != 0
    assert r.decode_instance[2] == 0  # idle since 1.1 s; the lowest number of equals


def test_a_started_instance_serves_after_its_start_up_time():
    wishes = ((Stop(1, "spare"),), (), (Start(Sharding(), Role.PREFILL, "burst"),))
    requests = [(0.0, 100, 2)] + [(0.31 + 0.2 * k, 100, 2) for k in range(6)]
    result = served(requests, Scripted(wishes=wishes), PAIR, table=SIMPLE, options=RunOptions(start_up_s=0.5))
    assert set(result.requests.prefill_instance.tolist()) == {0}
    assert [each.kind for each in result.decisions] == ["stop", "start"]
    instances = result.instances
    assert instances.gpus.tolist() == [1] * 5
    assert instances.stop_s[1] == pytest.approx(0.1)
    assert instances.start_s[4] == pytest.approx(0.3)
    assert np.all(instances.gpu_s >= 0)


def test_a_drained_instance_finishes_what_it_has():
    policy = Scripted(wishes=((Stop(2, "scale down"),),))
    result = served([(0.0, 100, 50), (0.5, 100, 50)], policy, PAIR, table=SIMPLE)
    assert result.requests.status.tolist() == [Outcome.COMPLETED] * 2
    assert result.requests.decode_instance.tolist() == [2, 3]
    assert result.instances.stop_s[2] == pytest.approx(result.requests.finish_s[0])


def test_without_draining_its_requests_fail():
    policy = Scripted(wishes=((), (Stop(2, "scale down", drain=False),)))
    result = served([(0.0, 100, 50), (0.01, 100, 3)], policy, PAIR, table=SIMPLE)
    assert result.requests.status.tolist() == [Outcome.FAILED, Outcome.COMPLETED]
    assert result.instances.stop_s[2] == pytest.approx(0.2)


def test_a_prompt_that_waits_moves_to_another_instance_at_no_cost():
    """Both go to instance 0, 1,990 tokens take 209 ms each; at 0.1 s the second moves and starts at once."""
    requests = [(0.0, 1990, 3), (0.05, 1990, 3)]
    policy = Scripted(wishes=((Move(1, 0, 1, "idle"),),), routing=Handover(lambda *_: 0, least_decode))
    result = served(requests, policy, PAIR, table=SIMPLE)
    r = result.requests
    assert r.prefill_instance.tolist() == [0, 1]
    assert r.prefill_start_s == pytest.approx([0.0, 0.1])
    assert r.first_token_s == pytest.approx([0.209, 0.309])
    assert r.segments.tolist() == [2, 2]
    assert r.status.tolist() == [Outcome.COMPLETED] * 2
    assert result.instances.prefill_tokens.tolist() == [1990, 1990, 0, 0]
    decision = result.decisions[0]
    assert (decision.kind, decision.instance, decision.wish) == ("move", 1, "move of request 1 from instance 0 to 1")


def test_the_rest_of_a_moved_request_goes_where_it_would_have_gone():
    """Early push: its decode instance, 3, was chosen at arrival."""
    turns = iter((2, 3))
    routing = Handover(lambda *_: 0, lambda *_: next(turns), early=True)
    policy = Scripted(wishes=((Move(1, 0, 1, "idle"),),), routing=routing)
    r = served([(0.0, 1990, 3), (0.05, 1990, 3)], policy, PAIR, table=SIMPLE).requests
    assert r.prefill_instance.tolist() == [0, 1]
    assert r.decode_instance.tolist() == [2, 3]


NO_MOVES = {
    "begun": (Move(0, 0, 1, "why not"), {}, "no prompt of it waits on instance 0 with nothing computed"),
    "elsewhere": (Move(1, 2, 1, "why not"), {}, "no prompt of it waits on instance 2"),
    "unknown": (Move(1, 0, 9, "why not"), {}, "there is no instance 9"),
    "draining": (Move(1, 0, 1, "why not"), {"before": (Stop(1, "spare"),)}, "instance 1 is draining, not ready"),
}


@pytest.mark.parametrize("case", NO_MOVES)
def test_a_move_of_what_does_not_wait_there_stops_the_run(case):
    wish, extra, text = NO_MOVES[case]
    wishes = ((*extra.get("before", ()), wish),)
    policy = Scripted(wishes=wishes, routing=Handover(lambda *_: 0, least_decode))
    with pytest.raises(PolicyError, match=text):
        served([(0.0, 1990, 3), (0.05, 1990, 3)], policy, PAIR, table=SIMPLE)


IMPOSSIBLE = {
    "unknown instance": (Flip(9, Role.DECODE, "why not"), r"flip of instance 9 to decode .* there is no instance 9"),
    "same role": (Flip(0, Role.PREFILL, "why not"), "has that role"),
    "last of a phase": (Stop(1, "why not"), "the last that serves decode"),
    "flip of the last": (Flip(0, Role.DECODE, "why not"), "the last that serves prefill"),
    "no wish": (42, "0.3 s: 42 is impossible: it is no Flip"),
}
NO_LISTS = {"nothing": None, "a wish alone": Flip(1, Role.PREFILL, "why not")}


@pytest.mark.parametrize("case", [*IMPOSSIBLE, *NO_LISTS])
def test_an_impossible_wish_stops_the_run_with_the_state_so_far(case):
    wish, text = IMPOSSIBLE.get(case, (None, "is impossible: wishes come in a list"))
    answer = (wish,) if case in IMPOSSIBLE else NO_LISTS[case]
    with pytest.raises(PolicyError, match=text) as caught:
        served([(0.0, 100, 5), (9.0, 100, 5)], Scripted(wishes=((), (), answer)), SPLIT, table=SIMPLE)
    assert "Scripted" in str(caught.value)
    assert caught.value.so_far.requests.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


def test_limits_that_a_policy_sets_hold_from_the_next_step_on():
    """A prompt of 100 tokens begins at once, 20 ms; two follow in one step of 30 ms, and from 0.1 s on one by one."""
    policy = Scripted(wishes=((), (SetLimits(0, Limits(max_prompts=1), "one by one"),)))
    requests = [(arrival, 100, 1) for arrival in (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)]
    r = served(requests, policy, SPLIT, table=SIMPLE).requests
    assert r.first_token_s - r.arrival_s == pytest.approx([0.02, 0.05, 0.05, 0.02, 0.04, 0.06])


class Pairwise:
    """Batches of two prompts, or of what is there after a second."""

    def __init__(self):
        self.since = {}

    def form(self, view, instance, waiting):
        since = self.since.setdefault(instance, view.now)
        if len(waiting) >= 2 or view.now >= since + 1.0:
            del self.since[instance]
            return Batch(tuple(waiting[:2]))
        return Batch((), since + 1.0)


def test_a_policy_forms_batches_and_waits_for_its_timeout():
    """Two prompts of 100 tokens in one pass: 30 ms. The third waits a second for a companion."""
    manual = ByRole(prefill=Limits(mode=Mode.MANUAL), decode=Limits())
    policy = Scripted(forming=Pairwise(), steps=manual)
    r = served([(0.0, 100, 1), (0.5, 100, 1), (0.51, 100, 1)], policy, SPLIT, table=SIMPLE).requests
    assert r.first_token_s == pytest.approx([0.53, 0.53, 0.53 + 1.0 + 0.02])


def test_a_policy_hears_what_instances_remember_and_nothing_without_caches():
    """The second prompt begins with the 16 tokens of the first; it comes a second after it."""
    prefix = PrefixBlocks(offsets=np.array([0, 1, 3]), ids=np.array([1, 1, 2]), block_tokens=16)
    told = Trace(arrival=np.arange(2.0), input_tokens=np.array([16, 32]), output_tokens=np.array([1, 1]), prefix=prefix)
    heard = []

    def first(view, members, request):
        heard.append((view.remembers, view.cached_tokens(request, 0), view.cached_everywhere(request).tolist()))
        return fewest_requests(view, members, request)

    policy = Scripted(routing=Handover(first, least_decode))
    served(told, policy, SPLIT, table=SIMPLE)
    served(told, policy, SPLIT, table=SIMPLE, options=RunOptions(prefix_cache=True))
    assert heard == [(False, 0, [0, 0])] * 2 + [(True, 0, [0, 0]), (True, 16, [16, 0])]


def test_a_remembered_prefix_needs_no_prefill():
    """Blocks of 16: the second prompt shares 64 of 100 tokens and computes 36; the third, its last block."""
    ids = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 10], [1, 2, 3, 4, 8, 9]]
    prefix = PrefixBlocks(offsets=np.array([0, 7, 14, 20]), ids=np.concatenate(ids), block_tokens=16)
    lengths = np.array([100, 100, 96])
    requests = Trace(arrival=np.arange(3.0), input_tokens=lengths, output_tokens=np.array([2, 2, 2]), prefix=prefix)
    options = RunOptions(prefix_cache=True)
    r = served(requests, "vllm", deployment(colocated=1), table=SIMPLE, options=options).requests
    assert r.cached_tokens.tolist() == [0, 64, 80]
    assert r.first_token_s - r.arrival_s == pytest.approx([0.020, 0.0136, 0.0116])


@pytest.mark.parametrize(("between", "found"), [(208, 96), (240, 80), (319, 0)])
def test_a_prompt_in_free_memory_is_found_until_its_blocks_are_taken(between, found):
    """100 tokens leave 7 of 20 blocks; the next prompt takes the 13 others first, then these from the last on."""
    counts = np.array([7, -(-between // 16), 7])
    ids = np.concatenate([np.arange(7), 100 + np.arange(counts[1]), np.arange(7)])
    prefix = PrefixBlocks(offsets=np.concatenate([[0], counts.cumsum()]), ids=ids, block_tokens=16)
    lengths = np.array([100, between, 100])
    requests = Trace(arrival=np.arange(3.0), input_tokens=lengths, output_tokens=np.array([2, 1, 2]), prefix=prefix)
    options = RunOptions(prefix_cache=True)
    r = served(requests, "vllm", deployment(colocated=1), table=SIMPLE, blocks=20, options=options).requests
    assert r.cached_tokens.tolist() == [0, 0, found]
    with pytest.raises(InputError, match="prefix_cache true: trace"):
        served([(0.0, 100, 5)], "vllm", deployment(colocated=1), table=SIMPLE, options=options)


class Watching:
    """Remembers what windows of a second show at each tick."""

    period_s = 0.5

    def __init__(self):
        self.windows = []

    def flips(self, view):
        self.windows.append(view.window(1.0))
        return ()


def test_a_window_shows_what_happened_in_it():
    """One request of 100 tokens in and 5 out at 0.2 s, which ends at 0.364 s."""
    watching = Watching()
    served([(0.2, 100, 5), (2.3, 300, 1), (2.4, 10, 1), (2.9, 9, 1)], Scripted(watching=watching), SPLIT, table=SIMPLE)
    first, second, third = watching.windows[:3]
    assert (first.seconds, first.arrivals) == (0.5, 1)
    assert (first.input_tokens, first.output_tokens) == (100, 5)
    assert second.output_tokens == 5  # it looks back by a second
    assert third.arrivals == 0
    assert np.isnan(third.output_tokens)
    last = watching.windows[4]
    assert (last.arrivals, last.input_tokens) == (2, 155)


@pytest.mark.parametrize("policy", ["arrow", "least_load"])
def test_decode_goes_where_it_goes_step_by_step(policy):
    """A choice by load sees the steps of a run that is going on.

    Times of steps that no transfer ends with: which of two events at one instant comes first, the two may see apart.
    """
    odd = StepTable.affine(step=0.01001, per_sequence=0.00099, per_token=0.000103)
    requests = [(0.05 * k, 50 + 37 * k % 90, 20 + 53 * k % 200) for k in range(60)]
    whole, stepped = (
        served(requests, policy, PAIR, table=odd, options=RunOptions(step_by_step=each)).requests
        for each in (False, True)
    )
    assert whole.decode_instance.tolist() == stepped.decode_instance.tolist()
    assert whole.finish_s == pytest.approx(stepped.finish_s, rel=1e-9)
