"""Laws of power from tables of measured watts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from disagg_sim.cli.main import app
from disagg_sim.facts.load import check_file, list_specs, load_power, load_system
from disagg_sim.facts.power import POWER_KINDS, WINDOWED, PowerLaw
from disagg_sim.physics.power import kernel_power
from disagg_sim.units import US
from lab.calibration.power.fit import calibrate_power, read_power_table

TRUE = PowerLaw(
    kind="gemm",
    form="bf16",
    engine="vllm",
    version="1",
    points=0,
    median_error=0.0,
    p90_error=0.0,
    base=0.05,
    compute=0.8,
    compute_power=0.6,
    memory=0.5,
    memory_power=0.8,
    gap=15 * US,
)
IDLE, LIMIT = 0.2, 700.0


def gemm_table(path, noise=0.0):
    """Multiplies of H200 whose power follows ``TRUE``."""
    draw, h200 = np.random.default_rng(3), load_system("h200_sxm")
    m, n, k = (2 ** draw.integers(low, 15, 400) for low in (0, 9, 9))
    flops, moved = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
    time = 5 * US + np.maximum(flops / (0.8 * h200.peak_flops["bf16"]), moved / (0.9 * h200.hbm_bandwidth))
    shares = {"compute": flops / time / h200.peak_flops["bf16"], "memory": moved / time / h200.hbm_bandwidth}
    watts = LIMIT * kernel_power(TRUE, **shares, time=time, idle=IDLE) * np.exp(noise * draw.standard_normal(400))
    watts[:8] = LIMIT * IDLE  # kernels that do next to nothing: the least 1 % are what a GPU draws that waits
    rows = {"system": "h200_sxm", "framework": "vllm", "version": "1", "kind": "gemm", "dtype": "bfloat16"}
    rows |= {"m": m, "n": n, "k": k, "latency_us": time / US, "power_w": watts, "power_limit_w": LIMIT}
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_a_law_is_found_again_from_rows_that_follow_it(tmp_path):
    fit = calibrate_power(read_power_table(gemm_table(tmp_path / "power.csv"), "h200_sxm"))
    (law,) = fit.laws
    assert fit.idle == pytest.approx(IDLE)
    assert law.held_out_points > 60
    assert law.held_out_median_error < 0.01


def test_held_out_rows_do_not_change_a_law(tmp_path):
    path = gemm_table(tmp_path / "power.csv", noise=0.05)
    table = read_power_table(path, "h200_sxm")
    spoilt = table.rows.assign(watts=table.rows["watts"].where(~table.rows["held_out"], 690.0))
    law, again = (calibrate_power(each).laws[0] for each in (table, type(table)("", "", table.system, LIMIT, spoilt)))
    assert law.compute == pytest.approx(again.compute, rel=0.02)
    assert again.held_out_median_error > 5 * law.held_out_median_error


def test_the_command_writes_a_file_that_is_read_back(tmp_path):
    table, out = gemm_table(tmp_path / "power.csv"), tmp_path / "hw_specs" / "power" / "h200_sxm.yaml"
    done = CliRunner().invoke(app, ["calibrate", "power", str(table), "--system", "h200_sxm", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "1 laws, " in done.output
    assert check_file(out) == "power"
    spec = load_power(out)
    assert (spec.laws[0].kind, spec.limit, spec.idle) == ("gemm", LIMIT, pytest.approx(IDLE))


def test_every_shipped_system_has_power_and_every_kind_a_law():
    assert set(list_specs("power")) == set(list_specs("hardware"))
    for name in list_specs("power"):
        spec = load_power(name)
        assert 0.1 < spec.idle < 0.3
        assert {spec.law_of(kind, "").kind for kind in POWER_KINDS} >= {"gemm", "prefill_attention", "decode_attention"}
        assert all(bool(law.inherited_from) == spec.inherited for law in spec.laws)


@pytest.mark.parametrize("kind", ["gemm", "prefill_attention", "experts", "elementwise"])
def test_power_on_shapes_held_out_is_within_12_percent_by_kind(kind):
    """The mean over the laws of three systems of their medians, by rows; MLA in prefill is a known miss of 16 %."""
    laws = [law for name in ("h200_sxm", "b200_sxm", "gb200_nvl72") for law in load_power(name).laws]
    mine = [law for law in laws if law.kind == kind and law.form != "mla"]
    errors, rows = zip(*((law.held_out_median_error, law.held_out_points) for law in mine), strict=True)
    assert np.average(errors, weights=rows) <= 0.12


def test_attention_over_windows_has_a_law_of_its_own_where_there_is_one():
    h200 = load_power("h200_sxm")
    assert h200.law_of("decode_attention", WINDOWED, "vllm").form == WINDOWED
    without = replace(h200, laws=tuple(law for law in h200.laws if law.form != WINDOWED))
    assert without.law_of("decode_attention", WINDOWED, "vllm").form == "gqa"
