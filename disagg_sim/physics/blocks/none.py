"""Parts that a layer does not have: it consists of attention or of a feed-forward part alone."""

from __future__ import annotations

from disagg_sim.domain import Sharding
from disagg_sim.facts.layers import NONE, NoAttention, NoFfn
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.blocks.base import AttentionBlock, Cut, FfnBlock, attention, ffn
from disagg_sim.physics.work import Numeric, Operator, Tokens


@attention(NONE)
class Unattended(AttentionBlock[NoAttention]):
    """No attention: no operators, no weights, no cache, and every TP degree is allowed."""

    present = False
    launches = 0

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        return []

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        return ([],)

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        return ([],)

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        return 0.0

    def weight_bytes(self, hidden: int, precision: Precision, tp: Numeric) -> Numeric:
        return 0.0

    def activation_width(self, tp: Numeric) -> Numeric:
        return 0.0

    def elementwise_width(self, tp: Numeric) -> Numeric:
        return 0.0

    def rejects(self, tp: int) -> str | None:
        return None


@ffn(NONE)
class Unfed(FfnBlock[NoFfn]):
    """No feed-forward part."""

    present = False
    launches = 0

    def local(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        return []

    def weight_bytes(self, hidden: int, precision: Precision, mapping: Sharding) -> Numeric:
        return 0.0

    def widest(self, hidden: int, mapping: Sharding, tokens: Numeric, all_tokens: Numeric, imbalance: float) -> Numeric:
        return 0.0

    def rejects(self, mapping: Sharding) -> str | None:
        return None

    def cuts(self, precision: Precision, mapping: Sharding) -> list[Cut]:
        return []

    def format(self, precision: Precision) -> Format:
        return precision.ffn

    @property
    def active_width(self) -> int:
        return 0
