"""Blocks of prompts in KV memory: a naive LRU beside the kernel's, and when a prompt finds what others brought."""

from dataclasses import replace

import numpy as np
import pytest
from sites import deployment, site

from disagg_sim.domain import Slo
from disagg_sim.facts.load import load_scheduler
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import ServiceClass
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

#: 10 ms a step, 20 us a prompt token: about 0.1 s a prompt of those below.
TABLE = StepTable.affine(step=0.010, per_sequence=0.0001, per_token=0.00002, max_sequences=1024)
SLO = Slo(ttft=2.0, tpot=0.1)


def played(trace, blocks, *, scheduling="fcfs", scheduler="vllm_v1_2026"):
    """Requests of a run whose prompts stay in KV memory of so many blocks."""
    by = tuple(ServiceClass(name=name, slo=SLO, priority=place) for place, name in enumerate(("low", "high")))
    run = RunOptions(prefix_cache=True, scheduling=scheduling, classes=by if trace.classes else ())
    engine = Engine(0)
    here = site(engine, deployment(colocated=1), table=TABLE, blocks=blocks, options=run)
    return serve(trace, "vllm", replace(here, scheduler=load_scheduler(scheduler)), engine, run).requests


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
