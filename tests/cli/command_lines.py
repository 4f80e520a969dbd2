"""A question as a person writes it in a shell, asked of the command or of the tool for agents."""

import json
import re
from typing import Any, get_args

from typer.testing import CliRunner

from disagg_sim.cli.main import app
from disagg_sim.question import fields_of


def words(said: str) -> list[str]:
    """Words of a command line."""
    return [part.strip("'") for part in re.findall(r"'[^']*'|\S+", said)]


def json_of(command: str, said: str) -> Any:
    """What a command prints with ``--json``."""
    done = CliRunner().invoke(app, [command, *words(said), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def at(answer: Any, where: str) -> Any:
    """What stands at a place of an answer (keys and places of lists, with dots); None where there is nothing."""
    for key in where.split("."):
        answer = answer[int(key)] if isinstance(answer, list) else answer.get(key)
        if answer is None:
            return None
    return answer


def arguments(question: type, said: str) -> dict[str, Any]:
    """Arguments of the tool that say what a command line does, numbers as numbers."""
    flags = {each.flag: each for each in fields_of(question)}
    found: dict[str, Any] = {}
    rest = iter(words(said))
    for flag in rest:
        name, kind, ask, _ = flags[flag]
        value: Any = kind is bool or next(rest)
        if {int, float} & {kind, *get_args(kind)} and re.fullmatch(r"[0-9.]+", value):
            value = json.loads(value)
        several = name in ("price", "pool")
        found[ask.agents or name] = [*found.get(ask.agents or name, []), value] if several else value
    return found
