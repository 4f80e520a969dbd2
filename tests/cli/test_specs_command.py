"""``disagg-sim specs`` and ``trace``: what they print, and one line with exit code 2 for what a user can mend."""

import json
from unittest.mock import patch

import pytest

from disagg_sim.cli.main import run
from disagg_sim.facts.load import list_specs, load_efficiency
from disagg_sim.facts.yaml_files import spec_files
from disagg_sim.simulation.options import options_of
from disagg_sim.simulation.policies.registry import policies, title_of

KINDS = ("hardware", "model", "traffic", "precision", "profile")


def output(capsys, *arguments):
    assert run(["specs", *arguments]) == 0
    return capsys.readouterr().out


def test_list_names_everything(capsys):
    text = output(capsys, "list")
    for kind in KINDS:
        for name in list_specs(kind):
            assert any(line.split()[:2] == [kind, name] for line in text.splitlines())


def test_the_list_of_policies_has_every_option_with_its_default_and_its_meaning(capsys):
    text = output(capsys, "list", "policies")
    assert text == output(capsys, "list", "policy")
    *blocks, run_keys = text.split("\n\n")
    assert len(blocks) == len(policies())
    for (name, policy), block in zip(policies().items(), blocks, strict=True):
        title, takes, _, *rows = block.splitlines()
        assert title == f"{name}: {title_of(policy)}"
        assert takes == f"takes the parts {', '.join(policy.needs)} of a deployment"
        assert [row.split()[0] for row in rows] == list(options_of(policy))
        assert all(options_of(policy)[row.split()[0]].meaning in row for row in rows)
    assert run_keys.startswith("run: ")
    assert "\nsample_s      10 s" in run_keys


MINE = """
from dataclasses import dataclass
from disagg_sim.simulation.policy import register

@register("mine_alone")
@dataclass(frozen=True)
class Mine:
    needs = ("colocated",)
    patience: int = 7

    def build(self, site): ...
"""


@patch.dict(policies())
def test_the_policies_of_a_file_are_shown_as_far_as_they_are_known(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    lines = output(capsys, "show", "policy", str(tmp_path / "mine.py")).splitlines()
    assert lines[:2] == ["mine_alone", "takes the parts colocated of a deployment"]
    assert lines[3].split() == ["patience", "7", "whole", "numbers"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.py").write_text("x = 1\ny = (\n")
    assert run(["specs", "show", "policy", "open.py"]) == 2
    assert capsys.readouterr().err == "error: open.py: line 2: '(' was never closed\n"
    (tmp_path / "none.py").write_text("x = 1\n")
    assert run(["specs", "show", "policy", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err.endswith("none.py: registers no serving policy\n")


def test_every_shipped_spec_can_be_shown(capsys):
    for kind, name in [(each, name) for each in KINDS for name in list_specs(each)]:
        text = output(capsys, "show", kind, name)
        assert name in text
        assert [line for line in text.splitlines() if line != line.rstrip()] == [], name


def test_a_system_is_shown_in_engineers_units_with_its_fits(capsys):
    text = output(capsys, "show", "hardware", "H100-SXM")
    for figure in ("989.4 TFLOPS", "80 GB", "85.52 GB", "3.35 TB/s", "450 GB/s one way", "700 W", "1.99-5 USD/h"):
        assert figure in text
    assert "trtllm 1.3.0rc20" in text
    assert "inherited" not in text


def test_inherited_fits_are_marked(capsys):
    assert "h100_sxm (inherited)" in output(capsys, "show", "hardware", "mi300x")
    lines = output(capsys, "show", "hardware", "b200_sxm", "--fits").splitlines()
    inherited = [line.split()[0] for line in lines if "h100_sxm (inherited)" in line]
    exchange = [row for row in load_efficiency("b200_sxm").alltoall if row.inherited_from]
    assert inherited == ["alltoall"] * len(exchange)
    assert exchange


def test_assumed_rows_are_marked(capsys):
    lines = output(capsys, "show", "hardware", "gb300_nvl72", "--fits").splitlines()
    one_shot, two_shot = (line for line in lines if "(assumption" in line)
    assert "op=all_reduce gpus=0 latency=4us" in one_shot
    assert "algorithm=two_shot" in two_shot


def test_a_model_is_shown_with_its_counts(capsys):
    text = output(capsys, "show", "model", "deepseek-r1")
    for figure in ("671,026,419,200", "37,552,297,472", "70,272 B", "35,136 B", "163,840 tokens", "58 layers"):
        assert figure in text


def test_a_system_without_fits_says_so(capsys, tmp_path):
    path = tmp_path / "x100.yaml"
    path.write_bytes(spec_files("hardware")["h100_sxm"].read_bytes())
    assert "no fitted efficiencies: only the profile 'ideal' can be used" in output(
        capsys, "show", "hardware", str(path)
    )


def test_check_names_the_faults_of_every_file(capsys, tmp_path):
    good, bad, empty = (tmp_path / name for name in ("good.yaml", "bad.yaml", "empty.yaml"))
    text = spec_files("hardware")["h200_sxm"].read_text(encoding="utf-8")
    good.write_text(text, encoding="utf-8")
    bad.write_text(text.replace("sm_count: 132", "sm_cuont: 132"), encoding="utf-8")
    empty.write_text("", encoding="utf-8")
    assert run(["specs", "check", str(good), str(bad), str(empty)]) == 2
    seen = capsys.readouterr()
    assert seen.out.split() == ["ok", "hardware", str(good)]
    assert seen.err == (
        f"error: {bad}:\n  - missing key 'sm_count'\n  - unknown key 'sm_cuont', did you mean 'sm_count'?\n"
        f"{empty}: empty file; expected 'key: value' lines\n"
    )


ROWS = "arrival_s,input_tokens,output_tokens\n0,10,2\n90,30,4\n60,20,3\n95,0,1\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(ROWS)
    return path


def test_stats_as_json_have_null_for_what_is_not_there(trace, capsys):
    assert run(["trace", "stats", str(trace), "--json", "--kind", "csv"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["dropped"], found["duration_s"]) == (3, 1, 90)
    assert found["input_tokens"]["mean"] == 20
    assert found["every_minute"]["minutes"] == 2
    trace.write_text(ROWS.splitlines()[0] + "\n0,10,2\n")
    assert run(["trace", "stats", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate_per_s"] is None
