"""The popularity of experts as an axis of sweeps, and copies of experts in plans."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.designs import scores_of, times_of
from disagg_sim.certainty.rows import designs_of
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.facts.load import load_profile
from disagg_sim.facts.provenance import place_of_key
from disagg_sim.planning.choices import _best_of_sizes
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.spec import load_sweep

MODELS = "{name: tiny, models: [qwen3_30b_a3b, llama_3_1_8b], systems: {h100_sxm: fp8}"
LENGTHS, WIDE = ds.lengths(2048, 512), ds.Sharding(dp_attn=8, ep=8)


@pytest.fixture
def cases(tmp_path):
    def of(keys):
        path = tmp_path / "tiny.yaml"
        path.write_text(f"{MODELS}, traffic: [{{isl: 512, osl: 64}}]{keys}}}")
        return cases_of(load_sweep(str(path)))

    return of


def test_models_with_experts_have_a_case_for_each_skew(cases):
    moe, skewed, dense = cases(", expert_skew: [0, 0.5]")
    assert [each.decode_setup.profile.expert_skew for each in (moe, skewed, dense)] == [0.0, 0.5, 0.0]
    assert skewed.name == moe.name.replace("-skew0", "-skew0.5")
    assert "skew" not in "".join(each.name for each in cases(""))


def test_a_skew_is_a_change_of_the_profile_alone():
    at = ds.setup("qwen3_30b_a3b", "h100_sxm", "fp8", "measured_skew2")
    by_hand = at.changed(profile=replace(load_profile("measured"), expert_skew=2.0, rank_skew=2.0))
    even = ds.setup("qwen3_30b_a3b", "h100_sxm", "fp8")
    ttl = [ds.decode_grid(each, WIDE, ds.lengths(512, 64), batch=[64, 1024]).latency[0] for each in (at, by_hand, even)]
    assert np.array_equal(ttl[0], ttl[1])
    assert ttl[0][1] > ttl[2][1]  # a large batch waits for the rank of the popular experts
    assert place_of_key("profile", "measured_skew2", "host") == place_of_key("profile", "measured", "host")


def test_rows_say_their_skew_and_are_timed_again_with_it():
    at, options = ds.setup("qwen3_30b_a3b", "h100_sxm", "fp8", "measured_skew0.5"), ds.Colocation(batch=(64,))
    table = ds.colocated(at, WIDE, ds.lengths(512, 64), options=options)
    assert set(table["profile"]) == {"measured_skew0.5"}
    (designs,) = designs_of(table)
    assert scores_of(designs, times_of(designs)).ttl == pytest.approx(table["ttl_s"].to_numpy(), rel=1e-9)


def test_names_of_profiles_with_a_skew_are_checked():
    with pytest.raises(DisaggSimError, match="unknown profile 'measure', did you mean 'measured'"):
        load_profile("measure_skew0.5")
    with pytest.raises(InputError, match="expert_skew 9 is out of range; allowed: 0 to 3"):
        load_profile("measured_skew9")


def test_of_mappings_that_differ_in_copies_one_is_sized():
    at = ds.setup("qwen3_30b_a3b", "h100_sxm", "fp8", "measured_skew1")
    copies = ds.Sharding.stack([replace(WIDE, redundant_slots=slots) for slots in (0, 8, 16)])
    grid = ds.decode_grid(at, copies, ds.lengths(512, 64), batch=[64, 1024])
    fewest, best = _best_of_sizes(grid, grid.feasible)  # without copies, and the fastest
    assert grid.mappings.redundant_slots[fewest[0]] == 0
    assert grid.request_rate[best] >= grid.request_rate[fewest]


def test_models_without_experts_are_told_in_one_line():
    for options in ({"expert_skew": 0.5}, {"max_redundant_experts": 8}):
        with pytest.raises(InputError, match="are of models with experts; llama_3_1_8b has none"):
            ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(512, 64), rate=1, options=ds.PlanOptions(**options))
