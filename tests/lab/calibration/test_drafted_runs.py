"""Runs with drafts: read with their acceptance, and judged by TPOT and by its gain over an equal run without."""

from dataclasses import replace

import pandas as pd
import pytest

from lab.calibration.served.drafts import drafts_summed, judged_drafts
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.read import SPECULATIVE, read_rows

CELL = {
    **{"num_spec": 0, "concurrency": 4, "tpot_mean_ms": 7.0, "accept_pos0": "", "accept_pos1": "", "isl": 8000},
    **{"model": "gpt-oss-120b (mxfp4)", "gpu": "1x H200", "engine": "vLLM 0.22.0", "osl": 1000},
}


@pytest.fixture
def rows(tmp_path):
    """One cell without drafts, two of equal load with them, of which one has more in flight than places."""
    drafts = {"num_spec": 2, "tpot_mean_ms": 5.0, "accept_pos0": 0.5, "accept_pos1": 0.6}
    table = pd.DataFrame([CELL, CELL | drafts, CELL | drafts | {"concurrency": 256}])
    table.to_csv(tmp_path / "cells.csv", index=False)
    return read_rows(tmp_path / "cells.csv")


def test_a_cell_states_its_drafts_and_their_acceptance(rows):
    plain, drafted, full = rows
    assert (plain.system, plain.engine, plain.model) == ("h200_sxm", "vllm", "gpt_oss_120b")
    assert (plain.speculative, plain.accepted, plain.reason) == (False, (), "")
    assert (drafted.drafts, drafted.accepted, drafted.reason) == (2, (0.5, 0.5), SPECULATIVE)
    assert full.reason == "some requests wait for a place"


def test_drafts_replace_the_decode_step_of_the_run_without_them(rows):
    (line,) = judged_drafts(rows).to_dict("records")
    steady = evaluate(rows[:1])["predicted"][0]
    assert line["without"] == pytest.approx(steady)
    assert steady / 2 < line["predicted"] < 1.5 * steady  # a step of three tokens makes 2
    assert line["error"] == pytest.approx(line["predicted"] / 5e-3 - 1)
    assert line["gain_error"] == pytest.approx((steady / line["predicted"]) / (7.0 / 5.0) - 1)
    summed = drafts_summed(judged_drafts(rows)).set_index("part")
    assert summed.loc["all", ["acceptance", "runs", "pairs"]].tolist() == ["stated", 1, 1]
    assert summed.loc["all", "error_tpot"] == pytest.approx(abs(line["error"]))


def test_rows_without_drafts_or_of_what_has_no_profile_have_no_table(rows):
    unknown = [replace(rows[1], **{name: ""}) for name in ("engine", "model", "system")]
    assert judged_drafts([rows[0], *unknown]).empty
