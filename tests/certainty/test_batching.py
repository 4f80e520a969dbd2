"""Designs of several modes are timed together as they are one by one."""

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.certainty.batching import batch_passes, batched_times
from disagg_sim.certainty.designs import times_of
from disagg_sim.certainty.extrapolation import outside_calibration
from disagg_sim.certainty.passes import batched_passes
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.certainty.trust import rests_on
from disagg_sim.sweep.labels import label_rows


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
