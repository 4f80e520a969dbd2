"""Help of every command: by ``-h`` as by ``--help``, whole at every width, with an example that is a command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from every_command import COMMANDS, LEAVES

from disagg_sim.cli.main import run


def shown(words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*words, option]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


@pytest.mark.parametrize("width", [80, 120])
def test_help_is_whole(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for words in COMMANDS:
        text = shown(words, "--help", capsys)
        assert shown(words, "-h", capsys) == text
        assert max(map(len, text.splitlines())) <= width, words
        assert "\u2026" not in text
        assert not re.search(r"^(?!Usage: ).*[\w,]\.\.\.$", text, flags=re.MULTILINE), text  # a line that was cut


def test_the_example_of_a_command_is_one():
    """Its words name the command, and its options are the command's own."""
    for words in LEAVES:
        example = LEAVES[words].epilog.removeprefix("Example: disagg-sim ").split()
        assert tuple(example[: len(words)]) == words
        known = {name for each in LEAVES[words].params for name in each.opts}
        assert {word for word in example if word.startswith("--")} <= known, words


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_the_help_of_a_question_loads_no_room(command):
    heavy = ("numpy", "pandas", "rich", "disagg_sim.facts.schema", f"disagg_sim.cli.{command}")
    code = "import sys; from disagg_sim.cli.main import run; run(sys.argv[1:]); "
    code += f"print({{*{heavy}}} & {{*sys.modules}})"
    shown = subprocess.run(
        [sys.executable, "-c", code, command, "-h"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == "set()"


def test_the_page_of_plans_lists_options_that_exist_once():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    listed = [
        word for row in re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE) for word in re.findall(r"--[\w-]+", row)
    ]
    assert len(listed) > 15
    assert len(listed) == len(set(listed))
    assert set(listed) <= {name for each in LEAVES["plan",].params for name in each.opts}
