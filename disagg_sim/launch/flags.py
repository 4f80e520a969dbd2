"""Flags of a command, and their text for a shell or a list of arguments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

#: Flags in their order: True = a switch, a mapping = JSON, a tuple = the flag once for each.
Flags = Mapping[str, Any]


class Shell(str):
    """Text that the shell expands: quoted, but with its variables."""

    __slots__ = ()


def arguments(flags: Flags) -> list[str]:
    """List the arguments of flags, as a program receives them."""
    return [word for pair in _pairs(flags) for word in pair]


def lines(command: str, flags: Flags) -> str:
    """Write a command for a shell, a flag a line."""
    rows = [
        " ".join(f'"{word}"' if isinstance(word, Shell) else shlex.quote(word) for word in pair)
        for pair in _pairs(flags)
    ]
    return " \\\n  ".join([command, *rows])


def _pairs(flags: Flags) -> Iterator[tuple[str, ...]]:
    for flag, value in flags.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield (flag,) if each is True else (flag, _text(each))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
