"""Sessions of trace files and traces: turns, think times, cuts and rates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import InputError, TraceError
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.request_columns import Sessions
from disagg_sim.workload.scaling import at_rate
from disagg_sim.workload.statistics import trace_statistics
from disagg_sim.workload.trace import Trace, mix

HEADER = "arrival_s,input_tokens,output_tokens,session,think_s\n"


def read(folder, text: str, **options) -> Trace:
    path = folder / "log.csv"
    path.write_text(text)
    return load_trace(path, **options)


def test_empty_arrivals_are_filled_as_if_turns_were_served_at_once(tmp_path):
    text = HEADER + "10,100,5,a,\n11,50,5,b,\n,130,5,a,4.5\n,70,5,b,0.5\n12,9,9,,\n,160,5,a,1\n"
    trace = read(tmp_path, text)
    assert trace.input_tokens.tolist() == [100, 50, 70, 9, 130, 160]
    assert trace.arrival.tolist() == [0.0, 1.0, 1.5, 2.0, 4.5, 5.5]
    assert trace.sessions.previous().tolist() == [-1, -1, 1, -1, 0, 4]
    assert trace.sessions.think_s.tolist() == [0.0, 0.0, 0.5, 0.0, 4.5, 1.0]
    assert trace.notes[1] == "3 sessions: 3 later turns wait for the turn before and a think time"
    found = trace_statistics(trace).sessions
    assert (found.sessions, found.turns, found.most_turns, found.think_p50_s) == (3, 2.0, 3, 1.0)
    back = read(tmp_path, trace.frame().to_csv(index=False))  # the frame is the plain form
    assert back.arrival.tolist() == trace.arrival.tolist()
    assert back.sessions.previous().tolist() == trace.sessions.previous().tolist()


def test_recorded_arrivals_of_later_turns_stay_and_both_times_have_one_unit(tmp_path):
    text = HEADER + "10000,100,5,a,\n19000,130,5,a,4500\n"
    trace = read(tmp_path, text, time_unit="ms")
    assert trace.arrival.tolist() == [0.0, 9.0]
    assert trace.sessions.think_s.tolist() == [0.0, 4.5]
    assert read(tmp_path, text, time_unit="ms", sessions=False).sessions is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "1,5,5,a,\n,5,5,a,\n", "log.csv:3: no value of 'think_s'"),
        (HEADER + "1,5,5,a,\n,5,5,a,-2\n", "log.csv:3: think_s '-2' is negative"),
        (HEADER + ",5,5,a,\n", "log.csv:2: no value of 'arrival_s'"),
        (HEADER + "5,5,5,a,\n4,5,5,a,1\n", "log.csv:3: arrival_s '4' lies before the turn before it"),
        (HEADER[:-1] + ",turn\n1,5,5,a,0,2\n,5,5,a,1,1\n", "log.csv:3: turn '1' is not above that of the turn before"),
    ],
)
def test_a_faulty_session_is_one_line(tmp_path, text, said):
    with pytest.raises(TraceError, match=said):
        read(tmp_path, text)


def test_think_times_of_burstgpt_begin_where_the_answer_ended(tmp_path):
    """Of session 7 the second request comes 6 s after the first answer; of session 8 before it: no wait."""
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "10,7,4,ChatGPT,100,50,150,Conversation log\n12,8,9,ChatGPT,100,50,150,Conversation log\n"
        "20,7,3,ChatGPT,200,50,250,Conversation log\n20,8,3,ChatGPT,200,50,250,Conversation log\n"
        "21,,1,GPT-4,30,5,35,API log\n"
    )
    trace = read(tmp_path, text)
    assert trace.arrival.tolist() == [0, 2, 10, 10, 11]
    assert trace.sessions.previous().tolist() == [-1, -1, 0, 1, -1]
    assert trace.sessions.think_s.tolist() == [0, 0, 6, 0, 0]
    assert read(tmp_path, text, sessions=False).sessions is None


@st.composite
def traces(draw) -> Trace:
    """At least 40 requests in sessions of up to 4 turns; think time and input tell each turn."""
    rows = []
    for number in range(40):
        at = draw(st.floats(0.0, 600.0))
        for turn in range(draw(st.integers(1, 4))):
            at += 7.0 * turn
            rows.append((at, number, turn))
    rows.sort(key=lambda row: row[0])
    arrival, number, turn = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(
        arrival=arrival,
        input_tokens=100 * number + turn + 1,
        output_tokens=np.ones(len(rows)),
        sessions=Sessions(session=number, think_s=7.0 * turn),
    )


def told(trace: Trace) -> dict[int, list[tuple[float, int]]]:
    """Session -> its turns: time since its begin, number of the turn."""
    found: dict[int, list[tuple[float, int]]] = {}
    begin = trace.arrival[trace.sessions.first()]
    for row, session in enumerate(trace.sessions.session.tolist()):
        turn = int(trace.input_tokens[row]) % 100 - 1
        assert trace.sessions.think_s[row] == 7.0 * turn
        found.setdefault(session, []).append((round(float(trace.arrival[row] - begin[row]), 6), turn))
    return found


@given(trace=traces(), rate=st.floats(0.1, 4.0), by=st.sampled_from(["time", "requests"]), seed=st.integers(0, 5))
def test_every_rate_keeps_sessions_whole_and_their_inside(trace, rate, by, seed):
    """Compressed time begins sessions faster and makes nobody think faster."""
    found = told(at_rate(trace, rate, by, seed=seed))
    whole = {tuple(turns) for turns in told(trace).values()}
    assert {tuple(turns) for turns in found.values()} <= whole
    if by == "requests":
        assert sum(map(len, found.values())) == pytest.approx(rate * len(trace), abs=2)  # half a session of 4 turns
    else:
        assert len(found) == 40


def test_a_part_begins_a_session_with_its_first_turn_inside():
    trace = Trace(
        arrival=[0.0, 5.0, 9.0], input_tokens=[1, 2, 3], output_tokens=[1, 1, 1],
        sessions=Sessions(session=[4, 4, 4], think_s=[0.0, 5.0, 4.0]),
    )  # fmt: skip
    part = trace.between(4.0, 20.0)
    assert part.sessions.previous().tolist() == [-1, 0]
    assert trace.head(2).sessions.previous().tolist() == [-1, 0]
    mixed = mix([trace, replace(trace, sessions=None)], [1.0, 1.0], np.random.default_rng(0))
    assert sorted(np.bincount(mixed.sessions.session).tolist(), reverse=True)[:4] == [3, 1, 1, 1]


def test_think_times_below_0_are_refused():
    with pytest.raises(InputError, match="0 s or more"):
        Sessions(session=[0, 0], think_s=[0.0, -1.0])
