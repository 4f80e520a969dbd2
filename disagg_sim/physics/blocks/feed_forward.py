"""Feed-forward layers: dense, and a mixture of experts (router, shared and routed). Physics page, sections 2 and 6."""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.ffn import DenseFfn, MoeFfn
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.blocks.base import Cut, FfnBlock, ffn
from disagg_sim.physics.work import (
    ACTIVATION_BYTES,
    ExpertRows,
    Numeric,
    Operator,
    all_reduce,
    expert_rows,
    expert_work,
    fullest_rank,
    gemm,
)
from disagg_sim.techniques.experts.physics import ExpertRouting, fullest_load, lasting_imbalance


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


#: Experts to each redundant slot, at least, where EP does not divide the experts: DeepSeek-V3 is served with 32
#: redundant slots for 256 experts (arXiv 2412.19437, section 3.4). [1]
LEAST_EXPERTS_A_COPY = 8


@ffn("moe")
class Moe(FfnBlock[MoeFfn]):
    """``top_k`` of ``experts`` a token, spread over ``ep`` ranks; shared experts are cut like a dense FFN.

    With a latent every rank leads its own tokens into it before they are sent, and back after they have come home.
    """

    launches = 16

    @property
    def picks(self) -> int:
        return self.spec.top_k

    def local(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """The router with the gate of shared experts, the ways into a latent and back, the all-reduce over ``tp``.

        The all-reduce sums the shared experts and, under TEP, the routed ones; under DP attention
        (tp = 1) it costs nothing.
        """
        s, d = self.spec, model.hidden
        latent = [
            gemm("into latent", tokens, s.latent, d, precision.ffn),
            gemm("out of latent", tokens, d, s.latent, precision.ffn),
        ]
        return [
            gemm("router", tokens, s.experts + s.shared_gate, d, precision.router),
            *(latent if s.latent else []),
            all_reduce("FFN all-reduce", tokens, model, precision, tp),
        ]

    def beside(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        """Shared experts and a dense layer, sharded like a dense FFN (whole on every rank under DP attention)."""
        s, d, found = self.spec, model.hidden, []
        if s.shared_experts:
            width, first = s.shared_experts * s.shared_width / tp, "gate, up" if s.matrices == 3 else "up"
            found = [
                gemm(f"shared {first}", tokens, (s.matrices - 1) * width, d, precision.expert),
                gemm("shared down", tokens, d, width, precision.expert),
            ]
        if s.dense_width:
            width = s.dense_width / tp
            found.append(gemm("dense gate, up", tokens, 2 * width, d, precision.ffn))
            found.append(gemm("dense down", tokens, d, width, precision.ffn))
        return found

    def routed(
        self, model: ModelSpec, precision: Precision, mapping: Sharding, tokens: Numeric, routing: ExpertRouting
    ) -> Operator:
        experts, width = self.spec.experts, self.spec.width / mapping.tp_ffn
        hidden = self.spec.expert_hidden(model.hidden)
        if routing.imbalance is None:
            load = fullest_load(
                tokens,
                experts=experts,
                top_k=self.spec.top_k,
                ep=mapping.ep,
                routing=routing,
                redundant=mapping.redundant_slots,
            )
            rows = ExpertRows(*load, (experts + mapping.redundant_slots) / mapping.ep, hidden, width)
        else:
            rows = expert_rows(
                tokens=tokens,
                experts=experts + mapping.redundant_slots,
                top_k=self.spec.top_k,
                hidden=hidden,
                width=width,
                ep=mapping.ep,
                imbalance=routing.imbalance,
            )
        rows = rows._replace(matrices=self.spec.matrices)
        work = expert_work(rows, weight_bytes=precision.expert.bytes)
        name = "routed experts"
        return Operator(name, "experts", work, precision.expert.name, size=tokens, ranks=mapping.ep, experts=rows)

    def imbalance(self, mapping: Sharding, skew: float) -> Numeric:
        return lasting_imbalance(self.spec.experts, mapping.ep, mapping.redundant_slots, skew)

    def weight_bytes(self, hidden: int, precision: Precision, mapping: Sharding) -> Numeric:
        s, experts = self.spec, (self.spec.experts + mapping.redundant_slots) / (mapping.ep * mapping.tp_ffn)
        total = experts * s.expert_params(hidden) * precision.expert.bytes
        total = total + experts * s.expert_other_params(hidden) * ACTIVATION_BYTES
        gates = s.router_params(hidden) + s.gate_params(hidden)
        router = gates * precision.router.bytes + s.other_params(hidden) * ACTIVATION_BYTES
        total = total + s.shared_params(hidden) / mapping.tp_attn * precision.expert.bytes + router
        beside = s.latent_params(hidden) + s.dense_params(hidden) / mapping.tp_attn
        return total + beside * precision.ffn.bytes

    def widest(self, hidden: int, mapping: Sharding, tokens: Numeric, all_tokens: Numeric, imbalance: float) -> Numeric:
        first = (self.spec.matrices - 1) * self.spec.width / mapping.tp_ffn
        return self._fullest(mapping, all_tokens, imbalance) * (first + self.spec.expert_hidden(hidden))

    def live_width(self, mapping: Sharding) -> Numeric:
        s = self.spec
        return (s.matrices * s.shared_experts * s.shared_width + 3 * s.dense_width) / mapping.tp_attn

    def workspace(self, hidden: int, mapping: Sharding, all_tokens: Numeric, imbalance: float) -> Numeric:
        """Two of a fused kernel: out of the first matrices or the last one, and their product."""
        one, width = self.spec.expert_hidden(hidden), self.spec.width / mapping.tp_ffn
        each = np.maximum(width, one) + np.maximum((self.spec.matrices - 1) * width, one)
        return self._fullest(mapping, all_tokens, imbalance) * each

    def _fullest(self, mapping: Sharding, all_tokens: Numeric, imbalance: float) -> Numeric:
        """Rows of the fullest expert rank: a token takes one at each expert that it picks. [1]"""
        return all_tokens * (self.spec.top_k * fullest_rank(imbalance, mapping.ep)) / mapping.ep

    def wire_width(self, hidden: int) -> int:
        return self.spec.expert_hidden(hidden)

    def least_redundant_slots(self, ep: int) -> int | None:
        fewest = -self.spec.experts % ep
        return fewest if fewest * LEAST_EXPERTS_A_COPY <= self.spec.experts else None

    def rejects(self, mapping: Sharding) -> str | None:
        s, tp_attn, tp_ffn, ep = self.spec, mapping.tp_attn, mapping.tp_ffn, mapping.ep
        if (s.experts + mapping.redundant_slots) % ep:
            slots = f"{s.experts} experts"
            slots += f" and {mapping.redundant_slots} redundant slots" if mapping.redundant_slots else ""
            return f"ep does not divide {slots}"
        if mapping.redundant_slots and ep == 1:
            return "redundant slots need expert parallelism"
        if s.width % tp_ffn:
            return f"tp_ffn does not divide the expert width {s.width}"
        if s.shared_experts and (s.shared_experts * s.shared_width) % tp_attn:
            return f"tp_attn does not divide the shared width {s.shared_experts * s.shared_width}"
        if s.dense_width % tp_attn:
            return f"tp_attn does not divide the dense width {s.dense_width}"
        return None

    def cuts(self, precision: Precision, mapping: Sharding) -> list[Cut]:
        s, fmt = self.spec, precision.expert
        shared = s.shared_experts * s.shared_width
        return [
            ("experts", s.width, mapping.tp_ffn, fmt),
            *([("shared experts", shared, mapping.tp_attn, fmt)] if shared else []),
            *([("dense layer", s.dense_width, mapping.tp_attn, precision.ffn)] if s.dense_width else []),
        ]

    def format(self, precision: Precision) -> Format:
        return precision.expert

    @property
    def active_width(self) -> int:
        s = self.spec
        return s.top_k * s.width + s.shared_experts * s.shared_width + s.dense_width
