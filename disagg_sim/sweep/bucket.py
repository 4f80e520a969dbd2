"""Pass blocks between machines that share no directory: through an object store, or any other place that fsspec knows.

Reference: https://filesystem-spec.readthedocs.io/en/latest/api.html. A block has the same path below the URL as below a
directory of results, so what reads the one reads the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from disagg_sim.atomic import written
from disagg_sim.errors import InputError, StoreError, quoted
from disagg_sim.extras import extra

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def put(bucket: str, relative: Path, path: Path) -> None:
    """Copy a file into a bucket; one that is there is replaced.

    Parameters
    ----------
    bucket
        URL, ``s3://NAME/DIR``.
    relative
        Place below it.
    path
        File of this machine.

    Returns
    -------
    None

    Raises
    ------
    StoreError
        One line: the bucket cannot be written.
    InputError
        No such kind of bucket.

    Examples
    --------
    >>> with TemporaryDirectory() as folder:
    ...     (path := Path(folder, "a")).write_text("block")
    ...     put("memory://doctest", Path("points/demo/a"), path)
    ...     get("memory://doctest", Path("points/demo/a"), Path(folder, "b")), Path(folder, "b").read_text()
    5
    (True, 'block')
    """
    files, root = _place(bucket)
    place = f"{root}/{relative.as_posix()}"
    with _told(bucket, "written"):
        files.makedirs(place.rpartition("/")[0], exist_ok=True)
        files.pipe_file(place, path.read_bytes())


def get(bucket: str, relative: Path, path: Path) -> bool:
    """Copy a file of a bucket here, as ``put`` put it there.

    Returns
    -------
    bool
        Whether it was there.

    Examples
    --------
    >>> get("memory://doctest", Path("points/demo/missing"), Path("nowhere"))
    False
    """
    files, root = _place(bucket)
    with _told(bucket, "read"):
        try:
            data = files.cat_file(f"{root}/{relative.as_posix()}")
        except FileNotFoundError:
            return False
    with written(path) as handle:
        handle.write(data)
    return True


def held(bucket: str) -> frozenset[str]:
    """List what a bucket holds, by the place below it.

    Examples
    --------
    >>> held("memory://doctest/of/nothing")
    frozenset()
    """
    files, root = _place(bucket)
    with _told(bucket, "read"):
        files.invalidate_cache()
        found: list[str] = files.find(root)
    return frozenset(path[path.index(root) + len(root) :].strip("/") for path in found)


@cache
def scratch() -> Path:
    """The directory of this process in which blocks wait for their way, and others for a second reader."""
    folder = TemporaryDirectory(prefix="disagg-sim-")
    _kept.append(folder)  # it goes with the process
    return Path(folder.name)


_kept: list[Any] = []


def _place(bucket: str) -> tuple[AbstractFileSystem, str]:
    with extra("bucket"):
        from fsspec.core import url_to_fs
    try:
        files, root = url_to_fs(bucket)
    except (ImportError, ValueError) as error:  # a package of its own reads s3://, another one gs://
        raise InputError(f"bucket {quoted(bucket)}: {error}") from None
    return files, root.rstrip("/")


@contextmanager
def _told(bucket: str, done: str) -> Iterator[None]:
    """One line of whatever the package of an object store raises: its errors share no class."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise StoreError(f"bucket {bucket}: cannot be {done}: {why}") from None
