"""The network between instances: sharing, pushing, and who waits for blocks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import SIMPLE, deployment, served

from disagg_sim.domain import Sharding, Slo
from disagg_sim.physics.kv_transfer import descriptors, kv_bytes_per_request
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import NORMAL, Engine
from disagg_sim.simulation.kernel.entry import ARRIVES
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec, Spine, instance_bandwidth
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome, latencies
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.transfers import WAYS
from disagg_sim.simulation.wishes import Leg, Limits, Role


def served_site(at, link):
    """The site of a deployment of eight GPUs."""
    wire = link.wire(at, 8)
    part = (Replicas(mapping=Sharding(), instances=8),)
    return Site(
        setup=at,
        deployment=ServedDeployment(name="eight", gpus=8, colocated=part),
        slo=Slo(ttft=1.0, tpot=0.1),
        link=link,
        link_bandwidth=wire.bandwidth,
        link_latency_s=wire.latency_s,
        link_descriptor_s=wire.descriptor_s,
        tables=lambda mapping, sequences: None,
        blocks=lambda mapping, limits: 1,
        rng=Engine().rng,
        start_up_s=0.0,
        flip_s=0.0,
        prompt_tokens=1000.0,
        output_tokens=100.0,
    )


class Moved:
    """Transfers on links of stated bandwidths, and when each has arrived."""

    def __init__(self, bandwidths, latency_s=0.0, spine=None):
        self.engine = Engine()
        self.fleet = Fleet([InstanceSpec(table=StepTable.affine(step=1.0), blocks=1)] * len(bandwidths), spine=spine)
        for bandwidth in bandwidths:
            self.fleet.wires.join(bandwidth, latency_s)
        self.sent, self.ends = {}, {}
        self.engine.attach(self)

    def advance(self, until):
        self.told, time = self.fleet.run_until(until)
        return np.inf if self.told == -1 else time

    def deliver(self):
        self.ends[self.sent[ARRIVES - self.told]] = self.engine.now

    def send(self, index, sender, receiver, size, post_s=0.0):
        self.sent[self.fleet.move(receiver, (sender, -1, 0, size, post_s, 0.0), self.engine.now)] = index

    def all(self, sends):
        for index, (time, *sent) in enumerate(sends):
            self.engine.at(time, NORMAL, self.send, index, *sent)
        self.engine.run()
        assert self.fleet.wires.in_flight == 0
        return [self.ends[index] for index in range(len(sends))]


def finished(sends, bandwidths, latency_s=0.0):
    """Times at which transfers (time, sender, receiver, size) end, by their index."""
    return Moved(bandwidths, latency_s).all(sends)


@pytest.mark.parametrize(
    ("sends", "ends"),
    [
        ([(1.0, 0, 4, 60.0)], [13.0]),  # over the narrower end
        ([(0.0, 0, 1, 40.0), (2.0, 0, 2, 40.0)], [6.0, 8.0]),  # from 2 s on 20 of 40 B at 5 B/s each
        ([(0.0, 0, 2, 40.0), (0.0, 1, 2, 40.0)], [8.0, 8.0]),  # into one receiver
        ([(0.0, 0, 1, 40.0), (0.0, 2, 3, 40.0)], [4.0, 4.0]),  # between other instances
    ],
)
def test_transfers_by_hand(sends, ends):
    """Links of 10 B/s, the last of 5 B/s."""
    assert finished(sends, [10.0, 10.0, 10.0, 10.0, 5.0]) == pytest.approx(ends)


def test_a_transfer_alone_takes_its_latency_and_its_bytes():
    assert finished([(1.0, 0, 1, 60.0)], [10.0, 5.0], latency_s=0.5) == [13.5]


@pytest.mark.parametrize(
    ("post_s", "ends"),
    [
        (0.0, [8.0, 8.0]),  # from the start each has half of 10 B/s
        (1.0, [7.0, 8.0]),  # 10 of 40 B are there at 1 s, then 30 at 5 B/s; the second has 10 B left at 7 s
        (3.0, [5.0, 8.0]),
        (4.0, [4.0, 8.0]),  # the first is gone when the second starts
        (6.0, [4.0, 10.0]),  # and the link rests for 2 s
    ],
)
@pytest.mark.parametrize("spine", [None, Spine(1, 10.0)])
def test_descriptors_that_are_posted_take_no_share_of_the_link(post_s, ends, spine):
    """Two transfers of 40 B at 10 B/s, one behind its descriptors: the other ends after 8 s less these, or 4 s."""
    assert Moved([10.0] * 2, spine=spine).all([(0.0, 0, 1, 40.0), (0.0, 0, 1, 40.0, post_s)]) == pytest.approx(ends)
    assert Moved([10.0] * 2, spine=spine).all([(0.0, 0, 1, 40.0, post_s), (0.0, 0, 1, 40.0)]) == pytest.approx(
        ends[::-1]
    )


@pytest.mark.parametrize(("post_s", "end"), [(3.0, 13.0), (0.0, 9.0)])
def test_a_link_that_comes_back_goes_on_where_it_was(post_s, end):
    """No link from 2 to 5 s, then 5 B/s: for 40 B whose descriptors were posted up to 3 s, or for 20 B of them."""
    moved = Moved([10.0] * 2)
    for time, share in ((2.0, 0.0), (5.0, 0.5)):
        moved.engine.at(time, NORMAL, moved.fleet.limit_link, 0, share, time)
    assert moved.all([(0.0, 0, 1, 40.0, post_s)]) == [end]


def test_gpus_that_share_tokens_post_the_blocks_that_they_take_in_alone():
    site = served_site(setup("deepseek_r1", "h200_sxm", "fp8"), LinkSpec(descriptor_s=1e-6))
    alone, shared = Sharding(tp_attn=8, tp_ffn=8), Sharding(tp_attn=8, tp_ffn=8, dcp=8)
    assert site.post_share_s(alone, shared) == site.post_share_s(alone, alone) / 8 > 0


SENDS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 0)]), st.floats(1, 100)), max_size=8
)


@given(SENDS)
def test_every_transfer_ends_once_and_none_beats_an_empty_link(wanted):
    sends = [(time, sender, receiver, size) for time, (sender, receiver), size in wanted]
    for (time, _, _, size), end in zip(sends, finished(sends, [10.0] * 3), strict=True):
        assert end >= time + size / 10.0 - 1e-9


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(1, 100)), min_size=1, max_size=8))
def test_sharing_keeps_a_link_as_busy_as_a_queue_does(wanted):
    """Between one pair of instances the last byte arrives when it would if transfers went one after the other."""
    end = 0.0
    for time, size in sorted(wanted):
        end = max(end, time) + size / 10.0
    assert max(finished([(time, 0, 1, size) for time, size in wanted], [10.0] * 2)) == pytest.approx(end, rel=1e-9)


def test_a_push_in_pieces_exposes_its_last_piece_on_a_fast_link():
    link = Moved([10.0] * 2).fleet.wires
    assert link.hidden_bytes(0, 1, 80.0, pieces=4, window_s=100.0) == 60.0
    assert link.hidden_bytes(0, 1, 80.0, pieces=1, window_s=100.0) == 0.0
    slow = link.hidden_bytes(0, 1, 80.0, pieces=4, window_s=4.0)
    assert slow == pytest.approx(30.0)  # 10 B/s over the 3 s after the first piece


def test_pieces_are_chunks_and_layers():
    assert LinkSpec(push="whole").pieces(5000, 80) == 1
    assert LinkSpec(push="chunk", chunk_tokens=2048).pieces(5000, 80) == 3
    assert LinkSpec(push="layer", chunk_tokens=2048).pieces(5000, 80) == 240


def test_bandwidth_counts_gpus_with_distinct_cache():
    """Llama-3.1-8B has 8 KV heads: TP 4 has 4 distinct parts, TP 16 still 8."""
    small = setup("llama_3_1_8b", "h100_sxm", "fp8")
    assert instance_bandwidth(small, Sharding(tp_attn=4, tp_ffn=4), 7.0) == 28.0
    assert instance_bandwidth(small, Sharding(tp_attn=16, tp_ffn=16), 7.0) == 56.0


def test_the_wire_is_nvlink_inside_a_domain_and_the_nic_beyond():
    small = setup("llama_3_1_8b", "h100_sxm", "fp8", "ideal")
    inside, across = (LinkSpec().wire(small, gpus).bandwidth for gpus in (8, 9))
    ratio = small.system.nvlink_bandwidth / small.system.nic_bandwidth
    assert np.isclose(inside / across, ratio)
    assert LinkSpec(bandwidth=3.0, latency_s=0.25).wire(small, 8) == (3.0, 0.25, 0.0, False)


def test_a_transfer_pays_for_its_descriptors_as_published():
    """DOPD measured 15-80 ms with NIXL for prompts of 1,000-3,000 tokens of Llama-70B, TP1 to TP2, "depending on
    fragmentation": 63 to 188 blocks of keys and values of 80 layers, 10,080 to 30,080 descriptors of 2.4 us.
    """
    at, one, two = setup("llama_3_1_70b", "h100_sxm", "fp8"), Sharding(), Sharding(tp_attn=2, tp_ffn=2)
    wire = LinkSpec().wire(at, 8)
    assert wire.bandwidth == pytest.approx(0.84 * 450e9)
    took = []
    for tokens in (1000, 3000):
        moved = kv_bytes_per_request(at.model, at.precision, tokens) / wire.bandwidth  # one GPU sends all
        took.append(wire.latency_s + wire.descriptor_s * descriptors(at.model, tokens, 16) + moved)
    assert took == pytest.approx([0.026, 0.075], abs=0.002)
    assert 0.015 < took[0] < took[1] < 0.080
    here = served_site(at, LinkSpec())
    assert here.post_share_s(two, one) == pytest.approx(2 * wire.descriptor_s)  # its blocks come in halves
    assert here.post_share_s(one, Sharding(pp=4)) == pytest.approx(wire.descriptor_s / 4)


def test_a_link_of_ones_own_costs_what_is_stated():
    at = setup("llama_3_1_70b", "h100_sxm", "fp8")
    assert LinkSpec(bandwidth=1e9).wire(at, 8).descriptor_s == 0.0
    assert LinkSpec(latency_s=0.015).wire(at, 8) == (450e9, 0.015, 0.0, True)
    assert LinkSpec(bandwidth=1e9, descriptor_s=1e-6).wire(at, 8).descriptor_s == 1e-6


def test_descriptors_are_hidden_with_their_pieces():
    """4 pieces a second apart: each takes 2 s on the wire and 2 s to post, so that 3 s hide three quarters of one."""
    link = Moved([10.0] * 2).fleet.wires
    assert link.hidden_bytes(0, 1, 80.0, pieces=4, window_s=4.0, post_s=8.0) == pytest.approx(15.0)


def crossing(sends, leaf_gpus, uplink, instances=4, bandwidth=10.0):
    """As ``finished``, with instances of one GPU under leaves whose uplinks the transfers between them share."""
    return Moved([bandwidth] * instances, spine=Spine(leaf_gpus, uplink)).all(sends)


def test_transfers_between_leaves_share_uplinks_and_those_within_do_not():
    """Leaves {0, 1} and {2, 3}, an uplink of 10 B/s each way: 0 to 2 and 1 to 3 take 5 B/s each, 0 to 1 takes 10."""
    assert crossing([(0.0, 0, 2, 40.0), (0.0, 1, 3, 40.0)], 2, 10.0) == pytest.approx([8.0, 8.0])
    assert crossing([(0.0, 0, 1, 40.0), (0.0, 2, 3, 40.0)], 2, 10.0) == pytest.approx([4.0, 4.0])
    assert crossing([(0.0, 0, 2, 40.0)], 2, 10.0) == pytest.approx([4.0])  # alone it has its whole NIC


def test_an_uplink_that_becomes_free_is_taken():
    """Both at 5 B/s from t = 2: the first ends at 6; the second has 20 of 40 left then, and ends two seconds later."""
    assert crossing([(0.0, 0, 2, 40.0), (2.0, 1, 3, 40.0)], 2, 10.0) == pytest.approx([6.0, 8.0])


PAIRS = st.permutations(range(4)).map(lambda order: order[:2])


@given(st.lists(st.tuples(st.floats(0, 5), PAIRS, st.floats(1, 50)), min_size=1, max_size=6))
def test_a_spine_without_oversubscription_changes_nothing(drawn):
    sends = [(time, *pair, size) for time, pair, size in drawn]
    assert crossing(sends, 2, 1e9) == pytest.approx(finished(sends, [10.0] * 4))


def test_a_deployment_larger_than_a_leaf_shares_its_spine():
    plain = setup("llama_3_1_8b", "h100_sxm", "fp8", "ideal")
    at = plain.changed(system=replace(plain.system, leaf_gpus=32, spine_oversubscription=4.0))
    assert LinkSpec().spine(plain, 64) is LinkSpec().spine(at, 32) is None
    spine = LinkSpec().spine(at, 64)
    assert spine == (32, pytest.approx(32 * 50e9 / 4))
    assert LinkSpec().wire(at, 64, shared_spine=True).bandwidth == 50e9
    assert LinkSpec().wire(at, 64).bandwidth == 12.5e9


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
