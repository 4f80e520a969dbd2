"""Store blocks as Parquet files, written atomically, with their counts in the metadata.

A block is a table, a text, and the digest of all its inputs; the store knows nothing of LLMs. A block with another
digest is stale; a block whose bytes changed after they were written is corrupt (``is_sealed``). Both are computed
again. A directory of results is locked against a second run, and against links that lead out of it.

``store.json`` lists which blocks a directory is to hold.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, TypeVar

import pandas as pd

from disagg_sim.atomic import no_link, remove, remove_leftovers, write_text, written
from disagg_sim.errors import InputError, StoreError, quoted
from disagg_sim.parquet import join_parquet, parquet_metadata, read_parquet, write_parquet
from disagg_sim.reading import read_json

#: A name of a file or directory in a store: none of them leads out of it, or is hidden.
PLAIN = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True, slots=True)
class Key:
    """The place of a block, ``table/group/name.parquet``, and the digest of all its inputs."""

    table: str
    group: str
    name: str
    digest: str

    def __post_init__(self) -> None:
        """Refuse names that are not ``PLAIN`` with a ``ValueError``."""
        for name in (self.table, self.group, self.name):
            if not PLAIN.fullmatch(name):
                raise ValueError(f"{quoted(name)} is no name of a file in a store")

    @property
    def relative(self) -> Path:
        """Where the block lies below the root."""
        return Path(self.table) / self.group / f"{self.name}.parquet"


INDEX = "store.json"
#: All that runs write or remove beside their tables of blocks and ``.lock``.
WRITTEN = (
    *("summary.md", "frontier.csv", "pools.csv", "infeasible.csv", "summary.csv", "decisions.csv"),
    *("classes.csv", "models.csv", "tiers.csv", "capacity.csv", "capacity_runs.csv", "energy.csv", "notes.txt"),
    *("outside_calibration.csv", "uncertainty.csv", "gain.csv", "sensitivity.csv", "manifest.json", INDEX),
    *("perfetto", "pieces"),
)
#: Of the layout of directories, and of names and metadata of files; raised when an older program could not read them.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Index:
    """Content of ``store.json``."""

    holds: str  # "sweep" or "scenario"
    blocks: tuple[Key, ...]


def write_index(root: Path, holds: str, blocks: Iterable[Key]) -> None:
    """Write the index of a directory, unless it says the same already."""
    groups: dict[str, dict[str, str]] = {}
    for key in sorted(blocks, key=lambda key: key.relative):
        groups.setdefault(f"{key.table}/{key.group}", {})[key.name] = key.digest
    text = json.dumps({"schema": SCHEMA, "holds": holds, "blocks": groups}, indent=1) + "\n"
    path = root / INDEX
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def read_index(root: Path) -> Index:
    """Read the index of a directory."""
    path = root / INDEX
    try:
        held = read_json(path)
        schema, holds = int(held["schema"]), str(held["holds"])
        keys = [
            Key(group.partition("/")[0], group.partition("/")[2], name, str(digest))
            for group, names in held["blocks"].items()
            for name, digest in names.items()
        ]
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{root}: no store: {INDEX} is missing; a sweep or a simulation writes it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(f"{path}: damaged; the run that wrote it writes it again") from None
    if schema != SCHEMA:
        raise InputError(f"{path}: schema {schema}; this version of disagg-sim reads schema {SCHEMA}")
    return Index(holds, tuple(keys))


LOCK = ".lock"
#: Directory in which runs are kept while they go on.
PIECES = "pieces"


@contextmanager
def locked(root: Path, tables: Iterable[str] = ()) -> Iterator[None]:
    """Hold a directory until the block ends; the lock dies with the process, however that ends."""
    file = root / LOCK
    with ExitStack() as held:
        try:
            handle = held.enter_context(open(file, "ab", opener=no_link))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            others = "another run is writing there; wait for it, or give another --out"
            raise StoreError(f"{root}: {others}") from None
        except OSError as error:
            said = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(f"{file}: cannot be locked against a second run: {said}") from None
        for path in chain.from_iterable(map(root.glob, ("*/", "*/*/", "*/*/*/"))):  # as deep as results lie
            own = path.parent == root and path.name in {*tables, PIECES} and path.lstat().st_uid == os.getuid()
            if path.is_symlink() and not own:
                raise StoreError(f"{path}: a link to another directory; allowed: one that you made in place of a table")
        yield


# A seal is a checksum in a file, of every byte of it, with zeros in the place of the checksum. So a block is one file,
# and renaming the file completes it. The seal is verified before any of the file is parsed.

#: Stands before the checksum; the last one in a file is its own, the metadata being written last, and it last of them.
_MARK = b"disagg_sim:sha256:"
#: A checksum that is not filled in: SHA-256 has 64 hexadecimal digits.
_OPEN = b"0" * 64
#: Where a file that is to be sealed says so.
OPEN_SEAL = (_MARK + _OPEN).decode()


def bytes_of(path: Path) -> bytes:
    """Read all bytes of a file, where it is one."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no file", str(path))
    return path.read_bytes()


def sealed(data: bytes) -> bytes:
    """A file whose open checksum is filled in: that of all its bytes, the checksum itself being open."""
    at = data.rindex(_MARK + _OPEN) + len(_MARK)
    return data[:at] + _digest_of(data) + data[at + len(_OPEN) :]


def is_sealed(data: bytes) -> bool:
    """Whether every byte of a file is as it was when it was sealed."""
    if (at := data.rfind(_MARK)) < 0:
        return False
    at += len(_MARK)
    return _digest_of(data[:at], _OPEN, data[at + len(_OPEN) :]) == data[at : at + len(_OPEN)]


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


Item = TypeVar("Item")

_DIGEST = "disagg_sim.digest"
_NOTE = "disagg_sim.note"
_HEADER = "disagg_sim.header"
_SCHEMA = "disagg_sim.schema"
_SEAL = "disagg_sim.seal"


class BlockState(Enum):
    """What the store holds under a key."""

    MISSING = "missing"
    STALE = "stale"  # its inputs changed
    CORRUPT = "corrupt"  # its bytes changed after it was written, or have no checksum: of another program
    STORED = "stored"


class RunListener(Protocol):
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

    root: Path  # absolute for tasks, which run in directories of their own

    def prepare(self) -> None:
        """Create the directory; ``StoreError`` when it cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(f"{self.root}: cannot write results there: {error.strerror or error}") from None

    def path(self, key: Key) -> Path:
        """File of a block."""
        return self.root / key.relative

    def write(self, key: Key, rows: pd.DataFrame | Sequence[Path], note: str, header: str = "") -> None:
        """Write a block, its note and its header, with a checksum of every byte; its rows may lie in several files."""
        own = {_SCHEMA: str(SCHEMA), _DIGEST: key.digest, _NOTE: note, _HEADER: header, _SEAL: OPEN_SEAL}
        with written(self.path(key)) as handle:
            if isinstance(rows, pd.DataFrame):
                write_parquet(rows, handle.name, own)
            else:
                join_parquet(rows, handle.name, own)
            handle.write(sealed(Path(handle.name).read_bytes()))

    def copy(self, key: Key, held: Store) -> None:
        """Take a block that another store holds in a file of its own."""
        with written(self.path(key)) as handle:
            handle.write(held.path(key).read_bytes())

    def state(self, key: Key) -> BlockState:
        """Whether the block can be used; reads every byte of it."""
        try:
            data = bytes_of(self.path(key))
        except OSError as error:
            return BlockState.MISSING if isinstance(error, FileNotFoundError) else BlockState.CORRUPT
        if not is_sealed(data):
            return BlockState.CORRUPT
        digest = parquet_metadata(self.path(key)).get(_DIGEST, "")
        return BlockState.STORED if digest == key.digest else BlockState.STALE

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

    def clean(self, tables: tuple[str, ...], planned: set[Key]) -> int:
        """Remove halves of interrupted writes, and blocks of ours that are not planned; returns how many of these."""
        remove_leftovers(self.root)
        removed = 0
        for table in tables:
            places = {key.relative for key in planned if key.table == table}
            for path in sorted((self.root / table).glob("*/*")):
                if path.suffix == ".parquet" and path.relative_to(self.root) not in places and _is_ours(path):
                    remove(path)
                    removed += 1
            for group in (self.root / table).glob("*"):
                with suppress(OSError):  # it holds something
                    group.rmdir()
        return removed

    def _whole(self, key: Key) -> Path:
        """File of a block that is as it was written."""
        path = self.path(key)
        try:
            data = bytes_of(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot read the block: {error.strerror or error}") from None
        if not is_sealed(data):
            raise StoreError(f"{path}: the block was changed after it was written; the same command computes it again")
        return path


@dataclass(frozen=True, slots=True)
class Own:
    """What belongs to a sweep or a scenario in a directory."""

    tables: tuple[str, ...]
    planned: set[Key]  # its blocks
    require: Callable[[Store], None]  # raises ``StoreError`` where the directory holds something else


@contextmanager
def opened(root: Path, listener: RunListener, *, overwrite: bool, noun: str, own: Own) -> Iterator[Store]:
    """Open the store of a directory, locked, without the blocks that are not planned; ``noun`` is what is run."""
    store = Store(root)
    store.prepare()
    with locked(root, own.tables):
        if not overwrite:
            _require_no_others(store, own.tables)
            own.require(store)
        if removed := store.clean(own.tables, own.planned):
            listener.note(f"{removed} stored blocks are not part of this {noun}: removed")
        write_index(root, noun, own.planned)
        yield store


def _require_no_others(store: Store, tables: tuple[str, ...]) -> None:
    """Raise ``StoreError`` where a directory that no run wrote into holds what results would take the place of."""
    with suppress(InputError):
        read_index(store.root)
        return
    paths = [store.root / name for name in (*WRITTEN, *tables)]
    held = [path for path in paths if (any(path.iterdir()) if path.is_dir() else path.exists())]
    if held and not store.groups(tables):
        raise StoreError(
            f"{held[0]}: is there already, and no run wrote it; give another --out, or --overwrite to replace it"
        )


def missing(
    items: Sequence[Item], keys: Callable[[Item], Sequence[Key]], store: Store, listener: RunListener, *, noun: str
) -> list[Item]:
    """List the items, in order, with a block that is missing, stale or corrupt; the listener hears why."""
    states = {item: {key: store.state(key) for key in keys(item)} for item in items}
    for key, state in (pair for blocks in states.values() for pair in blocks.items()):
        if state is BlockState.CORRUPT:
            listener.warn(f"{store.path(key)}: corrupt block, computing it again")
    if stale := sum(BlockState.STALE in blocks.values() for blocks in states.values()):
        listener.note(f"{stale} stored {noun} are stale (their inputs changed): computing them again")
    lacking = [item for item, blocks in states.items() if {*blocks.values()} != {BlockState.STORED}]
    listener.note(f"{len(items) - len(lacking)} of {len(items)} {noun} already stored")
    return lacking


def _is_ours(path: Path) -> bool:
    """Whether the path is a block of a store, damaged or not."""
    try:
        return _DIGEST.encode() in bytes_of(path)
    except OSError:
        return False
