"""Check a directory of results: every file that is missing, damaged, or of other inputs, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from disagg_sim.atomic import leftovers
from disagg_sim.errors import InputError
from disagg_sim.sweep.index import read_index
from disagg_sim.sweep.manifest import MANIFEST, checksum, read_manifest
from disagg_sim.sweep.store import BlockState, Store, locked

_SAID = {
    BlockState.MISSING: "missing",
    BlockState.STALE: "stale: written for other inputs, or by another version",
    BlockState.CORRUPT: "damaged: changed after it was written",
    BlockState.UNSEALED: "without a checksum: not written by this program",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a file."""

    path: Path  # below the root
    said: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a check found."""

    holds: str  # "sweep" or "scenario"
    blocks: int  # that the directory is to hold [1]
    files: int  # in which they lie [1]
    size: int  # of these files [B]
    faults: tuple[Fault, ...]


def check_store(root: Path) -> StoreReport:
    """Read every byte of a directory of results and list what is not as it was written.

    Returns its blocks, and the faults in the order of the blocks, then of the tables.
    """
    index, store = read_index(root), Store(root)
    tables = {key.table for key in index.blocks}
    with locked(root, tables, reading=True):
        store.require_single(tables)
        states = [(key, store.state(key)) for key in index.blocks]
        faults = [Fault(key.relative, _SAID[state]) for key, state in states if state is not BlockState.STORED]
        faults += [Fault(path.relative_to(root), "left by a writer that was killed") for path in leftovers(root)]
        if index.holds == "sweep":
            faults += _tables(root)
    files = {path for key in index.blocks if (path := store.path(key)).is_file()}
    size = sum(path.stat().st_size for path in files)
    return StoreReport(index.holds, len(index.blocks), len(files), size, tuple(dict.fromkeys(faults)))


def _tables(root: Path) -> list[Fault]:
    """Tables of a sweep that are not those of its manifest."""
    try:
        manifest = read_manifest(root)
    except InputError as error:
        return [Fault(Path(MANIFEST), str(error).partition(": ")[2])]
    if manifest is None:
        return [Fault(Path(MANIFEST), "missing: the sweep has not ended")]
    faults = []
    for name, sealed in manifest.tables.items():
        path = root / name
        if not path.is_file():
            faults.append(Fault(Path(name), _SAID[BlockState.MISSING]))
        elif checksum(path.read_bytes()) != sealed:
            faults.append(Fault(Path(name), _SAID[BlockState.CORRUPT]))
    return faults
