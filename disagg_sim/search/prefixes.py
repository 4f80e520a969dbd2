"""Prompts of a grid: where a cached prefix can be taken up again, and the mean of a pass over their distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.passes.prefill import PrefillPass
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.prefixes import Prompts


def taken_up(at: Setup, lengths: Lengths) -> Lengths:
    """Find where the layers of a model let a cached prefix be taken up again.

    Parameters
    ----------
    at, lengths
        Setup, whose model has recurrent states or compressed entries or has not, and lengths of requests.

    Returns
    -------
    Lengths
        With pasts that end at whole checkpoints (``physics.kv_transfer.checkpoint_tokens``); of most models the same.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> found = lengths(65_536, 1024, cached=0.9)
    >>> models = ("llama_3_1_70b", "qwen3_next_80b_a3b")
    >>> [taken_up(setup(name, "h200_sxm", "fp8"), found).cached.mean_past for name in models]
    [58976.0, 58688.0]
    """
    return lengths.at_whole(checkpoint_tokens(at.model, at.precision)) if lengths.cached is not None else lengths


class TimedPrompts(NamedTuple):
    """Prompts whose passes are timed."""

    nodes: Prompts
    counted: tuple[float, float] | None  # prompt and past whose FTL counts; None = the mean over ``nodes`` [token]

    def expected(self, one: Callable[[float, float, str], PrefillPass]) -> PrefillPass:
        """Mean pass over the distribution of lengths; FTL is that of ``counted`` if set."""
        ftl, busy, sums, load = 0.0, 0.0, Sums(), 0.0
        for isl, past, weight, tier in self.nodes.each():
            each = one(isl, past, tier)
            ftl, busy, sums = ftl + weight * each.ftl, busy + weight * each.busy, sums.plus(each.sums, weight)
            load = load + weight * each.load
        return PrefillPass(one(*self.counted, HBM).ftl if self.counted else ftl, busy, sums, load)
