"""Keep what a study computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

Kept = TypeVar("Kept")
Method = TypeVar("Method", bound=Callable[..., Any])


class Keeping:
    """Whatever a study computes, each once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], compute: Callable[[], Kept]) -> Kept:
        """Return what was kept under a key; compute it the first time."""
        if key not in self._kept:
            self._kept[key] = compute()
        found: Kept = self._kept[key]
        return found


def kept(method: Method) -> Method:
    """Compute what a method of ``Keeping`` gives once for each of its arguments."""
    sign = signature(method)

    @wraps(method)
    def found(self: Keeping, *given: Any, **named: Any) -> Any:
        bound = sign.bind(self, *given, **named)
        bound.apply_defaults()
        key = (method.__qualname__, *list(bound.arguments.values())[1:])
        return self.once(key, lambda: method(self, *given, **named))

    return found  # type: ignore[return-value]
