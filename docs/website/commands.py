"""Write the reference of the commands from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from disagg_sim.cli.main import app

PROGRAM = "disagg-sim"
TYPE = re.compile(r"<(\w+)[^>]*>")  # of a value that has no name of its own
HEAD = """# Commands

Every command with all of its options, as `--help` prints them. Exit codes: 0 done; 1 a curve moved (of `check` alone);
2 one line on standard error says what you can mend; 3 a fault of the program; 130 interrupted.
"""


def command_reference() -> str:
    """Make the page: a section for each command, in the order of ``disagg-sim --help``."""
    root = typer.main.get_command(app)
    return HEAD + "".join(_section(name, command) for name, command in leaves(root, PROGRAM))


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the command of everything that can be called below a command."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    context = command.context_class(command, info_name=name)
    for each in command.list_commands(context):
        yield from leaves(command.get_command(context, each), f"{name} {each}")


def _section(name: str, command: Any) -> str:
    """Write usage, help, example and a table of the options."""
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [_row(each, context) for each in command.params if not getattr(each, "hidden", False)]
    table = ["| argument or option | what |", "| --- | --- |", *rows] if rows else []
    parts = [f"## {name}", command.help, f"```text\n{name} {usage}\n```", "\n".join(table)]
    if command.epilog:
        parts.append(f"Example: `{command.epilog.removeprefix('Example: ')}`")
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def _row(parameter: Any, context: Any) -> str:
    """Write the row of a parameter as its help has it; in code a bar does not end a cell of the site's Markdown."""
    name, said = parameter.get_help_record(context) or (parameter.make_metavar(context), "")
    typed = TYPE.sub(lambda found: found[1].upper(), name)
    text = " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return f"| `{typed}` | {text} |"
