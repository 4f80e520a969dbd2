"""Static disaggregation: prefill instances and decode instances with fixed roles.

Y. Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving",
OSDI 2024; vLLM's disaggregated prefill differs in that its prefill instances work in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import Checked, max_sequences_option, option, token_budget_option
from disagg_sim.simulation.policies.loads import ByRole, Handover
from disagg_sim.simulation.policies.routers import (
    ROUTERS,
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
        choices = choices_of(self, site)
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
