"""Make a command of a question: each of its fields is an option, and completion and help need nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import Annotated, Any, get_args

import typer

from disagg_sim.cli.completion import words_of
from disagg_sim.cli.workers import Offline
from disagg_sim.errors import InputError
from disagg_sim.question import Ask, QuestionField, fields_of


def command_of(command: str, question: type, answer: Callable[[Any], None]) -> Callable[..., None]:
    """Make the function of a command, which builds its question and hands it on."""

    def asked(offline: bool = False, **said: Any) -> None:  # noqa: ARG001 - its callback answers it
        answer(question(**said))

    parameters = [_parameter(command, each) for each in fields_of(question)]
    if "model" in (each.name for each in parameters):
        parameters.append(Parameter("offline", Parameter.KEYWORD_ONLY, default=False, annotation=Offline))
    asked.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    asked.__annotations__ = {each.name: each.annotation for each in parameters}
    asked.__doc__ = question.__doc__
    return asked


def _parameter(command: str, field: QuestionField) -> Parameter:
    option = field.ask
    kinds = get_args(field.kind) if isinstance(field.kind, UnionType) else (field.kind,)
    settings: dict[str, Any] = {"metavar": option.value or None, "help": option.help}
    if field.kind is not bool:
        settings["autocompletion"] = words_of(command, field.name)
    if option.unit:
        settings["parser"] = parser_of(option)
    else:
        settings |= {"min": option.low, "max": option.high}
    made = typer.Argument(**settings) if option.argument else typer.Option(field.flag, **settings)
    kind = kinds[0] | None if NoneType in kinds else kinds[0]
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def parser_of(option: Ask) -> Callable[[str], float]:
    """Make what reads an option's quantity: ``90%``, ``800 Gbit/s``, ``600/min``, or a number alone."""

    def read(text: str) -> float:
        """A number."""
        try:
            return option.read(text)
        except InputError as error:
            raise typer.BadParameter(str(error).strip()) from None

    return read
