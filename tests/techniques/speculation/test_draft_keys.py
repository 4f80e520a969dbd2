"""``speculation`` and ``draft_tokens`` of a scenario or sweep, of all instances or of a part."""

from pathlib import Path

import pytest

import disagg_sim as ds
from disagg_sim.errors import SpecError
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.spec import load_sweep

TEXT = """
name: drafts
model: deepseek_r1
system: h200_sxm
precision: fp8
speculation: deepseek_r1_mtp
draft_tokens: 1
trace: {kind: synthetic, lengths: {isl: 256, osl: 32}, rate_per_s: 4, requests: 10}
slo: {ttft_s: 5.0, tpot_s: 0.05}
deployments:
  two: {prefill: {tp: 8, ep: 8, draft_tokens: 0}, decode: {tp: 8, ep: 8}, colocated: {tp: 8, ep: 8}}
policies: [vllm, disaggregated]
"""


def read(tmp_path: Path, old: str = "", new: str = ""):
    assert old in TEXT
    (tmp_path / "s.yaml").write_text(TEXT.replace(old, new), encoding="utf-8")
    return load_scenario(str(tmp_path / "s.yaml"))


def test_all_parts_draft_that_do_not_say_something_else(tmp_path):
    scenario = read(tmp_path)
    (two,) = scenario.deployments
    assert [getattr(two, part)[0].mapping.draft_tokens for part in ("prefill", "decode", "colocated")] == [0, 1, 1]
    assert scenario.setup.speculation == ds.load_speculation("deepseek_r1_mtp")


def test_a_part_without_a_drafter_does_not_draft(tmp_path):
    two = read(tmp_path, "colocated: {tp: 8,", "colocated: {speculation: none, tp: 8,").deployments[0]
    assert two.colocated[0].setup.speculation is None
    assert two.colocated[0].mapping.draft_tokens == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("draft_tokens: 1", "draft_tokens: 3", "3 draft tokens are out of range; allowed: 0 to 1"),
        ("speculation: deepseek_r1_mtp\n", "", "draft_tokens: acts with 'speculation' only"),
        ("deepseek_r1_mtp", "deepseek_v3_mtp", "was measured on deepseek_v3, not on deepseek_r1"),
        ("deepseek_r1_mtp", "ngram 0.5", "method 'ngram' is not timed; allowed: mtp, eagle3"),
        ("decode: {tp: 8,", "decode: {speculation: none, tp: 8,", "deepseek_r1_mtp in prefill, none in decode"),
    ],
)
def test_what_does_not_go_together_is_one_line(tmp_path, old, new, said):
    with pytest.raises(SpecError, match=said):
        read(tmp_path, old, new)


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
