"""Expected failures: one clear line each; a bug keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Real


class DisaggSimError(Exception):
    """Base of every failure that a user can mend; the CLI prints its text and exits with 2."""


class SpecError(DisaggSimError):
    """A fact or sweep file is wrong: file, key, value, what is allowed, nearest valid name."""


class TraceError(DisaggSimError):
    """A trace file is wrong: file, line, value, what is allowed."""


class UnknownNameError(DisaggSimError):
    """A model, system, traffic, recipe, profile or engine of that name does not exist."""


class InputError(DisaggSimError):
    """An argument is out of range; the text says what is allowed."""


class InfeasibleError(DisaggSimError):
    """Nothing satisfies the limits; the text says which one binds and by how much."""


class StoreError(DisaggSimError):
    """The results directory cannot be read or written."""


class PolicyError(DisaggSimError):
    """A serving policy wished what cannot be; the text names policy, wish and reason.

    Parameters
    ----------
    text : str
        The line.
    so_far : object
        The ``RunResult`` of what had happened until then; None where no run had begun.
    """

    def __init__(self, text: str, so_far: object = None) -> None:
        super().__init__(text)
        self.so_far = so_far


def nearest(name: object, allowed: Iterable[str]) -> str:
    """`` , did you mean 'x'?`` for the closest allowed name, or an empty string.

    A name that goes on where ``name`` ends comes first: ``b200`` is ``b200_sxm``, not ``gh200``.
    """
    names = list(allowed)
    longer = [each for each in names if each.startswith(f"{name}_")]
    close = difflib.get_close_matches(str(name), longer or names, n=1, cutoff=0.0 if longer else 0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def short(value: object, most: int = 60) -> str:
    """``repr(value)``, cut after ``most`` characters: a message stays one line however long the value is. [1]"""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def whole_number(name: str, value: object, least: int = 1, note: str = "") -> int:
    """The argument ``name`` as an int; ``InputError`` unless it is a whole number from ``least`` up."""
    number = float(value) if isinstance(value, Real) else float("nan")
    if not number.is_integer() or number < least:
        raise InputError(f"{name} {value} is out of range; allowed: whole numbers from {least}{note}")
    return int(number)


def above_zero(name: str, value: object, unit: str = "") -> float:
    """The argument ``name`` as a float; ``InputError`` unless it is a number above 0, infinity included."""
    number = float(value) if isinstance(value, Real) else float("nan")
    if not number > 0:
        raise InputError(f"{name} must be above 0{unit and f' {unit}'}, got {value}")
    return number
