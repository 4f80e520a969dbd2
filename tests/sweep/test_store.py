"""The store keeps toy tables; it knows no word of the domain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from disagg_sim.errors import StoreError
from disagg_sim.sweep.store import Key, State, Store

KEY = Key("points", "apples", "3", "digest-1")
FRAME = pd.DataFrame({"weight": [0.1, 0.2, 1e300], "name": ["a", "b", "c"]})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    held = Store(tmp_path / "out")
    held.prepare()
    return held


def test_a_block_comes_back_with_its_note(store: Store) -> None:
    frame = FRAME.copy()
    frame.attrs = {"limit": float("inf"), "name": "x", "count": 3}
    store.write(KEY, frame, '{"count": 3}')
    assert store.read(KEY).attrs == frame.attrs
    assert store.state(KEY) is State.STORED
    assert store.note(KEY) == '{"count": 3}'
    pd.testing.assert_frame_equal(store.read(KEY), FRAME)
    assert store.read(KEY, columns=["weight"]).columns.tolist() == ["weight"]


def test_another_digest_makes_a_block_stale(store: Store) -> None:
    store.write(KEY, FRAME, "{}")
    assert store.state(Key("points", "apples", "3", "digest-2")) is State.STALE
    assert store.state(Key("points", "apples", "4", "digest-1")) is State.MISSING


def test_every_truncation_is_seen(store: Store) -> None:
    store.write(KEY, FRAME, "{}")
    path = store.path(KEY)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert store.state(KEY) is State.CORRUPT, length


def test_a_flipped_bit_in_the_data_is_seen(store: Store) -> None:
    frame = pd.DataFrame({"x": range(5000)})
    store.write(KEY, frame, "{}")
    path = store.path(KEY)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 0x10
    path.write_bytes(bytes(whole))
    assert store.state(KEY) is State.CORRUPT


def test_a_foreign_file_in_the_place_of_a_block_is_corrupt(store: Store) -> None:
    store.write(KEY, FRAME, "{}")
    FRAME.to_parquet(store.path(KEY))
    assert store.state(KEY) is State.CORRUPT


def test_clean_removes_halves_and_our_own_unplanned_blocks_only(store: Store) -> None:
    other = Key("points", "pears", "0", "d")
    for key in (KEY, other):
        store.write(key, FRAME, "{}")
    half = store.path(KEY).with_name(".0003.parquet.99.tmp")
    half.write_bytes(b"PAR1")
    foreign = store.root / "points" / "notes" / "mine.parquet"
    foreign.parent.mkdir()
    FRAME.to_parquet(foreign)
    assert store.clean(("points",), {KEY.relative}) == 1
    assert store.state(KEY) is State.STORED
    assert store.state(other) is State.MISSING
    assert not half.exists()
    assert not store.path(other).parent.exists()
    assert foreign.exists()


def test_a_second_run_is_refused_while_the_first_lives(store: Store) -> None:
    hold = f"""
import sys, time
from pathlib import Path
from disagg_sim.sweep.store import Store
with Store(Path({str(store.root)!r})).lock():
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another run"), store.lock():
            pass
        first.kill()
    with store.lock():  # the lock died with its process
        pass


def test_a_file_in_the_place_of_the_directory_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match="cannot write results there"):
        Store(tmp_path / "out").prepare()
