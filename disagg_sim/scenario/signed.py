"""Files that only who wrote them reads again: states of runs are pickles, and those of others may do anything.

A file begins with the HMAC of the rest under a key of this account. One that was changed, or that came from another
account or machine, is as good as none.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

from disagg_sim.atomic import written
from disagg_sim.sweep.seal import bytes_of

_SIZE = hashlib.sha256().digest_size


def write_signed(path: Path, data: bytes) -> None:
    """Write a file for ``read_signed``; nothing where this account has no place for a key."""
    key = _key()
    if key is not None:
        with written(path) as handle:
            handle.write(hmac.digest(key, data, "sha256") + data)


def read_signed(path: Path) -> bytes | None:
    """What this account wrote into a file, as it was; None where it is anything else, or missing."""
    key = _key()
    try:
        held = bytes_of(path)
    except OSError:
        return None
    own = key is not None and hmac.compare_digest(hmac.digest(key, held[_SIZE:], "sha256"), held[:_SIZE])
    return held[_SIZE:] if own else None


@cache
def _key() -> bytes | None:
    """The key of this account, which nobody else can read; None where there is no place for it."""
    with suppress(OSError, RuntimeError):  # no home, or one that cannot be written
        path = Path.home() / ".cache" / "disagg_sim" / "key"
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        found = path.lstat()
        key = path.read_bytes()
        if found.st_uid == os.getuid() and not found.st_mode & 0o077 and len(key) == 32:
            return key
    return None
