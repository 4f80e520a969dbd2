"""Compiled: passes of prompts through the stages of a pipeline.

A pass goes in one part, or whole prompts in several, one after the other. A stage works on one part at a time, in their
order, and no more of them are in flight than there are stages: vLLM ``max_concurrent_batches``, SGLang
``pp_loop_size``, TensorRT-LLM ``num_micro_batches``. So short parts wait at the last stage for the long ones before
them, and the first stage idles while as many are in flight.
"""

from __future__ import annotations

from disagg_sim.simulation.kernel.compiled import inlined, inner
from disagg_sim.simulation.kernel.layout import MOST_STAGES, PROMPTS, FleetState, Mode
from disagg_sim.simulation.kernel.steps import only_prefill
from disagg_sim.simulation.kernel.times import equal_prompts, pass_part

CHUNKED, SLO_AWARE = int(Mode.CHUNKED), int(Mode.SLO_AWARE)


@inlined
def next_entry(st: FleetState, i: int) -> float:
    """When a pipeline takes the next pass; 0 where there is none. [s]"""
    inst = st.inst[i]
    if inst.table.pipeline == 1:
        return 0.0
    time: float = inst.leaves_s[inst.entered % min(inst.table.pipeline, MOST_STAGES)]
    return time


@inlined
def nothing_decodes(st: FleetState, i: int) -> bool:
    """Whether nothing decodes on an instance now or after the pass."""
    inst = st.inst[i]
    decodes = False
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        decodes |= not only_prefill(st, row, st.inst[row].pieces)
    return not decodes


@inlined
def pass_through(st: FleetState, i: int, now: float) -> float:
    """Note when the tokens of a pass of prompts leave a pipeline; when the next step may begin. [s]"""
    inst = st.inst[i]
    latency, busy = pass_all_ranks(st, i, now + inst.swapping_s)
    inst.latency_s = latency + inst.swapping_s
    inst.leaves_s[(inst.entered - 1) % min(inst.table.pipeline, MOST_STAGES)] = now + inst.latency_s
    return busy if nothing_decodes(st, i) else latency


@inner
def part_of_pass(st: FleetState, row: int, first: int, together: int) -> tuple[int, int, float]:
    """Tokens of the prompts of a rank in the micro-batch from prompt ``first`` on, cached ones, query-key pairs."""
    count = min(together, st.inst[row].pieces - first)
    tokens, past, pairs = 0, 0, 0.0
    s = st.inst[row].first[PROMPTS]
    for k in range(first + max(count, 0)):
        if k >= first:
            tokens += st.seg[s].piece
            past += st.seg[s].cached
            pairs += st.seg[s].piece * (st.seg[s].cached + 0.5 * st.seg[s].piece)
        s = st.seg[s].next
    return tokens, past, pairs


@inner
def pass_all_ranks(st: FleetState, i: int, start: float) -> tuple[float, float]:
    """A pass of prompts of all ranks through a pipeline: when its last token leaves, and when the next may start. [s]

    Whole prompts of each rank go through in as many micro-batches as there are stages; chunks all together;
    those of a rank that go together count as equal prompts with as many query-key pairs. Experts work on all tokens.
    """
    inst = st.inst[i]
    head = inst.table
    own = 0
    for row in range(inst.rank_at, inst.rank_at + inst.ranks):
        own = max(own, st.inst[row].pieces)
    packed = inst.mode in (CHUNKED, SLO_AWARE)
    chunk = 0 if packed else head.chunk
    together = own if packed or chunk > 0 else -(-own // min(head.pipeline, own))
    stages = min(head.pipeline, MOST_STAGES)
    free, leaves = start + st.values[head.host_at], inst.leaves_s[(inst.entered - 1) % stages]
    for first in range(0, own, together):
        slowest, rest, total = 0.0, 0.0, 0
        for row in range(inst.rank_at, inst.rank_at + inst.ranks):
            total += part_of_pass(st, row, first, together)[0]
        for row in range(inst.rank_at, inst.rank_at + inst.ranks):
            tokens, past, pairs = part_of_pass(st, row, first, together)
            if tokens == 0:
                continue
            filled = total / (tokens * inst.ranks)
            alike, length, before = equal_prompts(tokens, pairs, past)
            stage, through = pass_part(head, st.values, chunk, alike, length, before, filled)
            slowest, rest = max(slowest, stage), max(rest, through)
        place = inst.entered % stages
        free = max(free, inst.leaves_s[place]) + slowest
        leaves = max(free + rest, leaves + slowest)
        inst.leaves_s[place] = leaves
        inst.entered += 1
    return leaves - start, free - start
