"""Chunks of prompts in a pipeline that holds no more of them than it has stages."""

from itertools import pairwise

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.planning.choices import chunk_stalls
from disagg_sim.search.grid import prefill_grid

PROMPTS = 40


def interval(stages, chunks):
    """Time from prompt to prompt of a full queue, chunk by chunk, each as long in every stage."""
    free, leaves, ends = 0.0, [0.0] * stages, []
    for _ in range(PROMPTS):
        for time in chunks:
            start = max(free, leaves[-stages])
            free = start + time
            leaves.append(max(start + stages * time, leaves[-1] + time))
        ends.append(leaves[-1])
    half = PROMPTS // 2
    return (ends[-1] - ends[half]) / (PROMPTS - 1 - half)


@pytest.mark.parametrize(
    ("stages", "prompt", "chunk"),
    [(4, 8192, 4096), (4, 32768, 8192), (4, 65536, 4096), (8, 16384, 4096), (2, 16384, 2048), (4, 8192, 8192)],
)
def test_the_last_chunk_of_a_prompt_holds_up_those_after_it(stages, prompt, chunk):
    """Two to sixteen chunks of R1 on GB200 in two to eight stages; a prompt in one pass holds nothing up."""
    at, mapping = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.Sharding(pp=stages)
    starts = range(0, prompt, chunk)
    times = [
        float(prompt_pass(at, mapping, batch=1, isl=start + chunk, past=start, chunk_tokens=chunk).busy)
        for start in starts
    ]
    grid = prefill_grid(at, mapping, ds.lengths(prompt, 64), chunk_tokens=[chunk], batch=[1])
    row = int(np.flatnonzero(grid.mappings.chunk_tokens == (chunk if len(times) > 1 else 0))[0])
    held = chunk_stalls(grid, np.array([row]), np.ones(1)).item()
    assert sum(times) + held == pytest.approx(interval(stages, times), rel=0.015)
    assert (held > 0.01 * sum(times)) == (len(times) > 1)


@pytest.mark.parametrize(("stages", "prompt", "chunk"), [(4, 16383, 8192), (8, 32000, 8192), (4, 8000, 4096)])
def test_chunks_that_go_on_with_the_next_prompt_hold_up_as_much(stages, prompt, chunk):
    """Packed chunks of a full queue: a prompt that lacks a few tokens of whole chunks is no faster."""
    at, mapping = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.Sharding(pp=stages)

    def busy(past):
        return float(prompt_pass(at, mapping, batch=1, isl=past + chunk, past=past, chunk_tokens=chunk).busy)

    of_pair = (busy(7 * chunk) - busy(0)) / (7 * chunk**2)  # a chunk takes longer by the keys that its queries meet
    free, leaves = 0.0, [0.0] * stages
    for start in range(0, 100 * prompt, chunk):
        cuts = sorted({start, start + chunk, *range(-(-start // prompt) * prompt, start + chunk, prompt)})
        pairs = sum((b - a) * (a % prompt + (b - a) / 2) for a, b in pairwise(cuts))
        time = busy(0) + of_pair * (pairs - chunk**2 / 2)
        begin = max(free, leaves[-stages])
        free = begin + time
        leaves.append(max(begin + stages * time, leaves[-1] + time))
    half = len(leaves) // 2
    of_prompt = (leaves[-1] - leaves[half]) / (len(leaves) - 1 - half) / chunk * prompt
    grid = prefill_grid(at, mapping, ds.lengths(prompt, 64), chunk_tokens=[chunk], batch=[1])
    row = int(np.flatnonzero(grid.mappings.chunk_tokens == chunk)[0])
    held = chunk_stalls(grid, np.array([row]), np.ones(1)).item()
    assert 1.0 / float(grid.request_rate[row, 0]) + held == pytest.approx(of_prompt, rel=0.015)
