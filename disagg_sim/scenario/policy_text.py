"""Find what a policy file registers from its text alone: it is parsed, never run.

A file may compute at run time what it registers. Whatever the text does not show is told as not checked.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_sim.errors import SpecError, quoted
from disagg_sim.facts.yaml_files import shown
from disagg_sim.reading import read_file
from disagg_sim.scenario.option_values import Form
from disagg_sim.simulation import options as option_module
from disagg_sim.simulation.deployment import PARTS
from disagg_sim.simulation.options import Option, options_of
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.policy import Policy

#: Largest policy file: the shipped ones have 20 kB. [B]
MOST_BYTES = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyText:
    """What the text of a policy file shows."""

    path: Path
    forms: tuple[Form, ...]
    whole: bool  # whether it registers nothing else


def form_of(name: str, policy: type[Policy]) -> Form:
    """The form of a policy whose class is there."""
    return Form(name=name, needs=policy.needs, options=options_of(policy))


def read_policies(path: Path) -> PolicyText:
    """What a policy file registers, by its text."""
    tree = _tree(path)
    aliases = _imported(tree)
    own = {name for name, (_, what) in aliases.items() if what == "register"}
    classes = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
    forms, named = [], set()
    for each in classes.values():
        for decorator in each.decorator_list:
            name = _registered(decorator, own)
            if name is not None:
                named.add(id(decorator))
                forms.append(_form(name, each, classes, aliases, path))
    calls = (each for each in ast.walk(tree) if isinstance(each, ast.Call) and _is_register(each.func, own))
    return PolicyText(path=path, forms=tuple(forms), whole=all(id(call) in named for call in calls))


def python_file(path: Path) -> Path:
    """The path of a policy file; ``SpecError`` unless it is there, an ordinary file, and Python by its name."""
    if path.suffix != ".py" or not path.is_file():
        raise SpecError(f"{shown(path)}: no such file, or not a Python file (.py)")
    return path


def text_of(path: Path) -> bytes:
    """The text of a policy file; ``SpecError`` as of ``python_file``, and where it cannot be read or is too large."""
    try:
        return read_file(python_file(path), MOST_BYTES)
    except OSError as error:
        raise SpecError(f"{shown(path)}: cannot be read: {error.strerror}") from None


def _tree(path: Path) -> ast.Module:
    content = text_of(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(content, filename=str(path))
    except SyntaxError as error:
        raise SpecError(f"{shown(path)}: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise SpecError(f"{shown(path)}: not a Python file, or nested too deeply") from None


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Name in the file -> module and name there, of ``from MODULE import NAME``."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _is_register(function: ast.expr, own: set[str]) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == "register"
    return isinstance(function, ast.Name) and function.id in own


def _registered(decorator: ast.expr, own: set[str]) -> str | None:
    """Name that a decorator registers; None where it is another, or computes the name."""
    if not isinstance(decorator, ast.Call) or not _is_register(decorator.func, own):
        return None
    given = [*decorator.args, *(each.value for each in decorator.keywords)]
    name = _literal(given[0]) if len(given) == 1 else None
    return name if isinstance(name, str) else None


def _form(
    name: str,
    node: ast.ClassDef,
    classes: Mapping[str, ast.ClassDef],
    aliases: Mapping[str, tuple[str, str]],
    path: Path,
) -> Form:
    needs: Any = None
    options: dict[str, Option | None] = {}
    whole = True
    seen: set[str] = set()

    def take(each: ast.ClassDef) -> None:
        nonlocal needs, whole
        if each.name in seen:  # a class below itself: Python will refuse it
            return
        seen.add(each.name)
        for base in reversed(each.bases):
            known = base.id if isinstance(base, ast.Name) else ""
            if known in classes:
                take(classes[known])
            elif (shipped := _shipped(aliases.get(known))) is not None:
                needs = shipped.needs
                options.update(options_of(shipped))
            else:
                whole = whole and known == "object"
        marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in each.decorator_list]
        fields = any(getattr(mark, "attr", getattr(mark, "id", "")) == "dataclass" for mark in marks)
        for key, value, constant in _assigned(each):
            if key == "needs":
                needs = _literal(value)
            elif fields and not constant:
                options[key] = _option(value)

    take(node)
    known = isinstance(needs, tuple) and bool(needs) and all(each in PARTS for each in needs)
    if needs is not None and not known:
        where = f"{shown(path)}: line {node.lineno}: policy {quoted(name)}"
        raise SpecError(f"{where}: needs is {quoted(needs)}; allowed: a tuple of some of {', '.join(PARTS)}")
    return Form(name=name, needs=needs, options=options, whole=whole)


def _shipped(place: tuple[str, str] | None) -> type[Policy] | None:
    """The class of this package that a file imports from there; it is loaded already."""
    return next((each for each in policies().values() if (each.__module__, each.__name__) == place), None)


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None, bool]]:
    """Name, value and whether it is of the class alone, of everything that a class body assigns."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each.value, "ClassVar" in ast.dump(each.annotation)
        elif isinstance(each, ast.Assign):
            yield from ((target.id, each.value, True) for target in each.targets if isinstance(target, ast.Name))


def _option(value: ast.expr | None) -> Option | None:
    """The option of a field's default: a literal, ``field(default=LITERAL)``, or ``option(...)`` with literals."""
    if isinstance(value, ast.Call):
        function = getattr(value.func, "attr", getattr(value.func, "id", ""))
        given = {each.arg: each.value for each in value.keywords if each.arg}
        if function == "field":
            return _option(given.get("default"))
        if function == "option" and value.args:
            named = {key: _constant(each) for key, each in given.items() if key in Option.__dataclass_fields__}
            return _plain_option(_constant(value.args[0]), {k: v for k, v in named.items() if v is not None})
        return None
    return _plain_option(_constant(value), {})


def _plain_option(default: Any, more: dict[str, Any]) -> Option | None:
    return Option(default=default, **more) if isinstance(default, bool | int | float | str) else None


def _constant(value: ast.expr | None) -> Any:
    """A literal, or a constant of the module that options come from, by its name."""
    if isinstance(value, ast.Name) and value.id.isupper():
        return getattr(option_module, value.id, None)
    return _literal(value)


def _literal(value: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(value) if value is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
