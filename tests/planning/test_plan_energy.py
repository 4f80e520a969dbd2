"""What the GPUs of a plan draw at its rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.facts.load import load_power
from disagg_sim.physics import power
from disagg_sim.planning.energy import added_up, drawn

LENGTHS = ds.lengths(2048, 256)


@pytest.fixture(scope="module")
def plan():
    return ds.plan("llama_3_1_8b", "h200_sxm", LENGTHS, tpot="20 ms", rate=40)


@pytest.fixture
def designs(plan):
    assert plan.best is not None
    assert plan.other is not None
    return plan.best, plan.other


def test_gpus_whose_kernels_draw_nothing_draw_idle_power(designs, monkeypatch):
    spec = load_power("h200_sxm")
    nothing = {"base": 0.0, "compute": 0.0, "memory": 0.0}
    quiet = replace(spec, laws=tuple(replace(law, **nothing) for law in spec.laws))
    monkeypatch.setattr(power, "load_power", lambda _: quiet)
    for design in designs:
        assert drawn(design).watts == pytest.approx(design.gpus * 700 * spec.idle)


def test_a_prompt_keeps_one_attention_rank_at_work_and_not_all():
    """Eight ranks compute a prompt each at once: no GPU draws more than its TDP, however many ranks there are."""
    ranks = {"colocated": ds.Replicas(mapping=ds.Sharding(dp_attn=8, ep=8), instances=4)}
    design = ds.evaluate("deepseek_r1", "h200_sxm", ranks, ds.lengths(1024, 1024), rate=20).design
    assert drawn(design).watts < design.gpus * design.pools[0].setup.system.tdp


def test_pools_on_several_nodes_need_the_network_between_them():
    """Two pools of a node each are 16 GPUs of one deployment, which draws for its network as one pool of 16 does."""
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    idle = power.power_at(at).idle
    one, two = added_up([(at, 16, 16 * idle)]), added_up([(at, 8, 8 * idle)] * 2)
    assert two == one
    assert two.facility > 2 * added_up([(at, 8, 8 * idle)]).facility
