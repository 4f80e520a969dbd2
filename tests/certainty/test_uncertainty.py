"""Error bars: invariants of the bands, and figures that can be worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from design_tables import tables_of

import disagg_sim as ds
from disagg_sim.certainty import error_bars
from disagg_sim.certainty.error_bars import kind_of
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import GemmFit
from disagg_sim.facts.load import load_uncertainty
from disagg_sim.facts.uncertainty import spread_of
from disagg_sim.physics.work import KINDS

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

    What a request spends beside its pass is off by seconds: a base times the factors of engine and mode.
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
    assert np.std(found.beside[0]) == pytest.approx(sigma("first_token"), rel=0.04)


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
