"""Further pools in a sweep: the table that it writes, limits, and what a file may not say."""

from unittest.mock import Mock

import pandas as pd
import pytest

from disagg_sim.report.page.sweep import sweep_content
from disagg_sim.serving.pool_frontier import GPUS
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep

SWEEP = """name: many
models: qwen3_5_35b_a3b
systems: {gb200_nvl72: nvfp4_fp8kv}
profile: ideal
traffic: [{isl: 4096, osl: 256}]
limits: {max_gpus: 4, gpu_cap: 32}
"""
IMAGES = "images: {images: 2, height: 1120, width: 1120}\n"


def ran(folder, text):
    (folder / "sweep.yaml").write_text(SWEEP + text)
    out = folder / "out"
    result = run_sweep(plan_sweep(load_sweep(str(folder / "sweep.yaml"))), out, jobs=1, listener=Mock(), overwrite=True)
    return result, out


def test_a_sweep_with_further_pools_writes_their_frontier_beside_that_of_two(tmp_path):
    result, out = ran(tmp_path, "pools: [encode, prefill, attention, ffn, decode]\n" + IMAGES)
    table = pd.read_csv(out / "pools.csv")
    assert len(table) == len(result.pools) > 3
    assert set(table["case"]) == {result.cases[0].plan.case.name}
    assert "encode-prefill-attention-ffn-decode" in table["case"][0]
    assert (table["encode_gpus"] > 0).all()
    shown = sweep_content(out, beside=0, breakdowns=False).tables["pools"]
    assert [name for name in GPUS if name in shown] == [name for name in GPUS if table[name].any()]
    both = result.frontier
    plain, out = ran(tmp_path, "")
    assert not (out / "pools.csv").exists()
    assert plain.pools.empty
    values = [name for name in plain.frontier if name != "case"]
    pd.testing.assert_frame_equal(both[values], plain.frontier[values])


@pytest.mark.parametrize("per", ["usd", "watt"])
def test_throughput_of_all_pools_is_counted_over_what_the_sweep_says(per, tmp_path):
    """Encode and prefill on a system that costs more: every row has the cost of its pools, and the front is over it."""
    pools = "pools: [encode, prefill, attention, ffn, decode]\n" + IMAGES
    prices = {"b200_sxm": 5.0, "h200_sxm": 2.0} if per == "usd" else {"b200_sxm": 1000.0, "h200_sxm": 700.0}
    text = SWEEP.replace("{gb200_nvl72: nvfp4_fp8kv}", "[{prefill: {b200_sxm: nvfp4_fp8kv}, decode: {h200_sxm: fp8}}]")
    own = f"prices: {{{', '.join(f'{name}: {price}' for name, price in prices.items())}}}\n" if per == "usd" else ""
    (tmp_path / "sweep.yaml").write_text(f"{text}{pools}per: {per}\n{own}")
    out = tmp_path / "out"
    run_sweep(plan_sweep(load_sweep(str(tmp_path / "sweep.yaml"))), out, jobs=1, listener=Mock())
    table = pd.read_csv(out / "pools.csv")
    total, over = ("usd_per_hour", "tokens_per_usd") if per == "usd" else ("tdp_watts", "tokens_per_joule")
    dear = table["encode_gpus"] + table["prefill_gpus"]
    cost = prices["b200_sxm"] * dear + prices["h200_sxm"] * (table["total_gpus"] - dear)
    assert table[total].to_numpy() == pytest.approx(cost.to_numpy())
    tokens = table["tokens_per_s_per_gpu"] * table["total_gpus"] * (3600.0 if per == "usd" else 1.0)
    assert table[over].to_numpy() == pytest.approx((tokens / cost).to_numpy())
    assert table[over].is_monotonic_decreasing
    assert table["tokens_per_s_per_user"].is_monotonic_increasing
