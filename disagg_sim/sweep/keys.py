"""Name the blocks of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
