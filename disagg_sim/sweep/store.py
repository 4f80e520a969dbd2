"""Parquet blocks on disk: one file each, written atomically, what was counted in its metadata.

Knows no word of the domain: a block is a table, a text beside it, and the digest of everything that
went into it. A block whose digest differs is stale, one whose bytes differ from those that were written is corrupt;
both are computed again.

The checksum that tells stands in the file itself, so that a block is one file and its renaming the one moment in which
it comes to be: SHA-256 of all bytes of the file, zeros in the place of the checksum. Nothing of a file is parsed before
its checksum was verified.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from disagg_sim.atomic import remove_leftovers, written
from disagg_sim.errors import StoreError

if TYPE_CHECKING:
    import pandas as pd

_DIGEST = b"disagg_sim.digest"
_NOTE = b"disagg_sim.note"
_ATTRS = b"disagg_sim.attrs"
_SEAL = b"disagg_sim.seal"
#: Stands before the checksum; the last one in a file is its own, the metadata being written last.
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
        import fcntl

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

    def write(self, key: Key, frame: pd.DataFrame, note: str) -> None:
        """Write a block, ``attrs`` included, with a checksum of every byte of its file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(frame, preserve_index=False)
        own = {
            _DIGEST: key.digest.encode(),
            _NOTE: note.encode(),
            _ATTRS: json.dumps(frame.attrs).encode(),
            _SEAL: _MARK + _OPEN,
        }
        file = pa.BufferOutputStream()
        metadata = dict(table.schema.metadata or {}) | own
        pq.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")
        with written(self.path(key)) as handle:
            handle.write(_sealed(file.getvalue().to_pybytes()))

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
        return State.STORED if _metadata(data).get(_DIGEST) == key.digest.encode() else State.STALE

    def read(self, key: Key, columns: list[str] | None = None) -> pd.DataFrame:
        """The table of a stored block, or some columns of it; ``StoreError`` when it is not as it was written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = self._data(key)
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            table = file.read(columns=columns)
        frame: pd.DataFrame = table.to_pandas()
        frame.attrs = json.loads(table.schema.metadata[_ATTRS])
        return frame

    def note(self, key: Key) -> str:
        """The text that was written beside the table; ``StoreError`` as ``read``."""
        return _metadata(self._data(key))[_NOTE].decode()

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

    def _data(self, key: Key) -> bytes:
        """Content of a block that is as it was written."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: cannot read the block: {error.strerror or error}") from None
        if not _is_sealed(data):
            raise StoreError(f"{path}: the block was changed after it was written; the same command computes it again")
        return data


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
    """Where the checksum of a file stands; None without one."""
    at = data.rfind(_MARK)
    return None if at < 0 else at + len(_MARK)


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _metadata(data: bytes) -> dict[bytes, bytes]:
    """What stands beside the table of a sealed block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata: dict[bytes, bytes] = pq.read_schema(pa.BufferReader(data)).metadata
    return metadata


def _is_ours(path: Path) -> bool:
    """Whether a block of a store stands there, damaged or not."""
    try:
        return _DIGEST in path.read_bytes()
    except OSError:
        return False
