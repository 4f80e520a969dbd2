"""Turns of sessions as a joint law: what tiers serve of it, few prompts for all, and its name in tables."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.facts.load import load_traffic
from disagg_sim.techniques.prefix.requests_hits import hit_curve, routed
from disagg_sim.workload.lengths import observed_lengths
from disagg_sim.workload.named import lengths_named
from disagg_sim.workload.synthetic import session_trace
from disagg_sim.workload.turns import TurnCaches, found_by_tier, joint_lengths, turn_lengths, turns_of, turns_text

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
