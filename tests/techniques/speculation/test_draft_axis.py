"""Speculation as an axis of a sweep: cases, columns, refusals."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg_sim.certainty.rows import rescore
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep

SWEEP = """\
name: drafts
models: [deepseek_r1]
systems: {b200_sxm: fp8}
traffic: [{isl: 2048, osl: 512}]
limits: {max_gpus: 8, gpu_cap: 16, layouts: served}
"""


def written(path: Path, more: str) -> str:
    file = path / "drafts.yaml"
    file.write_text(SWEEP + more)
    return str(file)


@pytest.mark.long
def test_a_sweep_has_a_frontier_with_and_without_drafts(tmp_path):
    """With drafts users get more tokens a second; where none pay, at large batches, a point has none."""
    spec = load_sweep(written(tmp_path, "speculation: [none, deepseek_r1_mtp, mtp 0.8 0.6]\n"))
    plan = plan_sweep(spec)
    assert [each.case.speculation for each in plan.cases] == ["", "deepseek_r1_mtp", "mtp 0.8 0.6"]
    result = run_sweep(plan, tmp_path / "out", jobs=1, listener=Mock())
    front = result.frontier
    fastest = front.groupby("speculation")["tokens_per_s_per_user"].max()
    assert fastest["none"] < fastest["deepseek_r1_mtp"] < fastest["mtp 0.8 0.6"]
    assert (front.loc[front["speculation"] == "none", "decode_draft_tokens"] == 0).all()
    assert rescore(front)["ttl_s"].tolist() == pytest.approx(front["ttl_s"].tolist(), rel=1e-7)


def test_some_numbers_of_drafts_are_tried(tmp_path):
    spec = load_sweep(written(tmp_path, "speculation: mtp 0.8 0.6 0.4\ndraft_tokens: [1, 3]\n"))
    case = plan_sweep(spec).cases[0].case
    assert case.decode_setup.speculation is not None
    assert case.decode_setup.speculation.choices == (1, 3)
    assert case.name.endswith("mtp_0.8_0.6_0.4-drafts1_3")
