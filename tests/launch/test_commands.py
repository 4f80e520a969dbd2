"""``disagg-sim launch`` and ``disagg-sim plan --emit``: files, notes, refusals."""

import json

import pytest

from disagg_sim.cli.main import run as started

pytestmark = pytest.mark.usefixtures("without_changes")
SCENARIO = """
name: small
model: llama_3_1_8b
system: h100_sxm
precision: fp8
profile: measured
engine: vllm
trace: {kind: synthetic, name: few, lengths: azure_2023_conversation, rate_per_s: 2.0, requests: 10}
slo: {ttft_s: 1.0, tpot_s: 0.05}
deployments:
  two: {gpus: 2, prefill: [{instances: 1}], decode: [{instances: 1, batch: 64}]}
  four: {gpus: 4, prefill: [{tp: 2, instances: 1}], decode: [{tp: 2, instances: 1}]}
policies: [disaggregated]
"""
PLAN = "plan --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20"


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert started(command.split()) == 0
    return capsys.readouterr().out


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_deployment_of_a_scenario_is_written_with_its_notes(scenario, tmp_path, capsys):
    out = tmp_path / "start"
    told = run(f"launch {scenario} --deployment two --engine vllm --out {out}", capsys)
    assert sorted(path.name for path in out.iterdir()) == ["decode.sh", "notes.txt", "prefill.sh", "router.sh"]
    assert [f"# {line}" for line in (out / "notes.txt").read_text().splitlines()] == told.splitlines()[:-3]
    assert "--max-num-seqs 64" in (out / "decode.sh").read_text()
    assert (out / "router.sh").stat().st_mode & 0o100


def test_files_of_its_own_are_replaced_and_others_never(scenario, tmp_path, capsys):
    out, asked = tmp_path / "start", f"launch {scenario} --deployment two --engine vllm --out {tmp_path / 'start'}"
    run(asked, capsys)
    run(asked, capsys)
    (out / "router.sh").write_text("mine")
    (out / "notes.txt").unlink()
    assert started(asked.split()) == 2
    assert "router.sh: is there already, and this command did not write it" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["decode.sh", "prefill.sh", "router.sh"]


def test_policy_files_of_a_scenario_are_not_run(scenario, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    scenario.write_text(f"{SCENARIO}policy_file: mine.py\n")
    assert "decode.sh" in run(f"launch {scenario} --deployment two --engine vllm", capsys)


def test_without_a_directory_the_files_are_printed(scenario, capsys):
    told = run(f"launch {scenario} --deployment four --engine llm-d", capsys)
    assert "# --- decode.yaml" in told
    assert "kind: LeaderWorkerSet" in told


def test_a_plan_writes_nothing_where_a_link_is_in_the_place_of_a_file_of_its_launch(tmp_path, capsys):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "notes.txt").symlink_to("mine")
    assert started(f"{PLAN} --emit sglang --out {tmp_path}".split()) == 2
    assert "notes.txt: is a link" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["start", "notes.txt"]


def test_a_plan_is_emitted_with_the_times_of_its_engine(tmp_path, capsys):
    document = json.loads(run(f"{PLAN} --emit sglang --json --out {tmp_path}", capsys))
    assert document["start"]["engine"] == "sglang"
    for name, text in document["start"]["files"].items():
        assert (tmp_path / "start" / name).read_text() == text
    assert "expect other latencies" not in (tmp_path / "start" / "notes.txt").read_text()
