"""What sizing asks of one configuration of the instances of a pool, whatever the pool does."""

from __future__ import annotations

from typing import Protocol

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup


class PoolChoice(Protocol):
    """One configuration of the instances of a pool."""

    @property
    def at(self) -> Setup:
        """Model, system, recipe and engine."""

    @property
    def mapping(self) -> Sharding:
        """Sharding of one instance."""

    @property
    def most(self) -> float:
        """Upper bound of the rate of an instance. [request/s]"""

    @property
    def ceiling(self) -> float:
        """Upper bound of ``most`` that takes less time to compute. [request/s]"""

    def reaches(self, rate: float) -> bool:
        """Whether ``most`` is at least a rate [request/s], which takes less time to find where it is not."""

    def holds(self, rate: float, instances: int) -> bool:
        """Whether so many instances keep the limits at a rate [request/s]."""


class QuickBound:
    """A choice whose ``most`` takes no time to compute."""

    __slots__ = ()

    @property
    def most(self) -> float:
        """See ``PoolChoice``."""
        raise NotImplementedError

    @property
    def ceiling(self) -> float:
        """See ``PoolChoice``."""
        return self.most

    def reaches(self, rate: float) -> bool:
        """See ``PoolChoice``."""
        return self.most >= rate


def gpus_of(choice: PoolChoice) -> int:
    """GPUs of one instance. [1]"""
    return int(choice.mapping.gpus)
