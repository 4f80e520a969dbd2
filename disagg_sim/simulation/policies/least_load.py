"""Static roles with token-wise load balance, and without any: the ablations of Arrow.

Both differ from Arrow in the routing alone: its instances and its steps, and no flips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.simulation.options import Checked, max_sequences_option, prompts_per_step_option, token_budget_option
from disagg_sim.simulation.policies.loads import ByRole, Choice, Handover, InTurn, least_decode, least_prefill
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site
from disagg_sim.simulation.wishes import Limits, Role


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
