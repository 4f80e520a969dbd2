"""Merge the small files of a store: fewer files, the same rows in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from disagg_sim.sweep.index import read_index
from disagg_sim.sweep.keys import Key
from disagg_sim.sweep.lock import locked
from disagg_sim.sweep.merged import NUMBERED
from disagg_sim.sweep.store import State, Store
from disagg_sim.units import MIB

#: A file is not made larger than this, but for one block that is. [B]
FILE_SIZE = 64 * MIB


@dataclass(frozen=True, slots=True)
class Compacted:
    """Files in which the blocks of a store lie. [1]"""

    before: int
    after: int


def compact_store(root: Path, *, file_size: float = FILE_SIZE) -> Compacted:
    """Merge files of consecutive blocks of a group; the command that wrote them goes on with the merged ones.

    Parameters
    ----------
    root : Path
        Directory that a sweep or a simulation wrote. Blocks that are missing, damaged or stale are left as they are.
    file_size : float
        A file is not made larger than this, but for one block that is. [B]

    Returns
    -------
    Compacted
        Number of files before and after.

    Raises
    ------
    InputError
        One line: no store, or of another schema.
    StoreError
        A run is writing there, or the disk is full; what was merged until then stays.

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> from disagg_sim.sweep.index import write_index
    >>> keys = [Key("points", "demo", f"colocated-{number:04d}", "d1") for number in range(3)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     write_index(store.root, "sweep", keys)
    ...     for number, key in enumerate(keys):
    ...         store.write(key, pd.DataFrame({"batch": [number]}), note="")
    ...     compact_store(store.root), store.read(keys[2])["batch"].tolist()
    (Compacted(before=3, after=1), [2])
    """
    index, store = read_index(root), Store(root)
    tables = tuple(dict.fromkeys(key.table for key in index.blocks))
    with locked(root, tables):
        store.clean(tables, {*index.blocks})
        before = _files(store, index.blocks)
        for _, keys in groupby(index.blocks, key=lambda key: (key.table, key.group)):
            for batch in _batches(store, list(keys), file_size):
                store.join(batch)
        return Compacted(before, _files(store, index.blocks))


def _files(store: Store, keys: Sequence[Key]) -> int:
    return len({path for key in keys if (path := store.place(key)).is_file()})


def _batches(store: Store, keys: Sequence[Key], file_size: float) -> Iterator[list[Key]]:
    """Two blocks or more each, which have files of their own and consecutive numbers."""
    batch: list[Key] = []
    held, last = 0, ("", -1)
    for key in keys:
        found = NUMBERED.fullmatch(key.name)
        if found is None or not store.is_alone(key) or store.state(key) is not State.STORED:
            continue
        stem, number = found["stem"], int(found["number"])
        size = store.path(key).stat().st_size
        if batch and ((stem, number) != (last[0], last[1] + 1) or held + size > file_size):
            if len(batch) > 1:
                yield batch
            batch, held = [], 0
        batch.append(key)
        held, last = held + size, (stem, number)
    if len(batch) > 1:
        yield batch
