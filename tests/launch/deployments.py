"""Deployments that tests launch: unequal TP, attention DP with experts over several nodes, a rack, chunks, one pool."""

from typing import Any

import disagg_sim as ds
from disagg_sim.launch.workers import Workers

R1_ON_H200 = ("deepseek_r1", "h200_sxm", "fp8")
CHAT = ds.lengths(4096, 512)


def workers(role: str, at: ds.Setup, mapping: ds.Sharding, instances: int = 1, **limits: Any) -> Workers:
    return Workers(role=role, setup=at, mapping=mapping, instances=instances, **limits)


def tp(degree: int) -> ds.Sharding:
    return ds.Sharding(tp_attn=degree, tp_ffn=degree)


def unequal_tp() -> tuple[Workers, ...]:
    """Llama 70B, 4 instances a node for prefill, 2 for decode."""
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8", engine="vllm")
    prefill = workers("prefill", at, tp(2), 3, batch=4, token_budget=16384, lengths=CHAT)
    return prefill, workers("decode", at, tp(4), 2, batch=96, lengths=CHAT)


def dep() -> tuple[Workers, ...]:
    """DeepSeek-R1: prefill with TP attention and experts over a node, decode with attention DP over two nodes."""
    at = ds.setup(*R1_ON_H200, engine="sglang")
    prefill = workers("prefill", at, ds.Sharding(tp_attn=8, ep=8), 3, batch=2, token_budget=16384)
    return prefill, workers("decode", at, ds.Sharding(dp_attn=16, ep=16), batch=1000)


def rack() -> tuple[Workers, ...]:
    """DeepSeek-R1 on an NVL72: decode over 48 GPUs in trays of 4, with 32 redundant expert slots."""
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", engine="trtllm")
    prefill = workers("prefill", at, ds.Sharding(dp_attn=4, ep=4), 6, batch=4, token_budget=16384, lengths=CHAT)
    wide = ds.Sharding(dp_attn=48, ep=48, redundant_slots=32)
    return prefill, workers("decode", at, wide, batch=3072, lengths=CHAT)


def chunked() -> tuple[Workers, ...]:
    """DeepSeek-R1: prefill in chunks of 4096 tokens over 4 stages of 8 GPUs, decode with attention DP on a node."""
    at = ds.setup(*R1_ON_H200, engine="sglang")
    stages = ds.Sharding(tp_attn=8, tp_ffn=8, pp=4, chunk_tokens=4096)
    return workers("prefill", at, stages, batch=1, token_budget=65536), workers(
        "decode", at, ds.Sharding(dp_attn=8, ep=8), 2, batch=512
    )


def one_pool() -> tuple[Workers, ...]:
    """Qwen3 32B, prompts in the steps of decodes."""
    at = ds.setup("qwen3_32b", "h100_sxm", "bf16", engine="vllm")
    return (workers("colocated", at, tp(2), 4, batch=128, token_budget=2176),)


#: Name -> deployment, and the engines that can start it.
CASES = {
    "unequal_tp": (unequal_tp, ("vllm", "sglang", "trtllm", "dynamo", "llm-d")),
    "dep": (dep, ("vllm", "sglang", "trtllm", "dynamo", "llm-d")),
    "rack": (rack, ("vllm", "sglang", "trtllm", "dynamo", "llm-d")),
    "chunked": (chunked, ("vllm", "sglang", "trtllm", "dynamo", "llm-d")),
    "one_pool": (one_pool, ("vllm", "sglang", "trtllm", "dynamo", "llm-d")),
}
PAIRS = [(case, engine) for case, (_, engines) in CASES.items() for engine in engines]
