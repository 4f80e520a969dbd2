"""Make instances, pools and deployments of the configurations of grids."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.workload.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One configuration of a replica, as a grid scored it."""

    phase: str  # "prefill" or "decode"
    mapping: Sharding
    batch: int  # requests of an instance, summed over DP ranks [request]
    latency_s: float  # FTL or TTL, no queue [s]
    request_rate_per_s: float  # at full rate [request/s]
    memory_bytes: float  # on the fullest GPU [B]
    setup: Setup | None = field(default=None, compare=False, repr=False)  # None of an instance that no grid scored
    lengths: Lengths | None = field(default=None, repr=False)  # that it was scored for
    system: str = field(default="", init=False)  # name of the system that it runs on; "" where that is not known

    def __post_init__(self) -> None:
        """Name the system."""
        if self.setup is not None:
            object.__setattr__(self, "system", self.setup.system.name)


@dataclass(frozen=True, slots=True)
class Pool(Shown):
    """A multiset of instances: (instance, count) pairs, mostly one pair."""

    members: tuple[tuple[Instance, int], ...]

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool. [1]"""
        return sum(int(instance.mapping.gpus) * count for instance, count in self.members)

    @property
    def request_rate_per_s(self) -> float:
        """Requests that the pool finishes at full rate. [request/s]"""
        return sum(instance.request_rate_per_s * count for instance, count in self.members)


@dataclass(frozen=True, slots=True)
class Deployment(Shown):
    """A prefill pool and a decode pool."""

    prefill: Pool
    decode: Pool

    @property
    def gpus(self) -> int:
        """GPUs of both pools. [1]"""
        return self.prefill.gpus + self.decode.gpus

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems of its pools."""
        members = [each for pool in (self.prefill, self.decode) for each, _ in pool.members]
        return tuple(dict.fromkeys(each.system for each in members))

    @property
    def setup(self) -> Setup | None:
        """What its decode instances serve; None where no grid scored them.

        Raises
        ------
        InputError
            Pools on different systems: each instance has a setup of its own.
        """
        if len(self.systems) > 1:
            raise InputError(f"pools on {' and '.join(self.systems)}: each instance has a setup of its own")
        return self.decode.members[0][0].setup if self.decode.members else None

    @property
    def lengths(self) -> Lengths | None:
        """The lengths that it was planned for; None where no grid scored its decode instances."""
        return self.decode.members[0][0].lengths if self.decode.members else None
