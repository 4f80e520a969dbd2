"""Options and keys of earlier releases: one line says what to do instead."""

from pathlib import Path

import pytest

from disagg_sim.cli.main import run
from disagg_sim.errors import REMOVED
from disagg_sim.scenario.options import FIXED

PLAN = ["plan", "--model", "llama_3_1_8b", "--system", "h100_sxm", "--isl", "64", "--osl", "8", "--rate", "1"]


@pytest.mark.parametrize(
    ("option", "asked"),
    [
        ("--popularity-drift", [*PLAN, "--popularity-drift", "9"]),
        ("--no-figures", ["sweep", "smoke", "--no-figures"]),
        ("--bucket", ["sweep", "smoke", "--bucket", "s3://a"]),
        ("store compact", ["store", "compact", "results"]),
    ],
)
def test_a_removed_option_is_told(option, asked, capsys):
    assert run(asked) == 2
    assert f"{option} {REMOVED[option]}" in capsys.readouterr().err


def test_a_removed_key_is_told(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("models: [llama_3_1_8b]\npopularity_drift_s: 600\n")
    assert run(["specs", "check", str(file)]) == 2
    assert f"popularity_drift_s {REMOVED['popularity_drift_s']}" in capsys.readouterr().err


def test_a_removed_option_of_a_policy_is_told(tmp_path, capsys):
    file, shipped = tmp_path / "mine.yaml", Path(__file__).parents[2] / "scenarios" / "azure_conv_on_h100.yaml"
    file.write_text(shipped.read_text().replace("[vllm, ", "[{kind: dopd, label: own, correct: false}, "))
    assert run(["specs", "check", str(file)]) == 2
    assert f"correct {FIXED}" in capsys.readouterr().err
