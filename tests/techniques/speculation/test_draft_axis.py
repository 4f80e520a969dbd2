"""Speculation as an axis of a sweep: cases, columns, refusals."""

from pathlib import Path

from disagg_sim.sweep.plan import plan_sweep
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


def test_some_numbers_of_drafts_are_tried(tmp_path):
    spec = load_sweep(written(tmp_path, "speculation: mtp 0.8 0.6 0.4\ndraft_tokens: [1, 3]\n"))
    case = plan_sweep(spec).cases[0].case
    assert case.decode_setup.speculation is not None
    assert case.decode_setup.speculation.choices == (1, 3)
    assert case.name.endswith("mtp_0.8_0.6_0.4-drafts1_3")
