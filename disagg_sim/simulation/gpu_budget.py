"""Count the GPUs of a cluster that are held and free, of each system where there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from disagg_sim.domain import Sharding
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.records import Decision
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import State


class GpuHolder(Protocol):
    """Instances of one policy; lists have an entry for each."""

    site: Site
    mapping: list[Sharding]
    state: list[State]
    gpus: list[int]  # [1]
    start_s: list[float]  # when it took its GPUs [s]
    stop_s: list[float]  # when it gave them back [s]
    decisions: list[Decision]


class GpuBudget:
    """GPUs of a deployment, which the instances of one policy hold, or those of several models."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self._deployment = deployment
        self._apart = len(deployment.systems) > 1
        self._rosters: list[GpuHolder] = []
        self.instances: list[tuple[GpuHolder, int]] = []  # of the whole cluster by number: roster, and number there
        self.dead: Callable[[str], int] = lambda _: 0  # failed GPUs of a system, or of any, that no instance holds [1]

    def join(self, roster: GpuHolder) -> None:
        """Count the instances of a roster from now on."""
        self._rosters.append(roster)

    def enter(self, roster: GpuHolder, instance: int) -> int:
        """Number an instance of a roster in the whole cluster."""
        self.instances.append((roster, instance))
        return len(self.instances) - 1

    def total(self, roster: GpuHolder, mapping: Sharding | None = None) -> int:
        """GPUs that instances of a roster can hold: all but those of other rosters, and dead ones. [1]

        With a mapping those of its system.
        """
        system = self._system(roster, mapping)
        gpus = (self._deployment.gpus_on(system) if system else self._deployment.gpus) - self.dead(system)
        return gpus - sum(sum(_gpus_in_use(each, system)) for each in self._rosters if each is not roster)

    def free(self, roster: GpuHolder, mapping: Sharding | None = None) -> int:
        """Those of ``total`` that its instances do not hold. [1]"""
        return self.total(roster, mapping) - sum(_gpus_in_use(roster, self._system(roster, mapping)))

    def _system(self, roster: GpuHolder, mapping: Sharding | None) -> str:
        """Name of the system of a mapping; empty where all GPUs are alike, or all count."""
        return roster.site.setup_of(mapping).system.name if self._apart and mapping is not None else ""


def _gpus_in_use(roster: GpuHolder, system: str) -> Iterator[int]:
    """GPUs of the instances that have not stopped, of a system or of any. [1]"""
    for gpus, state, mapping in zip(roster.gpus, roster.state, roster.mapping, strict=True):
        if state != State.STOPPED and (not system or roster.site.setup_of(mapping).system.name == system):
            yield gpus
