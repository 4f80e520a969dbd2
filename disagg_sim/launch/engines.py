"""Write the settings of each engine: flags of vLLM and SGLang, the configuration file of TensorRT-LLM.

Limits of a step are per attention rank in vLLM and TensorRT-LLM; in SGLang they are per instance, except
``--max-prefill-tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disagg_sim.facts.engine import hold_settings
from disagg_sim.facts.load import load_engine, load_launcher
from disagg_sim.facts.speculation import DRAFT_MODEL, EAGLE3, MTP
from disagg_sim.launch.workers import NODE_GPUS, Weights, Workers
from disagg_sim.units import GB, GIB

#: Ports: SGLang's bootstrap server, NIXL in vLLM, then serving, head and router; one offset for each slot of a node.
BOOTSTRAP_PORT, NIXL_PORT, SERVE_PORT, HEAD_PORT, ROUTER_PORT = 8998, 5600, 8100, 29500, 8000
#: Transfer of embeddings from SGLang's encoders to prefill.
ENCODER_TRANSFER = "zmq_to_scheduler"
#: Most tokens of a rank in a decode step with DeepEP: unless told (sglang pull request 28985), and at all (SGLang
#: 0.5.21). [token]
DISPATCHED, MOST_DISPATCHED = 128, 1024
#: Tokens of the largest page of a cache (CUTLASS MLA), of which SGLang's chunks must be whole numbers. [token]
PAGE = 128
#: Entries of NVSHMEM's queues by default; DeepEP needs two a token, and two more. [1]
QUEUE_DEPTH = 1024
#: Kernel of experts in MXFP4 that vLLM on Hopper has to be told to take, as the efficiency files name it.
MARLIN = "W4A16: Marlin"
#: The exchange of vLLM that needs no library beside it.
GATHERED = "allgather_reducescatter"
#: Directory of the SSD tier on each node.
CACHE_DIRECTORY = "/kv_cache"


def vllm_flags(workers: Workers, weights: Weights) -> dict[str, Any]:
    """Make the flags of ``vllm serve``, as ``scripts.Flags``, without those that join nodes."""
    mapping, at = workers.mapping, workers.setup
    flags: dict[str, Any] = {"--tensor-parallel-size": int(mapping.tp_attn)}
    flags |= _above_one("--pipeline-parallel-size", mapping.pp) | _above_one("--data-parallel-size", mapping.dp_attn)
    flags |= _above_one("--decode-context-parallel-size", mapping.dcp)
    flags |= _above_one("--prefill-context-parallel-size", mapping.pcp) | _exchange_of(workers, "ag_rs")
    if mapping.ep > 1:
        flags["--enable-expert-parallel"] = True
        if mapping.dp_attn > 1:
            flags["--all2all-backend"] = vllm_exchange(workers)
    if mapping.redundant_slots:
        copies = {"num_redundant_experts": int(mapping.redundant_slots)}
        flags |= {"--enable-eplb": True, "--eplb-config": copies}
    flags |= _given("--max-model-len", workers.context) | _given("--max-num-seqs", workers.sequences)
    flags |= _given("--max-num-batched-tokens", workers.tokens)
    flags |= _given("--max-cudagraph-capture-size", _graphs(workers, load_engine("vllm").captured_tokens))
    flags |= _above_one("--long-prefill-token-threshold", mapping.chunk_tokens)
    if at.engine == "vllm" and at.overheads is not None:
        flags["--gpu-memory-utilization"] = at.overheads.memory_utilisation
    flags["--kv-cache-dtype"] = {"fp8": "fp8", "bf16": "bfloat16"}[at.precision.cache.name]
    flags |= _given("--quantization", weights.quantised or None)
    flags |= _vllm_connectors(workers)
    if drafts := drafts_of(workers):
        flags["--speculative-config"] = _vllm_drafts(workers, weights, drafts)
    return _known("vllm", workers, flags)


def _graphs(workers: Workers, default: int = 0) -> int | None:
    """Find the most tokens of a rank in a decode step captured as a graph; None where ``default`` has it. [token]

    Larger steps are launched kernel by kernel.
    """
    step = step_tokens(workers)
    told = 0 if workers.setup.overheads is None else workers.setup.overheads.captured
    return None if step <= default or 0 < told <= default else min(told or step, step)


def _vllm_drafts(workers: Workers, weights: Weights, drafts: int) -> dict[str, Any]:
    """Configure the drafter; vLLM requires the TP of the model for a draft model."""
    assert workers.setup.speculation is not None
    config: dict[str, Any] = {"method": workers.setup.speculation.method, "num_speculative_tokens": drafts}
    if (own := weights.drafter) is not None:
        config |= {"model": own.checkpoint, "draft_tensor_parallel_size": int(workers.mapping.tp_attn)}
        config |= _given("quantization", own.quantised or None)
    return config


def _vllm_connectors(workers: Workers) -> dict[str, Any]:
    """Configure KV transfer to another pool and offloading to DRAM; sizes are per data parallel rank."""
    kept = int(tier_bytes(workers, "dram")) * workers.gpus // int(workers.mapping.dp_attn)
    if workers.role not in _KV_ROLES:
        return {"--kv-offloading-size": round(kept / GIB, 2), "--kv-offloading-backend": "native"} if kept else {}
    sends = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[workers.role]}
    if not kept:
        return {"--kv-transfer-config": sends}
    keeps = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    both = [sends, keeps | {"kv_connector_extra_config": {"cpu_bytes_to_use": kept}}]
    named = {"kv_connector": "MultiConnector", "kv_role": _KV_ROLES[workers.role]}
    return {"--kv-transfer-config": named | {"kv_connector_extra_config": {"connectors": both}}}


_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
#: Tokens per KV block with Helix.
HELIX_BLOCK = 32


def _exchange_of(workers: Workers, default: str) -> dict[str, Any]:
    """Set how GPUs of a DCP group exchange outputs, unless the plan uses the default."""
    how = workers.setup.sharing.decode
    return {} if workers.mapping.dcp == 1 or how in (default, "helix") else {"--dcp-comm-backend": how}


def drafts_of(workers: Workers) -> int:
    """Count the draft tokens of workers: 1 in prefill, to fill the drafter's cache; 0 without a drafter. [token]"""
    drafts = int(workers.mapping.draft_tokens)
    return 1 if workers.role == "prefill" and workers.setup.speculation is not None else drafts


def vllm_exchange(workers: Workers) -> str:
    """Choose the exchange of experts: FlashInfer within a rack-scale NVLink domain, otherwise DeepEP by the phase.

    Its kernels of high throughput run without CUDA graphs, so co-located instances gather and scatter.
    """
    domain = workers.setup.system.nvlink_domain
    if domain > NODE_GPUS and workers.mapping.stage_gpus <= domain:
        return "flashinfer_nvlink_one_sided"
    return {"decode": "deepep_low_latency", "prefill": "deepep_high_throughput"}.get(workers.role, GATHERED)


def sglang_flags(workers: Workers, weights: Weights) -> dict[str, Any]:
    """Make the flags of ``sglang.launch_server``, as ``vllm_flags``."""
    mapping, at = workers.mapping, workers.setup
    if workers.role == "encode":
        return {"--tp-size": 1, "--encoder-only": True, "--encoder-transfer-backend": ENCODER_TRANSFER}
    ranks, stage = int(mapping.dp_attn), int(mapping.stage_gpus)
    flags: dict[str, Any] = {"--tp-size": stage} | _above_one("--pp-size", mapping.pp)
    if ranks > 1:
        flags |= {"--dp-size": ranks, "--enable-dp-attention": True}
        if mapping.tp_attn == 1 and workers.setup.model.is_moe:
            flags["--moe-dense-tp-size"] = 1
    flags |= _above_one("--dcp-size", mapping.dcp) | _exchange_of(workers, "a2a")
    if mapping.pcp > 1:
        flags |= {"--attn-cp-size": int(mapping.pcp), "--enable-prefill-cp": True}
    flags |= _above_one("--ep-size", mapping.ep)
    if _deepep(workers):
        mode = {"decode": "low_latency", "prefill": "normal"}.get(workers.role, "auto")
        flags |= {"--moe-a2a-backend": "deepep", "--deepep-mode": mode}
    if mapping.redundant_slots:
        flags |= {"--enable-eplb": True, "--ep-num-redundant-experts": int(mapping.redundant_slots)}
    flags |= _given("--context-length", workers.context)
    if workers.sequences is not None:
        flags["--max-running-requests"] = workers.sequences * ranks
    graphs = _graphs(workers)  # by default up to 8 to 512 requests, by memory and TP
    flags |= _given("--cuda-graph-max-bs-decode", graphs and graphs // (1 + drafts_of(workers)))
    if workers.tokens is not None:
        shared = workers.role == "colocated"
        mixed = shared and not drafts_of(workers)  # the scheduler takes running decodes off the chunk itself
        prompts = max(workers.tokens - (workers.sequences or 0) * (shared and not mixed), 1)
        page = PAGE if workers.role == "prefill" else 1
        prompts = -(-prompts // page) * page
        flags |= {"--chunked-prefill-size": prompts * ranks, "--max-prefill-tokens": prompts}
        flags |= {"--enable-mixed-chunk": True} if mixed else {}
    flags |= hold_settings("sglang", workers.hold_steps)
    if at.engine == "sglang" and at.overheads is not None:
        flags["--mem-fraction-static"] = at.overheads.memory_utilisation
    flags["--kv-cache-dtype"] = {"fp8": "fp8_e4m3", "bf16": "bf16"}[at.precision.cache.name]
    flags |= _given("--quantization", weights.quantised or None)
    if workers.role in _KV_ROLES:
        flags |= {"--disaggregation-mode": workers.role, "--disaggregation-transfer-backend": "nixl"}
    if kept := tier_bytes(workers, "dram"):  # HiCache: host memory of each GPU, then files
        flags |= {"--enable-hierarchical-cache": True, "--hicache-size": round(kept / GB)}
        flags["--hicache-write-policy"] = "write_through"
        flags |= {"--hicache-storage-backend": "file"} if tier_bytes(workers, "ssd") else {}
    return _known("sglang", workers, flags | _sglang_drafts(workers, weights))


def _deepep(workers: Workers) -> bool:
    """Whether SGLang exchanges the tokens of experts by DeepEP, whose buffers have a largest size."""
    wide = workers.mapping.dp_attn > 1 and workers.mapping.ep == workers.mapping.stage_gpus
    return bool(wide and step_tokens(workers) <= MOST_DISPATCHED)


def step_tokens(workers: Workers) -> int:
    """Most tokens of a rank in a decode step, drafts included; 0 of prefill. [token]"""
    return 0 if workers.role == "prefill" else (workers.sequences or 0) * (1 + drafts_of(workers))


def _sglang_drafts(workers: Workers, weights: Weights) -> dict[str, Any]:
    """Configure the drafter and the draft tokens of a step."""
    drafts, speculation = drafts_of(workers), workers.setup.speculation
    if not drafts or speculation is None:
        return {}
    flags = {"--speculative-algorithm": _SGLANG_DRAFTERS[speculation.method], "--speculative-num-steps": drafts}
    flags |= {"--speculative-eagle-topk": 1, "--speculative-num-draft-tokens": drafts + 1}
    if (own := weights.drafter) is not None:
        flags["--speculative-draft-model-path"] = own.checkpoint
        flags |= _given("--speculative-draft-model-quantization", own.quantised or None)
    return flags


#: Names of drafting methods in SGLang and TensorRT-LLM.
_SGLANG_DRAFTERS = {MTP: "EAGLE", EAGLE3: "EAGLE3", DRAFT_MODEL: "STANDALONE"}
_TRTLLM_DRAFTERS = {EAGLE3: "Eagle3", DRAFT_MODEL: "Draft_Target"}


def trtllm_config(workers: Workers, weights: Weights) -> dict[str, Any]:
    """Make the configuration file of ``trtllm-serve``; arguments as in ``vllm_flags``."""
    mapping, at = workers.mapping, workers.setup
    config: dict[str, Any] = {
        "tensor_parallel_size": int(mapping.stage_gpus // mapping.dcp),
        "pipeline_parallel_size": int(mapping.pp),
        **({"gpus_per_node": workers.gpus // workers.nodes()} if workers.nodes() > 1 else {}),
    }
    if at.model.is_moe:
        config |= {"moe_expert_parallel_size": int(mapping.ep), "moe_tensor_parallel_size": int(mapping.tp_ffn)}
    config["enable_attention_dp"] = bool(mapping.dp_attn > 1)
    config |= hold_settings("trtllm", workers.hold_steps)
    config |= _given("max_seq_len", workers.context)
    config |= _given("max_batch_size", workers.sequences) | _given("max_num_tokens", workers.tokens)
    if workers.role == "prefill":  # or prompts above max_num_tokens are refused, stages idle
        chunked = bool(mapping.chunk_tokens) or (workers.context or math.inf) > (workers.tokens or 0)
        config |= {"enable_chunked_prefill": bool(chunked or mapping.pp > 1), "disable_overlap_scheduler": True}
    elif workers.role == "colocated":
        config["enable_chunked_prefill"] = True
    config["kv_cache_config"] = {"dtype": {"fp8": "fp8", "bf16": "auto"}[at.precision.cache.name]}
    if kept := tier_bytes(workers, "dram"):
        config["kv_cache_config"]["host_cache_size"] = int(kept)
    if kept := tier_bytes(workers, "ssd"):
        config["kv_cache_config"] |= {"disk_cache_size": int(kept), "disk_cache_path": CACHE_DIRECTORY}
    if mapping.dcp > 1:
        config["context_parallel_size"] = int(mapping.dcp)
        config["cp_config"] = {"cp_type": "HELIX", "tokens_per_block": HELIX_BLOCK}
        config["kv_cache_config"]["tokens_per_block"] = HELIX_BLOCK
    if at.engine == "trtllm":
        config["kv_cache_config"]["free_gpu_memory_fraction"] = at.cache_share
    if mapping.redundant_slots:
        experts = max(getattr(kind.ffn, "experts", 0) for kind in at.model.kinds)
        slots = {"num_slots": experts + int(mapping.redundant_slots), "layer_updates_per_iter": 1}
        config["moe_config"] = {"load_balancer": slots}
    if workers.role != "prefill" and workers.sequences is not None:
        config["cuda_graph_config"] = {"enable_padding": True, "max_batch_size": workers.sequences}
    if workers.role in _KV_ROLES:
        config["cache_transceiver_config"] = {"backend": "NIXL"}
    if drafts := drafts_of(workers):
        config |= _trtllm_drafts(workers, weights, drafts)
    return config


def _trtllm_drafts(workers: Workers, weights: Weights, drafts: int) -> dict[str, Any]:
    """Configure the drafter; the documentation starts draft models without the overlap scheduler."""
    assert workers.setup.speculation is not None
    method, own = workers.setup.speculation.method, weights.drafter
    if own is None:
        return {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": drafts}}
    config = {"decoding_type": _TRTLLM_DRAFTERS[method], "max_draft_len": drafts, "speculative_model": own.checkpoint}
    return {**({"disable_overlap_scheduler": True} if method == DRAFT_MODEL else {}), "speculative_config": config}


def environment_of(engine: str, every: Sequence[Workers]) -> dict[str, str]:
    """List environment variables of all workers of an engine."""
    tps = {int(each.mapping.tp_attn) for each in every if each.role in _KV_ROLES}
    heads_cut = len(tps) > 1 and "mla" not in every[0].setup.model.attention_kinds
    if engine == "vllm":
        used = (fit for each in every for taken in each.setup.rates.used for fit in taken.fits)
        return {"VLLM_MXFP4_USE_MARLIN": "1"} if any(fit.stands_for == MARLIN for fit in used) else {}
    if engine != "sglang":
        return {}
    found = {"SGLANG_DISAGG_STAGING_BUFFER": "1"} if heads_cut else {}
    tokens = max((step_tokens(each) for each in every if _deepep(each)), default=0)
    if tokens > DISPATCHED:
        found["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(tokens)
    if 2 * (tokens + 1) > QUEUE_DEPTH:
        found["NVSHMEM_QP_DEPTH"] = str(2 * (tokens + 1))
    on_drives = any(tier_bytes(each, "ssd") for each in every)
    return found | ({"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": CACHE_DIRECTORY} if on_drives else {})


def tier_bytes(workers: Workers, tier: str) -> float:
    """Size per GPU of a tier of cached prompts; 0 if workers do not use it or its size is unknown. [B]"""
    known = workers.setup.system.kv_tiers
    return (known[tier].capacity or 0.0) if tier in workers.tiers and tier in known else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """Settings of an engine, and what it can load and cache."""

    title: str
    settings: Callable[[Workers, Weights], dict[str, Any]]
    quantises: bool  # whether it converts bf16 weights to fp8 as it loads them
    tiers: tuple[str, ...]  # cache tiers below HBM, without a separate service


ENGINES = {
    "vllm": EngineCommand(title="vLLM", settings=vllm_flags, quantises=True, tiers=("dram",)),
    "sglang": EngineCommand(title="SGLang", settings=sglang_flags, quantises=True, tiers=("dram", "ssd")),
    "trtllm": EngineCommand(title="TensorRT-LLM", settings=trtllm_config, quantises=False, tiers=("dram", "ssd")),
}


def _known(engine: str, workers: Workers, flags: dict[str, Any]) -> dict[str, Any]:
    """Drop flags that the engine lacks on the system of the workers."""
    return {flag: value for flag, value in flags.items() if flag not in lacking(engine, workers)}


def lacking(engine: str, workers: Workers) -> tuple[str, ...]:
    """List the options that an engine lacks on the system of workers."""
    support = load_launcher(engine).vendors.get(workers.setup.system.vendor)
    return () if support is None else support.lacks


def _above_one(flag: str, degree: Any) -> dict[str, Any]:
    return {flag: int(degree)} if degree > 1 else {}


def _given(flag: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {flag: value}
