"""What holds for every registered policy under any workload."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import deployment, served

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_traffic
from disagg_sim.simulation.kernel.layout import SegmentStatus
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.transfers import FIRST_TOKENS, WAYS
from disagg_sim.simulation.wishes import Flip, Move, Role, Start, Stop
from disagg_sim.workload.synthetic import session_trace

BLOCKS = 60  # of an instance: 960 tokens, so that requests preempt each other and some never fit [block]
TABLE = StepTable.affine(step=0.010, per_sequence=0.001, per_context=1e-6, per_token=0.0001)
EVERYTHING = deployment(prefill=2, decode=2, colocated=4, pairs=4)
REQUESTS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 500) | st.integers(900, 1000), st.integers(1, 200)),
    min_size=1,
    max_size=40,
).map(sorted)


def options_of(transfer, push, **others):
    """Chunks that take their own blocks leave as chunks."""
    link = LinkSpec(push="chunk" if transfer == "chunks" else push, chunk_tokens=100)
    return RunOptions(transfer=transfer, link=link, **others)


OPTIONS = st.builds(
    options_of,
    concurrency=st.sampled_from([0, 0, 3]),
    flip_s=st.sampled_from([0.0, 0.3]),
    start_up_s=st.sampled_from([0.0, 0.5]),
    sample_s=st.just(0.5),
    push=st.sampled_from(["whole", "chunk"]),
    transfer=st.sampled_from(["policy", *WAYS]),
    first_token=st.sampled_from(FIRST_TOKENS),
)
EVERY_SYSTEM = pytest.mark.parametrize("name", sorted(policies()))


def held(kernel):
    """KV blocks of each instance by the segments that hold them: in prefill, running, for a transfer in or out."""
    segments, inst = kernel.seg[: kernel.submitted], kernel.inst
    where, status = segments["instance"], segments["status"]
    cached = segments["cached"] + inst["counter"][where] - segments["joined"]  # of those that run
    blocks = np.where(status == SegmentStatus.RUNNING, -(-cached // 16), segments["blocks"])
    gone = np.isin(status, (SegmentStatus.DONE, SegmentStatus.WITHDRAWN, SegmentStatus.LOST))
    return np.bincount(where[~gone], blocks[~gone], minlength=inst.size)


class Watched:
    """A policy whose every placement is watched."""

    def __init__(self, name):
        self.inner = policy_named(name)
        self.needs = self.inner.needs
        self.now = 0.0

    def build(self, site):
        self.site = site
        parts = self.inner.build(site)
        self.routing = parts.routing
        return replace(parts, routing=self)

    def place(self, view, request):
        self.look(view)
        return self.routing.place(view, request)

    def proceed(self, view, request, origin):
        self.look(view)
        return self.routing.proceed(view, request, origin)

    def look(self, view):
        self.view = view
        assert view.now >= self.now, "time ran backwards"
        self.now = view.now
        assert (view.free_blocks >= 0).all(), "an instance exceeds its memory"
        assert (view.free_blocks <= view.total_blocks).all()
        assert np.array_equal(held(view.kernel), view.total_blocks - view.free_blocks), "blocks without an owner"
        assert view.prefill.size, "nobody prefills"
        assert view.decode.size, "nobody decodes"


def run(name, requests, options, seed=0):
    policy = Watched(name)
    result = served(requests, policy, EVERYTHING, table=TABLE, blocks=BLOCKS, seed=seed, options=options)
    return policy, result


@EVERY_SYSTEM
@settings(max_examples=10)
@given(requests=REQUESTS, options=OPTIONS)
def test_every_request_ends_once_and_nothing_is_lost(name, requests, options):
    policy, result = run(name, requests, options)
    r = result.requests
    inputs, outputs = r.input_tokens, r.output_tokens
    too_large = inputs + outputs > 16 * BLOCKS
    assert np.array_equal(r.status, np.where(too_large, Outcome.REJECTED, Outcome.COMPLETED))
    done = ~too_large
    assert np.isnan(r.finish_s[too_large]).all()
    for between in (r.first_token_s, r.decode_start_s):
        for earlier, later in pairwise([r.arrival_s, r.prefill_start_s, between, r.finish_s]):
            assert (later[done] >= earlier[done] - 1e-9).all()
    emits_late = (options.first_token == "decode") & (r.prefill_instance != r.decode_instance)
    assert (emits_late | (r.decode_start_s >= r.first_token_s))[done].all()
    assert ((r.finish_s > r.first_token_s) == (outputs > 1))[done].all()
    assert result.itl_counts.sum() == (outputs - 1)[done].sum()
    computed, prompts = result.instances.prefill_tokens.sum(), inputs[done].sum()
    assert computed >= prompts
    if r.preemptions.sum() == 0:
        assert computed == prompts
    assert ((result.samples.kv_use >= 0) & (result.samples.kv_use <= 1)).all()
    if done.any():
        view = policy.view
        view.refresh()
        assert np.array_equal(view.free_blocks, view.total_blocks), "blocks are lost"
        assert view.queued_requests.sum() + view.running_requests.sum() + view.queued_prompt_tokens.sum() == 0
        assert not any(view.coming)
        assert not view.coming_tokens.any()


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(policies())), requests=REQUESTS, options=OPTIONS)
def test_the_same_seed_gives_identical_records(name, requests, options):
    (_, one), (_, two) = run(name, requests, options, seed=3), run(name, requests, options, seed=3)
    for part in ("requests", "instances", "samples"):
        for field in fields(getattr(one, part)):
            a, b = (getattr(getattr(result, part), field.name) for result in (one, two))
            equal = a is b if a is None else np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            assert equal, f"{part}.{field.name}"
    assert one.decisions == two.decisions
    assert np.array_equal(one.itl_counts, two.itl_counts)


def agents():
    """The first turns of four sessions of a coding agent: prompts of 23,000 tokens and more, mostly remembered."""
    return session_trace(load_traffic("coding_agent"), rate=0.5, sessions=4, seed=1).head(20)


@EVERY_SYSTEM
def test_every_token_of_a_shipped_traffic_is_computed_and_emitted_once(name):
    """Prompts that instances remember are computed but for what is remembered."""
    options = RunOptions(prefix_cache=True)
    result = served(agents(), policy_named(name), EVERYTHING, table=TABLE, blocks=40_000, options=options)
    r = result.requests
    assert (r.status == Outcome.COMPLETED).all()
    assert not r.preemptions.any()
    assert result.instances.prefill_tokens.sum() == (r.input_tokens - r.cached_tokens).sum()
    assert r.cached_tokens.any()
    assert result.itl_counts.sum() == (r.output_tokens - 1).sum()


class Chaos:
    """Static disaggregation under wishes drawn at random from all that are possible."""

    needs = ("prefill", "decode")
    period_s = 0.05

    def __init__(self, drain):
        self.drain = drain

    def build(self, site):
        self.rng = site.rng("chaos")
        parts = policy_named("least_load").build(site)
        return replace(parts, roles=self)

    def flips(self, view):
        self.view = view
        possible = [Start(Sharding(), role, "chaos") for role in (Role.PREFILL, Role.DECODE) if view.free_gpus]
        for group, other in ((view.prefill, Role.DECODE), (view.decode, Role.PREFILL)):
            if group.size > 1:
                possible += [Flip(int(each), other, "chaos") for each in group]
                possible += [Stop(int(each), "chaos", self.drain) for each in group]
        possible += [Stop(each, "chaos") for role in Role for each in view.starting(role)]
        possible += [
            Move(int(request), origin, int(each), "chaos")
            for origin in range(len(view.roles))
            for request in view.waiting_prompts(origin)[-2:]
            for each in view.prefill
        ]
        return [possible[self.rng.integers(len(possible))]] if possible else []


@settings(max_examples=25)
@given(requests=REQUESTS, options=OPTIONS, drain=st.booleans(), seed=st.integers(0, 99))
def test_instances_that_come_and_go_lose_nothing_but_what_dies_with_them(requests, options, drain, seed):
    policy = Chaos(drain)
    result = served(requests, policy, EVERYTHING, table=TABLE, blocks=BLOCKS, seed=seed, options=options)
    r = result.requests
    too_large = r.input_tokens + r.output_tokens > 16 * BLOCKS
    assert ((r.status == Outcome.REJECTED) == too_large).all()
    ends = {Outcome.COMPLETED, Outcome.REJECTED} | (set() if drain else {Outcome.FAILED})
    assert set(r.status.tolist()) <= ends
    done = r.status == Outcome.COMPLETED
    assert np.array_equal(np.isfinite(r.finish_s), done)
    gpus = result.samples.gpus
    assert (gpus <= EVERYTHING.gpus).all()
    assert (result.instances.stop_s >= result.instances.start_s).all()
    if hasattr(policy, "view"):
        view = policy.view
        assert np.array_equal(view.free_blocks, view.total_blocks), "blocks are lost"
        assert not any(view.coming)


@EVERY_SYSTEM
def test_littles_law_holds(name):
    """Samples of the requests there, integrated, against the time that each was there.

    A sample every 5 ms of steps of 10 ms and more; at any time between sees a request in a queue, in decode
    or in transfer. The two differ by what a sum over samples misses of each request: a period at most.
    """
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(0.04, 200))
    requests = list(zip(arrival, rng.integers(1, 400, 200), rng.integers(2, 80, 200), strict=True))
    _, result = run(name, requests, RunOptions(sample_s=0.005))
    s, r = result.samples, result.requests
    there = (s.queued + s.running + s.transfers).sum() * 0.005
    sojourn = (r.finish_s - r.arrival_s).sum()
    assert (r.status == Outcome.COMPLETED).all()
    assert there == pytest.approx(sojourn, rel=0.02)
    assert np.array_equal(s.arrivals - s.finished >= 0, np.ones(s.time_s.size, bool))
