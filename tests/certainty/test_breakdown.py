"""Designs and whole instances of plans taken apart: parts add up, and each leads to its equation and to its fit."""

import io
import re
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from design_tables import CASES, tables_of

import disagg_sim as ds
from disagg_sim.certainty.elasticity import scaled
from disagg_sim.certainty.passes import LATENCIES, RESOURCES
from disagg_sim.certainty.pool_parts import encode_parts, split_parts
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.yaml_files import spec_roots
from disagg_sim.techniques.split.physics import Split, split_step

RESOURCE_COLUMNS = [f"{name}_s" for name in RESOURCES]


def llama(mapping, batch, prefill_batch):
    """A co-located Llama 3.1 70B on H100, one design."""
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8", engine="kernels")
    options = ds.Colocation(batch=(batch,), prefill_batch=(prefill_batch,))
    return ds.colocated(at, mapping, ds.lengths(4096, 512), options=options)


@cache
def taken_apart(case, mode):
    """The designs of a case in a mode, and their breakdown."""
    points = tables_of(case)[mode]
    return points, ds.breakdown(points)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["disaggregated", "colocated", "piggyback"])
def test_parts_add_up_to_ttl_ftl_and_memory_in_every_mode(case, mode):
    points, found = taken_apart(case, mode)
    for name in LATENCIES:
        parts = found.operators[found.operators["latency"] == name].groupby("row", sort=False)
        assert np.allclose(parts["seconds"].sum(), points[f"{name}_s"], rtol=1e-12)
        assert np.allclose(parts["share"].sum(), 1.0, rtol=1e-12)
    split = found.operators[RESOURCE_COLUMNS]
    assert np.allclose(split.sum(axis=1), found.operators["seconds"], rtol=1e-9)
    # stretched is what prefill adds to the decodes alone, where another resource may limit and another operator hide
    assert (split >= -0.01 * found.operators["seconds"].max()).all(axis=None)
    for phase in ("prefill", "decode"):
        mine = found.memory[found.memory["phase"].isin([phase, "both"])].groupby("row", sort=False)
        assert np.allclose(mine["bytes"].sum(), points[f"{phase}_memory_bytes"], rtol=1e-12)
        assert (mine["share"].sum() <= 1.0).all()


@pytest.mark.parametrize("measure", ["tpot", "mean", "p99"])
def test_parts_add_up_to_the_measure_of_ttl(measure):
    options = ds.Colocation(batch=(32,), prefill_batch=(1,), ttl_measure=measure)
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    points = ds.colocated(at, ds.Sharding(), ds.lengths(4096, 256), options=options)
    assert ds.breakdown(points).latency(0, "ttl")["seconds"].sum() == pytest.approx(points["ttl_s"][0], rel=1e-12)


def test_a_frontier_file_gives_what_the_table_gave():
    """What a CSV writes in ten digits is enough, and so is one row of it."""
    points = tables_of("dense")[0].head(4)
    text = points.to_csv(index=False, float_format="%.10g")
    again = pd.read_csv(io.StringIO(text))
    parts = ds.breakdown(again.iloc[2]).latency(2, "ttl")
    assert np.isclose(parts["seconds"].sum(), again["ttl_s"][2], rtol=1e-9)
    assert parts.equals(ds.breakdown(again).latency(2, "ttl"))


def test_layers_and_repetitions_are_counted():
    """80 layers, each with one decode attention; 512 tokens: the prompts of the 31 other residents come between."""
    points = llama(ds.Sharding(tp_attn=4, tp_ffn=4), batch=32, prefill_batch=1)
    parts = ds.breakdown(points).operators.query("latency == 'ttl'").set_index(["step", "operator"])
    assert parts.loc[("decode step", "decode attention"), "calls"] == 80
    assert parts.loc[("decode step", "head"), "calls"] == 1
    assert parts.loc[("decode step", "attention all-reduce"), "calls"] == 80
    assert parts.loc[("prefill pass", "prefill attention"), "calls"] == pytest.approx(80 * 31 / 511)
    # 2*m*n*k of gate and up on one of four GPUs: 32 tokens, hidden 8192, two times 28672 columns
    assert parts.loc[("decode step", "gate, up"), "flops"] == pytest.approx(80 * 2 * 32 * 8192 * 2 * 28672 / 4)


def test_resources_are_elasticities_where_nothing_waits():
    """On one stage the seconds of HBM are what its elasticity says, taken here by differences of two scored tables."""
    points = llama(ds.Sharding(tp_attn=8, tp_ffn=8), batch=64, prefill_batch=2)
    found = ds.breakdown(points)
    parts = found.operators.query("latency == 'ttl'")
    moved = ds.sensitivity(points).set_index("parameter")
    exact = found.elasticities.set_index("parameter")
    for resource, parameter in (("compute", "flops"), ("hbm", "hbm_bandwidth"), ("nvlink", "nvlink_bandwidth")):
        share = parts[f"{resource}_s"].sum() / points["ttl_s"][0]
        assert exact.loc[parameter, "ttl"] == pytest.approx(-share, rel=1e-9)
        assert moved.loc[parameter, "ttl"] == pytest.approx(-share, rel=1e-4)
    assert np.allclose(moved["ftl"].drop("hbm_capacity"), exact["ftl"], rtol=1e-4, atol=1e-8)
    assert np.allclose(moved["throughput"].drop("hbm_capacity"), exact["throughput"], rtol=1e-4, atol=1e-8)


def test_experts_of_long_prompts_wait_for_multiprocessors_not_for_hbm():
    """R1 on 8 H200: rows are gathered and summed in most of the time; HBM twice as fast takes 4 % off, not a third.

    Elasticities to rates and inverse latencies add up to one, less the fixed times of kernels and the host.
    """
    at, eight = ds.setup("deepseek_r1", "h200_sxm", "fp8", engine="kernels"), ds.Sharding(tp_attn=8, tp_ffn=8)
    points = ds.colocated(at, eight, ds.lengths(8192, 512), options=ds.Colocation(batch=(8,), prefill_batch=(1,)))
    faster = ds.rescore(points, partial(scaled, parameter="hbm_bandwidth", factor=2.0))
    assert 0.94 < faster["ftl_s"][0] / points["ftl_s"][0] < 0.97
    found = ds.breakdown(points)
    parts = found.operators.query("latency == 'ftl'")
    (experts,) = parts[parts["kind"] == "experts"].to_dict("records")
    assert experts["flops"] / (experts["compute_s"] * at.system.peak_flops["fp8"]) < 0.1
    assert experts["compute_s"] > 0.9 * experts["seconds"]
    exact = found.elasticities.set_index("parameter")["ftl"]
    rates = exact[["flops", "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth"]].sum()
    fixed = parts[["latency_s", "host_s", "waiting_s"]].sum().sum()
    assert -rates == pytest.approx(1.0 - fixed / points["ftl_s"][0], rel=1e-9)


def test_elasticities_of_a_capped_system_are_slopes():
    """The clock that a cap leaves depends on the rates: exact derivatives equal differences of scored tables."""
    at, eight = ds.setup("llama_3_1_70b", "h200_sxm_500w", "fp8", engine="vllm"), ds.Sharding(tp_attn=8, tp_ffn=8)
    points = ds.colocated(at, eight, ds.lengths(8192, 512), options=ds.Colocation(batch=(8,), prefill_batch=(1,)))
    exact = ds.breakdown(points).elasticities.set_index("parameter")
    for parameter in ("flops", "hbm_bandwidth", "nvlink_bandwidth"):
        more, less = (ds.rescore(points, partial(scaled, parameter=parameter, factor=f)) for f in (1.0001, 0.9999))
        for name in ("ftl", "ttl"):
            slope = np.log(more[f"{name}_s"] / less[f"{name}_s"])[0] / np.log(1.0001 / 0.9999)
            assert exact.loc[parameter, name] == pytest.approx(slope, rel=1e-4)


def test_a_pass_waits_for_its_other_micro_batches():
    """FTL = host + sum of t_s + (m - 1)*max t_s + (p - 1)*hop: with two stages and two prompts the second one waits."""
    at, short = (
        ds.setup("llama_3_1_70b", "h100_sxm", "fp8", engine="kernels"),
        ds.lengths(512, 512),
    )  # too short for chunks
    mapping = ds.Sharding(tp_attn=2, tp_ffn=2, pp=2)
    one, two = (ds.prefill_grid(at, mapping, short, batch=[b]) for b in (1, 2))
    decode = ds.decode_grid(at, mapping, short, batch=[2])
    points = ds.disaggregated(two, decode, ftl_limit=10.0)
    parts = ds.breakdown(points).latency(0, "ftl").set_index("operator")
    waiting = parts.loc["waiting", "seconds"]
    assert waiting == pytest.approx(float(two.latency[0, 0] - one.latency[0, 0]), rel=1e-9)
    layers = one.latency[0, 0] - 0.5e-3 - parts.loc["hop", "seconds"]
    assert waiting == pytest.approx(layers / 2, rel=0.02), "the slower of two stages"
    assert parts.loc["hop", "calls"] == 1


def test_a_point_of_a_grid_is_taken_apart_like_a_row_of_a_table():
    """Latent attention, whose chunks have a form of their own; memory by part, too."""
    at, lengths = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(4096, 256)
    grid = ds.prefill_grid(at, ds.Sharding(dp_attn=4, ep=4, pp=2), lengths, batch=[16, 32])
    for row in range(len(grid.mappings)):
        found = ds.breakdown(grid, at=(row, 1))
        assert found.operators["seconds"].sum() == pytest.approx(grid.latency[row, 1], rel=1e-12)
        assert found.memory["bytes"].sum() == pytest.approx(grid.memory_bytes[row, 1], rel=1e-12)
    with pytest.raises(InputError, match="the grid has 4 rows and 2 columns"):
        ds.breakdown(grid, at=(4, 0))


def test_the_ideal_profile_is_the_speed_of_light():
    parts = taken_apart("ideal", 2)[1].operators
    assert np.allclose(parts["ideal_s"], parts["seconds"], rtol=1e-9)
    real = taken_apart("dense", 2)[1].operators
    whole = real[real["latency"] == "ttl"].groupby("row")[["ideal_s", "seconds"]].sum()
    assert (whole["ideal_s"] < whole["seconds"]).all()


@pytest.mark.parametrize("case", ["latent", "inherited", "ideal"])
def test_every_part_leads_to_a_line_and_an_equation(case):
    """The line that a part names holds the entry; the function that it names explains itself."""
    found = taken_apart(case, 0)[1]
    for path in found.operators["equation"].unique():
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__doc__
    root = spec_roots()[-1]
    for file, line, entry, version in found.fits[["file", "line", "entry", "version"]].drop_duplicates().to_numpy():
        text = (root / file).read_text().splitlines()[line - 1]
        assert re.match(r"\s*- \{engine: ", text), (file, line, entry)
        assert version in text
    for source in found.operators.loc[found.operators["kind"] == "elementwise", "source"].unique():
        place, _, key = source.partition(" ")
        file, _, line = place.partition(":")
        assert (root / file).read_text().splitlines()[int(line) - 1].strip().startswith(f"{key}:")


def test_what_an_engine_adds_to_exchanges_stands_behind_those_of_decode_alone():
    parts = taken_apart("latent", 0)[1].operators
    named = parts["source"].str.contains("exchange_stretch")
    of_decode = (parts["kind"] == "all_to_all") & (parts["latency"] == "ttl")
    assert of_decode.any()
    assert (named == of_decode).all()


def test_fits_of_another_system_are_named_with_its_file():
    fits = taken_apart("inherited", 1)[1].fits
    taken = fits[fits["inherited_from"] != ""]
    assert len(taken)
    assert {Path(file).stem for file in taken["file"]} == set(taken["inherited_from"])


LENGTHS = ds.lengths(4096, 512)


def split_of(at, ffn_gpus, microbatches=3):
    if at.model.is_moe:
        return Split(Sharding(dp_attn=16, ep=16), Sharding(dp_attn=ffn_gpus, ep=ffn_gpus), microbatches)
    return Split(Sharding(tp_attn=4, tp_ffn=4), Sharding(tp_attn=ffn_gpus, tp_ffn=ffn_gpus), microbatches)


@pytest.mark.parametrize("profile", ["ideal", "measured"])
@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b", "qwen3_5_397b_a17b"])
@pytest.mark.parametrize("ffn_gpus", [4, 32])
def test_what_a_step_waits_for_adds_up_to_it(model, profile, ffn_gpus):
    at = ds.setup(model, "gb200_nvl72", "nvfp4_fp8kv", profile=profile)
    split = split_of(at, ffn_gpus)
    found = split_parts(at, split, LENGTHS, 48.0)
    ttl = float(split_step(at, at, split, sequences=48.0, context=LENGTHS.context).ttl)
    assert found.parts["waited"].sum() + found.host + found.links == pytest.approx(ttl)
    assert found.links >= -1e-12
    assert (found.parts["waited"] >= 0).all()
    layers = found.layers
    for pool, column in (("attention", "attention"), ("ffn", "ffn")):
        alone = found.parts.loc[found.parts["pool"] == pool, "seconds"].sum()
        ends = found.parts["operator"].isin(["embedding", "head"]) & (found.parts["pool"] == pool)
        whole = (layers["layers"] * layers[column]).sum() + found.parts.loc[ends, "seconds"].sum()
        assert alone == pytest.approx(whole)


def test_the_half_that_sets_the_pace_is_waited_for_m_times_and_the_other_hides():
    """Three micro-batches on few FFN GPUs: experts count three times a micro-batch but in the last layer's end."""
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")
    found = split_parts(at, split_of(at, 4), LENGTHS, 512.0)
    parts = found.parts.set_index("operator")
    experts, attention = parts.loc["routed experts"], parts.loc["decode attention"]
    assert experts["waited"] == pytest.approx(3 * experts["seconds"], rel=0.02)
    assert attention["waited"] < 0.2 * attention["seconds"]
    assert float(found.step.attention_idle) > float(found.step.ffn_idle)


def test_halves_on_two_systems_rest_on_fits_of_their_own():
    at, theirs = (ds.setup("deepseek_r1", name, "fp8") for name in ("h200_sxm", "h100_sxm"))
    split = Split(Sharding(dp_attn=8, ep=8), Sharding(dp_attn=32, ep=32), 2)
    found = split_parts(at, split, LENGTHS, 32.0, theirs)
    sources = found.parts.groupby("pool")["source"].agg(" ".join)
    assert "h200_sxm" in sources["attention"]
    assert "h100_sxm" in sources["ffn"]
    assert found.parts["waited"].sum() + found.host + found.links == pytest.approx(float(found.step.ttl))


def test_the_parts_of_encoding_add_up_and_need_their_images():
    step = ds.encode_step(ds.setup("kimi_k2_5", "h200_sxm", "fp8"), images=2, height=1120, width=1120)
    found = encode_parts(step, 1120, 1120)
    assert found.parts["seconds"].sum() == pytest.approx(step.time)
    assert found.parts["share"].sum() == pytest.approx(step.time / step.latency)
    with pytest.raises(InputError, match="are not those of the step"):
        encode_parts(step, 560, 560)
