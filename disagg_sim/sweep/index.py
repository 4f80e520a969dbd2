"""Name the blocks of a store, and list in ``store.json`` which of them a directory of results is to hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from disagg_sim.atomic import write_text
from disagg_sim.errors import InputError, quoted
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
    *("figures", "perfetto", "pieces"),
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
