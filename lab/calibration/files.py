"""Read the rows to exclude from fits; write specifications only if they are valid."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from disagg_sim.atomic import written

Spec = TypeVar("Spec")
#: Share of the shapes of kernel tables, and of the configurations of served runs, that no fit may see. [1]
HELD_OUT_SHARE = 0.3


def kept_from_fits(key: str) -> bool:
    """Whether rows of this key are held out: by its SHA-256, hence alike in every file and every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2.0**64 < HELD_OUT_SHARE


@dataclass(frozen=True, slots=True)
class Writer(Generic[Spec]):
    """Writes specifications of one kind if they read back without a fault: ``writer(path, text)`` returns the value."""

    #: Reads the file that shall stand at the first path from the second one beside it; what it raises, such as
    #: ``SpecError``, is passed on, and nothing is written.
    read: Callable[[Path, Path], Spec]

    def __call__(self, path: Path, text: str) -> Spec:
        """Write a text, its directory being made; ``StoreError`` where it cannot be written."""
        with written(path) as handle:
            handle.write(text.encode())
            handle.flush()
            return self.read(path, Path(handle.name))
