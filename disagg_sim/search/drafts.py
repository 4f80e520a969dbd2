"""Choose the draft tokens of every decode point: the fastest number that fits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


class Drafted(NamedTuple):
    """Decode points at one number of draft tokens, or at the fastest of several; arrays of shape (rows, batches)."""

    ttl: Numeric  # [s]
    memory: Numeric  # on the fullest GPU [B]
    microbatches: Numeric  # [1]
    bound: Numeric  # index into ``BOUNDS``
    drafts: Numeric  # [token]

    def or_faster(self, other: Drafted, limit: float) -> Drafted:
        """Take the ``other`` number of drafts where it is faster and fits, or where none fits and it needs less.

        At one batch throughput is proportional to 1/TTL, so the fastest number is the best in both. Takes
        ``limit`` [B].

        Three drafts are faster at both batches, and do not fit at the second:

        >>> none = Drafted(np.array([20e-3, 24e-3]), np.array([100e9, 130e9]), 1, 1, 0)
        >>> three = Drafted(np.array([8e-3, 9e-3]), np.array([105e9, 140e9]), 1, 1, 3)
        >>> none.or_faster(three, 135e9).drafts.tolist()
        [3, 0]
        """
        fits = other.memory <= limit
        better = np.where(self.memory <= limit, fits & (other.ttl < self.ttl), fits | (other.memory < self.memory))
        return Drafted(*(np.where(better, new, old) for new, old in zip(other, self, strict=True)))


def draft_choices(at: Setup) -> tuple[int, ...]:
    """Find the numbers of draft tokens that a search tries, rising: 0 alone without speculation. [token]

    >>> from disagg_sim.physics.setup import setup
    >>> plain, drafted = (setup("deepseek_r1", "h200_sxm", "fp8", speculation=s) for s in (None, "deepseek_r1_mtp"))
    >>> draft_choices(plain), draft_choices(drafted)
    ((0,), (0, 1))
    """
    return (0,) if at.speculation is None else at.speculation.choices


def drafting(at: Setup, mapping: Sharding, drafts: int) -> tuple[Setup, Sharding]:
    """Make setup and mapping of instances with so many draft tokens; without any they hold no drafter.

    >>> from disagg_sim.physics.setup import setup
    >>> own, mapping = drafting(setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp"), Sharding(), 0)
    >>> own.speculation is None, mapping.draft_tokens
    (True, 0)
    """
    if at.speculation is not None and not drafts:
        at = _undrafted(at)
    return at, replace(mapping, draft_tokens=drafts)


@lru_cache(maxsize=64)
def _undrafted(at: Setup) -> Setup:
    """The setup of instances without a drafter; one object, so that all groups of a search share its tables."""
    return replace(at, speculation=None)
