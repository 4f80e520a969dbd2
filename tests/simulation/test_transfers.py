"""How caches get from one instance to the next: who reserves, who holds, who waits, and when the user hears."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import SIMPLE, deployment, served

from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome, latencies
from disagg_sim.simulation.run_options import RunOptions
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
    assert latencies(late.requests)[1][0] == pytest.approx(0.011)
    assert latencies(early.requests)[1][0] == pytest.approx(0.011 + 0.240 / 10)


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
