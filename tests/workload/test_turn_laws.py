"""Sessions of files and synthetic ones: turns, think times, cuts, rates, and what caches find of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.errors import InputError, TraceError
from disagg_sim.facts.load import load_traffic
from disagg_sim.techniques.prefix.requests_hits import hit_curve, routed
from disagg_sim.workload.lengths import observed_lengths
from disagg_sim.workload.named import lengths_named
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.request_columns import Sessions
from disagg_sim.workload.scaling import at_rate
from disagg_sim.workload.statistics import prefix_hit_rate, trace_statistics
from disagg_sim.workload.synthetic import BLOCK_TOKENS, session_trace
from disagg_sim.workload.trace import Trace
from disagg_sim.workload.turns import TurnCaches, found_by_tier, joint_lengths, turn_lengths, turns_of, turns_text

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


def test_think_times_below_0_are_refused():
    with pytest.raises(InputError, match="0 s or more"):
        Sessions(session=[0, 0], think_s=[0.0, -1.0])


@pytest.fixture(scope="module")
def drawn():
    return session_trace(load_traffic("coding_agent"), rate=0.1, sessions=1500, seed=3)


def test_means_are_those_of_the_recorded_sessions(drawn):
    """11.6 turns, prompts of 33,952 and answers of 1,351 tokens, 18.4 s between turns; 92.7 % of the prompts were read
    from the provider's cache, which an infinite cache of the drawn blocks must find from their lengths alone."""
    later = drawn.sessions.previous() >= 0
    assert len(drawn) / 1500 == pytest.approx(11.6, rel=0.02)
    assert drawn.input_tokens.mean() == pytest.approx(33_952, rel=0.04)
    assert drawn.output_tokens.mean() == pytest.approx(1351, rel=0.03)
    assert drawn.sessions.think_s[later].mean() == pytest.approx(18.4, rel=0.03)
    assert prefix_hit_rate(drawn.prefix) == pytest.approx(0.927, abs=0.01)


def test_a_prompt_begins_with_the_prompt_before_and_all_with_the_shared_start(drawn):
    ids, offsets, previous = drawn.prefix.ids, drawn.prefix.offsets, drawn.sessions.previous()
    shared = 15_825 // BLOCK_TOKENS
    for row in range(0, len(drawn), 97):
        own = ids[offsets[row] : offsets[row + 1]]
        assert own.size == drawn.input_tokens[row] // BLOCK_TOKENS
        assert own[:shared].tolist() == list(range(shared))
        if (before := previous[row]) >= 0:
            older = ids[offsets[before] : offsets[before + 1]]
            assert own[: older.size].tolist() == older.tolist()
            assert drawn.input_tokens[row] > drawn.input_tokens[before]
        else:
            assert np.sum(ids == own[-1]) >= 10  # its session alone has it, in all its turns


def test_sessions_begin_at_the_rate(drawn):
    begin = drawn.arrival[drawn.sessions.previous() < 0]
    assert begin.size / begin[-1] == pytest.approx(0.1, rel=0.08)  # three standard deviations of 1,500 events


SHARED = 15_825


@pytest.fixture(scope="module")
def agents():
    return session_trace(load_traffic("coding_agent"), rate=0.2, sessions=150, seed=2)


def shares(trace, **caches):
    made = TurnCaches(sessions_per_s=0.2, **caches)
    found, tiers = found_by_tier(trace, made, 0.2 * len(trace) / 150, SHARED)
    return found.sum() / trace.input_tokens.sum(), dict(tiers)


@pytest.mark.parametrize(("back", "rooms"), [(False, (2e5, 6e5)), (True, (2e5, 4e5))])
def test_tiers_serve_differences_of_the_hit_curve(agents, back, rooms):
    """Written back, rooms add up; written through, the larger holds the smaller: 200,000 and 600,000 either way."""
    total, tiers = shares(agents, rooms=(("hbm", rooms[0]), ("dram", rooms[1])), back=back)
    exact = hit_curve(agents)
    assert total == pytest.approx(exact.share(6e5), abs=0.04)
    assert total * tiers["hbm"] == pytest.approx(exact.share(2e5), abs=0.04)


def test_a_tier_no_larger_than_the_one_above_adds_nothing_where_all_is_written_through(agents):
    _, tiers = shares(agents, rooms=(("hbm", 4e5), ("dram", 3e5)))
    assert tiers == {"hbm": 1.0}
    assert shares(agents, rooms=()) == (0.0, {})


def test_a_pooled_tier_does_not_mind_where_turns_go(agents):
    rooms, eight = (("remote", np.inf),), {"caches": 8, "sticky": False}
    apart, pooled = (shares(agents, rooms=rooms, **eight, pooled=pooled)[0] for pooled in ((), ("remote",)))
    blind = hit_curve(agents, routed(agents, 8, sticky=False)).share(np.inf)
    assert apart == pytest.approx(blind, abs=0.03)
    assert pooled == pytest.approx(shares(agents, rooms=rooms)[0])


def test_more_sessions_a_second_need_as_much_more_room():
    """Without the start that all share, rooms count by the prompts that come in a second."""
    small, large = (
        turn_lengths("coding_agent", TurnCaches(sessions_per_s=rate, rooms=(("hbm", SHARED + room),)))
        for rate, room in ((0.5, 4e5), (5.0, 4e6))
    )
    assert large.mean_new == pytest.approx(small.mean_new, rel=1e-6)


def test_long_answers_lengthen_the_gaps():
    quick, slow = (
        turn_lengths("coding_agent", TurnCaches(sessions_per_s=0.5, rooms=(("hbm", 1e6),), tpot_s=tpot))
        for tpot in (0.0, 0.05)
    )
    assert slow.mean_new > 1.2 * quick.mean_new


def test_few_prompts_stand_for_all(agents):
    """Rate and first token over every class of turns, against a distribution of all of them."""
    found, _ = found_by_tier(agents, TurnCaches(sessions_per_s=0.2, rooms=(("hbm", 4e5),)), agents.rate, SHARED)
    few = joint_lengths(agents.input_tokens, agents.output_tokens, found)
    every = observed_lengths(agents.input_tokens, agents.output_tokens, found)
    assert few.prompt_nodes().isl.size == 4 < every.prompt_nodes().isl.size
    assert (few.mean_isl, few.mean_new, few.context) == pytest.approx((every.mean_isl, every.mean_new, every.context))
    at, mapping = ds.setup("llama_3_1_70b", "h200_sxm", "fp8"), ds.Sharding(tp_attn=8, tp_ffn=8)
    fast, exact = (ds.prefill_grid(at, mapping, law, batch=[1, 4]) for law in (few, every))
    assert fast.request_rate == pytest.approx(exact.request_rate, rel=0.03)
    assert fast.latency == pytest.approx(exact.latency, rel=0.03)


@pytest.mark.parametrize(
    "caches",
    [
        TurnCaches(sessions_per_s=0.2),
        TurnCaches(sessions_per_s=2, rooms=(("hbm", 1e5), ("remote", np.inf)), pooled=("remote",), back=True),
        TurnCaches(sessions_per_s=1e-3, rooms=(("dram", 3e6),), caches=8, sticky=False, tpot_s=0.025),
    ],
)
def test_a_name_is_read_back(caches):
    name = f"coding_agent{turns_text(caches)}"
    assert turns_of(name) == ("coding_agent", caches)
    assert lengths_named(name) == turn_lengths("coding_agent", caches)
    assert turns_of("coding_agent") is None


def test_rooms_of_a_rate_far_above_the_sample_need_no_trace_of_it():
    crowded = TurnCaches(sessions_per_s=2000.0, rooms=(("hbm", 1e6), ("dram", 1e10)))
    law = turn_lengths("coding_agent", crowded)
    assert dict(law.cached.reuse.tiers)["dram"] > 0.2
    assert turn_lengths("coding_agent", replace(crowded, rooms=(("hbm", 1e10),))).mean_new == pytest.approx(
        law.mean_new
    )
