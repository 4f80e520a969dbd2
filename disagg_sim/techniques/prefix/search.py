"""Prompts of a grid: where a cached prefix can be taken up again, and the mean of a pass over their distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.cache_tiers import loaded_bytes, room_tokens
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.passes.prefill import PrefillPass
from disagg_sim.physics.passes.prompts import PromptPasses
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.techniques.prefix.requests import Prompts
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.turns import TurnCaches


def stored_bytes(at: Setup, lengths: Lengths) -> float:
    """Size what a prompt adds to tiers that all instances share: new blocks leave prefill by the port of hand-overs.

    Every new block is written there once: at once where tiers are written through, later where they get what the tier
    above forgets. Loads from there come in by the other direction of the port. The result is on average, each element
    once; 0 where no past lies in a shared tier [B].

    A tenth of 8,192 tokens is new, each of 65,536 B:

    >>> import disagg_sim as ds
    >>> from disagg_sim.facts.traffic import ConstantShare, Reuse
    >>> at, share = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ConstantShare(share=0.9)
    >>> kept = [ds.lengths(8192, 256, cached=Reuse(share=share, tiers=((name, 1.0),))) for name in ("remote", "dram")]
    >>> [stored_bytes(at, each) / 65_536 for each in kept]
    [832.0, 0.0]
    """
    tiers = () if lengths.cached is None else lengths.cached.reuse.below
    if not any(tier is not None and tier.shared for tier in (at.system.tier(name) for name in tiers)):
        return 0.0
    return sum(weight * loaded_bytes(at, isl, past) for isl, past, weight, _ in lengths.prompt_nodes().each())


def align_to_checkpoints(at: Setup, lengths: Lengths) -> Lengths:
    """Find where the layers of a model let a cached prefix be taken up again.

    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> found = lengths(65_536, 1024, cached=0.9)
    >>> models = ("llama_3_1_70b", "qwen3_next_80b_a3b")
    >>> [align_to_checkpoints(setup(name, "h200_sxm", "fp8"), found).cached.mean_past for name in models]
    [58976.0, 58688.0]
    """
    return lengths.at_whole(checkpoint_tokens(at.model, at.precision)) if lengths.cached is not None else lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCaches:
    """Prefix caches of instances, by what each GPU brings."""

    gpus: int = 1  # of each cache [1]
    hbm: float = 0.0  # of each GPU, set aside for prompts between requests [B]
    tiers: tuple[str, ...] = ()  # below it, of ``kv_tiers`` of the system, the fastest first
    caches: int = 1  # [1]
    sticky: bool = True
    back: bool = False

    def met(
        self,
        served: tuple[ModelSpec, Precision],
        system: SystemSpec,
        prompt: float,
        *,
        sessions_per_s: float,
        tpot_s: float = 0.0,
    ) -> TurnCaches:
        """Count the caches in tokens, of ``sessions_per_s`` [1/s]."""
        tiers = {name: tier for name in self.tiers if (tier := system.tier(name)) is not None}
        pooled = tuple(name for name, tier in tiers.items() if tier.shared)

        def room(name: str, capacity: float | None) -> float:
            gpus = self.gpus * (self.caches if name in pooled else 1)
            return math.inf if capacity is None else float(round(room_tokens(*served, gpus * capacity, prompt)))

        rooms = [(HBM, room(HBM, self.hbm))] if self.hbm else []
        return TurnCaches(
            sessions_per_s=sessions_per_s,
            rooms=(*rooms, *((name, room(name, tier.capacity)) for name, tier in tiers.items())),
            caches=self.caches,
            sticky=self.sticky,
            pooled=pooled,
            back=self.back,
            tpot_s=tpot_s,
        )


class TimedPrompts(NamedTuple):
    """Prompts whose passes are timed."""

    nodes: Prompts
    counted: tuple[float, float] | None  # prompt and past whose FTL counts; None = the mean over ``nodes`` [token]

    def expected(self, passes: PromptPasses, system: SystemSpec) -> list[PrefillPass]:
        """Mean pass over the distribution of lengths, of each form; FTL is that of ``counted`` if set."""
        means: list[PrefillPass] = []
        counted = [] if self.counted is None else [self.counted]
        passes.time_at_once([(isl, past) for isl, past, _, _ in self.nodes.each()] + counted)
        for isl, past, weight, tier in self.nodes.each():
            found = passes.passes(isl, past, system.tier(tier))
            means = means or [PrefillPass(0.0, 0.0, Sums())] * len(found)
            means = [
                PrefillPass(
                    mean.ftl + weight * each.ftl,
                    mean.busy + weight * each.busy,
                    mean.sums.plus(each.sums, weight),
                    mean.load + weight * each.load,
                )
                for mean, each in zip(means, found, strict=True)
            ]
        if self.counted is None:
            return means
        longest = passes.passes(*self.counted, system.tier(HBM))
        return [mean._replace(ftl=each.ftl) for mean, each in zip(means, longest, strict=True)]


class RowPrompts(NamedTuple):
    """Prompts without a past, one length a row, whose passes are timed."""

    isl: Numeric  # a column, or of all rows [token]

    def expected(self, passes: PromptPasses, _: SystemSpec) -> list[PrefillPass]:
        """The pass of each form; nothing is loaded."""
        return passes.passes(self.isl, 0.0, None)
