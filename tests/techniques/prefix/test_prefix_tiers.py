"""Tiers below HBM: what they hold, what a load costs, and the analytic model at constant lengths and a full queue."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.metrics import tier_use
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace
from tests.simulation import sites
from tests.simulation.sites import SIMPLE, deployment

BLOCK = 16
#: Bytes of a token of the small setup.
TOKEN = 131_072


#: 800 tokens in 40 ms.
SLOW = KvTier(bandwidth=2e4 * TOKEN, latency_s=0.0, shared=True)


def small(requests, options, served_by=None, policy="vllm", *, blocks=10**5, **tiers):
    """A run of the small site on a system with these tiers."""
    engine = Engine(0)
    here = sites.site(engine, served_by or deployment(colocated=1), table=SIMPLE, blocks=blocks, options=options)
    at = replace(here.setup, system=replace(here.setup.system, kv_tiers=tiers))
    return serve(requests, policy, replace(here, setup=at), engine, options)


def alike(arrivals, prompt, shared, outputs=1):
    """Prompts of one length that begin alike."""
    count, own = prompt // BLOCK, (prompt - shared) // BLOCK
    ids = [[*range(shared // BLOCK), *(10**6 * (k + 1) + np.arange(own))] for k in range(len(arrivals))]
    return Trace(
        arrival=arrivals,
        input_tokens=[prompt] * len(arrivals),
        output_tokens=[outputs] * len(arrivals),
        prefix=PrefixBlocks(offsets=np.arange(len(arrivals) + 1) * count, ids=np.ravel(ids), block_tokens=BLOCK),
    )


def below(tier):
    """Half of every prompt lies in a tier."""
    return RunOptions(reuse=Reuse(share=ConstantShare(share=0.5), tiers=((tier, 1.0),)), tiers=(tier,))


def test_loads_share_the_link_of_an_instance():
    """800 of 1,600 tokens come at 100,000 tokens/s in 8 ms, those of a prompt of the same time 8 ms later.

    The rest takes 90 ms each: the last ends at 5.189 s.
    """
    trace, options = alike([0.0, 5.0, 5.0], 1600, 800), below("dram")
    found = small(trace, options, dram=KvTier(bandwidth=1e5 * TOKEN, latency_s=0.001))
    assert found.requests.loads.load_s == pytest.approx([0.009, 0.009, 0.017])
    assert found.requests.loads.bytes[:, 0] == pytest.approx([800 * TOKEN] * 3)
    rates = tier_use(found.frame(), options.tiers)["bytes_per_s"]
    assert rates.tolist() == pytest.approx([0.0, 2400 * TOKEN / 5.189, 0.0])
    assert found.requests.cached_tokens.tolist() == [800, 800, 800]
    assert found.requests.first_token_s[1] == pytest.approx(5.009 + 0.010 + 0.080)
    assert set(found.frame()) >= {"dram_tokens", "load_s"}


def test_a_tier_without_end_is_a_hit_in_hbm_and_one_of_no_bandwidth_is_computed():
    trace = alike([0.0, 5.0, 6.0], 1600, 800)
    hit = small(trace, RunOptions(reuse=Reuse(share=ConstantShare(share=0.5)))).requests
    miss = small(trace, RunOptions()).requests
    options = below("dram")
    endless = small(trace, options, dram=KvTier(bandwidth=1e30, latency_s=0.0))
    closed = small(trace, options, dram=KvTier(bandwidth=1e-3, latency_s=0.0))
    assert endless.requests.first_token_s == pytest.approx(hit.first_token_s)
    assert closed.requests.first_token_s == pytest.approx(miss.first_token_s)
    assert closed.requests.loads.computed_again.tolist() == [800, 800, 800]
    assert not closed.requests.loads.load_s.any()


def test_what_one_instance_stores_another_finds_in_a_shared_tier_alone():
    trace, options = alike([0.0, 5.0, 5.001], 1600, 800), RunOptions(prefix_cache=True, tiers=("remote",))
    both = deployment(colocated=2)
    apart, shared = (
        small(trace, options, both, remote=KvTier(bandwidth=1e6 * TOKEN, latency_s=0.0, shared=each))
        for each in (False, True)
    )
    assert set(shared.requests.prefill_instance.tolist()) == {0, 1}
    assert sorted(apart.requests.cached_tokens.tolist()) == [0, 0, 800]
    assert sorted(shared.requests.cached_tokens.tolist()) == [0, 800, 800]
    assert shared.requests.loads.tokens.sum() == 800  # the other had it in HBM


@pytest.mark.parametrize(
    ("policy", "parts", "where"),
    [("vllm", {"colocated": 3}, [0, 0, 1, 2]), ("arrow", {"prefill": 3, "decode": 1}, [0, 0, 1, 2])],
)
def test_routers_count_prompts_that_load_their_past(policy, parts, where):
    """Once the first has been stored, two of three take 40 ms to load: prompts that come in 20 ms go to all."""
    trace, options = (
        alike([0.0, 10.0, 10.01, 10.02], 1008, 800, outputs=30),
        RunOptions(prefix_cache=True, tiers=("remote",)),
    )
    found = small(trace, options, deployment(**parts), policy, remote=SLOW)
    assert sorted(found.requests.loads.load_s[1:].tolist()) == pytest.approx([0.0, 0.04, 0.04])
    assert sorted(found.requests.prefill_instance.tolist()) == where


def test_planners_of_dynamo_count_prompts_that_load_their_past():
    """Two instances are idle at 5 s but for a load of 40 ms: the pool shrinks when that is over, at 10 s."""
    trace, options = (
        alike([0.0, 4.96, 4.97, 11.0], 1008, 800, outputs=30),
        RunOptions(prefix_cache=True, tiers=("remote",)),
    )
    policy = policy_named("dynamo_load", mode="latency", queue="instances")
    found = small(trace, options, deployment(prefill=2, decode=1), policy, remote=SLOW)
    assert [each.time_s for each in found.decisions] == [10.0]


def test_what_fails_loses_its_tiers_and_its_requests_end_once():
    """Others take all blocks between three like prompts. The instance fails while the past of the third is loaded."""
    alone, other = 150 * BLOCK, range(150)
    ids = [[*range(100)], [*(1000 + each for each in other)], [*range(100)], [*(2000 + each for each in other)]]
    ids = [*ids, [*range(100)]]
    lengths = np.array([1600, alone - 1, 1600, alone - 1, 1600])
    prefix = PrefixBlocks(offsets=np.cumsum([0, *map(len, ids)]), ids=np.concatenate(ids), block_tokens=BLOCK)
    ones = np.ones_like(lengths)
    trace = Trace(arrival=[0.0, 0.5, 1.0, 1.5, 2.0], input_tokens=lengths, output_tokens=ones, prefix=prefix)
    event = FailureEvent(at_s=2.02, kind="instance", number=0)
    failures = Failures(events=(event,), restart_s=1.0, migration_limit=1)
    options = RunOptions(prefix_cache=True, tiers=("dram",), failures=failures)
    found = small(trace, options, blocks=150, dram=KvTier(bandwidth=2.8e4 * TOKEN, latency_s=0.0))  # 57 ms of 160
    assert (found.requests.status == Outcome.COMPLETED).all()
    assert found.requests.cached_tokens.tolist() == [0, 0, 1584, 0, 0]
    assert found.requests.migrations.tolist() == [0, 0, 0, 0, 1]
