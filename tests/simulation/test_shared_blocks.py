"""Blocks of prompts in KV memory: a naive LRU beside the kernel's, and when a prompt finds what others brought."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from sites import deployment, site

from disagg_sim.domain import Slo
from disagg_sim.facts.load import load_scheduler
from disagg_sim.simulation.classes import ServiceClass
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.request_columns import Labels, PrefixBlocks
from disagg_sim.workload.trace import Trace

TRACE_BLOCK = 512  # tokens of a block with a name [token]
#: 10 ms a step, 20 us a prompt token: about 0.1 s a prompt of those below.
TABLE = StepTable.affine(step=0.010, per_sequence=0.0001, per_token=0.00002, max_sequences=1024)
SLO = Slo(ttft=2.0, tpot=0.1)


def conversations(rate, seed=1, count=1500):
    """Turns of conversations: each begins with the prompt before it, and most with one system prompt of two blocks."""
    draw = np.random.default_rng(seed)
    talks, ids, lengths, fresh = [], [], [], 2
    for _ in range(count):
        if not talks or draw.random() < 0.3:
            talks.append([0, 1] if draw.random() < 0.8 else [])
        talk = talks[-int(min(draw.geometric(0.02), len(talks)))]
        if len(talk) > 40:  # it begins anew
            del talk[:]
        more = int(draw.integers(1, 8))
        talk.extend(range(fresh, fresh + more))
        fresh += more
        rest = int(draw.integers(1, TRACE_BLOCK))  # of a last block that is not full
        ids.append([*talk, fresh])
        fresh += 1
        lengths.append(TRACE_BLOCK * len(talk) + rest)
    arrival = np.cumsum(draw.exponential(1.0 / rate, count))
    offsets = np.cumsum([0, *map(len, ids)])
    prefix = PrefixBlocks(offsets=offsets, ids=np.concatenate(ids), block_tokens=TRACE_BLOCK)
    labels = Labels(names=("low", "high"), number=draw.integers(0, 2, count))
    outputs = np.ones(count, int)
    return Trace(arrival=arrival, input_tokens=np.array(lengths), output_tokens=outputs, prefix=prefix, classes=labels)


def played(trace, blocks, *, scheduling="fcfs", scheduler="vllm_v1_2026"):
    """Requests of a run whose prompts stay in KV memory of so many blocks."""
    by = tuple(ServiceClass(name=name, slo=SLO, priority=place) for place, name in enumerate(("low", "high")))
    run = RunOptions(prefix_cache=True, scheduling=scheduling, classes=by if trace.classes else ())
    engine = Engine(0)
    here = site(engine, deployment(colocated=1), table=TABLE, blocks=blocks, options=run)
    return serve(trace, "vllm", replace(here, scheduler=load_scheduler(scheduler)), engine, run).requests


def naive_share(trace, order, blocks):
    """Share of the prompt tokens found by an LRU of so many KV blocks, which takes prompts one after the other."""
    prefix, kept, held, found = trace.prefix, OrderedDict(), 0, 0
    for request in order:
        own = prefix.ids[prefix.offsets[request] : prefix.offsets[request + 1]].tolist()
        prompt = int(trace.input_tokens[request])
        ends = [min((place + 1) * prefix.block_tokens, prompt) // BLOCK_TOKENS for place in range(len(own))]
        there = next((place for place, block in enumerate(own) if block not in kept), len(own))
        found += min(ends[there - 1] * BLOCK_TOKENS if there else 0, prompt - 1)
        for place in reversed(range(len(own))):  # the first of a prompt is the last to go
            size = ends[place] - (ends[place - 1] if place else 0)
            held += 0 if own[place] in kept else size
            kept[own[place]] = size
            kept.move_to_end(own[place])
        while held > blocks:
            held -= kept.popitem(last=False)[1]
    return found / trace.input_tokens.sum()


@pytest.mark.parametrize(
    ("rate", "blocks", "scheduling"),
    [
        (1.0, 6_000, "fcfs"),
        (8.0, 2_000, "priority"),
        (8.0, 18_000, "fcfs"),
        (64.0, 2_000, "fcfs"),
        (64.0, 6_000, "priority"),
    ],
)
def test_a_run_finds_what_a_naive_lru_of_the_same_room_finds(rate, blocks, scheduling):
    """From idle to six times overload, with room for some prompts to nearly all: the queue changes nothing."""
    trace = conversations(rate)
    requests = played(trace, blocks, scheduling=scheduling)
    assert (requests.status == 0).all()
    order = np.lexsort((np.arange(len(trace)), requests.prefill_start_s))
    share = requests.cached_tokens.sum() / trace.input_tokens.sum()
    assert share == pytest.approx(naive_share(trace, order, blocks), abs=0.003)


def prompts(arrival, names, tokens, outputs=1):
    """Requests whose prompts are alike where their names are."""
    counts = -(-np.array(tokens) // BLOCK_TOKENS)
    ids = [10_000 * name + np.arange(count) for name, count in zip(names, counts, strict=True)]
    prefix = PrefixBlocks(
        offsets=np.concatenate([[0], counts.cumsum()]), ids=np.concatenate(ids), block_tokens=BLOCK_TOKENS
    )
    arrivals, answers = np.array(arrival, float), np.full(len(names), outputs)
    return Trace(arrival=arrivals, input_tokens=np.array(tokens), output_tokens=answers, prefix=prefix)


@pytest.mark.parametrize(("scheduler", "second"), [("vllm_v1_2026", 992), ("sglang_2026", 0), ("vllm_v0_2024", 0)])
def test_engines_differ_in_when_blocks_are_found(scheduler, second):
    """Two that are alike begin in one step, after another, and one comes later: 992 of 1,000 tokens fill blocks."""
    trace = prompts([0.0, 0.001, 0.001, 0.04], [1, 2, 2, 2], [1000, 900, 1000, 1000])
    requests = played(trace, 1000, scheduler=scheduler)
    assert requests.cached_tokens.tolist() == [0, 0, min(second, 896), 992]


def test_prompts_that_wait_are_not_found():
    """The third looks for the second, which waits behind a long one: nothing is there when it comes, all when it runs.

    A router that asks when it comes hears of what is there, not of what waits.
    """
    trace = prompts([0.0, 0.01, 0.02], [1, 2, 2], [16_000, 1000, 1000])
    requests = played(trace, 2000)
    assert requests.cached_tokens.tolist() == [0, 0, 992]


def test_what_shares_blocks_needs_room_once():
    """Eight prompts of 63 blocks, 62 of them alike, and answers of one token: 80 blocks hold all at once."""
    trace = prompts(np.arange(8) * 1e-3, [1] * 8, [1000] * 8, outputs=10)
    requests = played(trace, 80)
    assert requests.cached_tokens.tolist() == [0] + [992] * 7
    assert np.ptp(requests.finish_s[1:]) < 0.005 + 1e-9
    assert requests.preemptions.sum() == 0
