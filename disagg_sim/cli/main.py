"""``disagg-sim``: run a command and return its exit code.

0: done. 1: a curve moved (``check`` only). 2: an error that the user can fix, in one line on standard error. 3: a bug,
with its traceback, or the output was closed. 130: interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any

import typer

# Matrices of plans are small: threads that share one wait for each other, several times as long as one works.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from disagg_sim.cli.commands import Commands
from disagg_sim.cli.completion import completing
from disagg_sim.errors import REMOVED, DisaggSimError, InputError, printable, quoted
from disagg_sim.facts.yaml_files import spec_roots
from disagg_sim.memory import VARIABLE, allowed_memory, memory_limit
from disagg_sim.reading import last_read
from disagg_sim.units import KIB, LEAST, MIB, MOST

EXPECTED, FAULT, INTERRUPTED = 2, 3, 130  # exit codes
#: Errors of a full disk or quota.
FULL = (errno.ENOSPC, errno.EDQUOT)

#: An integer as people write it: 2k, 1,024, 2e3.
_INTEGER = re.compile(r"'(\d[\d,]*\.?\d*(?:[eE]\d{1,2})?) ?([kKmM]?)'")
_NUMBER = re.compile(r"\d+\.?\d*(?:[eE][-+]?\d+)?")
UsageError: Any = typer.BadParameter.__bases__[0]  # click's class, which typer may bundle under another name


app = typer.Typer(
    name="disagg-sim",
    help="Design-space simulator for disaggregated LLM inference.",
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"disagg-sim {version('disagg-sim')}")
        raise typer.Exit


@app.callback()
def _root(
    shows: Annotated[  # noqa: ARG001 - its callback answers it
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory that each process may need, such as 8GB: what needs more is refused before it begins; "
            "default: what the machine has.",
        ),
    ] = "",
) -> None:
    """Design-space simulator for disaggregated LLM inference."""
    if memory:
        os.environ[VARIABLE] = f"{memory_limit(memory):.0f}"
    allowed_memory()  # every command refuses a wrong value of the variable
    spec_roots()  # and of the search path


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code. A bug keeps its exception."""
    command, before = typer.main.get_command(app), os.environ.get(VARIABLE)
    try:
        _require_values(arguments)
        code = command.main(args=list(arguments), prog_name="disagg-sim", standalone_mode=False)
        if sys.stdout is not None:  # None if closed at the start
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # click turns a closed pipe into an exit
        return _ended(error)
    except DisaggSimError as error:
        if not completing():  # the command itself prints it
            print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXPECTED
    except UsageError as error:
        error.message = _plain_words(error)
        text = printable(str(error.format_message()))
        if (option := getattr(error, "option_name", "") or " ".join(arguments[:2])) in REMOVED:
            text = f"{option} {REMOVED[option]}"
        print(f"error: {text or 'no command given'} ('disagg-sim --help' shows what there is)", file=sys.stderr)
        return EXPECTED
    except (ArithmeticError, RecursionError, MemoryError, UnicodeError, OSError) as error:
        if (code := _beyond_limits(error, arguments)) is None:
            raise
        return code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
    return code if isinstance(code, int) else 0


def _plain_words(error: Any) -> str:
    """Say which value is refused and what to write: ``'2k' is not a valid integer; write 2000 or 2048``."""
    text = str(error.message)
    if hasattr(cause := error.__cause__, "errors"):  # of pydantic, which newer versions of typer ask
        reason = cause.errors()[0]
        given, bounds = quoted(reason["input"]), reason.get("ctx", {})
        allowed = [f"{word} {bounds[key]:.12g}" for key, word in (("ge", "from"), ("le", "up to")) if key in bounds]
        kind = {"int": "integer", "float": "number"}.get(reason["type"].partition("_")[0], "")
        if allowed:
            text = f"{given.strip(chr(39))} is out of range; allowed: {allowed[0]}"
        elif kind:
            text = f"{given} is not a valid {kind}"
    found = _INTEGER.search(text) if "integer" in text else None
    sizes = () if found is None else {"": (1.0,), "k": (1e3, KIB), "m": (1e6, MIB)}[found[2].lower()]
    numbers = [float(found[1].replace(",", "")) * size for size in sizes if found is not None]
    meant = " or ".join(f"{number:.0f}" for number in numbers if number.is_integer())
    return f"{text}; write {meant}" if meant else text


def _beyond_limits(error: Exception, arguments: Sequence[str]) -> int | None:
    """Print in one line a limit of numbers, nesting, memory or the system, and its input; None for a bug."""
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        return None
    named = getattr(error, "filename", None) or last_read()
    extreme = next((f"{before} {word}" for before, word in pairwise(["", *arguments]) if _is_extreme(word)), "")
    if isinstance(error, OSError):
        said = f"{error.strerror or error}"
    elif isinstance(error, MemoryError):
        said = "there is not enough memory for it; --memory refuses such runs before they begin"
    elif isinstance(error, UnicodeError):
        said = (
            f"a text that cannot be written or read as {error.encoding}" if hasattr(error, "encoding") else f"{error}"
        )
    elif isinstance(error, RecursionError):
        said = "nested too deeply"
    elif extreme or isinstance(error, OverflowError):
        said = f"a number is too large or too small to be computed with ({error})"
    else:
        return None
    places = [quoted(extreme.strip())] if extreme else [str(named)] if named else []
    print(f"error: {printable(': '.join([*places, said]))}", file=sys.stderr)
    return EXPECTED


def _is_extreme(word: str) -> bool:
    """Whether an argument has a number beyond any plausible value."""
    return any(not LEAST < abs(float(each)) < MOST for each in _NUMBER.findall(word) if float(each) != 0)


def _ended(error: BrokenPipeError | SystemExit) -> int:
    """Return the exit code after click ended the process: the output was closed, or completion is done."""
    closed = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
    if not closed and isinstance(code := getattr(error, "code", None), int):
        return code
    with suppress(OSError):
        print("error: the output was closed before its end" if closed else f"error: {error!r}", file=sys.stderr)
    return FAULT


def _require_values(arguments: Sequence[str]) -> None:
    """Reject empty arguments: an unset shell variable would otherwise mean the working directory."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        option = argument.partition("=")[0] if argument.startswith("--") else before
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            of = f"{printable(option)} has an empty value" if option.startswith("-") else "an argument is empty"
            raise InputError(f"{of}; give one, or leave it out")


def main() -> None:
    """Run the console script."""
    for stream in (each for each in (sys.stdout, sys.stderr) if isinstance(each, TextIOWrapper)):
        stream.reconfigure(errors="backslashreplace")  # where the locale lacks a character
    gc.disable()  # until the command is imported (``commands``)
    try:
        code = run(sys.argv[1:])
    except Exception as error:
        with suppress(OSError):  # the output is closed
            if isinstance(error, OSError) and error.errno in FULL:
                print(f"error: {error.strerror}", file=sys.stderr)
            else:
                traceback.print_exception(error)
                print("error: a fault of disagg-sim, see the traceback", file=sys.stderr)
        code = FAULT
    if code == FAULT:
        _drop_output()
    sys.exit(code)


def _drop_output() -> None:
    """Discard unwritten output: flushing it into a closed pipe would change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (each for each in (sys.stdout, sys.stderr) if each is not None):
        with suppress(OSError, ValueError):
            stream.flush()
        os.dup2(nowhere, stream.fileno())
