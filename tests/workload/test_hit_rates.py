"""Hit rates of prefix caches: exact replay by stack distance, published tables, routing, Che's approximation."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.facts.load import load_traffic
from disagg_sim.techniques.prefix.requests_hits import hit_curve, routed
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions
from disagg_sim.workload.synthetic import session_trace
from disagg_sim.workload.trace import Trace
from disagg_sim.workload.turns import session_found


def of_blocks(prompts, block_tokens=16):
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
    ids = [block for prompt in prompts for block in prompt]
    tokens = [max(len(prompt), 1) * block_tokens + 1 for prompt in prompts]
    return Trace(
        arrival=np.arange(len(prompts), dtype=float),
        input_tokens=tokens,
        output_tokens=np.ones(len(prompts), dtype=int),
        prefix=PrefixBlocks(offsets=offsets, ids=ids, block_tokens=block_tokens),
    )


def replayed(trace, blocks, caches):
    """A cache a number, block by block: the first block of a prompt is the last to be evicted."""
    kept, found = {}, []
    for place, cache in enumerate(caches):
        mine = kept.setdefault(cache, OrderedDict())
        prompt = trace.prefix.ids[slice(*trace.prefix.offsets[place : place + 2])].tolist()
        count = 0
        while count < len(prompt) and prompt[count] in mine:
            count += 1
        found.append(count * trace.prefix.block_tokens)
        for block in reversed(prompt):
            mine[block] = None
            mine.move_to_end(block)
        while len(mine) > blocks:
            mine.popitem(last=False)
    return found


def blind_share(turns: int, caches: int) -> float:
    r"""Share of a conversation of equal turns that caches find where each turn goes to any of them. [1]

    .. math:: \frac{1}{J-1}\sum_{j=2}^{J}\frac{1}{j}\sum_{m=1}^{j-1}\frac{1}{n}\Bigl(1-\frac{1}{n}\Bigr)^{m-1}(j-m)

    A turn finds what its cache saw at its last visit, m turns ago. One cache for all finds (j-1)/j of turn j.
    """
    total = 0.0
    for turn in range(2, turns + 1):
        ago = np.arange(1, turn)
        total += float(np.sum((1 - 1 / caches) ** (ago - 1) / caches * (turn - ago))) / turn
    return total / (turns - 1)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(1, 3),
)
def test_stack_distances_are_a_replay(prompts, blocks, caches):
    trace = of_blocks(prompts)
    which = np.arange(len(prompts)) % caches
    curve = hit_curve(trace, which)
    assert curve.found(blocks * 16).tolist() == replayed(trace, blocks, which)
    assert curve.found(np.inf).tolist() == replayed(trace, 10**6, which)


def test_content_blind_routing_dilutes_as_the_formula_says():
    """Conversations of 20 equal turns on 8 caches: 0.41 of a prompt is found, and 0.86 where they stick to one."""
    turns, sessions, caches = 20, 1500, 8
    trace = Trace(
        arrival=np.arange(turns * sessions, dtype=float),
        input_tokens=np.repeat(np.arange(1, turns + 1) * 100, sessions),
        output_tokens=np.ones(turns * sessions, dtype=int),
        sessions=Sessions(session=np.tile(np.arange(sessions), turns), think_s=np.zeros(turns * sessions)),
    )
    later = trace.input_tokens > 100
    for sticky, alike in ((False, caches), (True, 1)):
        found = session_found(trace, np.inf, caches=routed(trace, caches, sticky=sticky, seed=1))
        share = np.mean(found[later] / trace.input_tokens[later])
        assert share == pytest.approx(blind_share(turns, alike), abs=0.01)


@pytest.mark.parametrize(("caches", "sticky"), [(1, True), (4, False)])
def test_che_is_close_to_lru(caches, sticky):
    """A trace of 200 sessions is thin at its ends, where more is kept than at its mean rate."""
    spec = load_traffic("coding_agent")
    trace = session_trace(spec, rate=0.2, sessions=200, seed=2)
    which = routed(trace, caches, sticky=sticky)
    curve = hit_curve(trace, which)
    for size in (1e5, 3e5, 3e6):
        found = session_found(trace, size, shared_tokens=spec.session.shared_tokens, caches=which)
        assert found.sum() / trace.input_tokens.sum() == pytest.approx(curve.share(size), abs=0.04)


def test_sessions_of_the_coding_agent_find_what_was_recorded():
    """92.7 % of the recorded prompts were read from the provider's cache (``data/workloads/agentic.md``)."""
    trace = session_trace(load_traffic("coding_agent"), rate=0.1, sessions=100, seed=1)
    curve = hit_curve(trace)
    assert curve.share(np.inf) == pytest.approx(0.927, abs=0.01)
    law = lengths(trace, cached=curve.found(np.inf))
    assert law.mean_new / law.mean_isl == pytest.approx(1 - curve.share(np.inf))
    assert law.mean_new == pytest.approx(2469, rel=0.1)
