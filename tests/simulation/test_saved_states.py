"""States that a simulated prefix cache saves take memory, by hand; turns of sessions."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.errors import InfeasibleError
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.ffn import DenseFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.linear_attention import GdnAttention
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.physics.kv_transfer import checkpoint_tokens, prefix_bytes
from disagg_sim.physics.memory import instance_bytes
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.physical_site import kv_blocks, physical_site
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.wishes import Limits
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions
from disagg_sim.workload.trace import Trace
from tests.simulation.sites import SIMPLE, deployment, served

LINEAR = GdnAttention(key_heads=16, value_heads=64, key_dim=128, value_dim=128)
FULL = GqaAttention(q_heads=64, kv_heads=8, head_dim=128)
#: 64 x 128 x 128 fp32, and 3 x (2 x 16 + 64) x 128 bf16 of the convolutions. [B]
STATE = 64 * 128 * 128 * 4 + 3 * 96 * 128 * 2


@lru_cache
def at_of(*attention):
    layers = tuple(LayerKind(each, DenseFfn(width=4096)) for each in attention)
    model = replace(load_model("llama_3_1_8b"), layers=layers)
    return setup(model, "h100_sxm", "bf16", "ideal")


def test_a_prefix_weighs_its_cached_tokens_and_the_states_along_it():
    """Three states of 4,268,032 B beside one layer that caches 4,096 B a token."""
    at = at_of(LINEAR, LINEAR, LINEAR, FULL)
    assert STATE == 4_268_032
    assert checkpoint_tokens(at.model, at.precision) == 1056  # 1,042 and up to a multiple of 16
    assert prefix_bytes(at.model, at.precision, 2112) == 4096 * 2112 + 2 * 3 * STATE


def test_compressed_attention_saves_nothing_at_the_end_of_an_entry():
    model = load_model("deepseek_v4_pro")
    precision = load_precision("fp8").resolve(model)
    assert model.state_bytes > 0
    assert prefix_bytes(model, precision, 1280) == model.kv_bytes(1280, precision) - model.state_bytes


def test_a_prompt_that_ends_at_a_checkpoint_begins_at_the_one_before():
    """Its last token is computed in any case, and no state was saved beside it."""
    at = at_of(LINEAR, LINEAR, LINEAR, FULL)
    ids = [[1, 2], [1, 2]]
    prefix = PrefixBlocks(offsets=[0, 2, 4], ids=np.concatenate(ids), block_tokens=1056)
    lengths = np.array([2112, 2112])
    trace = Trace(arrival=[0.0, 9.0], input_tokens=lengths, output_tokens=[5, 5], prefix=prefix)
    parts = ds.ServedDeployment(
        name="one", gpus=1, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),), setup=at
    )
    found = ds.simulate(parts, trace, "vllm", options=RunOptions(prefix_cache=True))
    assert found.records.requests.cached_tokens.tolist() == [0, 1056]


def site_blocks(at, inputs, outputs, **options):
    parts = ds.ServedDeployment(name="one", gpus=1, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),))
    trace = Trace(arrival=np.zeros(len(inputs)), input_tokens=inputs, output_tokens=outputs)
    site = physical_site(trace, parts, at=at, slo=ds.Slo(ttft=1.0, tpot=0.1), seed=0, options=RunOptions(**options))
    return site.blocks(ds.Sharding(), Limits())


def test_states_in_the_kv_memory_leave_it_fewer_blocks():
    """Requests of 2,000 and 4,224 tokens save 1 + 4 sets of states along 6,224 tokens."""
    at = at_of(LINEAR, LINEAR, LINEAR, FULL)
    free = site_blocks(at, [1900, 4000], [100, 224])
    held = site_blocks(at, [1900, 4000], [100, 224], prefix_cache=True)
    assert held / free == pytest.approx(4096 / (4096 + 5 / 6224 * 3 * STATE), rel=1e-3)
    assert site_blocks(at, [900], [100], prefix_cache=True) == site_blocks(at, [900], [100])  # shorter than a block
    full = at_of(FULL)
    assert site_blocks(full, [4000], [224], prefix_cache=True) == site_blocks(full, [4000], [224])


def test_states_of_many_sequences_may_leave_no_room_for_a_prompt():
    """30 layers of 64 x 128 x 128 numbers of 4 B are 126 MB a sequence, 32 GB for 256 sequences."""
    at = at_of(*[LINEAR] * 30, FULL)
    room = site_blocks(at, [4000], [224]) * BLOCK_TOKENS
    assert site_blocks(at, [room], [10]) * BLOCK_TOKENS == room
    with pytest.raises(InfeasibleError, match=f"hold {room:,} tokens beside room for 256 sequences.*'batch'"):
        site_blocks(at, [room + 1], [10])


def test_saved_states_are_sharded_as_running_ones():
    at = at_of(LINEAR, LINEAR, LINEAR, FULL)
    idle = Residents(sequences=10.0, tokens=0.0, live=0.0, live_total=0.0, emitted=0.0)
    for tp in (1, 4):
        cut = ds.Sharding(tp_attn=tp, tp_ffn=tp)
        more = instance_bytes(at, cut, replace(idle, saved=7.0)) - instance_bytes(at, cut, idle)
        assert float(more) == pytest.approx(7 * 3 * STATE / tp, rel=1e-9)
    blocks = kv_blocks(at, ds.Sharding(), saved_states=1e-3)
    assert blocks < kv_blocks(at, ds.Sharding())
    assert blocks * BLOCK_TOKENS * (4096 + 1e-3 * 3 * STATE) == pytest.approx(
        kv_blocks(at, ds.Sharding()) * BLOCK_TOKENS * 4096, rel=1e-4
    )


COLOCATED = deployment(colocated=2)

EVERY = deployment(prefill=2, decode=2, colocated=2, pairs=2)

SHIPPED = sorted(name for name, kind in policies().items() if kind.__module__.startswith("disagg_sim."))


def turns(rows: list[tuple[float, int, int, int, float]]) -> Trace:
    """Of (arrival, input, output, session, think)."""
    arrival, inputs, outputs, session, think = zip(*rows, strict=True)
    return Trace(
        arrival=arrival, input_tokens=inputs, output_tokens=outputs, sessions=Sessions(session=session, think_s=think)
    )


@st.composite
def sessions(draw) -> Trace:
    """Up to 6 sessions of up to 5 turns; arrivals as if served at once."""
    rows = []
    for number in range(draw(st.integers(1, 6))):
        at = draw(st.floats(0.0, 5.0))
        for turn in range(draw(st.integers(1, 5))):
            think = draw(st.floats(0.0, 3.0)) if turn else 0.0
            at += think
            rows.append((at, draw(st.integers(1, 3000)), draw(st.integers(1, 40)), number, think))
    return turns(sorted(rows, key=lambda row: row[0]))


def test_a_turn_comes_a_think_time_after_the_last_token_of_the_turn_before():
    """100 tokens take 10 + 10 ms, a token more 11 ms: turn 0 ends at 0.020 + 2 * 0.011 s, turn 1 comes 1.5 s later."""
    trace = turns([(0.0, 100, 3, 7, 0.0), (1.5, 200, 1, 7, 1.5)])
    found = served(trace, "vllm", COLOCATED, table=SIMPLE).requests
    assert found.finish_s[0] == pytest.approx(0.042)
    assert found.arrival_s[1] == pytest.approx(1.542)
    assert found.first_token_s[1] == pytest.approx(1.542 + 0.030)


@settings(max_examples=60)
@given(trace=sessions(), policy=st.sampled_from(SHIPPED))
def test_no_turn_starts_before_the_last_has_ended_under_any_policy(trace, policy):
    found = served(trace, policy, EVERY, table=SIMPLE, blocks=2000).requests
    assert (found.status == Outcome.COMPLETED).all()
    previous = trace.sessions.previous()
    later, first = previous >= 0, previous < 0
    waited = found.arrival_s[later] - found.finish_s[previous[later]]
    assert waited == pytest.approx(trace.sessions.think_s[later], abs=1e-9)
    assert np.array_equal(found.arrival_s[first], trace.arrival[first])


def test_a_session_ends_with_a_turn_that_is_rejected():
    """Turn 1 fits no memory, 100 blocks of 16 tokens: turns 2 and 3 never come, and count as rejected, too."""
    trace = turns([(t, 3000 if t == 1 else 100, 2, 0, 1.0) for t in range(4)] + [(5.0, 100, 2, 1, 0.0)])
    result = served(trace, "vllm", COLOCATED, table=SIMPLE, blocks=100)
    found = result.requests
    words = [Outcome(status).name for status in found.status]
    assert words == ["COMPLETED", "REJECTED", "REJECTED", "REJECTED", "COMPLETED"]
    assert np.isnan(found.arrival_s).tolist() == [False, False, True, True, False]
    assert result.duration_s == pytest.approx(found.finish_s[4])


def test_the_samples_end_with_the_last_turn():
    """The run goes on while a user thinks, though nothing is in the cluster."""
    trace = turns([(0.0, 100, 2, 0, 0.0), (100.0, 100, 2, 0, 100.0)])
    result = served(trace, "vllm", COLOCATED, table=SIMPLE, options=RunOptions(sample_s=1.0))
    assert result.samples.arrivals[50] == 1
    assert result.samples.time_s[-1] >= 100.0
    assert result.samples.arrivals[-1] == 2


@given(trace=sessions(), concurrency=st.integers(1, 3))
def test_a_closed_loop_of_sessions_holds_so_many_of_them(trace, concurrency):
    """The next session begins when one ends; think times count as part of a session."""
    options = RunOptions(concurrency=concurrency)
    found = served(trace, "vllm", COLOCATED, table=SIMPLE, blocks=2000, options=options).requests
    assert (found.status == Outcome.COMPLETED).all()
    numbers = trace.sessions.session
    begin = np.array([found.arrival_s[numbers == each].min() for each in np.unique(numbers)])
    end = np.array([found.finish_s[numbers == each].max() for each in np.unique(numbers)])
    there = [(begin <= at) & (at < end) for at in begin]
    assert max(int(each.sum()) for each in there) <= concurrency
    assert np.sort(begin)[: min(concurrency, begin.size)].max() == 0.0
    assert set(begin[begin > 0]) <= set(end)
