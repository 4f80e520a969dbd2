"""Seal files: a checksum in a file, of every byte of it, with zeros in the place of the checksum.

So a block is one file, and renaming the file completes it. The seal is verified before any of the file is parsed.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

#: Stands before the checksum; the last one in a file is its own, the metadata being written last, and it last of them.
_MARK = b"disagg_sim:sha256:"
#: A checksum that is not filled in: SHA-256 has 64 hexadecimal digits.
_OPEN = b"0" * 64
#: Where a file that is to be sealed says so.
OPEN_SEAL = (_MARK + _OPEN).decode()


def bytes_of(path: Path) -> bytes:
    """Read all bytes of a file.

    >>> b"Seal files" in bytes_of(Path(__file__))
    True
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no file", str(path))
    return path.read_bytes()


def sealed(data: bytes) -> bytes:
    """A file whose open checksum is filled in: that of all its bytes, the checksum itself being open."""
    at = data.rindex(_MARK + _OPEN) + len(_MARK)
    return data[:at] + _digest_of(data) + data[at + len(_OPEN) :]


def is_sealed(data: bytes) -> bool:
    """Whether every byte of a file is as it was when it was sealed."""
    at = checksum_at(data)
    if at is None:
        return False
    return _digest_of(data[:at], _OPEN, data[at + len(_OPEN) :]) == data[at : at + len(_OPEN)]


def checksum_at(data: bytes) -> int | None:
    """Position of the checksum of a file; None where it has no seal."""
    at = data.rfind(_MARK)
    return None if at < 0 else at + len(_MARK)


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()
