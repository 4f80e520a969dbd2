"""Elasticities: sums, signs, and a case by hand."""

from dataclasses import replace

import numpy as np
import pytest
from design_tables import tables_of

import disagg_sim as ds
from disagg_sim.errors import InputError

RATES = ("flops", "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth")


def wide(table, name):
    keys = ["mode", "tokens_per_s_per_user"]
    return table.pivot_table(index=keys, columns="parameter", values=name, sort=False)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_elasticities_of_the_ideal_profile_to_all_rates_add_up_to_one(mode):
    table = ds.sensitivity(ds.pareto_front(tables_of("ideal")[mode]))
    for name, sign in (("ttl", -1.0), ("ftl", -1.0), ("throughput", 1.0)):
        assert np.allclose(wide(table, name)[list(RATES)].sum(axis=1), sign, atol=1e-5)


def test_one_gpu_at_batch_one_is_bound_by_memory():
    """A dense 8B model on one GPU at speed of light reads its weights and cache: HBM bandwidth alone matters."""
    mapping = ds.Sharding()
    at = ds.setup("llama_3_1_8b", "h100_sxm", "bf16", "ideal")
    one = ds.Colocation(batch=(1,), prefill_batch=(1,))
    points = ds.colocated(at, mapping, ds.lengths(1024, 128), options=one)
    found = wide(ds.sensitivity(points), "ttl").iloc[0]
    # T = T_d: a step reads about 16 GB at 3.35 TB/s, 4.8 ms; the request's own prompt lies before its tokens.
    assert found["hbm_bandwidth"] == pytest.approx(-1.0, abs=0.001)
    assert found["flops"] == pytest.approx(0.0, abs=0.001)
    # A slot holds the prompt, too, T = T_d + t_p/(OSL-1): it is 16.4 TFLOP and attention at 989 TFLOP/s, 17 ms over 127
    # tokens, 0.14 ms.
    slot = ds.colocated(at, mapping, ds.lengths(1024, 128), options=replace(one, ttl_measure="mean"))
    found = wide(ds.sensitivity(slot), "ttl").iloc[0]
    assert found["hbm_bandwidth"] == pytest.approx(-0.972, abs=0.005)
    assert found["flops"] == pytest.approx(-0.028, abs=0.005)
    assert found["nvlink_bandwidth"] == found["nic_bandwidth"] == found["hbm_capacity"] == 0.0


def test_nic_latency_of_two_stages_on_two_nodes_is_that_of_their_hand_over():
    at, options = ds.setup("llama_3_1_70b", "h200_sxm", "fp8"), ds.Colocation(batch=(4,), prefill_batch=(1,))
    points = ds.colocated(at, ds.Sharding(tp_attn=8, tp_ffn=8, pp=2), ds.lengths(1024, 128), options=options)

    def longer(own):
        profile = own.profile
        return replace(own, profile=replace(profile, p2p_latency_across=1.01 * profile.p2p_latency_across))

    slope = np.log(ds.rescore(points, longer)["ttl_s"] / points["ttl_s"]) / np.log(1.01)
    found = wide(ds.sensitivity(points, parameters=("nic_latency",)), "ttl")["nic_latency"]
    assert found.to_numpy() == pytest.approx(slope.to_numpy(), rel=0.01)
    assert (found > 0.0).all()


def test_capacity_acts_through_a_search_only():
    points = ds.pareto_front(tables_of("dense")[1])
    asked = []

    def search(systems):
        asked.append(systems["h100_sxm"].hbm_capacity)
        factor = systems["h100_sxm"].hbm_capacity / ds.load_system("h100_sxm").hbm_capacity
        return points.assign(tokens_per_s_per_gpu=points["tokens_per_s_per_gpu"] * factor**0.5)

    assert ds.sensitivity(points, parameters=["hbm_capacity"])["frontier"].isna().all()
    found = ds.sensitivity(points, parameters=["hbm_capacity"], search=search)
    assert np.allclose(found["frontier"], 0.5)
    assert len(asked) == 2
    assert (found["throughput"] == 0).all()


def test_an_unknown_parameter_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'hbm_bandwidth'"):
        ds.sensitivity(tables_of("dense")[0], parameters=["hbm_bandwith"])
