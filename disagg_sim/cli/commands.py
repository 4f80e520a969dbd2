"""List the commands: module and function of each, its line in the list of commands, and an example.

A command is imported when it is called, so that help and usage errors load none of the rooms.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

import typer
from typer.core import TyperGroup

from disagg_sim.cli.aliases import AliasedCommand
from disagg_sim.cli.completion import BESIDE, Word, completing, outline, words_of
from disagg_sim.cli.workers import Offline
from disagg_sim.errors import InputError
from disagg_sim.laboratory import import_lab
from disagg_sim.question import Ask, EvaluateQuestion, ExplainQuestion, LaunchQuestion, PlanQuestion, QuestionField
from disagg_sim.techniques.registry import asked_fields, question_of


def command_of(command: str, question: type, answer: Callable[[Any], None]) -> Callable[..., None]:
    """Make the function of a command, which builds its question and hands it on."""

    def asked(offline: bool = False, **said: Any) -> None:  # noqa: ARG001 - its callback answers it
        answer(question_of(question, said))

    parameters = [_parameter(command, each) for each in asked_fields(question)]
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

    Modules stay until the end. Looking all of them over, again and again, would take a fifth of the time of a plan, and
    as the process ends an eighth.
    """
    beside = module.removeprefix(BESIDE)
    found = import_module(f"disagg_sim.cli.{module}") if beside == module else import_lab(f"cli.{beside}", command)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return found


class SpecsCommands(LazyGroup):
    """List, show and check systems, models, traffic, precision recipes, profiles and serving policies."""

    table: ClassVar = {
        "list": CommandEntry("specs:list_", "List names and titles of shipped specs.", "specs list model"),
        "show": CommandEntry(
            "specs:show", "Show one spec with units and sources.", "specs show hardware h100_sxm --fits"
        ),
        "check": CommandEntry(
            "specs:check", "Report every fault of spec files.", "specs check my_gpu.yaml my_sweep.yaml"
        ),
        "schema": CommandEntry("specs:schema", "Print the JSON Schema of a command's --json.", "specs schema plan"),
    }


class ModelCommands(LazyGroup):
    """Read models as Hugging Face publishes them."""

    table: ClassVar = {
        "import": CommandEntry(
            "model:import_", "Make a model's file of its config.json.", "model import Qwen3-8B/config.json --out models"
        )
    }


class TraceCommands(LazyGroup):
    """Inspect request traces."""

    table: ClassVar = {
        "stats": CommandEntry(
            "trace:stats", "Print rate, burstiness, lengths, prefix reuse.", "trace stats conv.csv --json"
        )
    }


class Commands(LazyGroup):
    """All commands, in the order of their use."""

    table: ClassVar = {
        "plan": CommandEntry(
            "plan:plan",
            "Answer what to deploy, on one screen.",
            "plan --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20",
            PlanQuestion,
        ),
        "evaluate": CommandEntry(
            "evaluate:evaluate",
            "Say what a deployment does under a load.",
            "evaluate --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20 --pool "
            "colocated:tp=2,instances=12",
            EvaluateQuestion,
        ),
        "sweep": CommandEntry(
            "sweep:sweep",
            "Compute frontiers, rate matching and KV bandwidth.",
            "sweep demo --out reports/demo --jobs 2",
        ),
        "simulate": CommandEntry(
            "simulate:simulate",
            "Replay request traces under serving policies.",
            "simulate azure_conv_on_h100 --out results",
        ),
        "explain": CommandEntry(
            "explain:explain",
            "Take one design apart, down to its fits.",
            "explain reports/demo --best --figure best.png",
            ExplainQuestion,
        ),
        "launch": CommandEntry(
            "launch:launch",
            "Write the commands that start a deployment.",
            "launch reports/demo --best --engine vllm --out start",
            LaunchQuestion,
        ),
        "report": CommandEntry(
            "report:report", "Write results as one interactive HTML page.", "report reports/demo --out demo.html"
        ),
        "sensitivity": CommandEntry(
            "sensitivity:sensitivity",
            "Compute elasticities to hardware parameters.",
            "sensitivity demo --out reports/demo",
        ),
        "check": CommandEntry(
            "compare:check",
            "Compare frontiers with a baseline; exit 1 if moved.",
            "check reports/mine --baseline baselines/mine",
        ),
        "compare": CommandEntry(
            "compare:compare",
            "Show how the frontiers of two sweeps differ.",
            "compare reports/mine reports/other --all",
        ),
        "reproduce": CommandEntry(
            "lab/reproduce:reproduce",
            "Reproduce figures and claims of a paper (in a clone).",
            "reproduce beyond-the-buzz --out reports/b",
        ),
        "measure": CommandEntry(
            "lab/measure:measure",
            "Time the kernels of this machine's GPU (in a clone).",
            "measure --out own.csv --system h200_sxm --quick",
        ),
        "mcp": CommandEntry("mcp:mcp", "Serve agents over the Model Context Protocol.", "mcp"),
        "specs": CommandEntry("commands:SpecsCommands", "List, show and check systems, models, policies, ..."),
        "model": CommandEntry("commands:ModelCommands", "Read the config.json of a model."),
        "trace": CommandEntry("commands:TraceCommands", "Print the statistics of a request trace."),
        "calibrate": CommandEntry("lab/commands:CalibrateCommands", "Fit efficiencies to measurements (in a clone)."),
        "validate": CommandEntry(
            "lab/commands:ValidateCommands", "Compare predictions with measurements (in a clone)."
        ),
    }
