"""Small made-up grids: rates and latencies are given, no physics runs."""

from dataclasses import dataclass

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.ffn import DenseFfn
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.load import load_profile, resolve_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.setup import Setup
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import lengths

MODEL = ModelSpec(
    name="toy",
    title="Toy",
    hidden=64,
    vocab=100,
    layers=(LayerKind(GqaAttention(q_heads=4, kv_heads=2, head_dim=16), DenseFfn(width=128)),) * 2,
    tied_embeddings=False,
    layer_norm=False,
    learned_positions=0,
    block_scaled_fp8=False,
    max_context=131072,
    max_context_sure=True,
    source="made up",
)
SYSTEM = SystemSpec(
    name="toy_gpu",
    title="Toy GPU",
    vendor="none",
    architecture="none",
    peak_flops={"bf16": 1e15},
    hbm_capacity=8e10,
    hbm_reported=8e10,
    hbm_bandwidth=3e12,
    l2_capacity=5e7,
    sm_count=100,
    attention_tile_rows=128,
    nvlink_bandwidth=4.5e11,
    nvlink_domain=8,
    engine="trtllm",
    in_switch_reduction=False,
    nic_bandwidth=5e10,
    tdp=700.0,
    usd_per_gpu_hour=None,
    confidence="none",
    sources={},
)


SETUP = Setup(
    model=MODEL,
    system=SYSTEM,
    precision=resolve_precision("bf16", MODEL, SYSTEM),
    profile=load_profile("measured"),
    engine="",
    rates=None,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ByHand(PhaseGrid):
    """A grid whose status, cache and GPUs with distinct cache are given, not counted."""

    status: np.ndarray
    kv_bytes_per_request: float
    unique_gpus: np.ndarray


def match(prefill, decode, **rules):
    """Every decode point with its best match."""
    return match_pools(prefill, decode, Rules(**rules))


def make_grid(phase, gpus, rate, *, latency=None, status=None, unique=None, tp=None, isl=1024, osl=101, kv_bytes=1e6):
    """A grid whose row ``i`` has ``gpus[i]`` GPUs; ``rate`` and ``latency`` of shape (rows,) or (rows, batches)."""
    gpus = np.asarray(gpus, dtype=np.int64)
    rate = np.asarray(rate, dtype=np.float64).reshape(gpus.size, -1)
    ones = np.ones_like(gpus)
    tp_attn = ones if tp is None else np.asarray(tp, dtype=np.int64)
    batch = 2 ** np.arange(rate.shape[1], dtype=np.int64)
    if latency is None:  # decode: r = B/(TTL*(OSL-1)); prefill: p = B/FTL
        latency = batch / rate / (osl - 1 if phase == "decode" else 1)
    latency = np.asarray(latency, dtype=np.float64)
    latency = latency[:, None] if latency.ndim == 1 else latency
    return ByHand(
        phase=phase,
        setup=SETUP,
        mappings=Sharding(
            tp_attn=tp_attn,
            dp_attn=gpus // tp_attn,
            tp_ffn=gpus,
            ep=ones,
            pp=ones,
            redundant_slots=0 * ones,
            dcp=ones,
            pcp=ones,
            chunk_tokens=0 * ones,
        ),
        lengths=lengths(isl, osl),
        batch=batch,
        latency=np.broadcast_to(latency, rate.shape),
        request_rate=rate,
        memory_bytes=np.full(rate.shape, 5e10),
        microbatches=np.ones(rate.shape, dtype=np.int64),
        status=np.zeros(rate.shape, dtype=np.int8) if status is None else np.asarray(status, dtype=np.int8),
        bound=np.ones(rate.shape, dtype=np.int8),
        mla_form=np.zeros(rate.shape, dtype=np.int8),
        drafts=np.zeros(rate.shape, dtype=np.int8),
        stall=None,
        kv_bytes_per_request=kv_bytes,
        unique_gpus=gpus if unique is None else np.asarray(unique, dtype=np.int64),
    )
