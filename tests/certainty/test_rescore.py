"""Designs of a table timed again: the same numbers under the same settings, and what changes under others."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from design_tables import tables_of

import disagg_sim as ds
from disagg_sim.certainty.contributions import timed_contributions
from disagg_sim.certainty.designs import scores_of, times_of
from disagg_sim.certainty.rows import designs_of
from disagg_sim.errors import InputError
from disagg_sim.physics.passes.engine_time import without_host
from disagg_sim.workload.lengths import uneven
from disagg_sim.workload.named import constant_named, lengths_named, parted, ranks_parted

NUMBERS = ("tokens_per_s_per_user", "tokens_per_s_per_gpu", "ftl_s", "ttl_s")


@pytest.mark.parametrize("case", ["dense", "latent", "long_prompt"])
def test_unchanged_settings_give_the_rows_own_numbers(case):
    for points in tables_of(case):
        again = ds.rescore(points)
        for name in NUMBERS:
            assert np.allclose(again[name], points[name], rtol=1e-12, atol=0.0), (points["mode"].iloc[0], name)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [
        ("8192/256", "/cached0.5_hbm0.5_dram0.5"),
        ("8192/256", "/cached0.75/ranks_random"),
        ("log_normal_4096_512", "/cached0.5_hbm0.5_dram0.5"),
        ("log_normal_4096_512", "/ranks_random"),
    ],
)
def test_rows_of_any_lengths_caches_and_routing_give_their_own_numbers(lengths, more):
    """The name of a table's traffic says all that the search was given."""
    at, mapping, traffic = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8), lengths + more
    plain, routing = ranks_parted(traffic)
    name, reuse = parted(plain)
    law = uneven(ds.lengths(8192, 256, cached=reuse), routing) if constant_named(name) else lengths_named(traffic)
    pools = ds.prefill_grid(at, mapping, law, batch=[1, 8, 16]), ds.decode_grid(at, mapping, law, batch=[8, 64])
    for points in (
        ds.disaggregated(*pools, ftl_limit=100.0),
        ds.colocated(at, mapping, law, options=ds.Colocation(batch=(16,), prefill_batch=(1, 8, 16))),
        ds.piggyback(at, mapping, law, options=ds.Colocation(batch=(16,), prefill_batch=(1, 8))),
    ):
        again = ds.rescore(points.assign(traffic=traffic))
        for column in NUMBERS:
            assert np.allclose(again[column], points[column], rtol=1e-12, atol=0.0), (points["mode"].iloc[0], column)


def test_prompts_of_one_length_and_unlike_pasts_are_timed_apart():
    law, at = ds.lengths([4096, 4096], [256, 256], cached=[1024, 3072]), ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    grids = (make(at, ds.Sharding(), law, batch=[1]) for make in (ds.prefill_grid, ds.decode_grid))
    points = ds.disaggregated(*grids)
    (one,) = designs_of(points, ds.Origin(lengths=law))
    assert len({prompt.past for prompt in one.prompts}) == 2
    again = ds.rescore(points, origin=ds.Origin(lengths=law))
    for column in NUMBERS:
        assert np.allclose(again[column], points[column], rtol=1e-12, atol=0.0), column
    parts = ds.breakdown(points, origin=ds.Origin(lengths=law)).operators
    assert parts.loc[parts["latency"] == "ftl", "seconds"].sum() == pytest.approx(points["ftl_s"].sum(), rel=1e-9)


def test_rates_twice_as_fast_halve_the_times_of_the_ideal_profile():
    for points in tables_of("ideal"):
        again = ds.rescore(points, _twice)
        assert np.allclose(again["ttl_s"], points["ttl_s"] / 2, rtol=1e-12)
        assert np.allclose(again["ftl_s"], points["ftl_s"] / 2, rtol=1e-12)
        assert np.allclose(again["tokens_per_s_per_gpu"], 2 * points["tokens_per_s_per_gpu"], rtol=1e-12)


def _twice(at):
    system = at.system
    faster = replace(
        system,
        peak_flops={name: 2 * peak for name, peak in system.peak_flops.items()},
        hbm_bandwidth=2 * system.hbm_bandwidth,
        nvlink_bandwidth=2 * system.nvlink_bandwidth,
        nic_bandwidth=2 * system.nic_bandwidth,
    )
    from disagg_sim.physics.setup import setup

    return setup(at.model, faster, at.precision.name, at.profile.name)


@pytest.mark.parametrize("case", ["dense", "latent"])
def test_operator_times_add_up_to_every_pass_on_a_host_that_takes_no_time(case):
    for points in tables_of(case):
        for designs in designs_of(points):
            bare = designs.under(decode=without_host(designs.at), prefill=without_host(designs.prefill_at))
            ((_, parts),) = timed_contributions([bare])
            for index, whole in enumerate(times_of(bare)):
                added = sum(each.seconds[index] for each in parts)
                assert np.allclose(added, whole, rtol=0.0, atol=1e-12 * whole.max())


def test_rematched_pools_lose_what_rounding_took_before():
    points = tables_of("dense")[0]
    for designs in designs_of(points):
        times = times_of(designs)
        kept, free = (scores_of(designs, times, rematch=each).throughput for each in (False, True))
        assert np.allclose(kept, free, rtol=1e-12)
        slow = times._replace(busy=2 * times.busy)
        assert (scores_of(designs, slow, rematch=True).throughput >= scores_of(designs, slow).throughput).all()


def test_a_table_that_its_settings_do_not_give_is_refused():
    points = tables_of("dense")[0].head(3)
    wrong = points.assign(ttl_s=points["ttl_s"] * 1.01, ttl_mean_s=points["ttl_mean_s"] * 1.01)
    with pytest.raises(InputError, match="row 0 of the table: its settings give ttl_s"):
        ds.rescore(wrong)
    with pytest.raises(InputError, match=r"no column .mixed_step_share."):
        ds.rescore(pd.DataFrame(points).drop(columns="mixed_step_share"))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((name, "evil/spec.yaml") for name in ("model", "system", "prefill_precision", "profile", "speculation")),
        *(("model", "evil"), ("speculation", "draft_model evil 0.8"), ("speculation", "draft_model evil/a.yaml 0.8")),
        *(("traffic", "evil.yaml"), ("traffic", "evil.yaml/turns0.2"), ("traffic", "x'; touch ./ran")),
        *(("traffic", "chat/turnsx"), ("traffic", "1024/128/cachedx"), ("nvlink_domain", "x")),
    ],
)
def test_what_a_table_names_is_a_name_and_opens_no_file(column, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no name|cannot be read|nvlink_domain x is out of range"):
        ds.rescore(tables_of("dense")[0].head(2).assign(**{column: value}))
