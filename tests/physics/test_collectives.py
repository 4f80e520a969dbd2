"""Collectives by hand: bytes over one link, latency plus wire time, and which path counts."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.efficiency import CollectiveFit
from disagg_sim.facts.load import load_engine
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.collectives import (
    AllToAllRate,
    LinkCurve,
    MessageTime,
    all_reduce_bytes,
    collective_curve,
    copies_per_pick,
    copies_per_rank,
    gather_bytes,
    hierarchical_all_reduce,
    in_switch_all_reduce_bytes,
    one_shot_all_reduce_bytes,
    pipeline_hop,
    ring_all_reduce_bytes,
)
from disagg_sim.physics.cost import NOTHING_DONE, all_reduce_cost, all_to_all_cost, exchange_cost, group_cost, hop_cost
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import Operator

MESSAGE = 8e6  # [B]


@pytest.mark.parametrize(
    ("n", "ring", "one_shot", "in_switch", "gather"),
    [(2, 8e6, 8e6, 12e6, 4e6), (4, 12e6, 24e6, 10e6, 6e6), (8, 14e6, 56e6, 9e6, 7e6), (1, 0, 0, 0, 0)],
)
def test_bytes_over_one_link(n, ring, one_shot, in_switch, gather):
    n = float(n)
    assert ring_all_reduce_bytes(MESSAGE, n) == ring
    assert one_shot_all_reduce_bytes(MESSAGE, n) == one_shot
    assert in_switch_all_reduce_bytes(MESSAGE, n) == in_switch
    assert gather_bytes(MESSAGE, n) == gather


def test_best_algorithm_takes_the_least_volume():
    n = np.array([1.0, 2.0, 4.0, 8.0])
    assert all_reduce_bytes(MESSAGE, n, best=True, in_switch=True).tolist() == [0, 8e6, 10e6, 9e6]
    assert all_reduce_bytes(MESSAGE, n, best=True, in_switch=False).tolist() == [0, 8e6, 12e6, 14e6]
    assert all_reduce_bytes(MESSAGE, n, best=False, in_switch=True).tolist() == [0, 8e6, 12e6, 14e6]


def test_only_switches_that_reduce_do():
    """Ideal TP8: (1 + 1/8)*S on an NVSwitch of Hopper or Blackwell, the ring's 14/8*S on A100 and MI300X."""
    for name, volume in (("gb200_nvl72", 9e6), ("h100_sxm", 9e6), ("a100_sxm_80gb", 14e6), ("mi300x", 14e6)):
        at = setup("llama_3_1_70b", name, "bf16", "ideal")
        expected = volume / at.system.nvlink_bandwidth
        assert float(all_reduce_cost(MESSAGE, 8.0, at).time) == pytest.approx(expected, rel=1e-12)


def test_hierarchical_all_reduce_by_hand():
    """16 ranks over two domains of 8: inside 14e6/400e9 + 10 us; across 2*(1/2)*(8e6/8)/40e9 = 25 us, two hops."""
    inside = MessageTime(10e-6, 14e6 / 400e9)
    done = hierarchical_all_reduce(MESSAGE, 16.0, 8.0, inside=inside, nic_bandwidth=40e9, nic_latency=7e-6)
    assert done.wire == pytest.approx(35e-6 + 25e-6, rel=1e-12)
    assert done.latency == pytest.approx(10e-6 + 2 * 7e-6, rel=1e-12)
    four = hierarchical_all_reduce(MESSAGE, 32.0, 8.0, inside=inside, nic_bandwidth=40e9, nic_latency=7e-6)
    assert four.wire == pytest.approx(35e-6 + 37.5e-6, rel=1e-12)  # 2*(3/4)*1e6/40e9
    assert four.latency == pytest.approx(10e-6 + 4 * 7e-6, rel=1e-12)
    part = hierarchical_all_reduce(MESSAGE, 20.0, 8.0, inside=inside, nic_bandwidth=40e9, nic_latency=7e-6)
    assert part.wire == pytest.approx(35e-6 + 4e-4 / 12, rel=1e-12)  # the third domain is half full: 2*(2/3)*1e6/40e9


@pytest.mark.parametrize(
    ("ranks", "domains", "inside", "across"),
    [(2.0, 2.0, 0.0, 1 / 2), (8.0, 2.0, 3 / 4, 1 / 2 / 4), (16.0, 4.0, 3 / 4, 3 / 4 / 4), (2.0, 4.0, 0.0, 1 / 2)],
)
def test_a_gather_over_domains_by_hand(ranks, domains, inside, across):
    """What a rank's NIC brings to a domain goes on over NVLink; two ranks of two domains each exchange halves."""
    at = setup("llama_3_1_70b", "h200_sxm", "fp8", "ideal")
    gather = Operator("all-gather of rows", "gather", NOTHING_DONE, size=8e6, ranks=ranks, domains=domains)
    nic = at.profile.nic_efficiency * at.system.nic_bandwidth
    expected = 8e6 * (inside / at.system.nvlink_bandwidth + across / nic)
    assert float(group_cost(gather, at).sums.communication) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "copies"), [(8, 4.59), (64, 7.46), (1, 0.0)])
def test_copies_of_a_token_without_duplicates(n, copies):
    """Expected distinct other ranks of 8 picks."""
    assert round(float(copies_per_rank(8, float(n))), 2) == copies


def test_copies_per_pick():
    assert float(copies_per_pick(8, 8.0)) == 7.0
    assert float(copies_per_pick(8, 64.0)) == 7.875
    assert float(copies_per_pick(8, 1.0)) == 0.0


def curve(latency: float, bandwidth: float, *, per_rank: bool = True) -> LinkCurve:
    copies = copies_per_rank if per_rank else copies_per_pick
    return LinkCurve(np.array([1.0]), np.array([latency]), np.array([bandwidth]), copies=copies)


def test_all_to_all_inside_a_domain_by_hand():
    """1000 tokens of 7168 bytes: 7168e3*4.5946 B at 400 GB/s after 10 us; one copy per pick instead: 7 of them."""
    for per_rank, copies in ((True, 7 * (1 - (7 / 8) ** 8)), (False, 7.0)):
        rate = AllToAllRate(curve(10e-6, 400e9, per_rank=per_rank), curve(30e-6, 40e9))
        cost = all_to_all_cost(1000.0, 8.0, 1.0, hidden=7168, top_k=8, wire_bytes=1.0, rate=rate)
        assert float(cost.time) == pytest.approx(10e-6 + 7_168_000 * copies / 400e9, rel=1e-12)
        assert float(cost.sums.communication + cost.sums.latency) == pytest.approx(float(cost.time), rel=1e-12)


def test_all_to_all_across_domains_takes_the_slower_path_and_the_latency_of_the_nic():
    """64 ranks in 8 domains: 7*(1-(7/8)^8) = 4.59 copies over the NIC, 7.46 over NVLink."""
    row, nic_copies, link_copies = 7_168_000, 7 * (1 - (7 / 8) ** 8), 63 * (1 - (63 / 64) ** 8)
    slow_nic = AllToAllRate(curve(10e-6, 400e9), curve(30e-6, 40e9))
    cost = all_to_all_cost(1000.0, 64.0, 8.0, hidden=7168, top_k=8, wire_bytes=1.0, rate=slow_nic)
    assert float(cost.time) == pytest.approx(30e-6 + row * nic_copies / 40e9, rel=1e-12)
    slow_link = AllToAllRate(curve(10e-6, 4e9), curve(30e-6, 40e9))
    cost = all_to_all_cost(1000.0, 64.0, 8.0, hidden=7168, top_k=8, wire_bytes=1.0, rate=slow_link)
    assert float(cost.time) == pytest.approx(30e-6 + row * link_copies / 4e9, rel=1e-12)


def exchange(at, **degrees):
    """Dispatch and combine of 1000 tokens a GPU of R1: 7168 elements a token, 8 experts. [s]"""
    return [float(part.time) for part in exchange_cost(1000.0, Sharding(**degrees), routed(at), "decode", at)]


def test_exchange_leaves_the_domain_only_where_the_stage_does():
    """The ideal rates: dispatch 1.03 B and combine 2 B an element; 16 ranks on H100 stand in two domains of 8."""
    at = setup("deepseek_r1", "h100_sxm", "fp8", "ideal")
    inside = exchange(at, dp_attn=8.0, ep=8.0)
    copies = 7 * (1 - (7 / 8) ** 8)
    assert inside == pytest.approx([b * 7_168_000 * copies / at.system.nvlink_bandwidth for b in (1.03, 2)], rel=1e-9)
    across = exchange(at, dp_attn=16.0, ep=16.0)
    nic_copies = 1 - (1 / 2) ** 8
    assert across == pytest.approx([b * 7_168_000 * nic_copies / at.system.nic_bandwidth for b in (1.03, 2)], rel=1e-9)


def test_expert_tensor_parallelism_gathers_and_scatters_the_tokens():
    """DP attention with expert TP over 8 GPUs: all-gather of 8*T tokens at 1.03 B, reduce-scatter at 2 B."""
    at = setup("deepseek_r1", "h100_sxm", "fp8", "ideal")
    done = exchange(at, dp_attn=8.0, tp_ffn=8.0)
    by_hand = [7 / 8 * 8 * 7_168_000 * size / at.system.nvlink_bandwidth for size in (1.03, 2)]
    assert done == pytest.approx(by_hand, rel=1e-9)


def test_pipeline_hop():
    assert pipeline_hop(1e6, latency=10e-6, bandwidth=100e9).time == pytest.approx(20e-6)
    at = setup("llama_3_1_70b", "h100_sxm", "fp8", "measured")
    near, far = (float(hop_cost(1000.0, n, at).time) for n in (8.0, 16.0))
    assert near == pytest.approx(10e-6 + 1000 * 8192 * 2 / 450e9, rel=1e-9)
    assert far == pytest.approx(17.5e-6 + 1000 * 8192 * 2 / 50e9, rel=1e-9)


def test_curves_go_straight_in_the_doublings_and_stay_flat_outside():
    known = LinkCurve(np.array([2.0, 8.0]), np.array([4e-6, 8e-6]), np.array([100e9, 300e9]), step=1e-6)
    latency, bandwidth = known.at(np.array([1.0, 2.0, 4.0, 8.0, 32.0]))
    assert latency == pytest.approx([4e-6, 4e-6, 6e-6, 8e-6, 10e-6])
    assert bandwidth == pytest.approx([100e9, 100e9, 200e9, 300e9, 300e9])


@pytest.mark.parametrize("mapping", [Sharding(dp_attn=8.0, ep=8.0), Sharding(dp_attn=32.0, ep=32.0)])
def test_an_engine_stretches_the_exchange_of_experts_in_decode_alone(mapping):
    """A stretch of 2.5 adds one and a half exchanges a layer; prefill has a stretch of its own."""
    at = setup("deepseek_r1", "gb200_nvl72", "fp8", engine="trtllm")
    at, stretched = (
        at.changed(overheads=replace(load_engine("trtllm"), exchange_stretch=factor)) for factor in (1.0, 2.5)
    )
    for phase, factor in (("decode", 2.5), ("prefill", 1.0)):
        for own, other in zip(
            exchange_cost(64.0, mapping, routed(at), phase, at),
            exchange_cost(64.0, mapping, routed(at), phase, stretched),
            strict=True,
        ):
            assert float(other.time) == pytest.approx(factor * float(own.time), rel=1e-12)
            assert float(other.sums.communication) == pytest.approx(factor * float(own.sums.communication), rel=1e-12)


def test_prefill_exchanges_as_long_as_its_fullest_rank():
    """1.3 times with the popularity of text on 8 ranks, twice on 32; evened out by 32 copies; as timed at skew 0."""
    at = setup("deepseek_r1", "gb200_nvl72", "fp8", engine="trtllm")
    alike = at.changed(profile=replace(at.profile, rank_skew=0.0))

    def longer(mapping, phase):
        costs = [exchange_cost(512.0, mapping, routed(at), phase, each) for each in (alike, at)]
        return [float(other.time / own.time) for own, other in zip(*costs, strict=True)]

    for ranks, factor in ((8.0, 1.29), (32.0, 2.04)):
        assert longer(Sharding(dp_attn=ranks, ep=ranks), "prefill") == pytest.approx([factor] * 2, rel=0.005)
        assert longer(Sharding(dp_attn=ranks, ep=ranks), "decode") == [1.0, 1.0]
    copied = Sharding(dp_attn=32.0, ep=32.0, redundant_slots=32)
    assert longer(copied, "prefill") == pytest.approx([1.0] * 2, abs=0.01)
    assert longer(Sharding(dp_attn=8.0, tp_ffn=8.0), "prefill") == [1.0, 1.0]


def test_attention_ranks_wait_before_they_gather_for_expert_tp():
    """42 us a layer whatever the tokens, in decode alone; no stretch: experts under TP are equal on all ranks.

    Nobody waits for others where experts lie whole on their ranks (that is in the stretch), or where one rank attends.
    """
    at = setup("deepseek_r1", "b300_sxm", "fp8", engine="trtllm")
    engine = load_engine("trtllm")
    assert engine.exchange_wait == pytest.approx(42e-6)
    at, waiting = (
        at.changed(overheads=replace(engine, exchange_stretch=factor, exchange_wait=wait))
        for factor, wait in ((1.0, 0.0), (2.5, 42e-6))
    )

    def more(mapping, phase, tokens=44.0):
        costs = [exchange_cost(tokens, mapping, routed(at), phase, each) for each in (at, waiting)]
        return [float(other.time) - float(own.time) for own, other in zip(*costs, strict=True)]

    cut = Sharding(dp_attn=8.0, tp_ffn=8.0)
    for tokens in (1.0, 44.0, 500.0):
        assert more(cut, "decode", tokens) == pytest.approx([42e-6, 0.0], abs=1e-15)
    assert more(cut, "prefill") == [0.0, 0.0]
    assert more(Sharding(tp_attn=8.0, tp_ffn=8.0), "decode") == [0.0, 0.0]
    apart = Sharding(dp_attn=8.0, ep=8.0)
    dispatch = exchange_cost(44.0, apart, routed(at), "decode", at)[0]
    assert more(apart, "decode")[0] == pytest.approx(1.5 * float(dispatch.time))


def routed(at):
    """Routed experts of the model's last kind of layer."""
    return layers_of(at.model)[-1][0].ffn


def law(engine: str, algorithm: str, latency: float, *, most: int, hop: float = 0.0) -> CollectiveFit:
    """An all-reduce at half of the link, timed on up to ``most`` GPUs."""
    return CollectiveFit(
        engine=engine,
        version="1",
        points=1,
        median_error=0.0,
        p90_error=0.0,
        op="all_reduce",
        gpus=0,
        latency=latency,
        e_bandwidth=0.5,
        algorithm=algorithm,
        hop=hop,
        valid=(("num_gpus", 2.0, float(most)),),
    )


def test_kernels_of_an_engine_end_where_they_were_timed_and_rings_do_not():
    """1 KB over links of 1 GB/s takes 2(n-1)/n * 2 us on the wire; the ring adds 3 us for each further rank."""
    n = np.array([2.0, 4.0, 8.0, 32.0])
    wire = 2.0 * (n - 1) / n * 2e-6
    own, ring = law("sglang", "two_shot", 4e-6, most=4), law("nccl", "ring", 8e-6, most=16, hop=3e-6)
    curve = collective_curve([own, ring], 1e9, latency=None, step=1e-6)
    assert curve.transfer(1e3, n, 0.0).time == pytest.approx(wire + np.array([4e-6, 4e-6, 29e-6, 101e-6]))
    assert [float(curve.at(each)[0]) for each in (4.0, 8.0)] == pytest.approx([4e-6, 29e-6])
    assumed = law("assumed", "two_shot", 5e-6, most=16)
    helped = collective_curve([own, ring, assumed], 1e9, latency=None, step=1e-6)
    assert helped.transfer(1e3, n, 0.0).time == pytest.approx(wire + np.array([4e-6, 4e-6, 5e-6, 5e-6]))
    alone = collective_curve([own], 1e9, latency=None, step=1e-6)  # nothing reaches further: one step a doubling
    assert alone.transfer(1e3, n, wire * 0.5e9).time == pytest.approx(wire + np.array([4e-6, 4e-6, 5e-6, 7e-6]))
