"""Pasts of prompts as they are stated, in place of caches that find them: which share, in which tier, held by decode.

What ``facts.traffic.Reuse`` says of traffic is played request by request: each finds its share in whole blocks, all of
it in one tier, drawn by the shares of the tiers. Every instance finds the same, the first prompt as the last; nothing
is remembered, and nothing forgotten. Loads take their time on the links of tiers, and are made where they bring the
first token sooner, as in ``techniques.prefix.play_tiers``. Of what decode holds already nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import HBM, Reuse
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.workload.distributions import whole_blocks
from disagg_sim.workload.synthetic import drawn_pasts
from disagg_sim.workload.trace import Trace


class StatedPasts:
    """What every instance finds of each prompt, as ``techniques.prefix.play.PrefixMemory`` says it."""

    def __init__(
        self, trace: Trace, reuse: Reuse, tiers: Sequence[str], *, fleet: Fleet, step: int, rng: np.random.Generator
    ) -> None:
        self.step, self.block_tokens, self._fleet = max(step, 1), reuse.block_tokens, fleet
        prompts = trace.input_tokens.astype(float)
        past: Floats = np.floor(drawn_pasts(prompts, reuse, rng) / self.step) * self.step
        self._past = past.astype(np.int64)
        self._in_decode = whole_blocks(past * reuse.in_decode, reuse.block_tokens).astype(np.int64)
        held = [(name, share) for name, share in reuse.tiers if share > 0] or [(HBM, 1.0)]
        names, shares = [name for name, _ in held], [share for _, share in held]
        below = np.array([-1 if name == HBM else list(tiers).index(name) for name in names])
        self._tier = below[np.searchsorted(np.cumsum(shares)[:-1], rng.random(len(trace)), side="right")]
        self._row: dict[int, int] = {}  # of requests that began again under another number

    def found(self, instance: int, request: int) -> int:  # noqa: ARG002  all instances find the same
        """See ``PrefixMemory``: in HBM."""
        row = self._row.get(request, request)
        return int(self._past[row]) if self._tier[row] < 0 else 0

    def found_everywhere(self, request: int) -> Ints:
        """See ``PrefixMemory``."""
        return np.full(len(self._fleet), self.found(0, request))

    def blocks_of(self, request: int) -> list[int]:
        """The blocks of a past below HBM, each by the number of its tier."""
        row = self._row.get(request, request)
        tier = int(self._tier[row])
        return [] if tier < 0 else [tier] * -(-int(self._past[row]) // self.block_tokens)

    def in_decode(self, request: int) -> int:
        """Tokens that decode holds already. [token]"""
        return int(self._in_decode[self._row.get(request, request)])

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:
        """Nothing is remembered."""

    def again(self, request: int, number: int) -> None:
        """See ``PrefixMemory``."""
        self._row[number] = self._row.get(request, request)

    def forget(self, instance: int) -> None:
        """What is stated does not go with an instance."""

    def begun(self) -> list[tuple[int, int]]:
        """No tier gets anything."""
        return []

    def tier_of(self, instance: int, block: int) -> int:  # noqa: ARG002  all instances find the same
        """See ``techniques.prefix.play_tiers.Stores``: a block is the number of its tier."""
        return block

    def used(self, instance: int, blocks: Sequence[int]) -> None:
        """Nothing moves."""


def check_reuse(reuse: Reuse, tiers: Sequence[str]) -> None:
    """``InputError`` where pasts lie in tiers that a run has not, or a share is none."""
    if isinstance(reuse.share, (int, float)):
        raise InputError(f"reuse: share is {reuse.share}; allowed: ConstantShare(share=...), or a distribution")
    if not 0.0 <= reuse.in_decode <= 1.0:
        raise InputError(f"reuse: in_decode is {reuse.in_decode:g}; allowed: 0 to 1")
    if lacking := [name for name in reuse.below if name not in tiers]:
        raise InputError(
            f"reuse: pasts lie in {', '.join(lacking)}, and the tiers of the run are {', '.join(tiers) or 'none'}; "
            "allowed: those of tiers, and hbm"
        )
