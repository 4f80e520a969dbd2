"""Hold a directory of results against a second run, and against links that lead out of it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from disagg_sim.atomic import no_link
from disagg_sim.errors import StoreError

LOCK = ".lock"
#: Directory in which runs are kept while they go on.
PIECES = "pieces"


@contextmanager
def locked(root: Path, tables: Iterable[str] = (), *, reading: bool = False) -> Iterator[None]:
    """Hold a directory until the block ends; the lock dies with the process, however that ends."""
    file = root / LOCK
    with ExitStack() as held:
        try:
            handle = held.enter_context(open(file, "rb" if reading else "ab", opener=no_link))
            fcntl.flock(handle, (fcntl.LOCK_SH if reading else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            others = "another run is writing there" + ("" if reading else ", or a check reads")
            raise StoreError(f"{root}: {others}; wait for it, or give another --out") from None
        except OSError as error:
            if not (reading and isinstance(error, FileNotFoundError)):  # an archive without it: nobody writes there
                said = "it is a link" if error.errno == errno.ELOOP else error.strerror
                raise StoreError(f"{file}: cannot be locked against a second run: {said}") from None
        _refuse_links(root, {*tables, PIECES}, reading=reading)
        yield


def _refuse_links(root: Path, tables: set[str], *, reading: bool) -> None:
    makers = {os.getuid(), root.stat().st_uid} if reading else {os.getuid()}
    for path in chain.from_iterable(map(root.glob, ("*/", "*/*/", "*/*/*/"))):  # as deep as results lie
        own = path.parent == root and path.name in tables and path.lstat().st_uid in makers
        if path.is_symlink() and not own:
            raise StoreError(f"{path}: a link to another directory; allowed: one that you made in place of a table")
