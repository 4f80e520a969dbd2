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
    """List the arguments of flags, as a program receives them.

    Parameters
    ----------
    flags
        In their order.

    Returns
    -------
    list of str
        Switches as one argument, all others as two.

    Examples
    --------
    >>> arguments({"--tp-size": 4, "--enable-eplb": True, "--eplb-config": {"num_redundant_experts": 8}})
    ['--tp-size', '4', '--enable-eplb', '--eplb-config', '{"num_redundant_experts": 8}']
    """
    return [word for pair in _pairs(flags) for word in pair]


def lines(command: str, flags: Flags) -> str:
    r"""Write a command for a shell, a flag a line.

    Parameters
    ----------
    command
        What stands before the flags.
    flags
        In their order; a ``Shell`` value keeps its variables.

    Returns
    -------
    str
        Without a line break at the end.

    Examples
    --------
    >>> print(lines("serve", {"--port": Shell("$PORT"), "--name": "a b"}))
    serve \
      --port "$PORT" \
      --name 'a b'
    """
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
