"""Storage and arithmetic formats, and the format of each operator group of one model."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from disagg_sim.notebook import Shown

#: Arithmetic of GPUs whose instructions multiply scaled blocks of 4 bits.
BLOCK_SCALED = "nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A storage format and the arithmetic that multiplies it."""

    name: str  # "bf16", "fp8" (per tensor), "fp8_block" (128x128 scales), "nvfp4", "int8", "mxfp4"
    bytes: float  # per element, scales included [B]
    arithmetic: str  # key of ``SystemSpec.peak_flops``; of a weight that is expanded first: what any GPU expands it to
    block_scaled: str = ""  # the same on a GPU whose instructions take scaled blocks of 4 bits; "" = no other
    static_scales: bool = False  # activations are quantised with scales that are known beforehand
    expanded: str = ""  # format whose dense kernels multiply it after it is expanded; "" = it has its own

    @property
    def dense(self) -> str:
        """Name of the format whose dense kernels multiply it."""
        return self.expanded or self.name

    def fastest(self, arithmetics: Container[str]) -> str:
        """Arithmetic that a GPU with these ``arithmetics`` multiplies it in at best."""
        return self.block_scaled if self.block_scaled and BLOCK_SCALED in arithmetics else self.arithmetic


BF16 = Format(name="bf16", bytes=2.0, arithmetic="bf16")
FP8 = Format(name="fp8", bytes=1.0, arithmetic="fp8", static_scales=True)
FP8_BLOCK = Format(name="fp8_block", bytes=1.0, arithmetic="fp8")
NVFP4 = Format(name="nvfp4", bytes=0.5625, arithmetic="nvfp4")  # 4 bit + one fp8 scale per 16 values
INT8 = Format(name="int8", bytes=1.0, arithmetic="int8", static_scales=True)  # weights and activations ("smooth quant")
#: 4 bit + one 8-bit scale per 32 values (OCP microscaling). Experts: W4A16 with bf16 activations, or W4A8 with MXFP8
#: ones on a GPU that multiplies scaled blocks (``ExpertKernels``); dense multiplies expand it to bf16.
MXFP4 = Format(name="mxfp4", bytes=0.53125, arithmetic="bf16", block_scaled="fp8", expanded="bf16")
FORMATS = {f.name: f for f in (BF16, FP8, FP8_BLOCK, NVFP4, INT8, MXFP4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Shown):
    """A recipe resolved for one model: the format of every operator group.

    ``attention`` names the arithmetic of scores and values ("bf16" or "fp8"; it picks the fitted
    attention kernels), ``cache`` the format of the KV cache, ``dispatch_bytes`` and
    ``combine_bytes`` the size of an activation on the wire (combine also stands for all-reduce). [B]
    """

    name: str
    attention_projection: Mapping[str, Format]  # by kind of attention of the model's layers
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
        groups = (*self.projections, self.ffn, self.expert, self.embedding, self.head, self.router)
        return frozenset(f.arithmetic for f in groups) | {self.attention}

    @property
    def projections(self) -> tuple[Format, ...]:
        """Formats of attention projections, each once, in the order of the model's layers."""
        return tuple(dict.fromkeys(self.attention_projection.values()))

    def projection(self, kind: str) -> Format:
        """Format of the projections of one kind of attention."""
        return self.attention_projection[kind]
