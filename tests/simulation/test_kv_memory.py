"""Grids and simulated instances have one rule of memory: what a grid calls feasible has its blocks."""

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.physical_site import kv_blocks
from disagg_sim.workload.lengths import lengths

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
