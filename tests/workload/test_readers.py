"""Readers of files, whole or in windows: their forms, and one line with file and line for a faulty one."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim import load_trace
from disagg_sim.errors import InputError, TraceError
from disagg_sim.parquet import write_parquet
from disagg_sim.workload.readers import columns
from disagg_sim.workload.readers.aliases import spread_batches

CSV = "arrival_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(tmp_path: Path, text: str | bytes, name: str = "requests.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(trace):
    return list(zip(trace.arrival.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_plain_csv_starts_with_its_first_request(tmp_path):
    trace = load_trace(write(tmp_path, "output_tokens, input_tokens,x,arrival_s\n7,5,a,1.5\n8,6,b,2e0\n\n"))
    assert rows(trace) == [(0.0, 5, 7), (0.5, 6, 8)]
    note = "arrivals count from the first request, which is at arrival_s 1.5 s in the file"
    assert (trace.name, trace.notes, trace.dropped) == ("requests", (note,), 0)


def test_a_frame_written_as_csv_reads_back(tmp_path):
    trace = load_trace(write(tmp_path, CSV + "0,5,7\n1.25,6,8\n"))
    trace.frame().to_csv(tmp_path / "again.csv", index=False)
    assert rows(load_trace(tmp_path / "again.csv")) == rows(trace)


def test_azure_counts_from_the_first_stamp(tmp_path):
    text = AZURE + "2023-11-16 23:59:59.9000000,374,44\r\n2023-11-17 00:00:01.1500001,396,109"
    for path in (write(tmp_path, text), write(tmp_path, gzip.compress(text.encode()), "a.csv.gz")):
        trace = load_trace(path)
        assert rows(trace) == [(0.0, 374, 44), (pytest.approx(1.2500001, abs=1e-9), 396, 109)]


def test_burstgpt_in_both_forms_drops_failures(tmp_path):
    first = load_trace(write(tmp_path, BURST + "5,ChatGPT,472,18,490,API log\n45,GPT-4,30,0,30,API log\n"))
    third = load_trace(write(tmp_path, BURST_3 + "5,,1,ChatGPT,472,18,490,API log\n45,a,2,GPT-4,0,0,0,API log\n"))
    for trace in (first, third):
        assert rows(trace) == [(0.0, 472, 18)]
        assert trace.dropped == 1
        assert trace.notes == (
            "dropped 1 of 2 rows with zero input or output tokens",
            "arrivals count from the first request, which is at Timestamp 5 s in the file",
        )


def test_a_first_arrival_at_0_and_a_single_request_work(tmp_path):
    assert rows(load_trace(write(tmp_path, CSV + "0,1,1"))) == [(0.0, 1, 1)]


def test_unsorted_arrivals_are_sorted_with_a_warning(tmp_path):
    trace = load_trace(write(tmp_path, CSV + "0,1,1\n3,2,2\n2,3,3\n3,4,4\n"))
    assert trace.input_tokens.tolist() == [1, 3, 2, 4]
    assert trace.notes == ("warning: arrivals were not sorted (first at request 3); sorted",)


def test_a_table_without_arrivals_gets_poisson_ones(tmp_path):
    path = write(
        tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n5,6,11,0.8\n7,0,7,inf\n9,1,10,9\n"
    )
    with pytest.raises(TraceError, match="give a rate"):
        load_trace(path)
    trace = load_trace(path, rate=2.0, seed=3)
    assert trace.input_tokens.tolist() == [5, 9]
    assert trace.dropped == 1
    assert "Poisson arrivals at 2 requests/s with seed 3" in trace.notes[0]
    assert trace.arrival.tolist() != load_trace(path, rate=2.0, seed=4).arrival.tolist()


def test_an_azure_table_whose_times_are_crossed_out_has_none(tmp_path):
    path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,107,15\nXXX,396,513\n")
    assert load_trace(path, rate=1.0).output_tokens.tolist() == [15, 513]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CSV + "0,1,1\n1,2\n", ":3: no value of 'output_tokens'"),
        (CSV + '0,1,1\n1,"2,3\n', ":3: malformed: a quotation mark"),
        (CSV + "0,1,1\n\n1,-2,3\n", ":4: input_tokens '-2' is negative"),
        (CSV + "0,0,1\n1,1,0\n", "all 2 rows have zero tokens"),
        (CSV, "no line below the header"),
        ("arrival_s,input_token,output_tokens\n0,1,1\n", ":1: no column 'input_tokens', did you mean 'input_token'?"),
        ("arrival_s,input_tokens,input_tokens\n0,1,2\n", ":1: column 'input_tokens' occurs twice in the header"),
        (AZURE + "2023-11-16 18:17:03.97,1,1\r\nyesterday,1,1\r\n", ":3: TIMESTAMP 'yesterday' is not a date"),
        (CSV.encode() + b"0,1,1\n\xff,1,1\n", ":3: not a text file in UTF-8: invalid start byte (0xff)"),
        (b"PK\x03\x04abc", "a zip archive; unpack it"),
        (CSV + "2024-05-10,1,1\n7,1,1\n", ":3: arrival_s '7' is not a date and time, as the rows before it are"),
        (gzip.compress(CSV.encode() * 99, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_faulty_table_is_one_line_with_its_number(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as error:
        load_trace(path)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


OPENAI = {"created": 1_700_000_000, "model": "small", "usage": {"prompt_tokens": 512, "completion_tokens": 16}}
LANGFUSE = {"startTime": "2026-05-29T13:46:19.500Z", "type": "GENERATION", "input": "Why?", "output": "So."}
HALF_A_SECOND_ON = {"startTime": "2026-05-29T13:46:20.000Z", "promptTokens": 64, "completionTokens": 20}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("requestTimestampMs,isl,osl\n7000,512,16\n7500,64,20\n", "requestTimestampMs isl osl"),
        ("arrival_s,prompt_len,output_tokens\n7,512,16\n7.5,64,20\n", "arrival_s prompt_len output_tokens"),
        (
            "start_time,type,input,usage_details\n"
            '2026-05-29 13:46:19.500000,GENERATION,Why?,"{""input"":512,""output"":16}"\n'
            '2026-05-29 13:46:20.000000,GENERATION,How?,"{""input"":64,""output"":20}"\n',
            "start_time usage_details.input usage_details.output",
        ),
        (
            "gen_ai.usage.input_tokens,gen_ai.usage.output_tokens,timestamp\n512,16,1\n64,20,1.5\n",
            "timestamp gen_ai.usage.input_tokens gen_ai.usage.output_tokens",
        ),
        (
            json.dumps([LANGFUSE | {"promptTokens": 512, "completionTokens": 16}, HALF_A_SECOND_ON], indent=1),
            "startTime promptTokens completionTokens",
        ),
        (
            json.dumps(OPENAI)
            + "\n"
            + json.dumps(
                OPENAI | {"created": 1_700_000_000.5, "usage": {"prompt_tokens": 64, "completion_tokens": 20}}
            ),
            "created usage.prompt_tokens usage.completion_tokens",
        ),
    ],
)
def test_columns_of_other_tools_are_taken_and_said(tmp_path, text, taken):
    """Two requests, half a second apart."""
    trace = load_trace(write(tmp_path, text, "log.txt"))
    assert trace.arrival.tolist() == [0.0, 0.5]
    assert trace.input_tokens.tolist() == [512, 64]
    assert trace.output_tokens.tolist() == [16, 20]
    assert trace.models is None
    (line,) = [note for note in trace.notes if note.startswith("columns: ")]
    places = [line.index(f"{name!r} as") for name in taken.split()]
    assert places == sorted(places)


def test_times_under_the_names_of_mooncake_are_milliseconds_in_a_table_too(tmp_path):
    trace = load_trace(write(tmp_path, "timestamp,input_length,output_length\n0,512,16\n500,64,20\n"))
    assert trace.arrival.tolist() == [0.0, 0.5]
    assert "'timestamp' as arrival in ms, 'input_length' as input_tokens" in trace.notes[0]


def test_lengths_of_other_tools_without_times_get_drawn_ones(tmp_path):
    path = write(tmp_path, "prompt_tokens,completion_tokens\n512,16\n64,20\n")
    with pytest.raises(TraceError, match="no arrival times in the file"):
        load_trace(path)
    assert load_trace(path, rate=2.0).input_tokens.tolist() == [512, 64]


def test_a_time_unit_that_is_named_counts_before_that_of_a_header(tmp_path):
    path = write(tmp_path, "start_ms,isl,osl\n7,512,16\n8,64,20\n")
    assert load_trace(path, time_unit="s").arrival.tolist() == [0.0, 1.0]


def mooncake(*records: object) -> str:
    return "\n".join(json.dumps(each) for each in records)


def record(at: float, inputs: int = 600, outputs: int = 4, **more: object) -> dict[str, object]:
    return {"timestamp": at, "input_length": inputs, "output_length": outputs, **more}


#: A good request, which another line follows; and one whose length is to be filled in.
GOOD, LONG = mooncake(record(0)) + "\n", '{"timestamp": 0, "input_length": %s, "output_length": 3}\n'


def test_mooncake_spreads_batches_or_leaves_them(tmp_path):
    lines = [record(at, hash_ids=[0, place + 1]) for place, at in enumerate((0, 0, 0, 3000, 3000, 6000))]
    path = write(tmp_path, mooncake(*lines), "m.jsonl")
    assert load_trace(path).arrival.tolist() == [0.0, 1.0, 2.0, 3.0, 4.5, 6.0]
    as_is = load_trace(path, spread=False)
    assert as_is.arrival.tolist() == [0.0, 0.0, 0.0, 3.0, 3.0, 6.0]
    assert as_is.prefix.ids.tolist() == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6]
    assert as_is.prefix.block_tokens == 512


def test_a_pause_does_not_stretch_the_batch_before_it():
    times, instants = spread_batches(np.array([0.0, 3.0, 6.0, 6.0, 66.0, 66.0]))
    assert times.tolist() == [0.0, 3.0, 6.0, 7.5, 66.0, 67.5]  # the median interval is 3 s
    assert instants == 4
    times, instants = spread_batches(np.array([1.0, 1.0, 5.0, 5.0]))
    assert (times.tolist(), instants) == ([1.0, 3.0, 5.0, 7.0], 2)


def test_blocks_of_dropped_and_sorted_rows_stay_with_their_requests(tmp_path):
    lines = [record(3000, hash_ids=[1, 2]), record(0, hash_ids=[3, 4]), record(1000, outputs=0, hash_ids=[5, 6])]
    trace = load_trace(write(tmp_path, mooncake(*lines), "m.jsonl"))
    assert trace.prefix.ids.tolist() == [3, 4, 1, 2]
    assert trace.dropped == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"ts": 1, "isl": 5, "osl": 6}\n{"ts": 1, "isl": 5', ":2: malformed JSON at column 19"),
        ("[]", "the array is empty"),
        (GOOD + '{"timestamp": 1, "input_lenght": 3, "output_length": 2}', ":2: no key 'input_length', did you mean"),
        (GOOD + '{"timestamp": 1' + 6000 * "0" + "}", ":2: malformed JSON: Exceeds the limit"),
        (GOOD + json.dumps(record(0, hash_ids=[1, 2, 3])), ":2: 3 hash_ids for an input_length of 600"),
        (LONG % ("[" * 10**5 + "]" * 10**5), ":1: malformed: nested too deeply"),
    ],
)
def test_faulty_json_is_one_short_line_with_its_place(tmp_path, text, said):
    with pytest.raises(TraceError) as error:
        load_trace(write(tmp_path, text, "log.jsonl"))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["requests.csv", "requests.csv.gz"])
def test_a_file_that_is_too_large_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    """The same limit for a file, and a packed one, which may be tiny."""
    monkeypatch.setattr(columns, "MOST_BYTES", 10**5)
    text = (CSV + 9999 * "0,10000,10000\n").encode()
    write(tmp_path, gzip.compress(text) if name.endswith("gz") else text, name)
    with pytest.raises(TraceError, match=r"larger than 0 MB.*, the largest file read") as error:
        load_trace(tmp_path / name)
    assert len(str(error.value).splitlines()) == 1


def test_more_rows_than_a_trace_may_have_are_refused_before_they_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MOST_REQUESTS", 99)
    path = write(tmp_path, CSV + 101 * "0,10,10\n")
    with pytest.raises(TraceError, match="102 requests are too many"):
        load_trace(path)
    assert len(load_trace(write(tmp_path, CSV + 99 * "0,10,10\n"))) == 99


def test_rows_of_one_id_are_requests_of_their_own(tmp_path):
    path = write(tmp_path, "request_id," + CSV + "a,0,10,2\na,1,10,2\n")
    assert len(load_trace(path)) == 2


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path, newline, mark):
    path = write(tmp_path, mark + (CSV + "0,10,2\n1,20,4\n").replace("\n", newline))
    assert rows(load_trace(path)) == [(0.0, 10, 2), (1.0, 20, 4)]
    path = write(tmp_path, mark + mooncake(record(0), record(3000)).replace("\n", newline), "m.jsonl")
    assert len(load_trace(path)) == 2


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
