"""Systems without fits of their own: what their memory, links and formats alone decide, worked out by hand."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import decode_grid
from disagg_sim.workload.lengths import lengths

BANDWIDTHS = {  # data sheets [TB/s]
    "l40s": 0.864,
    "h20_3e": 4.0,
    "mi325x": 6.0,
    "mi355x": 8.0,
    "vr_nvl72": 19.16,
    "tpu7x": 7.38,
    "trainium2": 2.9,
    "trainium3": 4.9,
}
H100 = 3.35


def ttl(system: str, profile: str = "ideal") -> float:
    """Time of a step of one request of Llama 8B in bf16 on one GPU, without an engine. [s]"""
    at = setup("llama_3_1_8b", system, "bf16", profile, "kernels")
    return float(decode_grid(at, Sharding(), lengths(128, 128), batch=[1]).latency[0, 0])


def test_the_weights_cross_the_memory_of_an_l40s_once_a_token():
    """8.03e9 parameters less 0.525e9 of the embedding, of which one row is read, in 2 B: 15.0 GB over 864 GB/s."""
    weights = 2 * (8.030e9 - 128_256 * 4096)
    assert ttl("l40s") == pytest.approx(weights / 864e9, rel=5e-3)


@pytest.mark.parametrize(("system", "bandwidth"), BANDWIDTHS.items())
def test_a_step_bound_by_memory_takes_as_long_as_bandwidths_say(system, bandwidth):
    assert ttl(system) / ttl("h100_sxm") == pytest.approx(H100 / bandwidth, rel=1e-6)


@pytest.mark.parametrize(("system", "bandwidth"), BANDWIDTHS.items())
def test_with_fits_a_step_lies_between_equal_floors_and_the_ratio_of_bandwidths(system, bandwidth):
    """Starts of kernels do not follow the memory; an H20, whose ridge point is below 64 rows, has kernels of 16."""
    ratio = H100 / bandwidth
    measured = ttl(system, "measured") / ttl("h100_sxm", "measured")
    assert min(1.0, ratio) < measured < max(1.0, ratio)


@pytest.mark.parametrize(("system", "link"), [("mi325x", 64e9), ("mi355x", 76.8e9)])
def test_a_mesh_of_eight_is_the_sum_of_seven_links(system, link):
    """A ring or an exchange uses all seven; nothing in the middle adds up an all-reduce."""
    spec = load_system(system)
    assert spec.nvlink_bandwidth == pytest.approx((spec.nvlink_domain - 1) * link)
    assert not spec.in_switch_reduction


def band_of(system: str, engine: str) -> float:
    """S.d. of the logarithm of the time of a step of eight requests. [1]"""
    at = setup("llama_3_1_8b", system, "bf16", "measured", engine)
    options = ds.Colocation(batch=(8,), prefill_batch=(1,))
    points = ds.colocated(at, ds.Sharding(), ds.lengths(1024, 128), ftl_limit=10.0, options=options)
    return float(np.log(ds.uncertainty(points.head(1), samples=400).ttl).std())


@pytest.mark.parametrize(
    ("system", "origin", "engine"), [("l40s", "h100_sxm", "vllm"), ("vr_nvl72", "gb200_nvl72", "trtllm")]
)
def test_the_band_of_an_heir_is_wider_than_that_of_the_system_measured(system, origin, engine):
    assert band_of(system, engine) > 1.1 * band_of(origin, engine)


def test_the_pcie_card_has_the_memory_that_its_clock_gives():
    """5,120 bit at 1,593 MHz, both edges: 640 B * 3.186 GT/s = 2.039 TB/s; 16 GB of weights cross it once a token."""
    card = load_system("h100_pcie")
    assert card.hbm_bandwidth == pytest.approx(640 * 2 * 1.593e9, rel=1e-3)
    assert ttl("h100_pcie", "measured") / ttl("h100_sxm", "measured") == pytest.approx(
        3.35 / 2.039, rel=0.1
    )  # floors do not grow


@pytest.mark.parametrize(("card", "parent", "joined"), [("h100_nvl", "h100_sxm", 2), ("h200_nvl", "h200_sxm", 4)])
def test_cards_of_the_same_die_are_slower_by_clock_alone_and_joined_by_bridges(card, parent, joined):
    card, parent = load_system(card), load_system(parent)
    assert card.sm_count == parent.sm_count
    for arithmetic in ("bf16", "fp8"):
        assert card.peak_flops[arithmetic] / parent.peak_flops[arithmetic] == pytest.approx(0.844, abs=0.002)
    assert (card.nvlink_domain, card.in_switch_reduction) == (joined, False)
    fits = load_efficiency(card.name)
    assert (fits.inherited, fits.measured_on) == (True, parent.name)
