"""Shell completion, asked as shells ask: by a variable of the environment and the words so far."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from disagg_sim.cli.commands import Commands, LazyGroup, _load
from disagg_sim.cli.completion import POLICIES, VALUES, outline
from disagg_sim.cli.main import run
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.simulation.policies.registry import BUILT_IN, policies
from lab.studies.papers import HOMES

MAIN = "import sys; sys.argv = ['disagg-sim']; from disagg_sim.cli.main import main; main()"


Asked = Callable[..., str]


@pytest.fixture
def asked(monkeypatch, capsys):
    """What the program tells a shell at the end of a line; it says nothing else, and its exit code is 0."""

    def ask(line: str, shell: str = "bash", code: int = 0, **more: str) -> str:
        variables = {"_DISAGG_SIM_COMPLETE": f"complete_{shell}", **more}
        variables |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_TYPER_COMPLETE_ARGS": line}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert run([]) == code
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("disagg-sim pl", {"plan"}),
        ("disagg-sim specs sh", {"show"}),
        ("disagg-sim plan --tp", {"--tpot"}),
        ("disagg-sim plan --model qwen3_32", {"qwen3_32b"}),
        ("disagg-sim plan --isl 4096 --system h20", {"h200_nvl", "h200_sxm", "h200_sxm_500w", "h20_3e", "h20_sxm"}),
        ("disagg-sim plan --system h100_sxm,gh", {"h100_sxm,gh200"}),
        ("disagg-sim plan --system an", {"any"}),
        ("disagg-sim sweep smo", {"smoke"}),
        ("disagg-sim simulate azure_conv", {"azure_conv_on_h100"}),
        ("disagg-sim specs show policy dynamo", {"dynamo_load", "dynamo_sla"}),
        ("disagg-sim specs show models qwen3_32", {"qwen3_32b"}),
        ("disagg-sim launch results --engine l", {"llm-d"}),
        ("disagg-sim plan --trace ", set()),  # a file: the shell's own affair
        ("disagg-sim nothing ", set(Commands.table)),
    ],
)
def test_words_of_a_line(line, words, asked):
    assert set(asked(line).split()) == words


def test_names_of_own_specs_and_a_wrong_search_path(tmp_path, asked):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own_7b.yaml").write_text("")
    assert asked("disagg-sim plan --model own", DISAGG_SIM_PATH=str(tmp_path)).split() == ["own_7b"]
    assert asked("disagg-sim plan --model own", DISAGG_SIM_PATH=str(tmp_path / "none")).strip() == ""


def test_zsh_and_fish_are_told_what_a_command_does(asked):
    assert '"plan":"Answer what to deploy, on one screen."' in asked("disagg-sim pl", "zsh")
    told = asked("disagg-sim pl", "fish", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert told.strip() == "plan\tAnswer what to deploy, on one screen."


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_takes_the_script():
    """The script that ``--show-completion bash`` prints, and a Tab behind it; whichever shell runs the tests."""
    shown = subprocess.run(
        [sys.executable, "-c", MAIN.replace("['disagg-sim']", "['disagg-sim', '--show-completion', 'bash']")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ).stdout
    tab = f"""
disagg-sim() {{ {sys.executable} -c "{MAIN}"; }}
export -f disagg-sim
{shown.replace("$1", "bash -c disagg-sim")}
COMP_WORDS=(disagg-sim plan --model qwen3_32) COMP_CWORD=3
_disagg_sim_completion
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", tab], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["qwen3_32b"]


def functions(group: type[LazyGroup]) -> list[tuple[str, Any]]:
    return [
        pair
        for name, entry in group.table.items()
        for pair in ([(name, entry)] if entry.example else functions(type(_load(name, entry))))
    ]


@pytest.mark.parametrize(
    ("name", "entry"),
    [(name, entry) for name, entry in functions(Commands) if entry.question is None],
    ids=lambda value: getattr(value, "place", ""),
)
def test_an_outline_has_the_options_of_its_command(name, entry):
    def shape(command: Any) -> list[Any]:
        return [
            (each.name, each.opts, each.secondary_opts, getattr(each, "is_flag", None), each.multiple, each.nargs)
            for each in command.params
        ]

    module, _, function = entry.place.partition(":")
    assert shape(outline(name, module, function)) == shape(_load(name, entry))


def test_words_are_those_that_the_commands_take():
    assert set(VALUES["study"]) == {"beyond-the-buzz", *HOMES}
    assert sorted(POLICIES) == sorted(name for name, policy in policies().items() if policy in BUILT_IN)
    assert all(list_specs(kind) for kind in VALUES.values() if isinstance(kind, str))


#: CPU time of a Tab is 0.2 s on a quiet machine (bar: 0.3 s); other tests run beside this one. [s]
PATIENCE = 1.0


def test_nothing_heavy_is_loaded_for_a_word():
    heavy = ("numpy", "pandas", "matplotlib", "rich", "disagg_sim.cli.plan")
    told = f"print(*({{*{heavy}}} & {{*sys.modules}}), time.process_time(), file=sys.stderr)"
    code = f"import atexit, time; atexit.register(lambda: {told}); {MAIN}"
    variables = {"_DISAGG_SIM_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    variables |= {"COMP_WORDS": "disagg-sim plan --model qwen"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert "qwen3_32b" in done.stdout
    *loaded, seconds = done.stderr.split()
    assert not loaded
    assert float(seconds) < PATIENCE
