"""Rows under a distribution of lengths, and many rows at once, are timed again as the search timed them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.batching import batch_passes, batched_times
from disagg_sim.certainty.designs import times_of
from disagg_sim.certainty.extrapolation import outside_calibration
from disagg_sim.certainty.passes import batched_passes
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.certainty.trust import rests_on
from disagg_sim.errors import InputError, UnknownNameError
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.sweep.labels import label_rows

SHORT, LONG = 1000, 3000
OSL = 101
#: One prompt in three is short, so a seventh of all prompt tokens is of short prompts.
TWO = ds.lengths([SHORT, LONG, LONG], [OSL] * 3)
CHAT = "log_normal_4096_512"
LATENCY_COLUMNS = ["ttl_s", "ftl_s"]


def llama():
    return ds.setup("llama_3_1_8b", "h100_sxm", "fp8")


@cache
def served(mode, measure="tpot"):
    """Designs of Llama 3.1 8B under the shipped log-normal lengths, and what they were made with."""
    lengths, one = ds.lengths(CHAT), ds.Sharding()
    if mode == "disaggregated":
        prefill = ds.prefill_grid(llama(), one, lengths, batch=[1])
        points = ds.disaggregated(prefill, ds.decode_grid(llama(), one, lengths, batch=[8]))
    elif mode == "cpp":
        options = ds.Colocation(batch=(4,), prefill_batch=(1, 4), ttl_measure=measure)
        points = ds.colocated(llama(), ds.Sharding(pp=2), lengths, options=options)
        points = points[points["prefill_chunk_tokens"] == 1024].head(1).reset_index(drop=True)
    else:
        options = ds.Colocation(batch=(8,), prefill_batch=(1,), rank_chunk_tokens=(512,), ttl_measure=measure)
        points = getattr(ds, mode)(llama(), one, lengths, options=options).head(1)
    assert len(points) == 1
    return points, ds.Origin(lengths=lengths)


def seconds(found, latency):
    parts = found.operators[found.operators["latency"] == latency]
    return parts.set_index(["step", "operator"])["seconds"]


MODES = ["disaggregated", "colocated", "piggyback"]


@pytest.mark.parametrize("row", [0, 1], ids=["whole prompts", "chunks"])
def test_a_pass_of_two_lengths_is_the_weighted_mean_of_both(row):
    """(1/3) of every part at 1000 tokens and (2/3) at 3000; a chunk of 1024 makes one piece of the one, three of the
    other."""
    mapping = ds.Sharding(pp=2)

    def taken_apart(lengths):
        grid = ds.prefill_grid(llama(), mapping, lengths, batch=[1], chunk_tokens=[512])
        return ds.breakdown(grid, at=(row, 0))

    law, short, long = (taken_apart(each) for each in (TWO, ds.lengths(SHORT, OSL), ds.lengths(LONG, OSL)))
    expected = seconds(short, "ftl").mul(1 / 3).add(seconds(long, "ftl").mul(2 / 3), fill_value=0.0)
    assert np.allclose(seconds(law, "ftl").reindex(expected.index), expected, rtol=1e-9, atol=1e-15)
    calls = [each.operators.set_index("operator").loc["gate, up", "calls"] for each in (law, short, long)]
    assert calls[0] == pytest.approx(calls[1] / 3 + calls[2] * 2 / 3, rel=1e-9)


def test_mixed_steps_count_with_their_tokens_in_ttl_and_with_their_pieces_in_ftl():
    """Of 7 chunks 1 is of a short prompt; a prompt takes as many mixed steps to its first token as it has chunks."""
    options = ds.Colocation(batch=(8,), rank_chunk_tokens=(512,), every_step_mixed=False)
    points = ds.piggyback(llama(), ds.Sharding(), TWO, options=options)
    row = points.iloc[0]
    chunk, share = row["mixed_chunk_tokens"], row["mixed_step_share"]

    def step(isl):
        one = mixed_step(llama(), ds.Sharding(), batch=8.0, context=TWO.context, chunk=Chunk(chunk, isl))
        return float(np.squeeze(one.time))

    parts = ds.breakdown(points, origin=ds.Origin(lengths=TWO)).operators.groupby(["latency", "step"])["seconds"].sum()
    decode = float(np.squeeze(decode_step(llama(), ds.Sharding(), batch=8.0, context=TWO.context).ttl))
    seen = share - (1 - share) * share / 8  # one in eight mixed steps is of a request's own prompt
    assert parts["ttl", "decode step"] == pytest.approx((1 - seen) * decode, rel=1e-9)
    assert parts["ttl", "mixed step"] == pytest.approx(seen * (step(SHORT) / 7 + step(LONG) * 6 / 7), rel=1e-9)
    pieces = step(SHORT) * max(SHORT / chunk, 1) / 3 + step(LONG) * max(LONG / chunk, 1) * 2 / 3
    assert parts["ftl", "mixed step"] == pytest.approx(pieces, rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_are_all_alike_are_constant_lengths(mode):
    alike, constant = ds.lengths([2048] * 3, [256] * 3), ds.lengths(2048, 256)
    if mode == "disaggregated":
        grids = (grid(llama(), ds.Sharding(), constant, batch=[4]) for grid in (ds.prefill_grid, ds.decode_grid))
        points = ds.disaggregated(*grids)
    else:
        points = getattr(ds, mode)(llama(), ds.Sharding(), constant, options=ds.Colocation(batch=(4,)))
    one, other = ds.breakdown(points), ds.breakdown(points, origin=ds.Origin(lengths=alike))
    assert np.allclose(one.operators["seconds"], other.operators["seconds"], rtol=1e-12, atol=0.0)
    assert np.allclose(one.elasticities["ttl"], other.elasticities["ttl"], rtol=1e-12, atol=0.0)
    bars = [ds.uncertainty(points, samples=4, origin=ds.Origin(lengths=each)).ttl for each in (None, alike)]
    assert np.allclose(*bars, rtol=1e-12, atol=0.0)


def test_the_ftl_of_a_quantile_is_the_pass_of_that_prompt():
    lengths = ds.lengths(CHAT)
    prefill = ds.prefill_grid(llama(), ds.Sharding(), lengths, batch=[1], ftl_quantile=0.9)
    of_grid = ds.breakdown(prefill)
    assert seconds(of_grid, "ftl").sum() == pytest.approx(prefill.latency[0, 0], rel=1e-9)
    points = ds.disaggregated(prefill, ds.decode_grid(llama(), ds.Sharding(), lengths, batch=[8]))
    asked = ds.Origin(lengths=lengths, ftl_quantile=0.9)
    assert ds.rescore(points, origin=asked)["ftl_s"][0] == pytest.approx(points["ftl_s"][0], rel=1e-12)
    with pytest.raises(InputError, match="its settings give ftl_s"):
        ds.rescore(points, origin=replace(asked, ftl_quantile=None))


def test_a_point_of_a_decode_grid_runs_at_the_length_biased_context():
    """Half of the requests make 2 tokens, half 200: in a random step 199 of 200 of those in flight make 200."""
    law = ds.lengths([100, 5000], [2, 200])
    grid = ds.decode_grid(llama(), ds.Sharding(), law, batch=[16])
    assert law.context == pytest.approx((101 + 199 * 5100) / 200)
    assert seconds(ds.breakdown(grid), "ttl").sum() == pytest.approx(grid.latency[0, 0], rel=1e-9)


def test_elasticities_and_error_bars_are_of_the_distribution():
    """At the speed of light rates alone make the time; bars lie about the row's own numbers."""
    at, lengths = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile="ideal"), ds.lengths(CHAT)
    options = ds.Colocation(batch=(8,), prefill_batch=(1,), ttl_measure="p99")
    origin = ds.Origin(lengths=lengths)
    found = ds.sensitivity(
        ds.colocated(at, ds.Sharding(), lengths, options=options), parameters=("flops", "hbm_bandwidth"), origin=origin
    )
    for name, sign in (("ttl", -1.0), ("ftl", -1.0), ("throughput", 1.0)):
        assert found[name].sum() == pytest.approx(sign, abs=1e-9)
    points = pd.concat([served(mode)[0] for mode in MODES], ignore_index=True)
    bars = ds.uncertainty(points, samples=200, origin=origin).bands()
    for name in LATENCY_COLUMNS:
        short = name.removesuffix("_s")
        assert (bars[f"{short}_p10_s"] < bars[name]).all()
        assert (bars[name] < bars[f"{short}_p90_s"]).all()


def test_lengths_beyond_a_fit_are_told_where_their_time_counts():
    """Prefill attention was measured up to 16,384 tokens. Five of 10,000 prompts with 20 times the tokens take some
    20^2*5e-4 = 20 % of the scores, but scores are few per cent of a pass; of two prompts one takes nearly all."""

    def words(short, long):
        lengths = ds.lengths([SHORT] * short + [20_000] * long, [OSL] * (short + long))
        options = ds.Colocation(batch=(1,), prefill_batch=(1,))
        points = ds.colocated(llama(), ds.Sharding(), lengths, options=options)
        origin = ds.Origin(lengths=lengths)
        (part,) = ds.breakdown(points, origin=origin).operators.query(
            "operator == 'prefill attention' and latency == 'ftl'"
        )["outside"]
        return ds.outside_calibration(points, origin=origin)[0], part

    rare, often = words(9_995, 5), words(1, 1)
    assert "prompt" not in rare[0]
    assert rare[1] == "prompt 20,000 above 16,384", "the operator itself spends a hundredth of its time there"
    assert "prefill attention: prompt 2e+04 above 1.638e+04" in often[0]


def test_a_table_that_does_not_name_its_distribution_is_refused():
    points, origin = served("colocated")
    with pytest.raises(InputError, match="a distribution of lengths that neither the table nor the caller names"):
        ds.breakdown(points)
    with pytest.raises(InputError, match="isl 6653 and osl 740; the means of the lengths that were given are 2333"):
        ds.breakdown(points, origin=ds.Origin(lengths=TWO))
    named = ds.rescore(points.assign(traffic=CHAT))
    assert named["ttl_s"][0] == ds.rescore(points, origin=origin)["ttl_s"][0]
    with pytest.raises(UnknownNameError, match="did you mean 'log_normal_4096_512'"):
        ds.rescore(points.assign(traffic="log_normal_4096"))


def test_prompts_of_several_lengths_are_one_evaluation_with_the_same_times_and_words():
    """Three constant lengths and a distribution: times and words are those of each alone."""
    at, mappings = (
        ds.setup("deepseek_r1", "h200_sxm", "fp8"),
        [ds.Sharding(dp_attn=8, ep=8), ds.Sharding(tp_attn=8, ep=8)],
    )
    given = {
        "1024/128": ds.lengths(1024, 128),
        "65536/1024": ds.lengths(65536, 1024),
        "16384/64": ds.lengths(16384, 64),
    }
    given["log_normal_4096_512"] = ds.lengths("log_normal_4096_512")
    tables = []
    for name, lengths in given.items():
        options = ds.Colocation(batch=(8, 64), prefill_batch=(1, 8))
        for serve in (ds.colocated, ds.piggyback):
            tables.append(serve(at, mappings, lengths, options=options).assign(traffic=name, case=f"case {name}"))
    points = pd.concat(tables, ignore_index=True)
    designs = list(designs_of(points, Origin(lengths=given)))
    units = batch_passes(designs)
    assert sum(unit.phase == "decode" for unit in units) == 1
    assert len(units) < sum(len(one.prompts) for one in designs) / 10
    for one, found in zip(designs, batched_times(designs, lambda at: at), strict=True):
        for part, alone in zip(found, times_of(one), strict=True):
            np.testing.assert_allclose(np.broadcast_to(part, one.rows.shape), alone, rtol=1e-12)
    for say in (rests_on, outside_calibration):
        apart = [say(table, origin=Origin(lengths=given)) for _, table in points.groupby(["case", "mode"], sort=False)]
        assert say(points, origin=Origin(lengths=given)).tolist() == pd.concat(apart).tolist()
    assert len({*rests_on(points, origin=Origin(lengths=given))}) > 1


def test_both_labels_of_one_evaluation_are_those_of_two():
    """Prefill on H100, which has fits of its own, decode on H20, which inherits them; and every mode of both."""
    here, there = (ds.setup("llama_3_1_8b", system, "fp8") for system in ("h100_sxm", "h20_sxm"))
    lengths, wide = ds.lengths(30_000, 256), [ds.Sharding(), ds.Sharding(tp_attn=8, tp_ffn=8)]
    tables = [ds.disaggregated(ds.prefill_grid(here, wide, lengths), ds.decode_grid(there, wide, lengths, batch=[8]))]
    options = ds.Colocation(batch=(4, 64))
    tables += [
        serve(at, wide, lengths, options=options) for serve in (ds.colocated, ds.piggyback) for at in (here, there)
    ]
    points = pd.concat(tables, ignore_index=True)
    both = label_rows(points)
    assert both["rests_on"].tolist() == rests_on(points).tolist()
    assert both["outside_calibration"].tolist() == outside_calibration(points).tolist()
    assert both.nunique().min() > 1


def test_designs_are_taken_apart_together_as_they_are_one_by_one():
    """Two pools, co-located and piggybacked instances, whole prompts and chunks; ``varied_piggyback`` on record is a
    mix of lengths that is taken apart."""
    at, lengths = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.lengths(16384, 64)
    mappings = [ds.Sharding(dp_attn=8, ep=8), ds.Sharding(tp_attn=8, ep=8, pp=2)]
    options = ds.Colocation(batch=(64,), prefill_batch=(8,))
    grids = ds.prefill_grid(at, mappings, lengths, batch=[8]), ds.decode_grid(at, mappings, lengths, batch=[64])
    shared = [serve(at, mappings, lengths, options=options) for serve in (ds.colocated, ds.piggyback)]
    points = pd.concat([ds.disaggregated(*grids), *shared], ignore_index=True)
    whole = ds.breakdown(points)
    assert len(passes_of_all := list(batched_passes(list(designs_of(points))))) < len(points)
    assert any(len(unit.members) > 3 for unit, *_ in passes_of_all)
    alone = [ds.breakdown(points.iloc[[row]]) for row in range(len(points))]
    for name in ("operators", "fits", "memory", "elasticities"):
        keys = [
            key
            for key in ("row", "latency", "step", "operator", "kind", "phase", "part", "parameter", "entry")
            if key in getattr(whole, name)
        ]
        one, other = (
            frame.sort_values(keys, kind="stable", ignore_index=True)
            for frame in (getattr(whole, name), pd.concat([getattr(each, name) for each in alone], ignore_index=True))
        )
        pd.testing.assert_frame_equal(one, other, rtol=1e-9, atol=1e-15, check_dtype=False)
    ttl = whole.operators[whole.operators["latency"] == "ttl"].groupby("row")["seconds"].sum()
    np.testing.assert_allclose(ttl, points["ttl_s"], rtol=1e-9)
