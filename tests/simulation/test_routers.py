"""Routers that know what instances remember, by hand on two instances each; rules of schedulers."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import SIMPLE, deployment, served, site, trace

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.load import list_specs, load_scheduler, load_system
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.fleet import INSTANCE
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policies.routers import choices_of
from disagg_sim.simulation.run import run, serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import of_ranks, with_defaults
from disagg_sim.simulation.view import locked
from disagg_sim.simulation.wishes import Limits
from disagg_sim.workload.trace import PrefixBlocks, Trace

COLUMNS = (
    *("queued_requests", "running_requests", "queued_prompt_tokens"),
    *("queued_context_tokens", "running_tokens", "coming_tokens"),
    *("loading_requests", "loading_prompt_tokens"),
)


def cluster(prompt=1000, cached=(0, 0), admitted=(0, 0), free=(100, 100), now=0.0, decode=(0, 1), **columns):
    """Two instances of 100 blocks; one request, the first tokens of which they remember. Arrays are read-only."""
    inst = np.zeros(2, INSTANCE)
    inst["admitted"], inst["ranks"], inst["rank_at"] = admitted, 1, (0, 1)
    for name in COLUMNS:
        inst[name] = columns.get(name, (0, 0))
    inst, both = locked(inst), locked(np.arange(2))
    return SimpleNamespace(
        now=now,
        inst=inst,
        states=(1, 1),
        prefill=both,
        decode=locked(np.array(decode)),
        input_tokens=(prompt,),
        remembers=any(cached),
        cached_everywhere=lambda request: locked(np.array(cached)),
        refresh=lambda: None,
        prefill_rate=locked(np.array([7.0, 7.0])),
        seats=locked(np.array([9, 9])),
        free_blocks=locked(np.array(free)),
        total_blocks=locked(np.array([100, 100])),
        **{name: inst[name] for name in COLUMNS},
    )


def here(seed=0):
    return SimpleNamespace(rng=lambda name: np.random.default_rng(seed))


def choices(router, **options):
    policy = policy_named("vllm", router=router, **options)
    weights = {"credit": policy.overlap_credit, "weight": policy.prefix_weight}
    return choices_of(router, here(), temperature=policy.router_temperature, **weights)


def chosen(choice, view):
    return choice(view, view.prefill, 0)


def test_prefix_goes_where_least_is_left_to_compute():
    """Instance 0 has 300 tokens queued and 640 of the prompt: 300 + 360 = 660; instance 1 is idle: 1,000."""
    assert chosen(choices("prefix").prefill, cluster(queued_prompt_tokens=(300, 0), cached=(640, 0))) == 0
    assert chosen(choices("prefix").prefill, cluster(queued_prompt_tokens=(700, 0), cached=(640, 0))) == 1  # 1,060
    assert chosen(choices("prefix").prefill, cluster(running_requests=(2, 1))) == 1  # as much to compute
    for column in ("loading_requests", "loading_prompt_tokens"):  # whose past comes from tiers
        assert chosen(choices("prefix").prefill, cluster(**{column: (1, 0)})) == 1
    whole = cluster(cached=(1000, 999), running_requests=(2, 1))  # a token is computed of each prompt
    assert chosen(choices("prefix").prefill, whole) == 1


def test_dynamo_adds_what_is_to_compute_and_what_is_active():
    """Instance 0 remembers 640 of 1,000 tokens, and 500 more than on 1 are in decode.

    Costs 360 + 1,500 = 1,860 and 1,000 + 1,000 = 2,000. Half the credit: 2,180 and 2,000. A prefill worker is compared
    without what is active, a decode worker by that alone.
    """
    view = cluster(cached=(640, 0), running_tokens=(500, 0))
    assert chosen(choices("dynamo_kv").whole, view) == 0
    assert chosen(choices("dynamo_kv", overlap_credit=0.5).whole, view) == 1
    assert chosen(choices("dynamo_kv").prefill, cluster(cached=(640, 0), running_tokens=(5000, 0))) == 0
    assert chosen(choices("dynamo_kv").decode, view) == 1
    assert (
        chosen(
            choices("dynamo_kv", overlap_credit=0.5).prefill, cluster(cached=(640, 0), queued_prompt_tokens=(400, 0))
        )
        == 1
    )
    for column in ("queued_context_tokens", "coming_tokens", "loading_prompt_tokens"):
        for place in (0, 1):
            loads = cluster(**{column: np.eye(2, dtype=int)[place]})
            assert chosen(choices("dynamo_kv").decode, loads) == 1 - place


def test_a_queued_prompt_counts_for_dynamo_as_work_and_as_cache():
    """200 queued tokens are 400 of cost: as much as 400 in decode, which a 401st outweighs."""
    for running, wanted in ((399, 1), (401, 0)):
        assert (
            chosen(choices("dynamo_kv").whole, cluster(queued_prompt_tokens=(200, 0), running_tokens=(0, running)))
            == wanted
        )


def test_dynamo_draws_by_a_softmax_over_the_range_of_costs():
    """Two costs are 0 and 1 of their range: at temperature 0.5 the dearer one has e^-2 of the weight, 11.9 %."""
    router, view = choices("dynamo_kv", router_temperature=0.5), cluster(running_tokens=(500, 0))
    dearer = sum(chosen(router.whole, view) == 0 for _ in range(4000)) / 4000
    assert dearer == pytest.approx(np.exp(-2) / (1 + np.exp(-2)), abs=3 * np.sqrt(0.119 * 0.881 / 4000))


def test_llm_d_weighs_prefix_queue_and_memory():
    """Instance 0 has 640 of 1,000 tokens (3 * 0.64 = 1.92), the longer queue (0 of 2) and 30 % of its memory in use.

    1.92 + 0 + 1.4 = 3.32 against 0 + 2 + 2 = 4. With 700 tokens and 5 % in use: 2.1 + 0 + 1.9 = 4. With equal queues
    instance 0 wins by 5.32 to 4: a request that is in prefill does not wait.
    """
    assert chosen(choices("llm_d").whole, cluster(cached=(640, 0), queued_requests=(1, 0), free=(70, 100))) == 1
    for tokens, wanted in ((690, 1), (710, 0)):
        assert (
            chosen(choices("llm_d").whole, cluster(cached=(tokens, 0), queued_requests=(1, 0), free=(95, 100)))
            == wanted
        )
    view = cluster(cached=(640, 0), queued_requests=(1, 0), admitted=(1, 0), free=(70, 100))
    assert chosen(choices("llm_d").whole, view) == 0
    for place in (0, 1):
        view = cluster(loading_requests=np.eye(2, dtype=int)[place])
        assert chosen(choices("llm_d").whole, view) == 1 - place


def test_llm_d_reads_queues_and_memory_every_50_ms():
    """And at once where an instance has come."""
    router = choices("llm_d")
    assert chosen(router.whole, cluster(free=(90, 80))) == 0
    assert chosen(router.whole, cluster(free=(10, 80), now=0.049)) == 0
    assert chosen(router.whole, cluster(free=(10, 80), now=0.05)) == 1
    grown = cluster(free=(90, 80), now=0.052)
    assert chosen(router.whole, grown) == 1
    grown.states = (1, 1, 1)
    assert chosen(router.whole, grown) == 0


def test_llm_d_chooses_the_decode_instance_at_arrival():
    """Of the decode instances: where both prefill and 1 alone decodes, that is the one, whatever 0 remembers."""
    router = choices("llm_d", prefix_weight=2.0)
    assert chosen(router.prefill, cluster(cached=(0, 640), queued_requests=(3, 2))) == 1
    assert chosen(router.decode, cluster(queued_requests=(0, 9), now=9.0)) == 1  # chosen when 1 had the shorter queue
    assert chosen(router.prefill, cluster(cached=(640, 0), decode=(1,), now=18.0)) == 0
    assert chosen(router.decode, cluster(queued_requests=(0, 9), now=27.0)) == 1
    assert chosen(router.decode, cluster(queued_requests=(0, 9), now=36.0)) == 0  # none was chosen for it


@pytest.mark.parametrize(("cached", "wanted"), [(600, 0), (400, 1)])
def test_llm_d_weighs_prefix_and_queue_alone_in_two_pools(cached, wanted):
    """2 * 0.6 or 2 * 0.4 against 1 for the shorter queue; that 0 has 10 % of its memory left does not enter."""
    router, view = (
        choices("llm_d", prefix_weight=2.0),
        cluster(cached=(cached, 0), queued_requests=(1, 0), free=(10, 100)),
    )
    assert chosen(router.prefill, view) == wanted
    assert chosen(router.decode, cluster(now=9.0)) == wanted


@pytest.mark.parametrize(
    ("router", "part", "times"),
    [("dynamo_kv", "whole", 1), ("dynamo_kv", "prefill", 0), ("dynamo_kv", "decode", 1), ("llm_d", "whole", 1)],
)
def test_what_runs_is_brought_to_the_present_where_it_counts(router, part, times):
    """It grows from step to step; what waits is known without a look."""
    view, looks = cluster(), []
    view.refresh = lambda: looks.append(1)
    chosen(getattr(choices(router), part), view)
    assert len(looks) == times


@given(st.lists(st.integers(0, 5000), min_size=6, max_size=6), st.integers(1, 3000))
def test_without_caches_every_router_goes_by_its_load_alone(loads, prompt):
    """The prompt is the same everywhere, so that it decides nothing."""
    queued, running, waiting = loads[:2], loads[2:4], loads[4:]
    view = cluster(prompt, queued_prompt_tokens=queued, running_tokens=running, queued_requests=waiting)
    for router, load in (
        (choices("prefix").whole, queued),
        (choices("dynamo_kv").whole, [2 * q + r for q, r in zip(queued, running, strict=True)]),
        (choices("dynamo_kv").prefill, queued),
        (choices("dynamo_kv").decode, [q + r for q, r in zip(queued, running, strict=True)]),
        (choices("llm_d").whole, waiting),
    ):
        assert load[chosen(router, view)] == min(load)


@pytest.mark.parametrize("router", ["least", "prefix", "dynamo_kv", "llm_d"])
def test_a_second_turn_goes_where_its_first_was(router):
    """Two conversations of 1,600 tokens, a second apart; the second turn of each has 160 more.

    A router that knows the caches sends each to its own instance, where 26 ms (10 + 160 * 0.1) compute the rest.
    """
    first, second = list(range(100)), list(range(200, 300))
    ids = [first, second, [*second, *range(400, 410)], [*first, *range(500, 510)]]
    offsets = np.cumsum([0, *(len(each) for each in ids)])
    prefix = PrefixBlocks(offsets=offsets, ids=np.concatenate(ids), block_tokens=16)
    lengths = np.array([len(each) * 16 for each in ids])
    requests = Trace(
        arrival=np.array([0.0, 0.1, 10.0, 20.0]), input_tokens=lengths, output_tokens=np.full(4, 5), prefix=prefix
    )
    options = RunOptions(prefix_cache=True)
    found = served(
        requests, policy_named("vllm", router=router), deployment(colocated=2), table=SIMPLE, options=options
    )
    where = found.requests.prefill_instance
    assert where[0] != where[1]
    if router != "least":
        assert (where[2], where[3]) == (where[1], where[0])
        waited = found.requests.first_token_s - requests.arrival
        assert waited[2:] == pytest.approx(0.026)


SLO = Slo(ttft=9.0, tpot=0.1)

OPEN = Limits(token_budget=0, max_sequences=0)


@pytest.mark.parametrize(
    ("scheduler", "system", "ranks", "tokens", "sequences"),
    [
        ("vllm_v0_2024", "h200_sxm", 1, 2048, 256),
        ("vllm_v1_2025", "h100_sxm", 1, 8192, 1024),
        ("vllm_v1_2026", "h200_sxm", 8, 8 * 8192, 8 * 1024),
        ("vllm_v1_2026", "a100_sxm_80gb", 1, 2048, 256),
        ("vllm_v1_2026", "a100_sxm_40gb", 1, 2048, 256),
        ("sglang_2026", "h200_sxm", 8, 8192, 8 * 1024),
        ("sglang_2026", "b200_sxm", 1, 16384, 1024),
        ("trtllm_2026", "b200_sxm", 4, 4 * 8192, 4 * 2048),
    ],
)
def test_defaults_by_memory_and_ranks(scheduler, system, ranks, tokens, sequences):
    """SGLang divides its chunk by the ranks, the others count for each."""
    found = of_ranks(with_defaults(OPEN, load_scheduler(scheduler), load_system(system), ranks), ranks)
    assert (found.token_budget, found.max_sequences) == (tokens, sequences)


def test_what_a_policy_says_goes_before_the_scheduler():
    own, h100 = Limits(token_budget=512, max_sequences=0), load_system("h100_sxm")
    found = with_defaults(own, load_scheduler("vllm_v1_2026"), h100, 1)
    assert (found.token_budget, found.max_sequences) == (512, 512)  # no more sequences than tokens by default
    both = Limits(token_budget=512, max_sequences=40)
    assert with_defaults(both, load_scheduler("vllm_v1_2026"), h100, 1) == both


@pytest.mark.parametrize("scheduler", list_specs("scheduler"))
def test_every_scheduler_serves_under_memory_pressure(scheduler):
    """A hundred requests at once that end with 1,000 tokens each where 32,000 fit: who counts outputs preempts none."""
    engine, requests = Engine(0), trace([(0.0, 500, 500)] * 100)
    here = site(engine, deployment(colocated=1), table=SIMPLE, blocks=2000)
    here = replace(here, scheduler=load_scheduler(scheduler))
    found = serve(requests, policy_named("vllm", max_sequences=100), here, engine, RunOptions()).requests
    assert (found.finish_s > 0).all()
    assert (found.preemptions.sum() == 0) == (scheduler == "trtllm_2026")


def test_a_run_takes_the_scheduler_that_it_names():
    """5,000 tokens are one step under a budget of 8,192, three of 2,048 where the policy says so."""
    at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    one = ServedDeployment(name="one", gpus=1, colocated=(Replicas(mapping=Sharding(), instances=1),))
    requests = trace([(0.0, 5000, 2)])

    def first(scheduler, **own):
        policy, options = policy_named("vllm", **own), RunOptions(scheduler=scheduler)
        return run(requests, one, policy, at=at, slo=SLO, options=options).requests.first_token_s[0]

    assert first("vllm_v1_2026") < first("vllm_v0_2024") == first("vllm_v1_2026", token_budget=2048)
