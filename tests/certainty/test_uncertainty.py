"""Error bars, elasticities and points that are scored again: invariants, and figures that can be worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from design_tables import tables_of

import disagg_sim as ds
from disagg_sim.certainty import error_bars
from disagg_sim.certainty.contributions import timed_contributions
from disagg_sim.certainty.designs import scores_of, times_of
from disagg_sim.certainty.error_bars import kind_of
from disagg_sim.certainty.rows import design_of, designs_of
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import GemmFit
from disagg_sim.facts.load import load_uncertainty
from disagg_sim.facts.uncertainty import spread_of
from disagg_sim.physics.passes.engine_time import without_host
from disagg_sim.physics.work import KINDS
from disagg_sim.workload.lengths import uneven
from disagg_sim.workload.named import constant_named, lengths_named, parted, ranks_parted

SPREADS = load_uncertainty("measured")


def frontiers(case):
    return pd.concat([ds.pareto_front(points) for points in tables_of(case)], ignore_index=True)


def fit(median, p90):
    return GemmFit(
        engine="vllm",
        version="1",
        points=9,
        median_error=median,
        p90_error=p90,
        format="bf16",
        e_compute=0.5,
        e_memory=0.5,
        t0=0.0,
        blend_q=1.0,
    )


def test_spread_of_a_normal_fit_is_its_standard_deviation():
    """Half of a normal law lies within 0.674, nine tenths within 1.645 standard deviations."""
    assert spread_of(fit(0.0674490, 0.164485), SPREADS) == pytest.approx(0.1, rel=1e-4)
    assert spread_of(fit(0.05, 0.3), SPREADS) > spread_of(fit(0.05, 0.2), SPREADS)


def test_same_seed_same_bands_and_the_median_lies_near_the_nominal_numbers():
    points = frontiers("dense")
    first, again, other = (ds.uncertainty(points, samples=400, seed=seed) for seed in (1, 1, 2))
    assert (first.throughput == again.throughput).all()
    assert (first.throughput != other.throughput).any()
    bands = first.bands()
    for name in ("tokens_per_s_per_gpu", "tokens_per_s_per_user"):
        assert (bands[f"{name}_p10"] < bands[name]).all()
        assert (bands[name] < bands[f"{name}_p90"]).all()
        assert np.allclose(bands[f"{name}_p50"], bands[name], rtol=0.08)
    assert np.allclose(bands["ttl_p10_s"], 1 / bands["tokens_per_s_per_user_p90"], rtol=0.02)


def test_bands_of_a_frontier_and_of_the_gain_are_those_of_each_sample_by_hand():
    """In a sample the best at an interactivity has the most throughput of those that are as fast in it."""
    found, speeds = ds.uncertainty(frontiers("dense"), samples=25), [60.0, 100.0]

    def best(modes, speed):
        mine = found.points["mode"].isin(modes).to_numpy()
        return np.where(1.0 / found.ttl[mine] >= speed, found.throughput[mine], 0.0).max(axis=0)

    for mode, band in found.frontier(speeds).groupby("mode"):
        for speed, row in zip(speeds, band.to_dict("records"), strict=True):
            for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
                told = row[f"tokens_per_s_per_gpu_{name}"]
                assert told == pytest.approx(np.quantile(best([mode], speed), share), rel=1e-9)
    for speed, row in zip(speeds, found.gain(speeds).to_dict("records"), strict=True):
        ratio = best(["disaggregated"], speed) / best(["colocated", "piggyback"], speed)
        for name, share in (("gain_p10", 0.1), ("gain_p90", 0.9)):
            assert row[name] == pytest.approx(np.quantile(ratio, share, method="inverted_cdf"), rel=1e-9)
        assert row["probability"] == pytest.approx(np.mean(ratio > 1))


def test_an_ideal_profile_and_a_single_mode_are_refused_in_one_line():
    with pytest.raises(InputError, match="profile 'ideal' has no fits"):
        ds.uncertainty(tables_of("ideal")[1])
    with pytest.raises(InputError, match="a gain needs disaggregated points and co-located ones"):
        ds.uncertainty(ds.pareto_front(tables_of("dense")[1]), samples=10).gain([10.0])
    with pytest.raises(InputError, match="no points"):
        ds.uncertainty(tables_of("dense")[0].head(0))


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "hop"])
def test_every_kind_of_operator_has_a_spread(kind):
    spec = load_uncertainty("measured")
    assert kind_of(SimpleNamespace(kind=kind), spec) in spec.kinds.values()


def test_an_engine_is_off_by_as_much_as_its_served_runs_were(monkeypatch):
    """Where kernels are sure, logarithms of FTL and TTL have the s.d. of runs of this engine, layout and mode.

    What a request spends beside its pass is off by a share of it: a base times the factors of engine and mode.
    """
    monkeypatch.setattr(
        error_bars, "log_factor", lambda op, _designs, _spec, draws, _places: np.zeros((op.rows, draws.samples))
    )
    at, two, law = ds.setup("llama_3_1_70b", "h200_sxm", "fp8"), ds.Sharding(tp_attn=2, tp_ffn=2), ds.lengths(4096, 512)
    points = ds.disaggregated(ds.prefill_grid(at, two, law, batch=[1]), ds.decode_grid(at, two, law, batch=[32]))
    found = error_bars.uncertainty(points, samples=4000)
    kinds = {"engine": at.engine, "load": "closed_loop", "family": "dense", "layout": "TP", "mode": "disaggregated"}

    def sigma(field):
        spread = load_uncertainty("measured").served[field]
        return spread.base * np.prod([spread.factor(kind, level) for kind, level in kinds.items()])

    for latency in (found.ftl, found.ttl):
        assert np.std(np.log(latency[0])) == pytest.approx(sigma("step"), rel=0.04)
    assert np.std(found.beside[0]) == pytest.approx(sigma("first_token") * at.overheads.request_host, rel=0.04)


@pytest.mark.parametrize("measure", ["mean", "tpot", "p99"])
def test_an_engine_is_off_by_one_factor_in_all_its_mixed_steps(monkeypatch, measure):
    """Whichever step or gap TTL is: what all steps take longer, throughput loses."""
    monkeypatch.setattr(
        error_bars, "log_factor", lambda op, _designs, _spec, draws, _places: np.zeros((op.rows, draws.samples))
    )
    at, options = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ds.Colocation(batch=(32,), ttl_measure=measure)
    points = ds.piggyback(at, ds.Sharding(), ds.lengths(2048, 256), options=options).head(2)
    found = error_bars.uncertainty(points, samples=50)
    assert np.ptp(found.ttl, axis=1).min() > 0
    spent = found.ttl * found.throughput
    assert spent == pytest.approx(np.broadcast_to(spent[:, :1], spent.shape), rel=1e-9)


def test_a_fit_of_another_system_is_off_by_its_own_error_and_by_the_transfer():
    """Independent errors: their variances add."""
    spec = load_uncertainty("measured")
    own = fit(0.0674490, 0.164485)
    theirs = replace(own, inherited_from="h100_sxm")
    at = {"kind": "gemm", "sizes": {}, "rows": 1, "cut_of": None, "architecture": "Blackwell"}
    alone, moved = (error_bars.sigma_of(SimpleNamespace(fits=(each,), **at), spec) for each in (own, theirs))
    assert moved**2 - alone**2 == pytest.approx(spec.kinds["gemm"].transfer_across ** 2)


def test_errors_of_mappings_that_differ_in_one_degree_are_drawn_apart():
    at, apart = ds.setup("deepseek_r1", "h200_sxm", "fp8_block"), {"tp_attn": 8, "tp_ffn": 1, "ep": 8}
    grid = ds.decode_grid(at, [ds.Sharding(**apart, dcp=n) for n in (1, 2, 4)], ds.lengths(4096, 512), batch=[16])
    names = [error_bars._mapping_names(design_of(grid, row, 0), "decode") for row in range(3)]
    assert len({name for (name,) in names}) == 3


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
    ],
)
def test_what_a_table_names_is_a_name_and_opens_no_file(column, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no name|cannot be read|nvlink_domain x is out of range"):
        ds.rescore(tables_of("dense")[0].head(2).assign(**{column: value}))


def test_experts_of_a_text_move_passes_of_expert_ranks_and_no_skew_of_your_own(monkeypatch):
    """Nobody knows the text: between its ends lie 80 % of the samples where all else is certain."""
    monkeypatch.setattr(
        error_bars, "log_factor", lambda op, _designs, _spec, draws, _places: np.zeros((op.rows, draws.samples))
    )
    monkeypatch.setattr(error_bars, "served_sigma", lambda _, told: np.zeros(len(told["layout"])))
    law, wide, cut = ds.lengths(4096, 512), {"dp_attn": 8, "tp_ffn": 1, "ep": 8}, {"tp_attn": 8, "tp_ffn": 8}

    def found(degrees, profile="measured"):
        at, one = ds.setup("deepseek_r1", "h200_sxm", "fp8_block", profile=profile), ds.Sharding(**degrees)
        grids = ds.prefill_grid(at, one, law, batch=[8]), ds.decode_grid(at, one, law, batch=[256])
        return error_bars.uncertainty(ds.disaggregated(*grids).head(1), samples=4000)

    text = found(wide)
    (step, fill), ends = text.text[0], np.quantile(text.ftl[0], [0.1, 0.9]) / text.points["ftl_s"].iloc[0]
    assert fill == pytest.approx(ends, rel=0.02)
    assert step[0] < 1.0 < step[1]
    assert step[1] - step[0] < fill[1] - fill[0], "decode waits for weights more than for tokens"
    assert np.ptp(found({"dp_attn": 2, "tp_ffn": 1, "ep": 2, "pp": 4}).text[0]) > 0  # two ranks are skewed, too
    for none in (found(cut), found(wide, "measured_skew1.1")):
        assert (none.text == 1.0).all()
        assert np.ptp(none.ftl) == 0.0
