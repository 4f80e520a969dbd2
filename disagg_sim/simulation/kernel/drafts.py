"""Compiled: decode steps that verify drafts, and emit a random number of tokens for each segment.

Such a step is an event of its own, and touches every running segment: ``cached``, ``emitted`` and ``blocks`` of their
records are up to date. Position i of k drafts is accepted where a number drawn from [0, 1) lies below the share m_i of
steps in which the first i are all accepted, so that a step emits AL(k) = 1 + m_1 + ... + m_k tokens on average. The
draw belongs to the request and to its place in it: no order of events, no other request and no preemption changes it,
and the steps that a segment takes are known when it joins.
"""

from __future__ import annotations

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, FleetState, InstanceRecord, Segment
from disagg_sim.simulation.kernel.sharing import take_more

#: 32 bits, and the step of a Weyl sequence of them: the odd number next to 2**32 over the golden ratio.
BITS, WEYL = 0xFFFFFFFF, 0x9E3779B9


@inner
def mixed(bits: int) -> int:
    """The 32 bits of a number, each of which changes about half of them: the finaliser of MurmurHash3."""
    found = int(bits) & BITS
    found = ((found ^ (found >> 16)) * 0x85EBCA6B) & BITS
    found = ((found ^ (found >> 13)) * 0xC2B2AE35) & BITS
    return found ^ (found >> 16)


@inner
def drawn(stream: int, request: int, place: int) -> float:
    """A number from [0, 1) for a place of a request in a stream."""
    return mixed(mixed(stream ^ mixed(request + 1)) + place * WEYL) / (BITS + 1.0)


@inner
def step_tokens(st: FleetState, i: int, seg: Segment, cached: int) -> int:
    """Tokens that a step finds for a segment with so many in the cache: those accepted, and one of the model."""
    head = st.inst[i].table
    draw = drawn(st.world[0].stream, seg.request, cached)
    tokens = 1
    while tokens <= head.drafts and draw < st.values[head.accepted_at + tokens - 1]:
        tokens += 1
    return tokens


@inner
def steps_to_end(st: FleetState, i: int, s: int) -> int:
    """Steps in which a segment that joins emits all its tokens."""
    seg = st.seg[s]
    left, cached, steps = seg.generate - seg.emitted, seg.cached, 0
    while left > 0:
        tokens = step_tokens(st, i, seg, cached)
        left -= tokens
        cached += tokens
        steps += 1
    return steps


@inner
def own_growth(inst: InstanceRecord, seg: Segment) -> int:
    """Blocks that a running segment takes for its next step: one token and all drafts may enter the cache."""
    return max(-(-(seg.cached + 1 + inst.table.drafts) // BLOCK_TOKENS) - seg.blocks, 0)


@inner
def count_drafted(st: FleetState, i: int) -> None:
    """Let a step of the running set have happened; tokens beyond the end of a segment are dropped."""
    inst = st.inst[i]
    grown, growing, emitted = 0, 0, 0
    for j in range(inst.running_requests):
        seg = st.seg[st.sets[0, i, j] & 0xFFFFFFFF]
        more = own_growth(inst, seg)
        seg.blocks += more
        grown += more
        tokens = min(step_tokens(st, i, seg, seg.cached), seg.generate - seg.emitted)
        inst.decode_context += tokens * seg.cached + tokens * (tokens + 1) // 2
        seg.cached += tokens
        seg.emitted += tokens
        emitted += tokens
        growing += own_growth(inst, seg)
    inst.growing = growing
    take_more(st, i, grown)
    inst.running_tokens += emitted
    inst.counter += 1
    inst.decode_tokens += emitted
