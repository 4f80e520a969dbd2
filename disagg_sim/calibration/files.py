"""Read the rows to exclude from fits; write specifications only if they are valid."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from disagg_sim.atomic import written

Spec = TypeVar("Spec")
#: Share of the shapes of kernel tables, and of the configurations of served runs, that no fit may see. [1]
HELD_OUT_SHARE = 0.3


def kept_from_fits(key: str) -> bool:
    """Whether rows of this key are held out: by its SHA-256, hence alike in every file and every run.

    >>> [kept_from_fits(key) for key in ("gemm|4096|4096", "gemm|8192|1024")]
    [False, False]
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2.0**64 < HELD_OUT_SHARE


def write_sound(path: Path, text: str, read: Callable[[Path], Spec]) -> Spec:
    """Write ``text`` if ``read`` reads it back without a fault; returns the value read.

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
