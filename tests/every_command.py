"""Every command of ``disagg-sim``, found in the program itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from disagg_sim.cli.main import app


def _below(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _below(each, (*words, name))


#: Words -> command, groups of commands and the program itself included.
COMMANDS = dict(_below(typer.main.get_command(app)))
#: Those that do something.
LEAVES = {words: command for words, command in COMMANDS.items() if not hasattr(command, "commands")}


def command_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command that a command line calls; empty for none."""
    return next((words for words in LEAVES if tuple(arguments[: len(words)]) == words), ())
