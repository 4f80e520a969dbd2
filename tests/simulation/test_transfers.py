"""How caches get from one instance to the next: who reserves, who holds, who waits, and when the user hears."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import SIMPLE, deployment, served

from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.totals import latencies
from disagg_sim.simulation.transfers import WAYS
from disagg_sim.simulation.wishes import Leg, Limits, Role

ONE_OF_EACH = deployment(prefill=1, decode=1)
#: 240 tokens fill 15 of 20 blocks of either instance; a prefill takes 34 ms, a transfer 240 ms, a decode step 11 ms.
THREE = [(0.0, 240, 11)] * 3


def run(way, *, first_token="prefill", requests=THREE, blocks=20, policy="disaggregated", by=ONE_OF_EACH, table=SIMPLE):
    options = RunOptions(transfer=way, first_token=first_token)
    return served(requests, policy, by, table=table, blocks=blocks, options=options)


def test_a_buffer_takes_what_the_receiver_has_no_blocks_for():
    """Each prefill waits for the transfer before it, 240 ms, and for nothing else."""
    r = run("buffer").requests
    assert r.first_token_s == pytest.approx([0.034, 0.308, 0.582])
    assert r.reserve_wait_s == pytest.approx([0.0, 0.0, 0.0])
    assert r.decode_start_s == pytest.approx([0.274, 0.548, 0.822])


def test_under_pull_a_full_receiver_holds_up_prefill():
    """The second cache leaves when the first request has its last token: at 0.274 + 10 x 0.011 s. Until it has landed,
    240 ms later, the third prompt finds no blocks on the sender.
    """
    r = run("pull").requests
    assert r.finish_s[0] == pytest.approx(0.384)
    assert r.reserve_wait_s == pytest.approx([0.0, 0.384 - 0.308, 0.734 - 0.658])
    assert r.decode_start_s == pytest.approx([0.274, 0.624, 0.974])
    assert r.first_token_s == pytest.approx([0.034, 0.308, 0.658])
    assert r.exposed_transfer_s == pytest.approx([0.240] * 3)


def test_the_first_token_comes_from_the_first_step_of_the_receiver():
    """It comes 11 ms after the transfer has ended; the receiver takes a step for each of the 11 tokens, not for 10."""
    early, late = (run("pull", first_token=first, requests=THREE[:1]) for first in ("prefill", "decode"))
    r = late.requests
    assert r.first_token_s[0] == pytest.approx(0.274 + 0.011)
    assert r.prefill_end_s[0] == pytest.approx(0.034)
    assert r.decode_start_s[0] == pytest.approx(0.274)
    assert r.finish_s[0] == pytest.approx(0.274 + 11 * 0.011)
    assert (r.prefill_instance[0], r.decode_instance[0]) == (0, 1)
    assert late.instances.decode_tokens.tolist() == [0, 11]
    assert early.instances.decode_tokens.tolist() == [0, 10]
    assert late.itl_counts.sum() == early.itl_counts.sum() == 10
    assert latencies(late.requests).tpot[0] == pytest.approx(0.011)
    assert latencies(early.requests).tpot[0] == pytest.approx(0.011 + 0.240 / 10)


def test_an_only_token_comes_from_the_receiver_too():
    """A single output token ends at the prefill, or after transfer and step."""
    early, late = (run("pull", first_token=first, requests=[(0.0, 240, 1)]) for first in ("prefill", "decode"))
    assert early.requests.finish_s[0] == pytest.approx(0.034)
    assert late.requests.finish_s[0] == late.requests.first_token_s[0] == pytest.approx(0.285)


def test_who_stays_on_an_instance_has_its_first_token_from_its_prefill():
    """A co-located request, and one of Arrow that decodes where its prompt was computed."""
    for policy, by in (("vllm", deployment(colocated=1)), ("arrow", deployment(prefill=1, decode=1))):
        r = run("pull", first_token="decode", requests=[(0.0, 100, 3)], policy=policy, by=by).requests
        if r.prefill_instance[0] == r.decode_instance[0]:
            assert r.first_token_s[0] == pytest.approx(0.020)
            assert r.finish_s[0] == pytest.approx(0.020 + 2 * 0.011)


def test_a_push_has_its_blocks_from_the_start():
    """Two prompts of 2 x 2,048 tokens; the pieces of each but its last leave while it is computed.

    A receiver of 300 blocks has room for the first alone, so the second is pushed when that has ended.
    """
    early = policy_named("disaggregated", early_push=True)
    two = [(0.0, 4096, 2), (0.0, 4096, 2)]
    fast = StepTable.affine(step=0.010, per_sequence=0.001, per_token=0.01)
    r = run("push", requests=two, blocks=600, policy=early, table=fast).requests
    assert r.exposed_transfer_s[0] == pytest.approx(2.048)  # a thousand tokens a second
    r = run("push", requests=two, blocks=300, policy=early, table=fast).requests
    assert r.exposed_transfer_s[0] == pytest.approx(2.048)
    assert r.prefill_start_s[1] >= r.decode_start_s[0] - 1e-9  # the sender holds 256 of 300 blocks
    pulled = run("pull", requests=two, blocks=600, policy=early, table=fast).requests
    assert pulled.exposed_transfer_s[0] == pytest.approx(4.096)


class Onward:
    """Each request is prefilled on an instance of its own choice, in passes of 32 tokens, and decoded on the last."""

    needs = ("colocated",)

    def __init__(self, senders=1):
        self.senders = senders

    def build(self, site):
        limits = Limits(token_budget=32)
        steps = ByRole(prefill=limits, decode=limits)
        return Parts(start=site.instances(("colocated", Role.BOTH)), routing=self, steps=steps)

    def place(self, view, request):
        return Leg(request % self.senders, view.input_tokens[request] + 1, self.senders)

    def proceed(self, view, request, origin):
        return Leg(self.senders)


#: 40 ms for 32 tokens of a prompt, 9 ms for the only decode.
PASSES = StepTable.affine(step=0.008, per_sequence=0.001, per_token=0.001)


def pushed(requests, senders, blocks):
    """A run whose chunks of 32 tokens take blocks one by one; they cross in 32 ms if alone."""
    options = RunOptions(transfer="chunks", first_token="prefill", link=LinkSpec(chunk_tokens=32))
    by = deployment(colocated=senders + 1)
    return served(requests, Onward(senders), by, table=PASSES, blocks=blocks, options=options).requests


def test_chunks_take_blocks_when_they_are_computed():
    """Three prompts of two chunks, which decode for 144 ms, and a receiver of 8 blocks.

    The first chunk of each leaves after 40 ms of its prefill, in 2 blocks; the rest, with the place of the next token,
    takes 3. Of the second request it waits from 160 ms until the first is done at 256 ms. The first chunk of the third,
    computed at 200 ms, waits behind it; at 256 ms 3 blocks are free and 5 are wanted by then, so that all of it waits
    until the second is done.
    """
    r = pushed([(0.0, 64, 17)] * 3, senders=1, blocks=8)
    assert r.first_token_s == pytest.approx([0.080, 0.160, 0.240])
    assert r.decode_start_s == pytest.approx([0.112, 0.288, 0.496])
    assert r.finish_s == pytest.approx([0.256, 0.432, 0.640])
    assert r.reserve_wait_s == pytest.approx([0.0, 0.096, 0.192])
    assert r.exposed_transfer_s == pytest.approx([0.032, 0.032, 0.064])
    assert r.transfer_s == pytest.approx([0.064, 0.064, 0.064])
    assert r.transferred_tokens.tolist() == [64, 64, 64]


def test_a_receiver_full_of_parts_of_caches_goes_on():
    """Two senders fill 8 blocks with two of three chunks of each; the rest of either needs 3 more.

    The second gives its blocks back, and all of it moves when the first is done. Chunks of both share the link, so the
    first ones land at 104 ms, the second ones at 168 ms, the rest of the first at 200 ms.
    """
    r = pushed([(0.0, 96, 17)] * 2, senders=2, blocks=8)
    assert r.first_token_s == pytest.approx([0.120, 0.120])
    assert r.decode_start_s == pytest.approx([0.200, 0.440])
    assert r.finish_s == pytest.approx([0.344, 0.584])
    assert r.reserve_wait_s == pytest.approx([0.0, 0.224])
    assert r.exposed_transfer_s == pytest.approx([0.080, 0.096])
    assert r.transfer_s == pytest.approx([0.160, 0.096])
    assert r.preemptions.tolist() == [0, 0]


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 120), st.integers(2, 60)), min_size=1, max_size=25),
    senders=st.integers(1, 4),
    blocks=st.integers(12, 20),
)
def test_no_order_of_chunks_fills_a_receiver_for_ever(requests, senders, blocks):
    r = pushed(sorted(requests), senders, blocks)
    assert (r.status == Outcome.COMPLETED).all()
    assert r.transferred_tokens.tolist() == r.input_tokens.tolist()


class Crosswise:
    """Each request is prefilled on one instance and decoded on the other, in both directions."""

    needs = ("colocated",)

    def __init__(self, named):
        self.named = named

    def build(self, site):
        return Parts(
            start=site.instances(("colocated", Role.BOTH)),
            routing=self,
            steps=ByRole(prefill=Limits(), decode=Limits()),
        )

    def place(self, view, request):
        first, prompt = request % 2, view.input_tokens[request]
        return Leg(first, prompt + 1, 1 - first) if self.named else Leg(first, prompt + 1)

    def proceed(self, view, request, origin):
        return Leg(1 - origin)


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 200), st.integers(1, 120)), min_size=1, max_size=30),
    way=st.sampled_from(WAYS),
    first_token=st.sampled_from(["prefill", "decode"]),
    named=st.booleans(),
    blocks=st.integers(20, 40),
)
def test_no_order_of_requests_locks_two_instances(requests, way, first_token, named, blocks):
    by, policy = deployment(colocated=2), Crosswise(named)
    found = run(way, first_token=first_token, requests=sorted(requests), policy=policy, by=by, blocks=blocks)
    r = found.requests
    assert (r.status == Outcome.COMPLETED).all()
    assert found.itl_counts.sum() == (r.output_tokens - 1).sum()
