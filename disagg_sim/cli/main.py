"""``disagg-sim``: run a command and return its exit code.

0: done. 1: a curve moved, of ``check`` alone. 2: one line on standard error says what the user can mend. 3: a fault of
the program, with its traceback, or nobody reads the output any more. 130: interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any

import typer

from disagg_sim.cli.commands import Commands
from disagg_sim.cli.completion import completing
from disagg_sim.errors import DisaggSimError, InputError, printable
from disagg_sim.facts.yaml_files import spec_roots

EXPECTED, FAULT, INTERRUPTED = 2, 3, 130  # exit codes

UsageError: Any = typer.BadParameter.__bases__[0]  # click's, which typer may bring along under a name of its own


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
) -> None:
    """Design-space simulator for disaggregated LLM inference."""
    spec_roots()  # a fault of the search path is a fault of every command


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code. A bug keeps its exception."""
    command = typer.main.get_command(app)
    try:
        _require_values(arguments)
        code = command.main(args=list(arguments), prog_name="disagg-sim", standalone_mode=False)
        if sys.stdout is not None:  # closed from the beginning
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # the command line library turns a closed pipe into an exit
        return _ended(error)
    except DisaggSimError as error:
        if not completing():  # the command itself will say it
            print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXPECTED
    except UsageError as error:
        text = printable(str(error.format_message()))
        print(f"error: {text or 'no command given'} ('disagg-sim --help' shows what there is)", file=sys.stderr)
        return EXPECTED
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _ended(error: BrokenPipeError | SystemExit) -> int:
    """The exit code where the library ended the process: the output was closed, or a shell has its words."""
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
    gc.disable()  # until the command is imported (``lazy``)
    try:
        code = run(sys.argv[1:])
    except Exception as error:
        with suppress(OSError):  # nobody reads it
            _tell_fault(error)
        code = FAULT
    if code == FAULT:
        _drop_output()
    sys.exit(code)


def _tell_fault(error: Exception) -> None:
    """Print a traceback and a line; for a full disk only the line."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print(f"error: {error.strerror}", file=sys.stderr)
        return
    traceback.print_exception(error)
    print("error: a fault of disagg-sim, see the traceback", file=sys.stderr)


def _drop_output() -> None:
    """Discard unwritten output: flushing it into a closed pipe would change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (each for each in (sys.stdout, sys.stderr) if each is not None):
        with suppress(OSError, ValueError):
            stream.flush()
        os.dup2(nowhere, stream.fileno())
