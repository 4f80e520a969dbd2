"""Co-located replicas as vLLM runs them: continuous batches with chunked prefill.

W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023; chunked
prefill after A. Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import Checked, max_sequences_option, option, token_budget_option
from disagg_sim.simulation.policies.loads import ByRole, Whole
from disagg_sim.simulation.policies.routers import (
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
        limits = Limits(
            mode=mode, token_budget=self.token_budget, max_sequences=self.max_sequences, hold_steps=self.hold_steps
        )
        return Parts(
            start=site.instances(("colocated", Role.BOTH)),
            routing=Whole(choices_of(self, site).whole),
            steps=AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits)),
        )
