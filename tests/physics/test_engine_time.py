"""What an engine adds to its kernels, by hand: host time, launches, the stretch of prefill; the same TTL everywhere."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.facts.load import load_engine, load_profile
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.layers import attention_cost
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.work import Tokens
from disagg_sim.simulation.kernel.step_table import StepTable
from lab.calibration.served.steady_state import RowLengths, decode_time, prefill_time, served

ENGINE = replace(
    load_engine("trtllm"),
    step_host=1e-3,
    sequence_host=1e-5,
    rank_host=2e-3,
    prefill_stretch=1.5,
    exchange_stretch=1.0,
    kernel_launch=1e-5,
)
TP4 = ds.Sharding(tp_attn=4, tp_ffn=4)


def setups(model="llama_3_1_70b", system="h100_sxm", precision="fp8", engine=ENGINE):
    """With the engine, and its bare kernels on a host that takes no time."""
    at = ds.setup(model, system, precision, engine=engine)
    return at, replace(at, overheads=None, profile=replace(at.profile, host=0.0))


def test_a_decode_step_pays_for_the_step_its_ranks_and_its_sequences():
    """1 ms + 2 ms * log2(4 GPUs) + 10 us * 32 sequences of the one rank."""
    at, bare = setups()
    with_host, kernels = (float(decode_step(s, TP4, batch=32.0, context=1000.0).ttl) for s in (at, bare))
    assert with_host - kernels == pytest.approx(1e-3 + 2e-3 * 2 + 32e-5, rel=1e-9)


def test_ranks_of_attention_dp_share_the_sequences():
    at, bare = setups("deepseek_r1", "h200_sxm", "fp8")
    mapping = ds.Sharding(dp_attn=8, ep=8)
    with_host, kernels = (float(decode_step(s, mapping, batch=80.0, context=1000.0).ttl) for s in (at, bare))
    assert with_host - kernels == pytest.approx(1e-3 + 2e-3 * 3 + 80 / 8 * 1e-5, rel=1e-9)


def test_every_micro_batch_of_a_pipeline_has_host_time_of_its_own():
    """Two stages that are equal but for the head: 2*(t + host), the hand-over apart."""
    at, bare = setups()
    mapping = ds.Sharding(tp_attn=2, tp_ffn=2, pp=2)
    with_host, kernels = (float(decode_step(s, mapping, batch=64.0, context=1000.0).ttl) for s in (at, bare))
    host = 1e-3 + 2e-3 * 2 + 32e-5  # of 32 sequences each
    assert with_host - kernels == pytest.approx(2 * host, rel=1e-9)


def scores(at, mapping, **tokens):
    """Scores and values of all layers. [s]"""
    layers = layers_of(at.model)
    return sum(
        n * float(attention_cost(kind.attention, at, mapping.tp_attn, Tokens(**tokens), "auto").time)
        for kind, n in layers
    )


def test_prefill_takes_the_stretch_times_its_kernels_and_one_host():
    """Scores and values of attention, one long kernel a layer, take no stretch."""
    at, bare = setups()
    with_host, kernels = (float(prefill_pass(s, TP4, batch=4.0, isl=4096).ftl) for s in (at, bare))
    attention = scores(bare, TP4, prompts=4.0, new=4096.0)
    assert 0.05 < attention / kernels < 0.5
    assert with_host == pytest.approx(1.5 * (kernels - attention) + attention + 1e-3 + 2e-3 * 2, rel=1e-9)


def test_a_short_prompt_waits_for_the_launches_of_its_kernels():
    """32 layers of 9 and 7 kernels, 10 us each, and the host."""
    at, _ = setups("llama_3_1_8b")
    assert float(prefill_pass(at, TP4, batch=1.0, isl=16).ftl) == pytest.approx(32 * 16 * 1e-5 + 5e-3, rel=1e-9)


def test_chunks_pay_for_the_host_one_by_one():
    at, bare = setups()
    mapping = ds.Sharding(tp_attn=2, tp_ffn=2, pp=2)
    with_host, kernels = (
        chunked_prefill_pass(s, mapping, batch=1.0, isl=8192, chunk_tokens=2048.0) for s in (at, bare)
    )
    pieces = [scores(bare, mapping, prompts=1.0, new=2048.0, past=2048.0 * done) for done in range(4)]
    attention = sum(pieces) / 2  # one of two stages
    assert float(with_host.busy) == pytest.approx(1.5 * float(kernels.busy) - 0.5 * attention + 4 * 5e-3, rel=1e-9)


def test_what_a_chunk_adds_to_the_decodes_is_stretched():
    at, bare = setups()

    def step(s, tokens):
        return float(mixed_step(s, TP4, batch=32.0, context=1000.0, chunk=Chunk(tokens, 4096.0)).time)

    alone, both = step(bare, 0.0), step(bare, 2048.0)
    attention = scores(bare, TP4, prompts=1.0, new=2048.0, past=1024.0)  # at the mean past of the prompt's chunks
    added = 1.5 * (both - alone - attention) + attention
    assert step(at, 2048.0) == pytest.approx(alone + added + 1e-3 + 2e-3 * 2 + 32e-5, rel=1e-9)


def test_steps_of_more_tokens_than_were_captured_are_launched_kernel_by_kernel():
    """Llama 8B under vLLM: 32 layers of 16 kernels at 51 us are 26.11 ms, the host's other work within.

    513 sequences on a rank are more than the 512 tokens that a server captures.
    """
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="vllm")
    started = replace(at, overheads=at.overheads.as_started())

    def step(at, sequences, **mapping):
        return float(decode_step(at, ds.Sharding(**mapping), batch=sequences, context=100.0).time)

    assert step(started, 512) == step(at, 512)
    assert step(started, 513) == pytest.approx(512 * 51e-6, rel=1e-9)
    assert step(at, 513) < 0.9 * step(started, 513)
    assert step(replace(at, overheads=at.overheads.as_started(1024)), 513) == step(at, 513)
    assert step(started, 1024, dp_attn=2, tp_ffn=2) < step(started, 1026, dp_attn=2, tp_ffn=2) - 4e-3


def test_profiles_without_an_engine_add_nothing():
    for profile in ("ideal", "optimistic"):
        assert ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile, engine="vllm").overheads is None
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    assert at.engine == "trtllm"
    assert at.changed(profile=load_profile("ideal")).overheads is None
    assert ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="kernels").overheads is None


@pytest.mark.parametrize(
    ("model", "system", "precision", "mapping"),
    [
        ("llama_3_1_70b", "h100_sxm", "fp8", TP4),
        ("llama_3_1_70b", "h100_sxm", "fp8", ds.Sharding(tp_attn=2, tp_ffn=2, pp=2)),
        ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", ds.Sharding(dp_attn=16, ep=16)),
        ("gpt_oss_120b", "h200_sxm", "mxfp4", ds.Sharding(tp_attn=2, ep=2)),
    ],
)
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang", "vllm_eager"])
def test_frontier_simulation_and_validation_give_the_same_ttl(model, system, precision, mapping, engine):
    """64 sequences at 3,584 + 1,024/2 = 4,096 tokens, where the table of the simulation holds the physics itself."""
    at, lengths = ds.setup(model, system, precision, engine=engine), ds.lengths(3584, 1024)
    run, seen = served(model, system, precision, load_engine(engine)), RowLengths(np.float64(3584), np.float64(1024))
    grid = ds.decode_grid(at, mapping, lengths, batch=[64]).latency[0, 0]
    simulated = StepTable.build(at, mapping, max_sequences=64, max_context=8192).step_time(64, 4096.0)
    assert grid == pytest.approx(simulated, rel=1e-9)
    assert grid == pytest.approx(float(decode_time(run, mapping, 64.0, seen)), rel=1e-9)
    if mapping.pp == 1:  # the pass of a row is not cut into micro-batches
        ranks = int(mapping.dp_attn)
        prefill = ds.prefill_grid(at, mapping, lengths, batch=[ranks]).latency[0, 0]
        validated = prefill_time(run, mapping, np.float64(ranks * 3584), np.float64(ranks), seen)
        assert prefill == pytest.approx(float(np.max(validated)), rel=1e-9)


def test_an_engine_may_name_the_kernel_of_its_experts():
    """vLLM 0.12 on Hopper gives each of 128 experts a block: 94 layers * 128 * 4.7 MB at 0.687 * 4.8 TB/s are 17.2 ms.

    So a token takes longer than that, where the fastest kernel reads 8 experts. A system without that kernel takes the
    fastest.
    """
    told = ("qwen3_235b_a22b", "fp8_block_bf16kv")
    now, before = (ds.setup(told[0], "h200_sxm", told[1], engine=engine) for engine in ("vllm", "vllm_0_12"))
    (blocks,) = before.rates.moe["tp"]
    assert (blocks.block_rows, np.isinf(blocks.flops)) == (128, True)
    assert not any(rate.block_rows for rate in now.rates.moe["tp"])
    step, longer = (float(decode_step(at, TP4, batch=1.0, context=1000.0).ttl) for at in (now, before))
    weights = 94 * 128 * 3 * 4096 * 384 / (0.687 * 4.8e12)
    assert weights == pytest.approx(17.2e-3, rel=0.01)
    assert 0.9 * weights < longer - step < weights
    elsewhere = [ds.setup(told[0], "b200_sxm", told[1], engine=engine).rates.moe for engine in ("vllm", "vllm_0_12")]
    assert elsewhere[0] == elsewhere[1]
