"""Help of every command: by ``-h`` as by ``--help``, whole at every width, with an example that is a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from disagg_sim.cli.main import app, run


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


EVERY = dict(commands(typer.main.get_command(app)))


def shown(words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*words, option]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_is_whole(
    words: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown(words, "--help", capsys)
    assert shown(words, "-h", capsys) == text
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    assert not re.search(r"[\w,]\.\.\.$", text, flags=re.MULTILINE), text  # a line that was cut


@pytest.mark.parametrize("words", [name for name, each in EVERY.items() if not hasattr(each, "commands")], ids=" ".join)
def test_the_example_of_a_command_is_one(words: tuple[str, ...]) -> None:
    """Its words name the command, and its options are the command's own."""
    example = EVERY[words].epilog.removeprefix("Example: disagg-sim ").split()
    assert tuple(example[: len(words)]) == words
    known = {name for each in EVERY[words].params for name in each.opts}
    assert {word for word in example if word.startswith("--")} <= known
