"""Serving engines: the handful of named parameters in which vLLM, SGLang and TensorRT-LLM differ.

One file per engine in ``hw_specs/engines/``; every value has its source there. Kernels are not told
here: their fits stand in ``hw_specs/efficiency/``, where ``name`` says whose are taken first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg_sim.notebook import Shown


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Shown):
    """How one engine forms its steps, and what a step costs beside its kernels."""

    name: str
    title: str
    kernels: str  # whose fitted kernels are taken first: "vllm", "sglang" or "trtllm"
    step_host: float  # host time of a step that the GPU waits for [s]
    sequence_host: float  # the same, for each sequence of the step: scheduling, sampling, detokenising [s]
    rank_host: float  # the same, for each doubling of the GPUs of an instance: synchronising its processes [s]
    prefill_stretch: float  # prefill over the sum of its kernels timed alone: gaps, clocks under lasting load [1]
    kernel_launch: float  # host time to launch one kernel outside a CUDA graph; a step cannot be faster [s]
    decode_graphs: bool  # steps of decodes alone run as CUDA graphs; steps with prefill never do
    request_host: float  # of a request before its prefill: HTTP, tokenising, scheduling [s]
    chunk_tokens: int  # most new tokens of an attention rank in a step [token]
    mixed_steps: bool  # chunks of prefill ride along with decodes; else a pass of prefill stops decode
    two_batch_overlap: bool  # prefill over expert ranks of several NVLink domains hides exchange behind work
    max_running: int  # most sequences of an attention rank in a step [request]
    ranks_wait: bool  # ranks of attention DP gather a prompt each before they prefill
    memory_utilisation: float  # share of the reported memory that weights, cache and activations may fill [1]
    cache_share: float  # share that the cache may fill of what weights and activations leave of it [1]
    reserves_output: bool  # admits a request when its whole cache fits; else more are admitted and some evicted
    cache_of_quantised: str  # KV cache of a quantised checkpoint where nothing is said: "bf16" or "fp8"
    sources: Mapping[str, str]  # key -> where its value comes from
