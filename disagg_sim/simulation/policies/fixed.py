"""Policies whose instances keep their roles: co-located replicas, disaggregation, and the ablations of Arrow.

``vllm``
    Continuous batches with chunked prefill: W. Kwon et al., "Efficient Memory Management for Large Language Model
    Serving with PagedAttention", SOSP 2023; A. Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
    with Sarathi-Serve", OSDI 2024.
``disaggregated``
    Y. Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
    Serving", OSDI 2024; vLLM's disaggregated prefill differs in that its prefill instances work in chunks.
``least_load``, ``round_robin``
    Arrow without flips, with its token-wise load balance and without any: its instances and its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import (
    Checked,
    max_sequences_option,
    option,
    prompts_per_step_option,
    token_budget_option,
)
from disagg_sim.simulation.policies.loads import ByRole, Choice, Handover, InTurn, Whole, least_decode, least_prefill
from disagg_sim.simulation.policies.routers import (
    ROUTERS,
    WHOLE_ROUTERS,
    choices_of,
    credit_option,
    prefix_weight_option,
    router_option,
    temperature_option,
)
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site
from disagg_sim.simulation.wishes import Limits, Role

#: How prefill instances work: chunks of the budget over several prompts, or whole prompts up to the budget.
PREFILLS = {"chunked": Mode.CHUNKED, "whole": Mode.PREFILL_FIRST}


@register("disaggregated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated(Checked):
    """Prefill on the instance with the shortest queue, decode on the one with the fewest tokens.

    A part of the deployment with limits of its own, such as that of a matched plan, batches by them. The two kinds are
    engines of their own, each with a budget of its own: ``token_budget`` is that of prefill; a decode instance, which
    needs one for the decodes of a step and for what it computes again, has its part's or its scheduler's.
    """

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    token_budget: int = token_budget_option("prompt tokens of one step of an attention rank of a prefill instance")
    max_sequences: int = max_sequences_option("most sequences of an attention rank of a decode instance")
    prefill: str = option(
        "chunked",
        "chunks of token_budget over several prompts, or whole prompts up to token_budget a pass",
        choices=tuple(PREFILLS),
    )
    early_push: bool = option(
        False, "choose the decode instance at arrival and push the cache while the prompt is computed"
    )
    router: str = router_option(ROUTERS)
    router_temperature: float = temperature_option()
    overlap_credit: float = credit_option()
    prefix_weight: float = prefix_weight_option(2.0, "1 for a short queue")

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        weights = {"credit": self.overlap_credit, "weight": self.prefix_weight}
        choices = choices_of(self.router, site, temperature=self.router_temperature, **weights)
        return Parts(
            start=site.instances(("prefill", Role.PREFILL), ("decode", Role.DECODE)),
            routing=Handover(choices.prefill, choices.decode, early=self.early_push),
            steps=AsPlanned(
                site=site,
                parts=self.needs,
                alone=True,
                usual=ByRole(
                    prefill=Limits(mode=PREFILLS[self.prefill], token_budget=self.token_budget),
                    decode=Limits(token_budget=0, max_sequences=self.max_sequences),
                ),
            ),
            transfer="push" if self.early_push else "pull",
        )


@register("least_load")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoad(Checked):
    """Prefill where the fewest prompt tokens are queued, decode where the fewest tokens are in decode."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    token_budget: int = token_budget_option()
    max_sequences: int = max_sequences_option()
    prompts_per_step: int = prompts_per_step_option()

    def choices(self) -> tuple[Choice, Choice]:
        """Of the prefill instance and of the decode instance."""
        return least_prefill, least_decode

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        limits = Limits(
            token_budget=self.token_budget, max_sequences=self.max_sequences, max_prompts=self.prompts_per_step
        )
        return Parts(
            start=site.instances(("prefill", Role.PREFILL), ("decode", Role.DECODE)),
            routing=Handover(*self.choices()),
            steps=AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits)),
        )


@register("round_robin")
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(LeastLoad):
    """Take instances in turn."""

    def choices(self) -> tuple[Choice, Choice]:
        """See ``LeastLoad``."""
        return InTurn(), InTurn()


@register("vllm")
@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm(Checked):
    """Prefill and decode in the same steps; by default a request goes to the replica with the fewest."""

    needs: ClassVar[tuple[str, ...]] = ("colocated",)
    token_budget: int = token_budget_option(
        "decodes and prefill of one step; with chunked: false, prompt tokens of one pass"
    )
    max_sequences: int = max_sequences_option()
    chunked: bool = option(
        True, "prefill in chunks within decode steps; false: whole prompts in passes of their own, while decodes wait"
    )
    hold_steps: int = option(
        0, "most decode steps that prompts wait until every attention rank can take one, as in SGLang; 0: none", low=0
    )
    router: str = router_option(WHOLE_ROUTERS)
    router_temperature: float = temperature_option()
    overlap_credit: float = credit_option()
    prefix_weight: float = prefix_weight_option(3.0, "2 for a short queue and 2 for free KV memory")

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        mode = Mode.CHUNKED if self.chunked else Mode.PREFILL_FIRST
        weights = {"credit": self.overlap_credit, "weight": self.prefix_weight}
        choices = choices_of(self.router, site, temperature=self.router_temperature, **weights)
        limits = Limits(
            mode=mode, token_budget=self.token_budget, max_sequences=self.max_sequences, hold_steps=self.hold_steps
        )
        return Parts(
            start=site.instances(("colocated", Role.BOTH)),
            routing=Whole(choices.whole),
            steps=AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits)),
        )
