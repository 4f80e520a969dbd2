"""Feed-forward parts: dense layers and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from disagg_sim.facts.kinds import Count, CountOrNone, FfnSpec, register
from disagg_sim.facts.schema import Range

_Matrices = Annotated[int, Range(2, 3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFfn(FfnSpec):
    """A layer that has attention alone."""

    kind: ClassVar[str] = "none"
    norms: ClassVar[int] = 0

    def params(self, hidden: int, *, active: bool) -> int:  # noqa: ARG002 - as the base class asks
        """Nothing. [1]"""
        return 0

    def token_matmul_params(self, hidden: int) -> int:  # noqa: ARG002 - as the base class asks
        """Nothing. [1]"""
        return 0


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn(FfnSpec):
    """A dense feed-forward layer: 3 matrices with SwiGLU, 2 without gate."""

    kind: ClassVar[str] = "dense"
    width: Count
    matrices: _Matrices = 3
    bias: bool = False

    def matmul_params(self, hidden: int) -> int:
        """Weights of the layer. [1]"""
        return self.matrices * hidden * self.width

    def other_params(self, hidden: int) -> int:
        """Biases. [1]"""
        return self.bias * (self.width + hidden)

    def params(self, hidden: int, *, active: bool) -> int:  # noqa: ARG002 - a token touches all of them
        """Weights and biases. [1]"""
        return self.matmul_params(hidden) + self.other_params(hidden)

    def token_matmul_params(self, hidden: int) -> int:
        """Weights of the layer. [1]"""
        return self.matmul_params(hidden)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn(FfnSpec):
    """Routed experts (``top_k`` of ``experts`` per token), shared experts, the router, and what goes beside them.

    With ``latent`` the routed experts work in that width (Nemotron-3, Kimi K3): two more matrices, on every rank, lead
    into it and back. ``dense_width`` is a dense layer of three matrices on the same input (Gemma 4).
    """

    kind: ClassVar[str] = "moe"
    routes: ClassVar[bool] = True
    experts: Count
    top_k: Count
    width: Count
    matrices: _Matrices = 3  # of an expert, routed or shared; 2 without gate (relu^2)
    latent: CountOrNone = 0  # width in which routed experts work; 0 = the hidden size [1]
    latent_norm: bool = False  # a norm of the latent behind the experts (Kimi K3)
    shared_experts: Annotated[int, Range(0, 100)] = 0
    shared_width: CountOrNone = 0
    shared_gate: bool = False  # a gate of the shared experts: one number of a token (Qwen3-Next)
    dense_width: CountOrNone = 0  # of a dense layer beside the experts; 0 = none [1]
    router_bias: bool = False
    router_scale: bool = False  # a scale of the router's inputs and of each expert's outputs (Gemma 4)
    expert_bias: bool = False

    def __post_init__(self) -> None:
        """``ValueError`` where a token is sent to more experts than there are."""
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is above experts {self.experts}")
        if self.latent_norm and not self.latent:
            raise ValueError("latent_norm needs latent")

    def expert_hidden(self, hidden: int) -> int:
        """Width in which the routed experts work, and which goes over the wire. [1]"""
        return self.latent or hidden

    def expert_params(self, hidden: int) -> int:
        """Weights of one routed expert. [1]"""
        return self.matrices * self.expert_hidden(hidden) * self.width

    def expert_other_params(self, hidden: int) -> int:
        """Biases of one routed expert. [1]"""
        return self.expert_bias * ((self.matrices - 1) * self.width + self.expert_hidden(hidden))

    def latent_params(self, hidden: int) -> int:
        """Weights that lead into the latent and back. [1]"""
        return 2 * hidden * self.latent

    def shared_params(self, hidden: int) -> int:
        """Weights of all shared experts. [1]"""
        return self.matrices * hidden * self.shared_width * self.shared_experts

    def gate_params(self, hidden: int) -> int:
        """Weights of the gate of the shared experts. [1]"""
        return self.shared_gate * hidden

    def dense_params(self, hidden: int) -> int:
        """Weights of the dense layer beside the experts. [1]"""
        return 3 * hidden * self.dense_width

    def router_params(self, hidden: int) -> int:
        """Weights of the router. [1]"""
        return hidden * self.experts

    def other_params(self, hidden: int) -> int:
        """Biases and scales of the router, norm of the latent. [1]"""
        scale = self.router_scale * (hidden + self.experts)
        return self.router_bias * self.experts + scale + self.latent_norm * self.latent

    def beside_params(self, hidden: int) -> int:
        """Weights that every token is multiplied with beside those of its experts. [1]"""
        beside = self.shared_params(hidden) + self.gate_params(hidden) + self.dense_params(hidden)
        return beside + self.latent_params(hidden) + self.router_params(hidden)

    def params(self, hidden: int, *, active: bool) -> int:
        """Experts (all, or ``top_k``), what goes beside them and the router with their biases. [1]"""
        one = self.expert_params(hidden) + self.expert_other_params(hidden)
        routed = (self.top_k if active else self.experts) * one
        return routed + self.beside_params(hidden) + self.other_params(hidden)

    def token_matmul_params(self, hidden: int) -> int:
        """Weights of ``top_k`` experts, of what goes beside them and of the router. [1]"""
        return self.top_k * self.expert_params(hidden) + self.beside_params(hidden)

    @property
    def inner_norms(self) -> int:
        """A dense layer beside the experts has norms of its own: one before, two behind. [1]"""
        return 3 if self.dense_width else 0
