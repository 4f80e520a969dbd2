"""Import a command when it is called, so that help and usage errors load none of the rooms."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from disagg_sim.cli.aliases import AliasedCommand
from disagg_sim.cli.asked import command_of
from disagg_sim.cli.completion import BESIDE, Word, completing, outline
from disagg_sim.laboratory import import_lab


class CommandEntry(NamedTuple):
    """Module and function of a command, and the texts shown before it is imported."""

    place: str  # of a function or a ``LazyGroup``: "module:name" below ``disagg_sim.cli``, "lab/..." below ``lab.cli``
    said: str  # in the list of commands
    example: str = ""  # of a function: arguments of a call, shown below the help
    question: type | None = None  # of a function that answers one, whose fields are its options


class LazyGroup(TyperGroup):
    """A group of the commands in ``table``; its docstring is its help.

    References: "Lazily loading subcommands", documentation of click, https://click.palletsprojects.com.
    """

    table: ClassVar[Mapping[str, CommandEntry]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands(self.table)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help if no command is given."""
        if not args and not completing():
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C, while it is imported too, is left to ``main``: some versions of typer say nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - what click asks for
        """List the names of the commands, in the order of the table."""
        return list(self.table)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Options, or commands, which are not imported for it."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [Word(name, entry.said) for name, entry in self.table.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.said) for name, entry in self.table.items()])


class _Commands(Mapping[str, Any]):
    """Commands by name, each imported at its first use."""

    def __init__(self, table: Mapping[str, CommandEntry]) -> None:
        self._table, self._loaded = table, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._table[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _load(name: str, entry: CommandEntry) -> Any:
    module, _, attribute = entry.place.partition(":")
    if entry.question is not None:
        found = command_of(name, entry.question, partial(_answer, module, name, attribute))
    elif completing() and entry.example:  # a function
        return outline(name, module, attribute)
    else:
        found = getattr(_imported(module, name), attribute)
    if isinstance(found, type):
        return found(name=name, help=found.__doc__, rich_markup_mode=None)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=AliasedCommand, short_help=entry.said, epilog=f"Example: disagg-sim {entry.example}")(found)
    return typer.main.get_command(app)


def _answer(module: str, command: str, function: str, asked: Any) -> None:
    getattr(_imported(module, command), function)(asked)


def _imported(module: str, command: str) -> Any:
    """Import a command's module; wake the garbage collector if it rests, which from then on leaves alone what there is.

    Modules stay until the end. Looking all of them over, again and again, would take a fifth of the time of a plan.
    """
    beside = module.removeprefix(BESIDE)
    found = import_module(f"disagg_sim.cli.{module}") if beside == module else import_lab(f"cli.{beside}", command)
    if not gc.isenabled():
        gc.freeze()
        atexit.register(gc.unfreeze)  # compiled modules look at what is left at the end
        gc.enable()
    return found
