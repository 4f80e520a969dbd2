"""Chunks of prompts in a pipeline that holds no more of them than it has stages."""

from itertools import pairwise

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.prompts import prompt_pass

PROMPTS = 40


@pytest.fixture(scope="module")
def r1():
    return ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")


def timed(at, stages, chunk, end, past=0.0):
    """A pass of a prompt in chunks, each of which projects its past up again."""
    return prompt_pass(
        at, ds.Sharding(pp=stages), batch=1, isl=end, past=past, chunk_tokens=float(chunk), mla_form="naive"
    )


def interval(stages, times, through):
    """Mean time from chunk to chunk in the second half of a full queue; all stages take so many times the slowest."""
    free, leaves = 0.0, [0.0] * stages
    for time in times:
        start = max(free, leaves[-stages])
        free = start + time
        leaves.append(max(start + through * time, leaves[-1] + time))
    half = len(leaves) // 2
    return (leaves[-1] - leaves[half]) / (len(leaves) - 1 - half)


@pytest.mark.parametrize(
    ("stages", "prompt", "chunk"),
    [(4, 8192, 4096), (4, 32768, 8192), (4, 65536, 4096), (8, 16384, 4096), (2, 16384, 2048), (4, 8192, 8192)],
)
def test_the_last_chunk_of_a_prompt_holds_up_those_after_it(r1, stages, prompt, chunk):
    """Two to sixteen chunks of R1 on GB200 in two to eight stages; a prompt in one pass holds nothing up."""
    starts = range(0, prompt, chunk)
    times = [float(timed(r1, stages, chunk, start + chunk, float(start)).busy) for start in starts]
    found = timed(r1, stages, chunk, prompt)
    assert float(found.interval) == pytest.approx(len(times) * interval(stages, times * PROMPTS, stages), rel=0.015)
    assert (float(found.stall) > 0.01 * float(found.busy)) == (len(times) > 1)


def packed(at, stages, chunk, prompts):
    """Mean time from prompt to prompt of a full queue whose chunks go on with the next prompt."""
    first, last = (float(timed(at, stages, chunk, past + chunk, past).busy) for past in (0.0, 7.0 * chunk))
    of_pair = (last - first) / (7 * chunk**2)  # a chunk takes longer by the keys that its queries meet
    ends = np.cumsum(prompts)
    begins = ends - prompts
    times = []
    for start in np.arange(0.0, ends[-1] - chunk, chunk):
        cuts = [start, *ends[(ends > start) & (ends < start + chunk)], start + chunk]
        owners = begins[np.searchsorted(ends, cuts[:-1], side="right")]
        pairs = sum((b - a) * (a - own + (b - a) / 2) for (a, b), own in zip(pairwise(cuts), owners, strict=True))
        times.append(first + of_pair * (pairs - chunk**2 / 2))
    return interval(stages, times, stages) / chunk * float(np.mean(prompts))


@pytest.mark.parametrize(("stages", "prompt", "chunk"), [(4, 16383, 8192), (8, 32000, 8192), (4, 8000, 4096)])
def test_chunks_that_go_on_with_the_next_prompt_hold_up_as_much(r1, stages, prompt, chunk):
    """A prompt that lacks a few tokens of whole chunks is no faster; ``stalled`` weights such prompts, to 2 %."""
    found = float(timed(r1, stages, chunk, float(prompt)).interval)
    assert found == pytest.approx(packed(r1, stages, chunk, np.full(100, float(prompt))), rel=0.02)


@pytest.mark.parametrize(("stages", "mean", "chunk", "spread"), [(4, 16384, 4096, 0.5), (8, 32000, 4096, 0.3)])
def test_unlike_prompts_hold_up_each_by_its_own_chunks(r1, stages, mean, chunk, spread):
    """Log-normal prompts, packed: without the stalls the interval would be a tenth to a fifth too short."""
    sigma = np.sqrt(np.log(1 + spread**2))
    prompts = np.random.default_rng(5).lognormal(np.log(mean) - sigma**2 / 2, sigma, 1000).round()
    length, often = np.unique((prompts / 512).round() * 512, return_counts=True)
    each = [timed(r1, stages, chunk, float(isl)) for isl in length]
    share = often / often.sum()
    stalled, plain = (sum(share * [float(getattr(done, name)) for done in each]) for name in ("interval", "busy"))
    simulated = packed(r1, stages, chunk, prompts)
    assert stalled == pytest.approx(simulated, rel=0.05)
    assert plain < 0.93 * simulated


@pytest.mark.parametrize(("stages", "chunk"), [(4, 1024), (8, 1024), (8, 512)])
def test_the_head_runs_after_every_chunk(stages, chunk):
    """Llama 70B on B200, a GPU a stage: the last stage alone has the head, so what it adds to it is no stall."""
    at, isl = ds.setup("llama_3_1_70b", "b200_sxm", "nvfp4_fp8kv"), 16384
    starts = range(0, isl, chunk)
    each = [timed(at, stages, chunk, start + chunk, float(start)) for start in starts]
    times, through = [float(one.busy) for one in each], float(each[-1].ftl / each[-1].busy)
    found = timed(at, stages, chunk, isl)
    assert float(found.busy) == pytest.approx(sum(times), rel=1e-3)
    assert float(found.interval) == pytest.approx(len(times) * interval(stages, times * PROMPTS, through), rel=0.01)
