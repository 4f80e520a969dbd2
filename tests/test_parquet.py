"""Tables come back from Parquet files as they were written, whatever stands in them and wherever the file lies."""

import os
import random
import signal
import time
from threading import Timer

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg_sim.parquet import parquet_metadata, read_parquet, write_parquet

#: Texts with what a query could take for its own.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=8)
ROWS = st.tuples(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.none() | TEXTS,
    st.sampled_from(["memory", 'it\'s "compute"', "never"]),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, min_size=1, max_size=5), note=TEXTS, name=TEXTS.filter(bool))
def test_every_value_survives(rows, note, name, tmp_path):
    columns = dict(zip(("x", "n", "yes", "word", "bound"), zip(*rows, strict=True), strict=True))
    frame = pd.DataFrame(columns).astype({"word": "str" if pd.__version__ >= "3" else object, "yes": bool})
    frame["bound"] = pd.Categorical(columns["bound"], categories=["memory", "never", 'it\'s "compute"'])
    frame = frame.rename(columns={"x": f"x {name}"})
    write_parquet(frame, tmp_path / "a.parquet", {"note": note})
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet"), frame)
    assert parquet_metadata(tmp_path / "a.parquet")["note"] == note


@pytest.mark.parametrize("type_", ["int8", "uint8", "int16", "int32", "uint32", "uint64", "float32", "float64", "bool"])
def test_types_of_numbers_stay(type_, tmp_path):
    frame = pd.DataFrame({"a": np.array([0, 1, 1], dtype=type_)})
    write_parquet(frame, tmp_path / "a.parquet", {})
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet"), frame)
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet", columns=["a"]), frame)


def test_a_table_without_rows_keeps_its_columns(tmp_path):
    kinds = pd.Categorical([], categories=["one"])
    frame = pd.DataFrame({"a": np.array([], dtype=float), "kind": kinds})
    write_parquet(frame, tmp_path / "a.parquet", {})
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet"), frame)


@pytest.mark.parametrize("place", ["a[1]b", "every*", "what?", "it's", "key=value", "[*]?", "{x}", "a\\b"])
def test_a_name_is_no_pattern_and_tells_no_column(place, tmp_path):
    """Signs of shell patterns, quotes, and what partitioned tables would take for a column."""
    for folder in (place, "a1b", "every thing", "whats"):
        (tmp_path / folder).mkdir()
        write_parquet(pd.DataFrame({"here": [folder]}), tmp_path / folder / f"{folder}.parquet", {"at": folder})
    path = tmp_path / place / f"{place}.parquet"
    assert read_parquet(path).to_dict("list") == {"here": [place]}
    assert parquet_metadata(path)["at"] == place


def test_what_is_no_table_is_one_line(tmp_path):
    (tmp_path / "text.parquet").write_text("no table at all, but long enough to have a footer")
    for path, kind in ((tmp_path / "text.parquet", ValueError), (tmp_path, ValueError), (tmp_path / "no", OSError)):
        with pytest.raises(kind) as told:
            read_parquet(path)
        assert "\n" not in str(told.value)
    write_parquet(pd.DataFrame({"a": [1]}), tmp_path / "a.parquet", {})
    with pytest.raises(ValueError, match="b"):
        read_parquet(tmp_path / "a.parquet", columns=["b"])


@pytest.mark.parametrize("reads", [False, True])
def test_ctrl_c_is_never_taken_for_a_fault(reads, tmp_path):
    """DuckDB looks for signals while it runs, and raises errors of its own: half of all interrupts were lost."""
    frame = pd.DataFrame(np.random.default_rng(7).random((20_000, 12))).rename(columns=str)
    path, dice = tmp_path / "a.parquet", random.Random(7)
    began = time.perf_counter()
    write_parquet(frame, path, {})
    lasts = time.perf_counter() - began

    def again_and_again(interrupt: Timer) -> None:
        interrupt.start()
        while True:
            read_parquet(path) if reads else write_parquet(frame, tmp_path / "b.parquet", {})

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            again_and_again(Timer(dice.random() * lasts, os.kill, (os.getpid(), signal.SIGINT)))
    pd.testing.assert_frame_equal(read_parquet(path), frame)
