"""Files of requests that are read a window at a time."""

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.errors import InputError, TraceError
from disagg_sim.parquet import write_parquet

ROWS = pd.DataFrame(
    {"arrival_s": 7.25 + np.cumsum(np.tile([0.1, 0.0, 2.7], 20)), "input_tokens": np.arange(1, 61), "output_tokens": 9}
)


def written(folder, kind, rows=ROWS):
    path = folder / f"day{kind}"
    if kind == ".parquet":
        write_parquet(rows, path, {})
    elif kind == ".csv":
        rows.to_csv(path, index=False)
    else:
        rows.to_json(path, orient="records", lines=True, double_precision=15)
    return path


@pytest.mark.parametrize(("kind", "window"), [(".parquet", 7), (".jsonl", 1), (".csv", 60)])
def test_a_file_in_windows_is_the_file_read_at_once(tmp_path, kind, window):
    """As ``load_trace`` reads the same rows as CSV; the first so many of them, too."""
    whole, path = ds.load_trace(written(tmp_path, ".csv")), written(tmp_path, kind)
    for count in (None, 20):
        stream = ds.stream_trace(path, window=window, requests=count)
        assert max(map(len, stream.windows())) <= window
        found = stream.whole()
        for column in ("arrival", "input_tokens", "output_tokens"):
            np.testing.assert_array_equal(getattr(found, column), getattr(whole, column)[:count])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"output_tokens": 0}, "request 1: output_tokens '0'; allowed: whole numbers from 1 to"),
        ({"input_tokens": 1.5}, "request 1: input_tokens '1.5'; allowed: whole numbers from 1"),
        ({"arrival_s": -1.0}, "request 1: arrival_s '-1.0'; allowed: numbers from 0 s on"),
    ],
)
def test_a_fault_of_a_row_is_one_line(tmp_path, change, fault):
    path = written(tmp_path, ".parquet", ROWS.assign(**change))
    with pytest.raises(TraceError, match=fault):
        len(ds.stream_trace(path))


def test_a_fault_of_a_file_is_one_line(tmp_path):
    path = written(tmp_path, ".parquet", ROWS.rename(columns={"arrival_s": "arrivals"}))
    with pytest.raises(TraceError, match="no column 'arrival_s', did you mean 'arrivals'"):
        len(ds.stream_trace(path))
    for name in ("none.parquet", "none.csv", "none.jsonl"):
        with pytest.raises(TraceError, match=f"{name}: cannot be read: "):
            len(ds.stream_trace(tmp_path / name))
    with pytest.raises(TraceError, match=r"day.xlsx: cannot be read in windows; allowed: .parquet, .jsonl, .csv"):
        ds.stream_trace("day.xlsx")


@pytest.mark.parametrize(
    ("kind", "scale", "unit"), [(".parquet", 1e3, "ms"), (".jsonl", 1e6, "us"), (".csv", 1e9, "ns")]
)
def test_dates_in_another_unit_than_seconds_are_asked_for(tmp_path, kind, scale, unit):
    """As whole traces do; 1.7e12 s would be 54,000 years."""
    dated = ROWS.assign(arrival_s=(1.7e9 + ROWS["arrival_s"]) * scale)
    with pytest.raises(TraceError, match=f"looks like a date in {unit} since 1970.*windows take s alone: divide"):
        ds.stream_trace(written(tmp_path, kind, dated)).whole()
    assert (
        ds.stream_trace(written(tmp_path, kind, dated.assign(arrival_s=dated["arrival_s"] / scale))).whole().arrival[0]
        == 0
    )


@pytest.mark.parametrize("kind", [".parquet", ".csv"])
def test_a_file_without_rows_is_one_line(tmp_path, kind):
    with pytest.raises(InputError, match="trace day has no request; allowed: one or more"):
        ds.stream_trace(written(tmp_path, kind, ROWS.head(0))).whole()
