"""What each engine is told of GPUs that share tokens, and which of them cannot."""

import pytest

import disagg_sim as ds
from disagg_sim.launch.engines import sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.workers import Weights
from tests.launch.deployments import R1_ON_H200, workers

SHARED = ds.Sharding(tp_attn=8, ep=8, dcp=8)
PROMPTS = ds.Sharding(tp_attn=4, ep=8, pcp=2)
ALONE, BY_FOUR, BY_TWO = (ds.Sharding(tp_attn=8, ep=8, dcp=n) for n in (1, 4, 2))
PAIR = ds.Sharding(tp_attn=4, ep=4, dcp=2)
R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def test_flags_of_vllm_and_sglang():
    at = ds.setup(*R1_ON_H200, engine="vllm")
    decode, prefill = workers("decode", at, SHARED, batch=64), workers("prefill", at, PROMPTS, batch=1)
    flags = vllm_flags(decode, R1)
    assert (flags["--tensor-parallel-size"], flags["--decode-context-parallel-size"]) == (8, 8)
    assert "--dcp-comm-backend" not in flags
    flags = vllm_flags(prefill, R1)
    assert (flags["--tensor-parallel-size"], flags["--prefill-context-parallel-size"]) == (4, 2)
    assert sglang_flags(decode, R1)["--dcp-size"] == 8
    flags = sglang_flags(prefill, R1)
    assert (flags["--tp-size"], flags["--attn-cp-size"], flags["--enable-prefill-cp"]) == (8, 2, True)
    assert "--dcp-size" not in flags


def test_helix_of_tensorrt_llm_divides_its_gpus_into_tp_and_cp():
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", engine="trtllm")
    decode = workers("decode", at, ds.Sharding(tp_attn=8, ep=8, dcp=4), batch=64)
    config = trtllm_config(decode, R1)
    assert (config["tensor_parallel_size"], config["context_parallel_size"]) == (2, 4)
    assert config["moe_expert_parallel_size"] == 8
    assert config["cp_config"] == {"cp_type": "HELIX", "tokens_per_block": 32}
    assert config["kv_cache_config"]["tokens_per_block"] == 32


@pytest.mark.parametrize(
    ("model", "role", "mapping", "engine", "rule"),
    [
        ("deepseek_r1", "decode", SHARED, "vllm", ""),
        ("deepseek_r1", "decode", SHARED, "sglang", ""),
        ("deepseek_r1", "decode", SHARED, "trtllm", "DCP on Hopper"),
        ("deepseek_r1", "decode", ds.Sharding(tp_attn=4, dp_attn=2, ep=8, dcp=4), "vllm", ""),
        ("deepseek_r1", "prefill", PROMPTS, "vllm", ""),
        ("deepseek_r1", "prefill", ds.Sharding(tp_attn=2, dp_attn=2, ep=8, pcp=2), "vllm", "PCP with attention DP"),
        ("deepseek_r1", "prefill", PROMPTS, "trtllm", "PCP of mla attention"),
        ("deepseek_r1", "colocated", PROMPTS, "vllm", "PCP outside of prefill pools"),
        ("qwen3_235b_a22b", "prefill", PROMPTS, "vllm", "PCP of gqa attention"),
        ("qwen3_235b_a22b", "prefill", PROMPTS, "sglang", ""),
        ("qwen3_next_80b_a3b", "decode", PAIR, "sglang", ""),
        ("qwen3_next_80b_a3b", "decode", PAIR, "vllm", "DCP beside layers that keep all"),
    ],
)
def test_rules_of_engines(model, role, mapping, engine, rule):
    at = ds.setup(model, "h200_sxm", "bf16" if "next" in model else "fp8")
    found = ds.expressible([workers(role, at, mapping)], engine)
    assert [line.split(": ")[1][: len(rule)] for line in found] == ([rule] if rule else [])


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "engine", "reason"),
    [
        ("deepseek_r1", ALONE, SHARED, "vllm", ""),
        ("deepseek_r1", ALONE, BY_FOUR, "vllm", "DCP4 of TP8; allowed"),
        ("deepseek_r1", ALONE, BY_FOUR, "sglang", ""),
        ("deepseek_r1", BY_TWO, SHARED, "sglang", "DCP2 and DCP8; allowed: 1 in prefill"),
        ("deepseek_r1", PROMPTS, SHARED, "sglang", "PCP2 in prefill beside DCP in decode"),
        ("qwen3_235b_a22b", ALONE, BY_TWO, "sglang", "shared caches"),
    ],
)
def test_rules_on_what_pools_can_send_each_other(model, prefill, decode, engine, reason):
    at = ds.setup(model, "h200_sxm", "fp8")
    found = ds.expressible([workers("prefill", at, prefill), workers("decode", at, decode)], engine)
    assert [line.split(": ", 1)[1][: len(reason)] for line in found] == ([reason] if reason else [])


def test_another_exchange_than_the_default_is_told():
    decode = {name: workers("decode", ds.setup(*R1_ON_H200, engine=name), SHARED) for name in ("vllm", "sglang")}
    assert "--dcp-comm-backend" not in sglang_flags(decode["sglang"], R1)
    assert sglang_flags(decode["vllm"], R1)["--dcp-comm-backend"] == "ag_rs"
    assert vllm_flags(decode["sglang"], R1)["--dcp-comm-backend"] == "a2a"


def test_helix_is_for_decode_pools():
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    (said,) = ds.expressible([workers("colocated", at, SHARED)], "trtllm")
    assert said == "colocated TP8 DCP8 EP8 of TensorRT-LLM: Helix outside of decode pools"
