"""Expected failures: one clear line each; a bug keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DisaggSimError(Exception):
    """Base of every failure that a user can mend; the CLI prints its text and exits with 2."""


class SpecError(DisaggSimError):
    """A fact or sweep file is wrong: file, key, value, what is allowed, nearest valid name."""


class UnknownNameError(DisaggSimError):
    """A model, system, traffic, recipe, profile or engine of that name does not exist."""


class InputError(DisaggSimError):
    """An argument is out of range; the text says what is allowed."""


class InfeasibleError(DisaggSimError):
    """Nothing satisfies the limits; the text says which one binds and by how much."""


class StoreError(DisaggSimError):
    """The results directory cannot be read or written."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` , did you mean 'x'?`` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
