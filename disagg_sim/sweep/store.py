"""Parquet blocks on disk: one file each, written atomically, what was counted in its metadata.

Knows no word of the domain: a block is a table, a text beside it, and the digest of everything that
went into it. A block whose digest differs is stale, one that cannot be read whole is corrupt; both are
computed again. Page checksums are written and verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.atomic import remove_leftovers, written
from disagg_sim.errors import StoreError

if TYPE_CHECKING:
    import pandas as pd

_DIGEST = b"disagg_sim.digest"
_NOTE = b"disagg_sim.note"
_ATTRS = b"disagg_sim.attrs"


class State(Enum):
    """What the store holds under a key."""

    MISSING = "missing"
    STALE = "stale"
    CORRUPT = "corrupt"
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
            probe = self.root / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"{self.root}: cannot write results there: {error.strerror or error}") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory against a second run; the lock dies with the process, however it ends."""
        import fcntl

        with (self.root / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{self.root}: another run is writing there; wait for it, or give another --out"
                ) from None
            yield

    def path(self, key: Key) -> Path:
        """File of a block."""
        return self.root / key.relative

    def write(self, key: Key, frame: pd.DataFrame, note: str) -> None:
        """Write a block, ``attrs`` included: a temporary file beside it, flushed to disk, then renamed over it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(frame, preserve_index=False)
        own = {_DIGEST: key.digest.encode(), _NOTE: note.encode(), _ATTRS: json.dumps(frame.attrs).encode()}
        metadata = dict(table.schema.metadata or {}) | own
        path = self.path(key)
        with written(path) as handle:
            pq.write_table(
                table.replace_schema_metadata(metadata), handle, compression="zstd", write_page_checksum=True
            )

    def state(self, key: Key) -> State:
        """Whether the block can be used; reads every page of it."""
        import pyarrow as pa

        if not self.path(key).exists():
            return State.MISSING
        try:
            metadata = self._table(key).schema.metadata or {}
            note = metadata[_NOTE].decode()
            digest = metadata[_DIGEST].decode()
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return State.CORRUPT
        if not note.startswith("{"):
            return State.CORRUPT
        return State.STORED if digest == key.digest else State.STALE

    def read(self, key: Key, columns: list[str] | None = None) -> pd.DataFrame:
        """The table of a stored block, or some columns of it."""
        table = self._table(key, columns)
        frame: pd.DataFrame = table.to_pandas()
        frame.attrs = json.loads(table.schema.metadata[_ATTRS])
        return frame

    def note(self, key: Key) -> str:
        """The text that was written beside the table."""
        import pyarrow.parquet as pq

        metadata: dict[bytes, bytes] = pq.read_schema(self.path(key)).metadata
        return metadata[_NOTE].decode()

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

    def _table(self, key: Key, columns: list[str] | None = None) -> Any:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path(key), page_checksum_verification=True) as file:
            return file.read(columns=columns)


def _is_ours(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _DIGEST in (pq.read_schema(path).metadata or {})
    except (OSError, ValueError, pa.ArrowException):
        return False
