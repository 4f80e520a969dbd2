"""Cards of one chip: what power, memory and bridges make of it, worked out by hand."""

import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import decode_grid
from disagg_sim.workload.lengths import lengths


def ttl(system: str) -> float:
    """Time of a step of one request of Llama 8B in bf16 on one GPU, without an engine. [s]"""
    at = setup("llama_3_1_8b", system, "bf16", "measured", "kernels")
    return float(decode_grid(at, Sharding(), lengths(128, 128), batch=[1]).latency[0, 0])


def test_the_pcie_card_has_the_memory_that_its_clock_gives():
    """5,120 bit at 1,593 MHz, both edges: 640 B * 3.186 GT/s = 2.039 TB/s; 16 GB of weights cross it once a token."""
    card = load_system("h100_pcie")
    assert card.hbm_bandwidth == pytest.approx(640 * 2 * 1.593e9, rel=1e-3)
    assert ttl("h100_pcie") / ttl("h100_sxm") == pytest.approx(3.35 / 2.039, rel=0.1)  # floors do not grow


@pytest.mark.parametrize(("card", "parent", "joined"), [("h100_nvl", "h100_sxm", 2), ("h200_nvl", "h200_sxm", 4)])
def test_cards_of_the_same_die_are_slower_by_clock_alone_and_joined_by_bridges(card, parent, joined):
    card, parent = load_system(card), load_system(parent)
    assert card.sm_count == parent.sm_count
    for arithmetic in ("bf16", "fp8"):
        assert card.peak_flops[arithmetic] / parent.peak_flops[arithmetic] == pytest.approx(0.844, abs=0.002)
    assert (card.nvlink_domain, card.in_switch_reduction) == (joined, False)
    fits = load_efficiency(card.name)
    assert (fits.inherited, fits.measured_on) == (True, parent.name)
