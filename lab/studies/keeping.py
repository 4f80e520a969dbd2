"""Keep what a study computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Kept = TypeVar("Kept")


class Keeping:
    """Whatever a study computes, each once."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], Kept]) -> Kept:
        """Return what was kept under a key; compute it the first time."""
        if key not in self._kept:
            self._kept[key] = compute()
        found: Kept = self._kept[key]
        return found
