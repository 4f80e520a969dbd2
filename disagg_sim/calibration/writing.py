"""Writing a specification so that a faulty one never stands where a sound one is looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from disagg_sim.atomic import written

Spec = TypeVar("Spec")


def write_sound(path: Path, text: str, read: Callable[[Path], Spec]) -> Spec:
    """Write ``text`` once ``read`` has read it back without a fault; returns what it says.

    Parameters
    ----------
    path
        Where the file shall stand; its directory is made.
    text
        What it shall hold.
    read
        Reads the file from a place beside it; what it raises is passed on, and nothing is written.

    Raises
    ------
    StoreError
        When the file cannot be written.
    """
    with written(path) as handle:
        handle.write(text.encode())
        handle.flush()
        return read(Path(handle.name))
