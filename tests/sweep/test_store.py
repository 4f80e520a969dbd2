"""The store keeps toy tables; it knows no word of the domain."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import duckdb
import numpy as np
import pandas as pd
import pytest

from disagg_sim.errors import InputError, StoreError
from disagg_sim.parquet import join_parquet, parquet_metadata, read_parquet, write_parquet
from disagg_sim.sweep.store import BlockState, Key, Own, Store, locked, opened, read_index

KEY = Key("points", "apples", "3", "digest-1")
FRAME = pd.DataFrame({"weight": [0.1, 0.2, 1e300], "name": ["a", "b", "c"]})


@pytest.fixture
def store(tmp_path):
    held = Store(tmp_path / "out")
    held.prepare()
    return held


def by_another_program(frame: pd.DataFrame, path: Path) -> None:
    """Write a Parquet file that is none of the store's."""
    duckdb.from_df(frame).write_parquet(str(path))


def test_a_block_comes_back_with_its_note_and_its_header(store):
    store.write(KEY, FRAME, '{"count": 3}', '{"limit": 8}')
    assert store.header(KEY) == '{"limit": 8}'
    assert store.state(KEY) is BlockState.STORED
    assert store.note(KEY) == '{"count": 3}'
    pd.testing.assert_frame_equal(store.read(KEY), FRAME)
    assert store.read(KEY, columns=["weight"]).columns.tolist() == ["weight"]


def test_another_digest_makes_a_block_stale(store):
    store.write(KEY, FRAME, "{}")
    assert store.state(Key("points", "apples", "3", "digest-2")) is BlockState.STALE
    assert store.state(Key("points", "apples", "4", "digest-1")) is BlockState.MISSING


def test_every_truncation_is_seen(store):
    store.write(KEY, FRAME, "{}")
    path = store.path(KEY)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert store.state(KEY) is BlockState.CORRUPT, length


def stored_table(store: Store) -> tuple[bytearray, range]:
    """A block of numbers and words, and the bytes of it that hold the table; the rest is what stands beside it."""
    frame = pd.DataFrame({"x": np.arange(5000), "y": np.linspace(0.1, 9.9, 5000), "word": ["some", "words"] * 2500})
    store.write(KEY, frame, '{"count": 5000}')
    data = bytearray(store.path(KEY).read_bytes())
    footer = int.from_bytes(data[-8:-4], "little")  # a Parquet file ends with its footer, the length of that, "PAR1"
    return data, range(4, len(data) - 8 - footer)


@pytest.mark.parametrize("inside_the_table", [False, True])
def test_no_flipped_bit_is_read_and_none_is_a_traceback(store, inside_the_table):
    whole, table = stored_table(store)
    dice, path = random.Random(7), store.path(KEY)
    for _ in range(150):
        at, bit = dice.choice(table if inside_the_table else range(len(whole))), dice.randrange(8)
        hurt = whole.copy()
        hurt[at] ^= 1 << bit
        path.write_bytes(hurt)
        assert store.state(KEY) is BlockState.CORRUPT, (at, bit)
        for read in (store.read, store.note):
            with pytest.raises(StoreError, match="was changed after it was written"):
                read(KEY)
    path.write_bytes(whole)
    assert store.state(KEY) is BlockState.STORED


def other_numbers(path: Path) -> None:
    """Another table with all the metadata of the block."""
    metadata = parquet_metadata(path)
    write_parquet(read_parquet(path).assign(weight=2.0), path, metadata)
    assert parquet_metadata(path) == metadata


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


@pytest.mark.parametrize(
    "hurt",
    [
        other_numbers,
        lambda path: by_another_program(FRAME, path),
        lambda path: path.write_bytes(b"PAR1"),
        in_its_place(os.mkfifo),  # which is not waited for
    ],
)
def test_what_the_store_did_not_write_is_corrupt(store, hurt):
    store.write(KEY, FRAME, "{}")
    hurt(store.path(KEY))
    assert store.state(KEY) is BlockState.CORRUPT


def test_two_writes_of_a_table_are_the_same_bytes_and_any_reader_reads_them(store):
    first, _ = stored_table(store)
    second, _ = stored_table(store)
    assert first == second
    pd.testing.assert_frame_equal(duckdb.read_parquet(str(store.path(KEY))).df(), store.read(KEY))


def test_clean_removes_halves_and_our_own_unplanned_blocks_only(store):
    other = Key("points", "pears", "0", "d")
    for key in (KEY, other):
        store.write(key, FRAME, "{}")
    half = store.path(KEY).with_name(".0003.parquet.99.tmp")
    half.write_bytes(b"PAR1")
    foreign = store.root / "points" / "notes" / "mine.parquet"
    foreign.parent.mkdir()
    by_another_program(FRAME, foreign)
    assert store.clean(("points",), {KEY}) == 1
    assert store.state(KEY) is BlockState.STORED
    assert store.state(other) is BlockState.MISSING
    assert not half.exists()
    assert not store.path(other).parent.exists()
    assert foreign.exists()


def test_a_second_run_is_refused_while_the_first_lives(store):
    hold = f"""
import sys, time
from pathlib import Path
from unittest.mock import Mock
from disagg_sim.sweep.store import locked
with locked(Path({str(store.root)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another run"), locked(store.root):
            pass
        first.kill()
    with locked(store.root):  # the lock died with its process
        pass


def test_a_directory_that_cannot_be_locked_is_one_error(store):
    (store.root / ".lock").mkdir()
    with pytest.raises(StoreError, match="cannot be locked against a second run: Is a directory"), locked(store.root):
        pass


@pytest.mark.parametrize(
    "name", ["summary.md", "frontier.csv", "gain.csv", "manifest.json", "store.json", "perfetto/a/b", "points/mine"]
)
def test_a_file_that_no_run_wrote_is_kept_unless_it_may_be_replaced(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    (tmp_path / "points").mkdir(exist_ok=True)  # says nothing of who wrote the rest
    own = Own(("points",), set(), lambda _: None)
    asked = opened(tmp_path, Mock(), overwrite=False, noun="sweep", own=own)
    with pytest.raises(StoreError, match="is there already, and no run wrote it; give another --out"), asked:
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "points", name.partition("/")[0]}
    for overwrite in (True, False):  # from then on it is a directory of results
        with opened(tmp_path, Mock(), overwrite=overwrite, noun="sweep", own=own):
            assert name == "store.json" or (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no store: store.json is missing"),
        ("{", "store.json: damaged"),
        ('{"schema": 2, "holds": "sweep", "blocks": {}}', "schema 2; this version of disagg-sim reads schema 1"),
        *(
            (f'{{"schema": 1, "holds": "sweep", "blocks": {{"{group}": {{"{name}": ""}}}}}}', "store.json: damaged")
            for group, name in [("../x", "y"), ("points/..", "y"), ("points", "y"), ("points/x", "../y"), ("a/x", ".y")]
        ),
    ],
)
def test_what_is_no_store_is_one_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / "store.json").write_text(text)
    with pytest.raises(InputError, match=said):
        read_index(tmp_path)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [".lock", "perfetto", "points/apples", "pieces/four/run", "points"])
def test_no_link_leads_out_of_the_directory(store, tmp_path_factory, monkeypatch, name):
    """Somebody who unpacks results wants nothing beside them changed: no file emptied, no block removed."""
    store.write(KEY, FRAME, "{}")
    foreign, link = tmp_path_factory.mktemp("foreign") / "kept", store.root / name
    if name == ".lock":
        foreign.write_text("precious")
    else:
        shutil.copytree(store.root / "points", foreign)
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(foreign)
    if name == "points":  # of another account
        monkeypatch.setattr(os, "getuid", lambda: link.lstat().st_uid + 1)
    before = tree(foreign.parent)
    run = opened(store.root, Mock(), overwrite=True, noun="scenario", own=Own(("points",), set(), lambda _: None))
    said = rf"{name}: (a link to another directory|cannot be locked.* it is a link)"
    with pytest.raises(StoreError, match=said), run:
        pass
    assert tree(foreign.parent) == before


def test_a_table_may_be_a_link_to_a_scratch_disk(store, tmp_path_factory):
    store.write(KEY, FRAME, "{}")
    scratch = tmp_path_factory.mktemp("scratch") / "points"
    shutil.move(store.root / "points", scratch)
    (store.root / "points").symlink_to(scratch)
    with locked(store.root, ("points",)):
        assert store.state(KEY) is BlockState.STORED


def test_unlike_tables_do_not_join(tmp_path):
    write_parquet(FRAME, tmp_path / "a", {})
    write_parquet(FRAME.astype({"weight": str}), tmp_path / "b", {})
    with pytest.raises(ValueError, match="the columns or categories of its 2 parts differ"):
        join_parquet([tmp_path / "a", tmp_path / "b"], tmp_path / "c", {})
