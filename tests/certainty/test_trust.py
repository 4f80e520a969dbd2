"""Labels of numbers: shares are shares of time, the weakest fit speaks for an operator, pools count by their GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from design_tables import tables_of

import disagg_sim as ds
from disagg_sim.certainty.extrapolation import doubtful
from disagg_sim.certainty.rows import design_of, designs_of
from disagg_sim.certainty.trust import (
    MEANING,
    Trust,
    added,
    rests_on,
    shares_of_designs,
    shares_of_text,
    shares_text,
    trust_of,
    trust_of_host,
    trust_of_points,
    trust_shares,
)
from disagg_sim.errors import InputError
from disagg_sim.report.breakdown import trust_shares as shares_of_parts

LENGTHS = ds.lengths(2048, 256)
ONE_GPU = ds.Sharding()


def test_a_row_rests_on_what_its_throughput_does():
    """The pools of disaggregation count by their GPUs in its throughput, while its TTL is decode alone."""
    points = ds.pareto_front(tables_of("inherited")[0]).iloc[[0, -1]]
    of_number = trust_of_points(points)
    assert rests_on(points).tolist() == [shares_text(each) for each in of_number["throughput"]]
    assert of_number["throughput"] != of_number["ttl"]


def decode_shares(model, system, precision, mapping=ONE_GPU, **settings):
    at = ds.setup(model, system, precision, **settings)
    return trust_shares(ds.decode_grid(at, mapping, LENGTHS, batch=[64]), 0, 0)


@pytest.mark.parametrize("case", ["dense", "inherited"])
def test_shares_are_those_of_the_parts_of_a_latency(case):
    """Of a step without pipeline stages: seconds of parts of a label over all, which a breakdown finds otherwise."""
    points = tables_of(case)[1]
    points = points[points["decode_pp"] == 1].iloc[:4]
    found, parts = trust_of_points(points), ds.breakdown(points)
    for place, row in enumerate(points.index):
        for latency in ("ttl", "ftl"):
            assert found[latency][place] == pytest.approx(shares_of_parts(parts, row, latency), abs=1e-9)


def test_elementwise_kernels_are_all_that_is_assumed_of_one_gpu():
    """By hand: 12 us a layer, and hidden states that move through memory, are what no table times."""
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    found = ds.breakdown(ds.decode_grid(at, ds.Sharding(), LENGTHS, batch=[64])).latency(0, "ttl").set_index("operator")
    assumed = found["seconds"]["elementwise"] / found["seconds"].sum()
    assert decode_shares("llama_3_1_8b", "h100_sxm", "fp8")[Trust.ASSUMED] == pytest.approx(assumed, rel=0.02)
    assert 32 * 12e-6 < found["seconds"]["elementwise"] < 1.5 * 32 * 12e-6


def test_all_reduce_of_more_ranks_than_were_timed_is_not_fitted():
    """TensorRT-LLM's was timed on 2 and 4 GPUs of a GB200, on 8 and 16 of a GB300; beyond, nobody did."""
    four, eight = (
        decode_shares("llama_3_1_70b", "gb200_nvl72", "fp8", ds.Sharding(tp_attn=n, tp_ffn=n)) for n in (4, 8)
    )
    assert Trust.INHERITED not in four
    assert eight[Trust.INHERITED] > 0.1
    at = ds.setup("llama_3_1_405b", "gb200_nvl72", "fp8")
    more = ds.decode_grid(at, ds.Sharding(tp_attn=32, tp_ffn=32), LENGTHS, batch=[64])
    assert trust_shares(more, 0, 0)[Trust.ASSUMED] > 0.3


def test_exchange_over_nics_that_nobody_timed_is_assumed():
    """What a table lacks is the bandwidth of the NIC; inside one domain the same fits speak."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8")
    fits = [fit for taken in at.rates.used if taken.kind == "all_to_all" for fit in taken.fits]
    inside = [fit for fit in fits if getattr(fit, "link", "") != "nic"]
    assert trust_of(fits, {"node_num": 4.0}) == Trust.FITTED
    assert trust_of(inside, {"node_num": 4.0}) == Trust.ASSUMED
    assert trust_of(inside, {"node_num": 1.0}) == Trust.FITTED


def test_one_inherited_fit_makes_its_operator_inherited():
    (fit, *_) = ds.setup("llama_3_1_8b", "h100_sxm", "fp8").rates.used[0].fits
    assert trust_of([fit]) == Trust.FITTED
    both = (fit, replace(fit, inherited_from="a100_sxm_80gb"))
    assert trust_of(both) == Trust.INHERITED
    operator = {"sizes": {}, "rows": 1, "cut_of": None}  # inside all ranges
    assert [doubtful(SimpleNamespace(fits=fits, **operator)) for fits in ((fit,), both)] == [False, True]


def test_a_host_without_an_engine_is_assumed_and_of_an_unserved_class_inherited():
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    assert trust_of_host(at) == Trust.FITTED
    assert trust_of_host(ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="kernels")) == Trust.ASSUMED
    assert trust_of_host(replace(at, system=replace(at.system, architecture="Rubin"))) == Trust.INHERITED
    partly = replace(at.overheads, sources=at.overheads.sources | {"step_host": "assumed"})
    assert trust_of_host(replace(at, overheads=partly)) == Trust.ASSUMED


def test_a_throughput_counts_pools_by_their_gpus():
    """Of a matched pair whose pools need 1/P and 1/R GPUs for a request a second, by hand."""
    points = tables_of("dense")[0].iloc[[0]]
    (designs,) = designs_of(points)
    whole = shares_of_designs(designs)
    (row,) = points.to_dict("records")
    gpus = {side: row[f"{side}_gpus"] / row[f"{side}_request_rate_per_s"] for side in ("prefill", "decode")}
    for label, shares in whole.items():
        mean = (gpus["prefill"] * shares.ftl[0] + gpus["decode"] * shares.ttl[0]) / sum(gpus.values())
        assert shares.throughput[0] == pytest.approx(mean, rel=1e-9), label


def test_shares_of_a_point_of_a_grid_are_those_of_its_design():
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    grid = ds.prefill_grid(at, ds.Sharding(), LENGTHS, batch=[1, 4])
    found = shares_of_designs(design_of(grid, 0, 1))
    assert np.isclose(found[Trust.FITTED].throughput[0], trust_shares(grid, 0, 1)[Trust.FITTED])
    mtp = ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp")
    drafting = ds.decode_grid(mtp, ds.Sharding(dp_attn=8, ep=8, draft_tokens=1), LENGTHS, batch=[8])
    assert design_of(drafting, 0, 0).at.speculation == mtp.speculation  # one draft token is one, too


def test_words_are_short_and_say_every_label():
    assert shares_text({}) == ""
    assert shares_text(dict.fromkeys(Trust, 0.25)) == "measured 25 %, fitted 25 %, inherited 25 %, assumed 25 %"
    assert rests_on(tables_of("ideal")[1]).unique().tolist() == ["assumed 100 %"]
    assert set(MEANING) == set(Trust)
    assert shares_of_text("fitted 92 %, assumed 8 %") == {Trust.FITTED: 0.92, Trust.ASSUMED: 0.08}
    for wrong in ("fitted", "guessed 3 %", "fitted x %"):
        with pytest.raises(InputError, match=f"rests_on '{wrong}'; allowed: labels"):
            shares_of_text(wrong)
    assert sum(added([(2.0, {Trust.FITTED: 1.0}), (1.0, {Trust.ASSUMED: 1.0})]).values()) == 1.0


def test_an_operator_kind_without_a_fit_is_assumed():
    """Take the fits of decode attention away: its share of the step, and nothing else, is assumed then."""
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    kept = tuple(taken for taken in at.rates.used if taken.kind != "decode_attention")
    grid = ds.decode_grid(at, ONE_GPU, LENGTHS, batch=[64])
    parts = ds.breakdown(grid).latency(0, "ttl").set_index("kind")["share"]
    unknown = replace(grid, setup=replace(at, rates=replace(at.rates, used=kept)))
    more = trust_shares(unknown, 0, 0)[Trust.ASSUMED] - trust_shares(grid, 0, 0)[Trust.ASSUMED]
    assert more == pytest.approx(parts["decode_attention"], rel=1e-6)
