"""The dense feed-forward layer. Physics page, section 2."""

from __future__ import annotations

from disagg_sim.domain import Sharding
from disagg_sim.facts.layers import DenseFfn
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.blocks.base import Cut, FfnBlock, ffn
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric, Operator, all_reduce, gemm


@ffn("dense")
class Dense(FfnBlock[DenseFfn]):
    """Gate, up and down matrices, cut over the tensor-parallel ranks of attention."""

    def local(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        d, width, matrices = model.hidden, self.spec.width / tp, self.spec.matrices
        return [
            gemm("gate, up" if matrices == 3 else "up", tokens, (matrices - 1) * width, d, precision.ffn),
            gemm("down", tokens, d, width, precision.ffn),
            all_reduce("FFN all-reduce", tokens, model, precision, tp),
        ]

    def weight_bytes(self, hidden: int, precision: Precision, mapping: Sharding) -> Numeric:
        cut = self.spec.matmul_params(hidden) / mapping.tp_attn * precision.ffn.bytes
        return cut + self.spec.other_params(hidden) * ACTIVATION_BYTES

    def widest(self, hidden: int, mapping: Sharding, tokens: Numeric, all_tokens: Numeric, imbalance: float) -> Numeric:
        return tokens * (2 * self.spec.width / mapping.tp_attn)

    def live_width(self, mapping: Sharding) -> Numeric:
        return self.spec.matrices * self.spec.width / mapping.tp_attn

    def rejects(self, mapping: Sharding) -> str | None:
        return f"tp_attn does not divide the FFN width {self.spec.width}" if self.spec.width % mapping.tp_attn else None

    def cuts(self, precision: Precision, mapping: Sharding) -> list[Cut]:
        return [("FFN", self.spec.width, mapping.tp_attn, precision.ffn)]

    def format(self, precision: Precision) -> Format:
        return precision.ffn

    @property
    def active_width(self) -> int:
        return self.spec.width
