"""Memory of caches: preemption by swap, blocks beside the weights, and blocks that prompts share."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sites import SIMPLE, deployment, site, trace

import disagg_sim as ds
from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import ServiceClass
from disagg_sim.simulation.physical_site import Expected, kv_blocks, swap_times
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

#: One block takes 5 ms over the host link, after 1 ms.
SLOW_HOST = (0.005, 0.001)


def two_that_do_not_fit(swap_s):
    """Two requests of 30 + 20 tokens in four blocks of 16; steps of 10 ms, 1 ms a decode, 0.1 ms a prompt token."""
    engine, options = Engine(0), RunOptions(first_token="prefill")
    here = site(engine, deployment(colocated=1), table=SIMPLE, blocks=4, options=options)
    here = replace(here, swap_s=swap_s)
    return serve(trace([(0.0, 30, 20), (0.0, 30, 20)]), policy_named("vllm"), here, engine, options)


def test_a_sequence_is_swapped_out_and_back_by_hand():
    """The first prompt takes 13 ms, the second 14 ms beside a decode; at 39 ms both fill two blocks, and none is free.

    The second gives way with two tokens: 1 + 2 x 5 ms, and 11 ms for the fourth token of the first, up to 61 ms; its
    other 16 take until 237 ms. Then the second comes back in 11 ms, and 18 steps of 11 ms follow.
    """
    result = two_that_do_not_fit(lambda mapping: SLOW_HOST)
    r = result.requests
    assert r.first_token_s.tolist() == pytest.approx([0.013, 0.027])
    assert r.finish_s.tolist() == pytest.approx([0.237, 0.446])
    assert r.preemptions.tolist() == [0, 1]
    assert result.instances.prefill_tokens.tolist() == [60]  # nothing is computed again
    assert result.instances.busy_s.tolist() == pytest.approx([0.446])
    assert result.itl_counts.sum() == 38
    longest = result.itl_edges[result.itl_counts.nonzero()[0][-1]]
    assert longest == pytest.approx(0.220, rel=0.011)  # of the second, from 39 to 259 ms


def test_steps_that_move_blocks_alone_are_no_steps_with_prefill():
    """Both prompts in one step of 16 ms, two steps of 12; each swap is 11 ms, and 17 steps of 11 ms follow it."""
    limits = {"token_budget": 2048, "max_sequences": 8, "watermark": 0.0}
    fleet = Fleet(
        [InstanceSpec(table=SIMPLE, blocks=4, swap_block_s=SLOW_HOST[0], swap_first_s=SLOW_HOST[1], **limits)]
    )
    for request in range(2):
        fleet.submit(0, request, (0, 30, 20), 0.0)
    fleet.run_until(math.inf)
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.238, 0.436])
    assert fleet.arrays.inst["passes"].tolist() == [1]


def test_without_swap_its_tokens_are_computed_again():
    """All 32 in a step of 13.2 ms that emits the third token, once the first request has ended at 226 ms."""
    result = two_that_do_not_fit(None)
    assert result.requests.finish_s.tolist() == pytest.approx([0.226, 0.226 + 0.0132 + 17 * 0.011])
    assert result.instances.prefill_tokens.tolist() == [60 + 32]


def test_each_gpu_swaps_its_own_part_over_its_own_link():
    """131,072 B a token of Llama-3.1-8B in bf16 over 50 GB/s a GPU of an H100: 42 us a block of 16, a half with TP2."""
    at = ds.setup("llama_3_1_8b", "h100_sxm", "bf16")
    expected = Expected(1000.0, 100.0, 2000, 1500, 0.0)
    one, two = (swap_times(at, expected, Sharding(tp_attn=tp, tp_ffn=tp)) for tp in (1, 2))
    assert one == (pytest.approx(16 * 131_072 / 50e9), 20e-6)
    assert two[0] == pytest.approx(one[0] / 2)


def simulated(system, **options):
    """300 requests that Llama-3.1-8B on one GPU cannot hold at once."""
    requests = ds.synthetic_trace(rate=200.0, requests=300, lengths=(1500, 1000))
    part = (ds.Replicas(mapping=Sharding(), instances=1),)
    served = ds.ServedDeployment(name="one", gpus=1, setup=ds.setup("llama_3_1_8b", system, "bf16"), colocated=part)
    return ds.simulate(served, requests, "vllm", options=RunOptions(scheduler="vllm_v0_2024", **options))


def test_the_option_of_a_run_swaps():
    swapped, again = (simulated("h100_sxm", preemption=each) for each in ("swap", "recompute"))
    for result in (swapped.records, again.records):
        assert result.requests.preemptions.sum() > 0
        assert (result.requests.output_tokens == 1000).all()
    assert swapped.records.instances.prefill_tokens.sum() == 300 * 1500
    assert again.records.instances.prefill_tokens.sum() > 300 * 1500


def test_what_cannot_be_swapped_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"a100_sxm_80gb has no tier 'dram'"):
        simulated("a100_sxm_80gb", preemption="swap")
    with pytest.raises(InputError, match=r"'swap' with prefix_cache"):
        RunOptions(preemption="swap", prefix_cache=True)
    ranks = StepTable.build(ds.setup("mixtral_8x7b", "h100_sxm", "bf16"), Sharding(dp_attn=2, ep=2), max_sequences=8)
    with pytest.raises(InputError, match=r"2 attention ranks with preemption by swap; allowed: one rank"):
        InstanceSpec(table=ranks, blocks=100, max_sequences=8, swap_block_s=1e-4)


CASES = {
    "dense": ("llama_3_1_70b", "h100_sxm", "fp8", 8),
    "mla": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", 32),
    "window": ("gpt_oss_120b", "h100_sxm", "bf16", 8),
}


def test_blocks_are_what_memory_holds_beside_the_weights():
    """80 layers x 2 x 8 heads x 128 values in fp8 are 163,840 B a token, a quarter of them on each of 4 GPUs.

    TensorRT-LLM keeps a tenth of the room for them free.
    """
    at = setup("llama_3_1_70b", "h100_sxm", "fp8")
    mapping = Sharding(tp_attn=4.0, tp_ffn=4.0)
    blocks = kv_blocks(at, mapping)
    cache = blocks * BLOCK_TOKENS * 163_840 / 4 / 0.9
    weights = 70.55e9 / 4
    assert weights + cache < at.memory_limit < weights + cache + 5e9
    assert kv_blocks(at, mapping, max_tokens=16_384) < blocks
    assert kv_blocks(at, Sharding(tp_attn=4.0, dp_attn=2.0, tp_ffn=8.0)) > 1.9 * blocks


def test_a_model_that_leaves_no_memory_is_refused():
    with pytest.raises(InfeasibleError, match="leaves no memory for a KV cache"):
        kv_blocks(setup("llama_3_1_70b", "h100_sxm", "bf16", engine="vllm"), Sharding())


@pytest.fixture(scope="module", params=CASES)
def case(request):
    model, system, precision, most = CASES[request.param]
    at = setup(model, system, precision)
    return at, enumerate_mappings(at, max_gpus=most)


def fullest(grid, rng, count=40):
    """The largest feasible batch of some rows: (row, column) pairs."""
    rows = np.flatnonzero(grid.feasible.any(axis=1))
    chosen = rng.choice(rows, min(count, rows.size), replace=False)
    return [(int(row), int(np.flatnonzero(grid.feasible[row])[-1])) for row in chosen]


def test_the_largest_batch_of_a_decode_grid_has_its_blocks(case):
    """A rank holds ceil(B/dp) sequences of ISL + OSL/2 tokens and two deviations; a block rounds down."""
    at, mappings = case
    grid = decode_grid(at, mappings, lengths(2048, 512))
    law = decode_residents(2048, 512)
    for row, column in fullest(grid, np.random.default_rng(1)):
        batch, mapping = int(grid.batch[column]), grid.mappings[row]
        blocks = kv_blocks(at, mapping, max_sequences=batch, max_tokens=batch)
        own = -(-batch // mapping.dp_attn)
        tokens = law.of(float(own), at.profile.resident_deviations)
        assert blocks * BLOCK_TOKENS > mapping.dp_attn * (tokens - BLOCK_TOKENS)


def test_the_largest_pass_of_a_prefill_grid_has_its_blocks(case):
    """2*pp*ceil(b/dp) prompts of a rank are running or leaving; a pipeline works on a micro-batch or a chunk."""
    at, mappings = case
    grid = prefill_grid(at, mappings, lengths(4096, 2), mla_form="naive")
    for row, column in fullest(grid, np.random.default_rng(2)):
        batch, mapping = int(grid.batch[column]), grid.mappings[row]
        resident = 2 * mapping.pp * -(-batch // mapping.dp_attn)
        blocks = kv_blocks(
            at, mapping, max_sequences=resident * mapping.dp_attn, max_tokens=batch * 4096, prompts=batch
        )
        assert blocks * BLOCK_TOKENS >= mapping.dp_attn * (resident * 4096 - BLOCK_TOKENS)


def test_a_window_keeps_its_own_tokens_alone():
    """gpt-oss: 18 of 36 layers keep 128 tokens, so that half as many sequences leave the other half more room.

    With W = 128 tokens of S sequences in the windows, the full layers of a token take half of its bytes: capacity is
    (2*C - S*W) tokens, C those that fit where every layer keeps every token. SGLang keeps logits of them, too; the
    profile run of vLLM has room for those of all sequences that it may run.
    """
    at, cut = setup("gpt_oss_120b", "h100_sxm", "bf16", engine="sglang"), Sharding(tp_attn=4.0, ep=4.0)
    few, many = (kv_blocks(at, cut, max_sequences=n, max_tokens=8192) * BLOCK_TOKENS for n in (64, 1024))
    logits = 4 * at.model.vocab / 4 * (1024 - 64)  # 4 B of each that emits, a quarter on each GPU [B]
    per_token = 36 * 2 * 8 / 4 * 64 * 2  # layers, K and V, heads of a GPU, values of a head, bytes [B]
    assert few - many == pytest.approx((1024 - 64) * 128 + 2 * logits / per_token, abs=2 * BLOCK_TOKENS)
    at = setup("gpt_oss_120b", "h100_sxm", "bf16", engine="vllm")
    few, many = (kv_blocks(at, cut, max_sequences=n, max_tokens=8192) * BLOCK_TOKENS for n in (64, 1024))
    assert few - many == pytest.approx((1024 - 64) * 128, abs=2 * BLOCK_TOKENS)


def test_a_model_of_windows_alone_holds_every_sequence_at_its_longest():
    """Mistral keeps 4,096 tokens a sequence, 0.27 GB of 131,072 B each: 64 sequences fit, whatever their length."""
    at = setup("mistral_7b", "h100_sxm", "fp8")
    assert kv_blocks(at, Sharding(), max_sequences=64) == 64 * at.model.max_context // BLOCK_TOKENS


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
