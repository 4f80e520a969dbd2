"""A store says which of its files are broken."""

import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import duckdb
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from disagg_sim.cli.main import app
from disagg_sim.errors import InputError, StoreError
from disagg_sim.parquet import join_parquet, write_parquet
from disagg_sim.sweep.check_store import check_store
from disagg_sim.sweep.index import Key, write_index
from disagg_sim.sweep.store import Own, Store, locked, opened

KEYS = [Key("points", group, f"{stem}-{number:04d}", f"{group}-{stem}-{number}")
        for group in ("apples", "pears") for stem in ("red", "red-ripe") for number in range(4)]  # fmt: skip


def table(number: int) -> pd.DataFrame:
    """Rows of their own; the second block has none."""
    rows = 0 if number == 1 else 3
    words = pd.Categorical(["heavy"] * rows, categories=["light", "heavy"])
    return pd.DataFrame({"weight": np.arange(rows) + 10.0 * number, "kind": words})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store as it was written; not to be changed."""
    root = tmp_path_factory.mktemp("whole")
    write_index(root, "scenario", KEYS)
    for number, key in enumerate(KEYS):
        Store(root).write(key, table(number), f"note {number}", f"header {number}")
    return root


@pytest.fixture
def store(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return Store(tmp_path)


def test_every_kind_of_broken_file_is_named(store):
    store.path(KEYS[0]).unlink()
    store.path(KEYS[1]).write_bytes(b"PAR1")
    store.write(Key(KEYS[2].table, KEYS[2].group, KEYS[2].name, "older"), table(0), "")
    duckdb.from_df(table(0)).write_parquet(str(store.path(KEYS[3])))
    (store.root / "points" / "apples" / ".red-0000.parquet.99.tmp").touch()
    done = CliRunner().invoke(app, ["store", "check", str(store.root)])
    assert done.exit_code == 1
    said = [line.partition(": ") for line in done.stdout.splitlines()]
    assert [Path(name).name for name, _, _ in said[:-1]] == [
        *(f"{key.name}.parquet" for key in KEYS[:4]),
        ".red-0000.parquet.99.tmp",
    ]
    assert [text.partition(":")[0] for _, _, text in said] == [
        *("missing", "damaged", "stale", "without a checksum", "left by a writer that was killed"),
        "5 faults; the same scenario computes again what is needed",
    ]


def test_tables_of_a_sweep_are_checked_by_its_manifest(store):
    write_index(store.root, "sweep", KEYS)
    (fault,) = check_store(store.root).faults
    assert fault.said == "missing: the sweep has not ended"
    made = {"cases": [], "tables": {"frontier.csv": "0" * 64, "infeasible.csv": "0" * 64}}
    (store.root / "manifest.json").write_text(json.dumps(made))
    (store.root / "frontier.csv").write_text("changed")
    told = {str(fault.path): fault.said for fault in check_store(store.root).faults}
    assert told == {"frontier.csv": "damaged: changed after it was written", "infeasible.csv": "missing"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no store: store.json is missing"),
        ("{", "store.json: damaged"),
        ('{"schema": Infinity, "holds": "sweep", "blocks": {}}', "store.json: damaged"),
        ('{"schema": 2, "holds": "sweep", "blocks": {}}', "schema 2; this version of disagg-sim reads schema 1"),
        *(
            (f'{{"schema": 1, "holds": "sweep", "blocks": {{"{group}": {{"{name}": ""}}}}}}', "store.json: damaged")
            for group, name in [
                ("../x", "y"),
                ("points/..", "y"),
                ("points//etc", "y"),
                ("points", "y"),
                ("points/x", "../y"),
                ("points/x", ".y"),
                ("points/x", ""),
            ]
        ),
    ],
)
def test_what_is_no_store_is_one_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / "store.json").write_text(text)
    with pytest.raises(InputError, match=said):
        check_store(tmp_path)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [".lock", "figures", "points/apples", "pieces/four/run", "points"])
def test_no_link_leads_out_of_the_directory(store, whole, tmp_path_factory,
                                            monkeypatch, name):  # fmt: skip
    """Somebody who unpacks results wants nothing beside them changed: no file emptied, no block removed or merged."""
    foreign, link = tmp_path_factory.mktemp("foreign") / "kept", store.root / name
    if name == ".lock":
        foreign.write_text("precious")
    else:
        shutil.copytree(whole / "points", foreign)
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(foreign)
    if name == "points":  # of another account
        monkeypatch.setattr(os, "getuid", lambda: link.lstat().st_uid + 1)
    before = tree(foreign.parent)
    own = Own(("points",), set(), lambda _: None)
    run = opened(store.root, Mock(), overwrite=True, noun="scenario", own=own)
    said = rf"{name}: (a link to another directory|cannot be locked.* it is a link)"
    with pytest.raises(StoreError, match=said), run:
        pass
    if name != "points":
        with pytest.raises(StoreError, match=said):
            check_store(store.root)
    assert tree(foreign.parent) == before


def test_a_table_may_be_a_link_to_a_scratch_disk(store, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch") / "points"
    shutil.move(store.root / "points", scratch)
    (store.root / "points").symlink_to(scratch)
    assert not check_store(store.root).faults


def test_results_that_cannot_be_written_are_checked(store, monkeypatch):
    """Several at once, with the lock of their last run and without it; nothing is opened to be written."""
    opening = os.open

    def archive(path: str, flags: int, *more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opening(path, flags, *more)

    with locked(store.root):
        pass
    monkeypatch.setattr(os, "open", archive)
    with locked(store.root, reading=True):
        assert not check_store(store.root).faults
    (store.root / ".lock").unlink()
    assert not check_store(store.root).faults
    with pytest.raises(StoreError, match="cannot be locked against a second run: Read-only file system"):
        locked(store.root).__enter__()


def test_a_check_and_a_run_do_not_meet(store):
    with locked(store.root), pytest.raises(StoreError, match="another run is writing there;"):
        check_store(store.root)
    with locked(store.root, reading=True), pytest.raises(StoreError, match="or a check reads"):
        locked(store.root).__enter__()


def test_a_pipe_in_the_place_of_a_block_is_not_waited_for(store):
    store.path(KEYS[0]).unlink()
    os.mkfifo(store.path(KEYS[0]))
    (fault,) = check_store(store.root).faults
    assert str(fault.path) == str(KEYS[0].relative)


def test_a_manifest_names_no_table_outside(store):
    write_index(store.root, "sweep", KEYS)
    (store.root / "manifest.json").write_text(json.dumps({"cases": [], "tables": {"../secret.csv": "0" * 64}}))
    (fault,) = check_store(store.root).faults
    assert "damaged: not the manifest of a sweep" in fault.said


def test_several_blocks_in_a_file_are_one_line(store):
    """Of earlier releases: nothing is removed, nor computed beside them."""
    path = store.path(KEYS[0]).with_stem("red-0000-0003")
    write_parquet(table(0), path, {"disagg_sim.parts": "[]"})
    own = Own(("points",), set(KEYS), lambda _: None)
    with pytest.raises(StoreError, match=f"{path}: holds blocks that"):
        check_store(store.root)
    run = opened(store.root, Mock(), overwrite=False, noun="scenario", own=own)
    with pytest.raises(StoreError, match=f"{path}: holds blocks that"), run:
        pass
    assert path.exists()


def test_unlike_tables_do_not_join(tmp_path):
    write_parquet(table(0), tmp_path / "a", {})
    write_parquet(table(0).astype({"weight": int}), tmp_path / "b", {})
    with pytest.raises(ValueError, match="the columns or categories of its 2 parts differ"):
        join_parquet([tmp_path / "a", tmp_path / "b"], tmp_path / "c", {})
