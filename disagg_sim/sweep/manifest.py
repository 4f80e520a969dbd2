"""``manifest.json``: what the tables of a sweep were made of, and checksums that tell whether they are unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_sim.errors import InputError
from disagg_sim.reading import read_json
from disagg_sim.sweep.digests import Change, differences
from disagg_sim.sweep.store import PLAIN

MANIFEST, FRONTIER_FILE = "manifest.json", "frontier.csv"


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Content of the manifest of a finished sweep; empty where the manifest has no such entry."""

    name: str
    cases: tuple[str, ...]
    tables: Mapping[str, str]  # file -> SHA-256 of its bytes
    inputs: Mapping[str, Any]  # see ``digests.inputs_of``
    made_by: Mapping[str, Any]  # versions and options
    code: str  # digest of the sources
    verdicts: Mapping[str, str]  # case -> why it has no result; empty where it has one

    def changes(self, new: Manifest) -> list[Change]:
        """What differs from this manifest to a ``new`` one: spec files value by value, options, versions, code."""
        found = differences(self.inputs, new.inputs) + differences(self.made_by, new.made_by)
        if self.code != new.code and not any(change.key == "disagg-sim" for change in found):
            found.append(Change("disagg-sim itself", "sources", self.code[:12], new.code[:12]))
        return found


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of the sweep that was finished in a directory; None where there is none."""
    path = root / MANIFEST
    try:
        held = read_json(path)
        made_by = {f"the {name}": dict(held[name]) for name in ("options", "versions") if name in held}
        return Manifest(
            name=str(held.get("name", "")),
            cases=tuple(str(entry["case"]) for entry in held["cases"]),
            tables={_plain(file): str(checksum) for file, checksum in held.get("tables", {}).items()},
            inputs={str(file): dict(content) for file, content in held.get("inputs", {}).items()},
            made_by=made_by,
            code=str(held.get("code", "")),
            verdicts={str(entry["case"]): str(entry.get("verdict", "")) for entry in held["cases"]},
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: damaged: not the manifest of a sweep; run the sweep again") from None


def _plain(name: str) -> str:
    """A name of a file beside the manifest; ``ValueError`` of any other."""
    if not PLAIN.fullmatch(name):
        raise ValueError(name)
    return name


def is_as_written(manifest: Manifest, data: bytes) -> bool:
    """Whether these are the bytes of the frontier that the manifest was written for."""
    return manifest.tables.get(FRONTIER_FILE) == checksum(data)


def checksum(data: bytes) -> str:
    """SHA-256 of the bytes of a table."""
    return hashlib.sha256(data).hexdigest()
