"""Which part a served row belongs to: a file that no profile was fitted to is new, whatever its configurations."""

import pandas as pd
from shared_data import shared_file

from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.read import read_rows


def test_rows_of_the_fitted_files_are_told_from_rows_of_others(tmp_path):
    name = "inferencex_llama70b_gptoss120b_runs.csv"
    source = shared_file(f"measured/{name}")
    known = [row for row in read_rows(source) if row.engine == "vllm"][:40]
    assert set(evaluate(known)["part"]) == {"fitted", "held-out"}
    copy = tmp_path / name
    copy.write_text("".join(source.read_text().splitlines(keepends=True)[:6]))
    assert set(evaluate(read_rows(copy))["part"]) == {"new"}


def test_a_result_without_samples_is_a_row_with_a_reason(tmp_path):
    table = pd.read_csv(shared_file("measured/mlperf_inference.csv"), low_memory=False).head(3)
    table["samples_per_s"], table["tokens_per_sample_out"] = 0.0, float("nan")
    table.to_csv(tmp_path / "none.csv", index=False)
    verdicts = evaluate(read_rows(tmp_path / "none.csv"))
    assert not verdicts["evaluated"].any()
    assert (verdicts["reason"] != "").all()
