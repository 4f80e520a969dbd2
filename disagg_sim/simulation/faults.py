"""Report errors of a user's code in one line with the place in its file; our own bugs keep their traceback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from disagg_sim.errors import LONGEST_SHOWN, PolicyError, printable
from disagg_sim.facts.yaml_files import shown

PACKAGE = __name__.partition(".")[0]


def is_own(module: str) -> bool:
    """Tell whether a module is the user's own, not one of this package."""
    return module.partition(".")[0] != PACKAGE


@contextmanager
def own_faults(what: str, module: str, now: Callable[[], float] | None = None) -> Iterator[None]:
    """Turn what a user's own code raises inside, ``sys.exit()`` but not Ctrl-C, into a ``PolicyError`` of one line."""
    try:
        yield
    except (PolicyError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not is_own(module):
            raise
        when = f" at {now():.6g} s" if now is not None else ""
        raise PolicyError(f"{what}{when}: {error_with_place(error, module)}") from error


def error_with_place(error: BaseException, module: str) -> str:
    """The error with its place: the last line of ``module`` that was reached, or else where code began to fail."""
    said = "it called sys.exit()" if isinstance(error, SystemExit) else _error_text(error)
    steps = list(walk_tb(error.__traceback__))
    inside = [step for step in steps if step[0].f_globals.get("__name__") == module]
    outside = [step for step in steps if is_own(str(step[0].f_globals.get("__name__", "")))]
    last = (inside or outside or steps)[-1:]
    return said + "".join(f" ({_place(frame.f_code.co_filename, line, frame.f_code.co_name)})" for frame, line in last)


def _error_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # of the user: an exception of theirs may fail to describe itself
        text = ""
    text = " ".join(printable(text[:LONGEST_SHOWN]).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(file: str, line: int, name: str) -> str:
    return f"{shown(Path(file))}:{line}" + ("" if name.startswith("<") else f", in {name}")


def place_of(function: object) -> str:
    """Place of a user's function, in parentheses, to append to a line; empty for our own functions."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None or not is_own(str(getattr(function, "__module__", ""))):
        return ""
    return f" ({_place(code.co_filename, code.co_firstlineno, code.co_name)})"
