"""Name the blocks of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from disagg_sim.errors import quoted

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
