"""Precision recipes: which operator group is stored and multiplied in which format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg_sim.notebook import Shown

if TYPE_CHECKING:
    from disagg_sim.facts.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A storage format and the arithmetic that multiplies it."""

    name: str  # "bf16", "fp8" (per tensor), "fp8_block" (128x128 scales), "nvfp4", "int8"
    bytes: float  # per element, scales included [B]
    arithmetic: str  # key of ``SystemSpec.peak_flops``


BF16 = Format(name="bf16", bytes=2.0, arithmetic="bf16")
FP8 = Format(name="fp8", bytes=1.0, arithmetic="fp8")
FP8_BLOCK = Format(name="fp8_block", bytes=1.0, arithmetic="fp8")
NVFP4 = Format(name="nvfp4", bytes=0.5625, arithmetic="nvfp4")  # 4 bit + one fp8 scale per 16 values
INT8 = Format(name="int8", bytes=1.0, arithmetic="int8")  # weights and activations ("smooth quant")
#: 4 bit + one 8-bit scale per 32 values; multiplied by the bf16 kernels, whose name it bears.
MXFP4 = Format(name="bf16", bytes=0.53125, arithmetic="bf16")
FORMATS = {f.name: f for f in (BF16, FP8, FP8_BLOCK, NVFP4, INT8)} | {"mxfp4": MXFP4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Shown):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormat:
    """Format names of one operator group, by the kind of attention of the model."""

    gqa: str
    mla: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe(Shown):
    """A recipe as ``hw_specs/precision/`` writes it, before it meets a model.

    ``"fp8"`` weights mean per tensor scales, or 128x128 blocks where the model's checkpoints have them.
    """

    name: str
    title: str
    attention_projection: GroupFormat
    ffn: GroupFormat
    expert: GroupFormat
    attention: str  # arithmetic of scores and values: "bf16" or "fp8"
    cache: str
    embedding: str
    head: str
    router: str
    dispatch_bytes: float  # of an activation on the wire [B]
    combine_bytes: float  # [B]
    source: str

    def resolve(self, model: ModelSpec) -> Precision:
        """The format of every operator group for one model."""

        def weight(group: GroupFormat | str) -> Format:
            name = group if isinstance(group, str) else group.mla if model.is_mla else group.gqa
            return FP8_BLOCK if name == "fp8" and model.block_scaled_fp8 else FORMATS[name]

        return Precision(
            name=self.name,
            attention_projection=weight(self.attention_projection),
            ffn=weight(self.ffn),
            expert=weight(self.expert),
            attention=self.attention,
            cache=FORMATS[self.cache],
            embedding=weight(self.embedding),
            head=weight(self.head),
            router=weight(self.router),
            dispatch_bytes=self.dispatch_bytes,
            combine_bytes=self.combine_bytes,
            source=self.source,
        )
