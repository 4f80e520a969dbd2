"""Policy files read as text: what they register, which options they have, and that nothing in them runs."""

import os
from pathlib import Path

import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.errors import SpecError
from disagg_sim.scenario.policy_files import load_policies
from disagg_sim.scenario.policy_text import MOST_BYTES, read_policies
from disagg_sim.scenario.spec import check_scenario
from disagg_sim.simulation.options import Option, options_of
from disagg_sim.simulation.policies import registry
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.policy import POLICIES

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{100 + i},{10 + i}\n" for i in range(20))
SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "trace": {"path": "short.csv"},
    "slo": {"ttft_s": 2.0, "tpot_s": 0.15},
    "policy_file": "mine.py",
    "deployments": {"four": {"gpus": 4, "prefill": {"instances": 2}, "decode": {"instances": 2}}},
}
HEAD = """
from dataclasses import dataclass, field
from typing import ClassVar
from disagg_sim.simulation.options import MOST_TOKENS, option
from disagg_sim.simulation.policies.disaggregated import Disaggregated as Usual
from disagg_sim.simulation.policy import register
"""
PLAIN = """
@register("plain")
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    target: int = 8
    share: float = field(default=0.5)
    fast: bool = False
    kind: str = option("near", "which", choices=("near", "far"))
    most: int = option(64, "how many", low=1, high=MOST_TOKENS)
    product: int = 8 * 1024

    def build(self, site): ...
"""


@pytest.fixture
def written(tmp_path):
    """Writes a policy file and a scenario that names it, in a directory that ends with nothing else in it."""
    (tmp_path / "short.csv").write_text(TRACE)

    def write(text: str, *kinds: object) -> str:
        (tmp_path / "mine.py").write_text(HEAD + text)
        (tmp_path / "trial.yaml").write_text(yaml.safe_dump({**SCENARIO, "policies": [*kinds] or ["disaggregated"]}))
        return str(tmp_path / "trial.yaml")

    yield write
    assert {path.name for path in tmp_path.iterdir()} == {"short.csv", "mine.py", "trial.yaml"}
    assert "plain" not in POLICIES


def only(path: str):
    (form,) = read_policies(Path(path).with_name("mine.py")).forms
    return form


def faults(path: str) -> str:
    with pytest.raises(SpecError) as caught:
        check_scenario(path)
    return str(caught.value)


@pytest.mark.parametrize("line", ["open('ran', 'w')", "import sys; sys.exit()", "1 / 0", "while True: pass"])
def test_a_check_runs_nothing(written, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (note,) = check_scenario(written(f"{line}\n{PLAIN}{line}\n", "plain"))
    assert note.startswith("mine.py: read, not run (registers plain); not checked: plain.product, whether it can be")


def test_the_command_says_what_was_not_checked(written, capsys):
    assert run(["specs", "check", written(PLAIN, "plain")]) == 0
    table, note = capsys.readouterr().out.splitlines()
    assert table.startswith("ok  scenario  ")
    assert "mine.py: read, not run (registers plain); not checked: plain.product, whether it can be imported" in note


def test_options_are_read_from_literals(written):
    form = only(written(PLAIN))
    assert (form.needs, form.whole) == (("prefill", "decode"), True)
    assert form.options == {
        "target": Option(default=8),
        "share": Option(default=0.5),
        "fast": Option(default=False),
        "kind": Option(default="near", choices=("near", "far")),
        "most": Option(default=64, low=1, high=2**24),
        "product": None,
    }


def test_a_class_has_the_options_of_those_below_it(written):
    form = only(
        written("""
class Between(Usual):
    undecorated: int = 3

@register("plain")
@dataclass(frozen=True)
class Plain(Between):
    own: int = 7
""")
    )
    usual = policies()["disaggregated"]
    assert form.needs == usual.needs
    assert form.options == {**options_of(usual), "own": Option(default=7)}
    assert form.whole


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plein", "policies[0]: unknown policy 'plein', did you mean 'plain'?; known: arrow, disaggregated, "),
        ({"kind": "plain", "targt": 3}, "policies[0]: unknown key 'targt', did you mean 'target'?"),
        ({"kind": "plain", "target": "many"}, "policies[0].target: 'many' is out of range; allowed: whole numbers"),
        ({"kind": "plain", "fast": 1}, "policies[0].fast: 1 is out of range; allowed: true or false"),
        ({"kind": "plain", "kind_": 1}, "policies[0]: unknown key 'kind_'"),
        ({"kind": "plain", "most": 0}, "policies[0].most: 0 is out of range; allowed: whole numbers from 1 to 1677"),
    ],
)
def test_a_scenario_is_held_to_what_the_text_shows(written, kind, said):
    text = faults(written(PLAIN, kind))
    assert said in text
    assert len(text.splitlines()) == 1


def test_the_parts_that_a_system_takes_are_checked(written):
    text = PLAIN.replace('("prefill", "decode")', '("colocated",)')
    assert "has no colocated instances, which policy 'plain' needs" in faults(written(text, "plain"))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ('register("pl" + "ain")(Usual)\n', {"kind": "plain", "any": 1}, "names that it registers as it runs"),
        (
            PLAIN.replace("class Plain:", "class Plain(elsewhere.Base):"),
            {"kind": "plain", "any": 1},
            "not checked: the options of plain",
        ),
        (PLAIN.replace('("prefill", "decode")', "PARTS"), "plain", "the parts that plain takes"),
        ("", "disaggregated", "registers no policy by its text"),
    ],
)
def test_what_only_running_shows_is_told_and_no_fault(written, text, kind, said):
    (note,) = check_scenario(written(text, kind))
    assert said in note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Half(\n", "mine.py: line 7: '(' was never closed"),
        (PLAIN + PLAIN.replace("class Plain", "class Other"), "mine.py: policy 'plain' is registered twice"),
        (PLAIN.replace('"plain"', '"vllm"'), "mine.py: policy 'vllm' is registered twice"),
        (PLAIN.replace('("prefill", "decode")', '"decode"'), "policy 'plain': needs is 'decode'; allowed: a tuple of"),
        ("x = " + "(" * 10**5, "mine.py: "),
        ("x = " + "-" * 10**5 + "1", "mine.py: not a Python file, or nested too deeply"),
        ("x = '\0'", "mine.py: "),
        ("#" * MOST_BYTES, "mine.py: cannot be read: larger than 1 MB"),
    ],
)
def test_a_file_that_is_none_is_one_line(written, text, said):
    found = faults(written(text))
    assert said in found
    assert len(found.splitlines()) == 1


def test_what_python_would_not_import_is_refused_by_the_check_too(tmp_path):
    """A check that says ok of a file that ``simulate`` refuses is worth nothing; a pipe would never end."""
    (tmp_path / "mine.txt").write_text(HEAD + PLAIN)
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("mine.txt", "pipe.py"):
        for read in (read_policies, lambda path: load_policies(str(path))):
            with pytest.raises(SpecError, match=f"{name}: no such file, or not a Python file"):
                read(tmp_path / name)


def test_a_file_written_since_it_was_imported_is_told_and_not_run_as_it_was(tmp_path):
    """A worker of a cluster lives through many runs."""
    path = tmp_path / "kept.py"
    path.write_text("answer = 1\n")
    load_policies(str(path))
    load_policies(str(path))
    path.write_text("answer = 2\n")
    with pytest.raises(SpecError, match=r"kept\.py: written since this process imported it; start the process"):
        load_policies(str(path))


def test_the_text_of_every_shipped_policy_shows_what_its_class_says():
    """The reader of texts and Python agree on all systems of this package."""
    there = {}
    for path in Path(registry.__file__).parent.rglob("*.py"):
        for form in read_policies(path).forms:
            there[form.name] = form
    assert there.keys() == {name for name, kind in policies().items() if kind.__module__.startswith("disagg_sim.")}
    for name, form in there.items():
        told = options_of(policies()[name])
        assert form.options.keys() <= told.keys()
        for key, found in form.options.items():
            assert found is None or found.default == told[key].default
