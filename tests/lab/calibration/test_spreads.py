"""Spreads: estimated from made-up errors whose spread is known, written, read back; bands of served rows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from kernel_csv import QUANTIZE, quantize_rows, write
from made_loads import latencies, made_run

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_system, load_uncertainty
from lab.calibration.kernels.efficiency_yaml import efficiency_text, write_efficiency
from lab.calibration.kernels.fit import calibrate_kernels
from lab.calibration.kernels.residuals import band, deviation
from lab.calibration.kernels.spreads import kernel_spreads, shared_part, spreads_text, write_spreads
from lab.calibration.served.bands import with_bands
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.rows import WorkerGroup

RNG = np.random.default_rng(5)


def kernel_rows(shared, own, groups=150, each=12):
    """Rows of ``groups`` weights at ``each`` token counts, errors of a common and an own part."""
    errors = (shared * RNG.standard_normal((groups, 1)) + own * RNG.standard_normal((groups, each))).ravel()
    shapes = [f"dtype=bf16 m={m} n={n} k=64" for n in range(groups) for m in range(each)]
    words = {"operator": "gemm", "system": "s", "framework": "vllm", "kernel_source": "k"}
    return pd.DataFrame({"shape": shapes, **words}), errors


@pytest.mark.parametrize(("shared", "own"), [(0.1, 0.0), (0.0, 0.1), (0.06, 0.08)])
def test_the_share_of_groups_comes_back(shared, own):
    rows, errors = kernel_rows(shared, own)
    assert shared_part(rows, errors) == pytest.approx(shared**2 / (shared**2 + own**2), abs=0.08)


def test_a_band_of_a_normal_law_holds_four_fifths():
    errors = 0.2 * RNG.standard_normal(20_000)
    assert deviation(errors) == pytest.approx(0.2, rel=0.03)
    low, high = band(np.ones(20_000), np.full(20_000, 0.2))
    assert np.mean((np.exp(errors) >= low) & (np.exp(errors) <= high)) == pytest.approx(0.8, abs=0.01)


def test_the_same_data_give_the_same_file(tmp_path):
    h100 = load_system("h100_sxm")
    table = write(tmp_path / "q.csv", QUANTIZE, *quantize_rows(2.5, 0.75, bandwidth=h100.hbm_bandwidth))
    done = calibrate_kernels([table], "h100_sxm")
    write_efficiency(tmp_path / "h100_sxm.yaml", efficiency_text(done, data="d", date="2026-01-01", assumptions=None))
    kinds, composed = kernel_spreads([table], efficiency=tmp_path)
    told = {"data": "d", "date": "2026-01-01"}
    shipped = load_uncertainty("measured")
    served = shipped.shared, shipped.served
    text = spreads_text(replace(shipped, kinds=kinds, composed=composed), served, **told)
    kinds, composed = kernel_spreads([table], efficiency=tmp_path)
    assert text == spreads_text(replace(shipped, kinds=kinds, composed=composed), served, **told)
    spec = write_spreads(tmp_path / "mine.yaml", text)
    assert load_uncertainty(tmp_path / "mine.yaml") == spec
    assert (spec.shared, spec.served) == served
    assert spec.kinds["elementwise"].rows == done.files[0].fitted


def served_row(row, concurrency, system="h100_sxm"):
    words = {"form": "inferencex_dense", "model": "llama_3_1_70b", "system": system}
    workers = WorkerGroup(mapping=Sharding(tp_attn=4, tp_ffn=4))
    return made_run(row, **words, workers=workers, concurrency=concurrency, quantities=latencies(tpot=0.02, ttft=0.2))


def test_every_evaluated_line_of_a_served_run_has_a_band_and_says_what_it_rests_on():
    rows = [served_row("1", 4.0), served_row("2", 64.0), served_row("3", 8.0, system="h800_sxm")]
    lines = with_bands(evaluate(rows), rows)
    assert lines["evaluated"].all()
    assert (lines["predicted_p10"] < lines["predicted"]).all()
    assert (lines["predicted"] < lines["predicted_p90"]).all()
    assert lines["outside_calibration"].str.contains("inherited from h100_sxm").tolist() == [False] * 4 + [True] * 2
    assert (lines["calibrated"] == (lines["outside_calibration"] == "")).all()
    wide = lines.set_index(["row", "quantity"])
    width = np.log(wide["predicted_p90"] / wide["predicted_p10"])
    assert width["1", "ttft"] > width["1", "tpot"], "first tokens are less sure than the others"
