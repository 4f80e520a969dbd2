"""Store blocks as Parquet files, written atomically, with their counts in the metadata.

A block is a table, a text, and the digest of all its inputs; the store knows nothing of LLMs. A block with another
digest is stale; a block whose bytes changed after they were written is corrupt. Both are computed again.

The checksum is stored in the file itself, so a block is one file and renaming the file completes it. It is the SHA-256
of all bytes of the file, with zeros in the place of the checksum. It is verified before any of the file is parsed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from disagg_sim.atomic import remove_leftovers, written
from disagg_sim.errors import StoreError
from disagg_sim.parquet import parquet_metadata, read_parquet, write_parquet

Item = TypeVar("Item")

_DIGEST = "disagg_sim.digest"
_NOTE = "disagg_sim.note"
_HEADER = "disagg_sim.header"
_SEAL = "disagg_sim.seal"
#: Stands before the checksum; the last one in a file is its own, the metadata being written last, and it last of them.
_MARK = b"disagg_sim:sha256:"
#: A checksum that is not filled in: SHA-256 has 64 hexadecimal digits.
_OPEN = b"0" * 64
#: First and last bytes of every Parquet file.
_PARQUET = b"PAR1"


class State(Enum):
    """What the store holds under a key."""

    MISSING = "missing"
    STALE = "stale"  # its inputs changed
    CORRUPT = "corrupt"  # its bytes changed after it was written
    UNSEALED = "unsealed"  # a Parquet file without a checksum: of an older version, or another program
    STORED = "stored"


@dataclass(frozen=True, slots=True)
class Key:
    """The place of a block, ``table/group/name.parquet``, and the digest of all its inputs."""

    table: str
    group: str
    name: str
    digest: str

    @property
    def relative(self) -> Path:
        """Where the block lies below the root."""
        return Path(self.table) / self.group / f"{self.name}.parquet"


class Listener(Protocol):
    """Told what a run does; the command line prints it."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something wrong that the run mends by itself."""

    def start(self, points: int) -> None:
        """So many design points are about to be computed."""

    def advance(self, points: int) -> None:
        """So many more of them are stored."""

    def finish(self) -> None:
        """All of them are stored."""


@dataclass(frozen=True, slots=True)
class Store:
    """The blocks below one directory."""

    root: Path

    def prepare(self) -> None:
        """Create the directory; ``StoreError`` when it cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe.{os.getpid()}.tmp"  # a leftover of a killed run by its name
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"{self.root}: cannot write results there: {error.strerror or error}") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory against a second run; the lock dies with the process, however it ends."""

        with ExitStack() as held:
            try:
                handle = held.enter_context((self.root / ".lock").open("w"))
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{self.root}: another run is writing there; wait for it, or give another --out"
                ) from None
            except OSError as error:
                raise StoreError(f"{self.root}: cannot be locked against a second run: {error.strerror}") from None
            yield

    def path(self, key: Key) -> Path:
        """File of a block."""
        return self.root / key.relative

    def write(self, key: Key, frame: pd.DataFrame, note: str, header: str = "") -> None:
        """Write a block, its note and its header, with a checksum of every byte of its file."""
        own = {_DIGEST: key.digest, _NOTE: note, _HEADER: header, _SEAL: (_MARK + _OPEN).decode()}
        with written(self.path(key)) as handle:
            write_parquet(frame, handle.name, own)
            handle.write(_sealed(Path(handle.name).read_bytes()))

    def state(self, key: Key) -> State:
        """Whether the block can be used; reads every byte of it."""
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return State.MISSING
        except OSError:
            return State.CORRUPT
        if _checksum(data) is None:
            whole = len(data) > len(_PARQUET) and data.startswith(_PARQUET) and data.endswith(_PARQUET)
            return State.UNSEALED if whole else State.CORRUPT
        if not _is_sealed(data):
            return State.CORRUPT
        return State.STORED if parquet_metadata(self.path(key)).get(_DIGEST) == key.digest else State.STALE

    def read(self, key: Key, columns: list[str] | None = None) -> pd.DataFrame:
        """The table of a stored block, or some columns of it; ``StoreError`` when it is not as it was written."""
        return read_parquet(self._whole(key), columns)

    def note(self, key: Key) -> str:
        """The text stored with the table; ``StoreError`` as ``read``."""
        return parquet_metadata(self._whole(key))[_NOTE]

    def header(self, key: Key) -> str:
        """What belongs to the table and has no column in it, as text; ``StoreError`` as ``read``."""
        return parquet_metadata(self._whole(key))[_HEADER]

    def groups(self, tables: tuple[str, ...]) -> set[str]:
        """Groups that hold a block of ours."""
        folders = [path for table in tables for path in (self.root / table).glob("*")]
        return {path.name for path in folders if any(_is_ours(block) for block in path.glob("[!.]*.parquet"))}

    def clean(self, tables: tuple[str, ...], planned: set[Path]) -> int:
        """Remove halves of interrupted writes, and blocks of ours that are not planned; returns how many of these."""
        remove_leftovers(self.root)
        removed = 0
        for table in tables:
            for path in sorted((self.root / table).glob("*/*")):
                if path.suffix == ".parquet" and path.relative_to(self.root) not in planned and _is_ours(path):
                    path.unlink(missing_ok=True)
                    removed += 1
            for group in sorted((self.root / table).glob("*")):
                if group.is_dir() and not any(group.iterdir()):
                    group.rmdir()
        return removed

    def _whole(self, key: Key) -> Path:
        """File of a block that is as it was written."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: cannot read the block: {error.strerror or error}") from None
        if not _is_sealed(data):
            raise StoreError(f"{path}: the block was changed after it was written; the same command computes it again")
        return path


@dataclass(frozen=True, slots=True)
class Own:
    """What belongs to a sweep or a scenario in a directory."""

    tables: tuple[str, ...]
    planned: set[Path]  # its blocks
    require: Callable[[Store], None]  # raises ``StoreError`` where the directory holds something else


@contextmanager
def opened(root: Path, listener: Listener, *, overwrite: bool, noun: str, own: Own) -> Iterator[Store]:
    """Open the store of a directory, locked, without the blocks that are not planned.

    Parameters
    ----------
    root : Path
        Directory of the results; made if missing.
    listener : Listener
        Told what was removed.
    overwrite : bool
        Whether results of something else may be removed; else ``own.require`` raises for them.
    noun : str
        What is run, "sweep" or "scenario".
    own : Own
        Its tables and blocks.

    Yields
    ------
    Store
        Locked until the block ends.

    Raises
    ------
    StoreError
        The directory cannot be written, or another run is writing there.

    Examples
    --------
    >>> import tempfile
    >>> from unittest.mock import Mock
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with opened(Path(root), Mock(), overwrite=False, noun="sweep", own=Mock(tables=(), planned=set())) as store:
    ...         sorted(path.name for path in store.root.iterdir())
    ['.lock']
    """
    store = Store(root)
    store.prepare()
    with store.lock():
        if not overwrite:
            own.require(store)
        if removed := store.clean(own.tables, own.planned):
            listener.note(f"{removed} stored blocks are not part of this {noun}: removed")
        yield store


def missing(
    items: Sequence[Item], keys: Callable[[Item], Sequence[Key]], store: Store, listener: Listener, *, noun: str
) -> list[Item]:
    """List the items with a block that is missing, stale or corrupt; the listener hears why.

    Parameters
    ----------
    items : sequence
        Hashable; what is computed, each to one block or several.
    keys : callable
        Blocks of an item.
    store, listener : Store, Listener
        Where the blocks lie, and who is told.
    noun : str
        What an item is, "blocks" or "runs".

    Returns
    -------
    list
        In order of ``items``.

    Examples
    --------
    >>> import tempfile
    >>> from unittest.mock import Mock
    >>> blocks = [Key("points", "demo", name, "d1") for name in ("first", "second")]
    >>> with tempfile.TemporaryDirectory() as root:
    ...     Store(Path(root)).write(blocks[0], pd.DataFrame({"ttl_s": [0.01]}), note="")
    ...     [key.name for key in missing(blocks, lambda key: [key], Store(Path(root)), Mock(), noun="blocks")]
    ['second']
    """
    states = {item: {key: store.state(key) for key in keys(item)} for item in items}
    for key, state in (pair for blocks in states.values() for pair in blocks.items()):
        if state is State.CORRUPT:
            listener.warn(f"{store.path(key)}: corrupt block, computing it again")
    unsealed, stale = (
        sum(state in blocks.values() for blocks in states.values()) for state in (State.UNSEALED, State.STALE)
    )
    if unsealed:
        listener.warn(f"{unsealed} stored {noun} have no checksum: computing them again")
    if stale:
        listener.note(f"{stale} stored {noun} are stale (their inputs changed): computing them again")
    lacking = [item for item, blocks in states.items() if {*blocks.values()} != {State.STORED}]
    listener.note(f"{len(items) - len(lacking)} of {len(items)} {noun} already stored")
    return lacking


def _sealed(data: bytes) -> bytes:
    """A file whose open checksum is filled in: that of all its bytes, the checksum itself being open."""
    at = data.rindex(_MARK + _OPEN) + len(_MARK)
    return data[:at] + _digest_of(data) + data[at + len(_OPEN) :]


def _is_sealed(data: bytes) -> bool:
    """Whether every byte of a file is as it was when it was sealed."""
    at = _checksum(data)
    if at is None:
        return False
    return _digest_of(data[:at], _OPEN, data[at + len(_OPEN) :]) == data[at : at + len(_OPEN)]


def _checksum(data: bytes) -> int | None:
    """Position of the checksum of a file; None without one."""
    at = data.rfind(_MARK)
    return None if at < 0 else at + len(_MARK)


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _is_ours(path: Path) -> bool:
    """Whether the path is a block of a store, damaged or not."""
    try:
        return _DIGEST.encode() in path.read_bytes()
    except OSError:
        return False


def digest_of(value: Any) -> str:
    """Compute the digest of a value; the order of a mapping or set does not count.

    Parameters
    ----------
    value
        Plain, a frozen dataclass, or tuples, sets and mappings of them.

    Returns
    -------
    str
        SHA-256 in hexadecimal digits.

    Examples
    --------
    >>> digest_of({"isl": 1024, "osl": 128}) == digest_of({"osl": 128, "isl": 1024})
    True
    >>> digest_of((1024, 128)) == digest_of((128, 1024))
    False
    """
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


@cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Compute the digest of the sources of some rooms and of what all rooms share.

    Parameters
    ----------
    rooms
        Folders below the package; those inside them count, too.

    Returns
    -------
    str
        SHA-256 in hexadecimal digits: another one means that stored blocks are stale.

    Examples
    --------
    >>> len({code_digest(rooms) for rooms in (("physics",), ("physics",), ("search",))})
    2
    """
    root = files("disagg_sim")
    texts = [pair for room in rooms for pair in _sources(root / room, room)]
    texts += [(name, (root / name).read_text()) for name in ("domain.py", "parquet.py", "units.py")]
    return digest_of(sorted(texts))


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        path = f"{name}/{item.name}"
        if item.is_dir():
            yield from _sources(item, path)
        elif item.name.endswith(".py"):
            yield path, item.read_text()


def _plain(value: Any) -> Any:
    """Nested lists and sorted mappings of plain values, the same in every process."""
    if is_dataclass(value):
        return [type(value).__name__, {f.name: _plain(getattr(value, f.name)) for f in fields(value)}]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Fraction) else value
