"""Precision recipes: which operator group is stored and multiplied in which format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A storage format and the arithmetic that multiplies it."""

    name: str  # "bf16", "fp8" (per tensor), "fp8_block" (128x128 scales), "nvfp4"
    bytes: float  # per element, scales included [B]
    arithmetic: str  # key of ``SystemSpec.peak_flops``


BF16 = Format(name="bf16", bytes=2.0, arithmetic="bf16")
FP8 = Format(name="fp8", bytes=1.0, arithmetic="fp8")
FP8_BLOCK = Format(name="fp8_block", bytes=1.0, arithmetic="fp8")
NVFP4 = Format(name="nvfp4", bytes=0.5625, arithmetic="nvfp4")  # 4 bit + one fp8 scale per 16 values
FORMATS = {f.name: f for f in (BF16, FP8, FP8_BLOCK, NVFP4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A recipe resolved for one model: the format of every operator group.

    ``attention`` names the arithmetic of scores and values ("bf16" or "fp8"; it picks the fitted
    attention kernels), ``cache`` the format of the KV cache, ``dispatch_bytes`` and
    ``combine_bytes`` the size of an activation on the wire (combine also stands for all-reduce). [B]
    """

    name: str
    attention_projection: Format
    ffn: Format
    expert: Format
    attention: str
    cache: Format
    embedding: Format
    head: Format
    router: Format
    dispatch_bytes: float
    combine_bytes: float
    source: str

    @property
    def arithmetics(self) -> frozenset[str]:
        """Arithmetic that the GPU must have."""
        groups = (self.attention_projection, self.ffn, self.expert, self.embedding, self.head, self.router)
        return frozenset(f.arithmetic for f in groups) | {self.attention}
