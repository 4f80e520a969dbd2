"""Complete words of the command line for a shell: commands, options, and names of what is shipped or found.

A shell waits at every Tab, and a command takes up to a second to import. So none is imported: its options are read from
the syntax tree of its source. ``disagg-sim --install-completion`` tells the shell; it then calls ``disagg-sim`` with
the variable ``VARIABLE`` and the words so far.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from disagg_sim.choices import LAUNCHERS, OBJECTIVES, PHASES
from disagg_sim.errors import DisaggSimError
from disagg_sim.facts.yaml_files import DIRECTORIES, list_specs
from disagg_sim.laboratory import lab_folder

#: Set by the shell that asks.
VARIABLE = "_DISAGG_SIM_COMPLETE"
#: Before the module of a command that is in the laboratory.
BESIDE = "lab/"

#: Words that a parameter takes, by its name: a kind of spec files, or the words themselves.
VALUES: Mapping[str, str | tuple[str, ...]] = {
    "model": "model",
    "system": "hardware",
    "prefill_system": "hardware",
    "traffic": "traffic",
    "precision": "precision",
    "profile": "profile",
    "engine": "engine",
    "emit": LAUNCHERS,
    "objective": tuple(OBJECTIVES),
    "phase": PHASES,
    "device": ("cuda", "cpu"),
    "study": ("beyond-the-buzz", "arrow", "dopd", "dynaserve"),
}
#: The same where a command gives a name a meaning of its own.
OF_COMMANDS: Mapping[tuple[str, str], str | tuple[str, ...]] = {
    ("sweep", "name"): "sweep",
    ("sensitivity", "name"): "sweep",
    ("simulate", "name"): "scenario",
    ("launch", "engine"): VALUES["emit"],
    ("launch", "backend"): "engine",
    ("list", "kind"): ("hardware", "model", "traffic", "precision", "profile", "policy"),
    ("show", "kind"): ("hardware", "model", "traffic", "precision", "profile", "policy"),
}
#: Serving policies, which are no files.
POLICIES = (
    "arrow",
    "disaggregated",
    "dopd",
    "dynamo_load",
    "dynamo_sla",
    "dynaserve",
    "least_load",
    "round_robin",
    "vllm",
)


class Word(NamedTuple):
    """What a shell is told of a word, by the names of click's own."""

    value: str
    help: str = ""
    type: str = "plain"


def completing() -> bool:
    """Tell whether a shell asks for words, and nothing shall run."""
    return VARIABLE in os.environ


def outline(command: str, module: str, function: str) -> Any:
    """Make a command with the options of a function, which is not imported; it does nothing."""
    beside = module.removeprefix(BESIDE)
    folder = Path(__file__).parent if beside == module else lab_folder(command) / "cli"
    tree = ast.parse((folder / f"{beside}.py").read_text())
    shared = ast.parse(Path(__file__).with_name("workers.py").read_text())  # options of several commands
    named = {
        target.id: each.value
        for each in (*shared.body, *tree.body)
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    (found,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == function)

    def nothing() -> None:
        """Stand in for the function."""

    given = [*found.args.args, *found.args.kwonlyargs]
    parameters = [_parameter(command, each, named) for each in given]
    nothing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    nothing.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(command)(nothing)
    return typer.main.get_command(app)


def _parameter(command: str, given: ast.arg, named: Mapping[str, ast.expr]) -> Parameter:
    """A parameter of a command as its source has it: flag, option or argument, its declarations and its help."""
    written = given.annotation
    if isinstance(written, ast.Name):  # an annotation that several commands share
        written = named[written.id]
    assert isinstance(written, ast.Subscript)
    assert isinstance(written.slice, ast.Tuple)
    kind, declared = written.slice.elts
    assert isinstance(declared, ast.Call)
    declarations = [str(each.value) for each in declared.args if isinstance(each, ast.Constant)]
    said = {each.arg: each.value.value for each in declared.keywords if isinstance(each.value, ast.Constant)}
    declares = typer.Option if getattr(declared.func, "attr", "") == "Option" else typer.Argument
    text, flag = str(said.get("help", "")), isinstance(kind, ast.Name) and kind.id == "bool"
    if flag:
        type_: Any = Annotated[bool, typer.Option(*declarations, help=text)]
    else:
        info = declares(*declarations, help=text, autocompletion=words_of(command, given.arg))
        several = "list[" in ast.unparse(kind)
        type_ = Annotated[list[str], info] if several else Annotated[str, info]
    return Parameter(given.arg, Parameter.KEYWORD_ONLY, default=False if flag else None, annotation=type_)


def words_of(command: str, parameter: str) -> Callable[[typer.Context, str], list[str]]:
    """Make the function that finds the words of a parameter."""

    def words(ctx: typer.Context, incomplete: str) -> list[str]:
        """Those that begin with what is there; behind a comma, for the next one."""
        before, comma, rest = incomplete.rpartition(",") if parameter == "system" else ("", "", incomplete)
        return [f"{before}{comma}{word}" for word in _known(command, parameter, ctx) if word.startswith(rest)]

    return words


def _known(command: str, parameter: str, ctx: typer.Context) -> tuple[str, ...]:
    if (command, parameter) == ("show", "name"):
        kind = str(ctx.params.get("kind") or "").removesuffix("s").replace("policie", "policy")
        return POLICIES if kind == "policy" else _files(kind)
    values = OF_COMMANDS.get((command, parameter), VALUES.get(parameter, ()))
    if isinstance(values, tuple):
        return values
    return (*_files(values), "any") if (command, parameter) == ("plan", "system") else _files(values)


def _files(kind: str) -> tuple[str, ...]:
    try:
        return list_specs(kind) if kind in DIRECTORIES else ()
    except DisaggSimError:  # of a search path that is wrong: the command itself says so
        return ()
