"""Time columns: any zero, any unit, dates; never a trace of 50,000 years that nobody asked for."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim import Trace, load_trace
from disagg_sim.errors import InputError, TraceError

CSV = "arrival_s,input_tokens,output_tokens\n"
#: 2023-11-14 22:13:20 UTC. [s]
EPOCH = 1_700_000_000


def table(tmp_path: Path, *stamps: object, header: str = CSV) -> Path:
    path = tmp_path / "requests.csv"
    path.write_text(header + "".join(f"{stamp},10,2\n" for stamp in stamps))
    return path


@given(
    gaps=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    zero=st.integers(0, 10**8),
    unit=st.sampled_from(["s", "ms", "us"]),
)
def test_the_zero_of_a_clock_and_its_unit_do_not_matter(tmp_path_factory, gaps, zero, unit):
    """The same requests, whatever the clock shows and counts in."""
    tmp_path, at = tmp_path_factory.mktemp("clock"), sorted(gaps)
    scale = {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    trace = load_trace(table(tmp_path, *((zero + each) * scale for each in at)), time_unit=unit)
    assert trace.arrival.tolist() == pytest.approx([each - at[0] for each in at], abs=1e-6)


def test_seconds_since_1970_start_at_0_and_a_note_has_the_date(tmp_path):
    trace = load_trace(table(tmp_path, EPOCH + 2.5, EPOCH + 4))
    assert trace.arrival.tolist() == [0.0, 1.5]
    stamp = "arrival_s 1700000002.5 s (2023-11-14T22:13:22 UTC)"
    assert trace.notes == (f"arrivals count from the first request, which is at {stamp} in the file",)


@pytest.mark.parametrize(("unit", "scale"), [("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_a_clock_in_another_unit_is_asked_for_not_guessed(tmp_path, unit, scale):
    path = table(tmp_path, EPOCH * scale, (EPOCH + 3) * scale)
    said = f"arrival_s {EPOCH * scale} looks like a date in {unit} since 1970.*time_unit: {unit}"
    with pytest.raises(TraceError, match=said):
        load_trace(path)
    assert load_trace(path, time_unit=unit).arrival.tolist() == [0.0, pytest.approx(3.0, abs=1e-6)]


def test_milliseconds_of_mooncake_may_be_seconds(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [{"timestamp": EPOCH + at, "input_length": 5, "output_length": 2} for at in (0, 3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    said = "timestamp 1700000000 looks like a date in s since 1970, and would be taken for ms"
    with pytest.raises(TraceError, match=said):
        load_trace(path)
    assert load_trace(path, time_unit="s").arrival.tolist() == [0.0, 3.0]
    assert load_trace(path, time_unit="ms").arrival.tolist() == [0.0, 0.003]  # as the user says


def test_dates_are_understood_in_every_table_and_have_no_unit(tmp_path):
    start = datetime(2024, 5, 10, tzinfo=UTC)
    path = table(tmp_path, *(start + timedelta(seconds=each) for each in (0, 0.25, 90)))
    assert load_trace(path).arrival.tolist() == [0.0, 0.25, 90.0]
    with pytest.raises(TraceError, match="holds dates and times, which have no time_unit 'ms'"):
        load_trace(path, time_unit="ms")


def test_zones_of_dates_count(tmp_path):
    path = table(tmp_path, "2024-05-10T12:00:00+02:00", "2024-05-10T10:00:05Z", "2024-05-10 10:00:07")
    assert load_trace(path).arrival.tolist() == [0.0, 5.0, 7.0]


def test_the_first_request_that_is_kept_is_the_first(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(CSV + "5,10,0\n9,10,2\n7,10,2\n")
    trace = load_trace(path)
    assert trace.arrival.tolist() == [0.0, 2.0]
    assert trace.notes[-1].endswith("at arrival_s 7 s in the file")


def test_a_pause_of_years_is_told(tmp_path):
    trace = load_trace(table(tmp_path, 0, 10, 10 + 2 * 365 * 86_400))
    assert trace.notes == (
        "warning: no request arrives for 730 days from 10 s on; from_s and to_s, or Trace.between, take a part",
    )


def test_clock_times_in_an_array_are_refused_with_what_to_do():
    said = r"an arrival at 1.7e\+09 s is out of range.*from the first arrival \(at 1.7e\+09 s"
    with pytest.raises(InputError, match=said):
        Trace(arrival=[EPOCH, EPOCH + 1], input_tokens=[1, 1], output_tokens=[1, 1])


# --- columns ------------------------------------------------------------------------------------------------------

OTHER = "ts,id,prompt_len,gen_len\n"
ROLES = {"arrival": "ts", "input_tokens": "prompt_len", "output_tokens": "gen_len"}


def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.csv"
    path.write_text(OTHER + "3,a,10,2\n4,a,20,4\n")
    return path


def test_columns_say_what_other_headers_mean(tmp_path):
    trace = load_trace(other(tmp_path), columns=ROLES)
    assert trace.arrival.tolist() == [0, 1]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 20], [2, 4])
    same = load_trace(other(tmp_path), "burstgpt", columns=ROLES)
    assert same.arrival.tolist() == [0, 1]


def test_what_columns_leave_out_keeps_its_name(tmp_path):
    path = table(tmp_path, 0, 1, header="ts,input_tokens,output_tokens\n")
    assert len(load_trace(path, columns={"arrival": "ts"})) == 2


def test_a_table_without_arrivals_takes_columns_too(tmp_path):
    lengths = {"input_tokens": "prompt_len", "output_tokens": "gen_len"}
    drawn = load_trace(other(tmp_path), "lengths", columns=lengths, rate=2.0)
    assert drawn.input_tokens.tolist() == [10, 20]
    assert load_trace(other(tmp_path), "lengths", columns=ROLES).arrival.tolist() == [0, 1]


def test_forms_with_fixed_keys_take_no_columns(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}')
    with pytest.raises(TraceError, match="a trace of JSON lines takes no columns"):
        load_trace(path, columns=ROLES)
