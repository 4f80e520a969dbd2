"""Turns of sessions with their caches as the traffic of a sweep, and tiers in place of those of a system."""

import pytest

from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.workload.named import lengths_named

HEAD = "name: agents\nmodels: llama_3_1_8b\nsystems: {h200_sxm: fp8}\n"
SESSIONS = "sessions: coding_agent, sessions_per_s: 2"


def load(tmp_path, cache="none", more="", sessions=SESSIONS):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{HEAD}traffic: [{{{sessions}, cache: {cache}}}]\n{more}", encoding="utf-8")
    return load_sweep(str(path))


def test_rooms_of_gpus_are_counted_in_tokens_of_the_model(tmp_path):
    """A token of Llama-3.1-8B takes 65,536 B in fp8; eight GPUs bring 20 GB of HBM and 250 GB of DRAM each."""
    cases = cases_of(load(tmp_path, "[none, {gpus: 8, hbm: 20 GB, tiers: dram}, {tiers: [dram, remote], caches: 2}]"))
    plain, one, two = (case.traffic.met for case in cases)
    assert plain.rooms == ()
    assert dict(one.rooms) == pytest.approx({"hbm": 160e9 / 65_536, "dram": 2000e9 / 65_536}, rel=1e-6)
    assert (two.pooled, two.caches, dict(two.rooms)["remote"]) == (("remote",), 2, float("inf"))
    assert cases[0].lengths.mean_new > 2 * cases[1].lengths.mean_new
    assert [lengths_named(str(case.traffic)) for case in cases] == [case.lengths for case in cases]
    assert len({case.name for case in cases}) == 3


def test_hbm_of_a_cache_is_taken_from_the_instances_that_remember(tmp_path):
    (case,) = cases_of(load(tmp_path, "{hbm: 20 GB}"))
    limit = case.decode_setup.memory_limit
    assert [case.prefill_setup.memory_limit, case.shared.at.memory_limit] == [limit - 20e9] * 2


def test_tiers_of_a_sweep_stand_in_place_of_those_of_a_system(tmp_path):
    more = "kv_tiers: {dram: {bandwidth: 400 GB/s, latency_s: 2.0e-6, capacity: 1 TB}}\n"
    (case,) = cases_of(load(tmp_path, "{tiers: [dram, ssd]}", more))
    tiers = case.prefill_system.kv_tiers
    assert (tiers["dram"].bandwidth, tiers["ssd"].bandwidth) == (400e9, 5e9)
    assert dict(case.traffic.met.rooms)["dram"] == pytest.approx(1e12 / 65_536, rel=1e-6)
