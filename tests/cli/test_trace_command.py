"""``disagg-sim trace stats``."""

import json

import pytest

from disagg_sim.cli.main import run

ROWS = "arrival_s,input_tokens,output_tokens\n0,10,2\n90,30,4\n60,20,3\n95,0,1\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(ROWS)
    return path


def test_stats_as_json_have_null_for_what_is_not_there(trace, capsys):
    assert run(["trace", "stats", str(trace), "--json", "--kind", "csv"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["dropped"], found["duration_s"]) == (3, 1, 90)
    assert found["input_tokens"]["mean"] == 20
    assert found["every_minute"]["minutes"] == 2
    trace.write_text(ROWS.splitlines()[0] + "\n0,10,2\n")
    assert run(["trace", "stats", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate_per_s"] is None


def test_a_table_of_lengths_takes_a_rate(trace, capsys):
    trace.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n")
    assert run(["trace", "stats", str(trace)]) == 2
    assert "--rate" in capsys.readouterr().err
    assert run(["trace", "stats", str(trace), "--rate", "2"]) == 0
    assert "Poisson arrivals at 2 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "mooncak"], "did you mean 'mooncake'"),
        (["--kind", "azure"], "TIMESTAMP"),
        (["--time-unit", "sec"], "did you mean 's'"),
        (["--column", "arrival=arival_s"], "no column 'arival_s', did you mean 'arrival_s'?"),
        (["--column", "arrival_s"], "--column 'arrival_s' is not ROLE=HEADER"),
        (["--column", "begin=arrival_s"], "columns: unknown key 'begin'"),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(trace, capsys, arguments, said):
    assert run(["trace", "stats", str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_other_headers_and_units_have_options(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("ts,prompt,answer\n1700000000000,10,2\n1700000060000,20,4\n")
    headers = [f"--column={each}" for each in ("arrival=ts", "input_tokens=prompt", "output_tokens=answer")]
    assert run(["trace", "stats", str(path), *headers]) == 2
    assert "--time-unit ms" in capsys.readouterr().err
    assert run(["trace", "stats", str(path), *headers, "--time-unit", "ms"]) == 0
    shown = capsys.readouterr().out
    assert "first arrival to last                  60 s" in shown
    assert "ts 1700000000000 ms (2023-11-14T22:13:20 UTC) in the file" in shown
