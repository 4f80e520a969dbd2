"""Write files atomically: into a temporary file, flushed to disk, then renamed.

A process that is killed while it writes leaves a temporary file, and the file that it meant to replace as it was. A
temporary file is locked as long as its writer lives, so that what nobody will ever finish can be told and removed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from disagg_sim.errors import StoreError

#: Name of a temporary file: that of its target, and the process that writes it.
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
#: Results lie at most so many directories below that of a run, such as ``points/<case>/<block>``. [1]
_DEPTH = 3


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends without an exception; its directory is made.

    A device, a pipe or a stream of this process (``/dev/stdout``) keeps its place and is written directly. Yields an
    open file; what is written becomes ``path`` at once, or never.
    """
    if not path.name or path.is_dir():
        raise StoreError(f"{path}: is a directory; name a file in it")
    if _is_stream(path):
        try:
            with path.open("wb") as handle:
                yield handle
        except OSError as error:
            raise _refused(path, error) from None
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(each for each in path.parent.glob(".*.tmp") if _target(each) == path.name)
        with temporary.open("xb") as handle:  # a new one: nothing is written through a link
            with suppress(OSError):  # a file system without locks: what is left there stays there
                _lock(handle)
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
            temporary.replace(path)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    with written(path) as handle:
        handle.write(text.encode())


def write_csv(path: Path, table: Any, *, digits: int = 0) -> None:
    """Write a DataFrame as CSV so that it is there whole or not at all."""
    write_text(path, csv_text(table, digits=digits))


def csv_text(table: Any, *, digits: int) -> str:
    """Return the text that ``write_csv`` writes of a DataFrame."""
    return str(table.to_csv(index=False, lineterminator="\n", float_format=f"%.{digits}g" if digits else None))


def remove_leftovers(root: Path) -> int:
    """Remove what writers that were killed left below a directory of results. [1]"""
    places = (root.glob("*/" * depth + ".*.tmp") for depth in range(_DEPTH))
    return _remove(sorted(path for place in places for path in place if _target(path)))


def remove(path: Path, mark: str = "") -> None:
    """Remove a file, or a link, where there is one."""
    try:
        if not mark or _has(path, mark):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror or error}") from None


def require_own(root: Path, names: Iterable[str], mark: str, *, by: str = "") -> None:
    """Raise where what is to be written would take the place of a file of somebody else, or go through a link."""
    for name in names:
        path = root / name
        if path.is_symlink() and not _is_stream(path):
            raise StoreError(f"{path}: is a link, and nothing is written through it; remove it, or name another place")
        if path.is_file() and not _has(root / (by or name), mark):
            said = "is there already, and this command did not write it; move it away, or name another place"
            raise StoreError(f"{path}: {said}")


def _has(path: Path, mark: str) -> bool:
    with suppress(OSError), open(path, "rb", opener=no_link) as handle:
        return mark.encode() in handle.read(1 << 24)
    return False


def no_link(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=no_link)``: no link to another one, and without waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot write: {error.strerror or error}")


def _is_stream(path: Path) -> bool:
    """Whether the path is something that a file must not replace: a device, a pipe, an open file of a process."""
    with suppress(OSError):
        folder = path.parent.resolve()
        place = folder / path.readlink() if path.is_symlink() else folder
        opened = any(each.is_relative_to("/proc") for each in (folder, place))
        return opened or (path.exists() and not path.is_file() and not path.is_dir())
    return False


def _target(path: Path) -> str:
    """Name of the file that a temporary one was to become; "" of other files."""
    found = _TEMPORARY.fullmatch(path.name)
    return found[1] if found else ""


def _is_abandoned(path: Path) -> bool:
    """Whether nobody will ever finish a temporary file; a link is none that a writer made."""
    try:
        with open(path, "rb", opener=no_link) as handle:
            _lock(handle)
    except OSError as error:
        return error.errno == errno.ELOOP
    return True


def _lock(handle: BinaryIO) -> None:
    """Lock a file until it is closed; ``OSError`` when another process holds it."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(paths: Iterable[Path]) -> int:
    """Remove the temporary files whose writers are gone."""
    removed = 0
    for path in filter(_is_abandoned, list(paths)):
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed
