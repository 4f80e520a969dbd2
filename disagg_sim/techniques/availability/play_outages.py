"""Let what ``failures`` says fail in a run, and bring it back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import FIRST
from disagg_sim.simulation.instances import GpuBudget
from disagg_sim.simulation.records import Decision
from disagg_sim.simulation.wishes import State
from disagg_sim.techniques.availability.play import (
    RANDOM,
    Failure,
    FailureEvent,
    Failures,
    GpuOutage,
    gpus_of_instances,
)

#: States of an instance that can fail.
ALIVE = (State.STARTING, State.READY, State.DRAINING, State.FLIPPING)


class Outages:
    """All failures of a run. GPUs and nodes are numbered system by system, instances over the clusters of all
    models.
    """

    def __init__(
        self, failures: Failures, clusters: Sequence[Cluster], deployment: ServedDeployment, budget: GpuBudget
    ) -> None:
        self._failures, self._clusters, self._instances = failures, clusters, budget.instances
        self._engine = engine = clusters[0].engine
        self._of = {id(cluster.roster): cluster for cluster in clusters}
        setups = deployment.setups or (clusters[0].site.setup,)
        systems = {at.system.name: at.system for at in setups}
        gpus = [deployment.gpus_on(name) for name in systems]
        self._system = {name: place for place, name in enumerate(systems)}
        self._system_of = np.repeat(np.arange(len(gpus)), gpus)  # of each GPU
        nodes, self._node_of = 0, np.zeros(0, np.int64)  # node of each GPU
        for system, own in zip(systems.values(), gpus, strict=True):
            self._node_of = np.append(self._node_of, nodes + np.arange(own) // system.nvlink_domain)
            nodes = int(self._node_of[-1]) + 1
        self.happened: list[Failure] = []
        self._dead: list[GpuOutage] = []
        budget.dead = self._gpus_lost
        self._down: dict[int, int] = {}  # failures of the link of an instance so far [1]
        self._until: dict[int, float] = {}  # when the link of an instance is up again after the last of them [s]
        self.restarts = {id(cluster): 0 for cluster in clusters}  # of its instances, to come [1]
        count = {"gpu": sum(gpus), "node": nodes, "instance": len(self._instances), "link": len(self._instances)}
        for event in failures.events:
            if event.number >= count[event.kind]:
                most, of = count[event.kind] - 1, "instance" if event.kind == "link" else event.kind
                raise InputError(
                    f"failures: {event.kind} {event.number} is none of this run; allowed: 0 to {most}, the {of}s at "
                    f"its start"
                )
            engine.at(event.at_s, FIRST, self._strike, event)
        for kind, name in RANDOM.items():
            mean = getattr(failures, name)
            if mean < math.inf:
                self._draw(kind, count["node" if kind == "node" else "gpu"], mean)
        for cluster in clusters:
            cluster.outages = self

    def links_lost(self, cluster: Cluster) -> bool:
        """Whether a link of a cluster is down for good, and none of its links is to come up again."""
        own = [until for number, until in self._until.items() if self._there(number)[0] is cluster]
        return math.inf in own and not any(self._engine.now <= until < math.inf for until in own)

    @property
    def _at_work(self) -> bool:
        return any(cluster.at_work for cluster in self._clusters)

    def _there(self, number: int) -> tuple[Cluster, int]:
        """The cluster that has an instance of the run, and its number there."""
        roster, instance = self._instances[number]
        return self._of[id(roster)], instance

    def _alive(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Those of some instances that can fail."""
        pairs = ((number, *self._instances[number]) for number in numbers)
        return tuple(number for number, roster, instance in pairs if roster.state[instance] in ALIVE)

    def _draw(self, kind: str, count: int, mean: float) -> None:
        """The next failure of one of ``count``, each of which fails after ``mean`` [s]."""
        rng = self._engine.rng(f"failures of {kind}s")
        wait, number = float(rng.exponential(mean / count)), int(rng.integers(count))
        self._engine.at(self._engine.now + wait, FIRST, self._drawn, kind, count, mean, number)

    def _drawn(self, kind: str, count: int, mean: float, number: int) -> None:
        if self._at_work:
            if kind == "link":  # of a GPU: that of the instance on it
                for instance in self._on((number,)):
                    self._strike(FailureEvent(at_s=self._engine.now, kind=kind, number=instance))
            else:
                self._strike(FailureEvent(at_s=self._engine.now, kind=kind, number=number))
            self._draw(kind, count, mean)

    def _strike(self, event: FailureEvent) -> None:
        """Something fails now, if the run is not over."""
        if not self._at_work:
            return
        now, until = self._engine.now, self._engine.now + self._failures.lasts(event)
        if event.kind == "link":
            there = self._alive((event.number,))
            if there:
                self._log(event, there, until)
                self._cut(event.number, self._failures.link_share if event.share is None else event.share, until)
            self.happened.append(Failure(now, event.kind, event.number, there, until, 0, 0))
            return
        if event.kind == "instance":
            hit: tuple[int, ...] = (event.number,)
        else:
            gpus = np.array([event.number]) if event.kind == "gpu" else np.flatnonzero(self._node_of == event.number)
            hit = self._on(gpus.tolist())
            self._dead.append(GpuOutage(gpus, len(self._instances), until))
        hit = self._alive(hit)
        self._log(event, hit, until)
        lost = migrated = 0
        for cluster in self._clusters:
            own = tuple(instance for where, instance in map(self._there, hit) if where is cluster)
            if own:
                gone, moved = cluster.recovery.fail(own)
                lost, migrated = lost + gone, migrated + moved
        self.happened.append(Failure(now, event.kind, event.number, hit, until, lost, migrated))
        for cluster in self._clusters if until < math.inf else ():
            own = tuple(instance for where, instance in map(self._there, hit) if where is cluster)
            back = tuple(each for each in own if cluster.roster.state[each] == State.FAILED)
            if back:
                self.restarts[id(cluster)] += len(back)
                self._engine.at(until, FIRST, self._restore, cluster, back)

    def _log(self, event: FailureEvent, instances: tuple[int, ...], until: float) -> None:
        what, when = f"{event.kind} {event.number} failed", f"until {until:g} s" if until < math.inf else "for good"
        for number in instances:
            log = self._there(number)[0].roster.decisions
            log.append(Decision(self._engine.now, "failure", number, what, when))

    def _on(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Instances that hold some of these GPUs."""
        held = self._placements()
        alive = [number for number, (roster, each) in enumerate(self._instances) if roster.state[each] != State.STOPPED]
        return tuple(number for number in alive if np.isin(held[number], gpus).any())

    def _gpus_lost(self, system: str) -> int:
        """GPUs of a system, or of any, that have failed, are not back and belong to no instance. [1]"""
        gone = np.zeros(self._node_of.size, dtype=bool)
        for lost in self._dead:
            if self._engine.now < lost.until_s:
                gone[lost.gpus] = True
        if system:
            gone &= self._system_of == self._system[system]
        if gone.any():
            for own, (roster, each) in zip(self._placements(), self._instances, strict=True):
                if roster.state[each] != State.STOPPED:
                    gone[own] = False
        return int(np.count_nonzero(gone))

    def _placements(self) -> list[Ints]:
        """GPUs that each instance of the run holds or held."""
        there = self._instances
        names = [roster.site.setup_of(roster.mapping[each]).system.name for roster, each in there]
        fits = [self._system_of == self._system[name] for name in names]
        return gpus_of_instances(
            [roster.gpus[each] for roster, each in there],
            np.array([roster.start_s[each] for roster, each in there]),
            np.array([roster.stop_s[each] for roster, each in there]),
            node_of=self._node_of,
            fits=fits if len(self._system) > 1 else (),
            dead=self._dead,
        )

    def _restore(self, cluster: Cluster, instances: tuple[int, ...]) -> None:
        self.restarts[id(cluster)] -= len(instances)
        cluster.recovery.restore(instances)

    def _cut(self, number: int, share: float, until: float) -> None:
        """The link of an instance keeps a share of its bandwidth."""
        self._down[number] = serial = self._down.get(number, 0) + 1
        self._until[number] = until
        cluster, instance = self._there(number)
        cluster.fleet.limit_link(instance, share, self._engine.now)
        if until < math.inf:
            self._engine.at(until, FIRST, self._mend, number, serial)

    def _mend(self, number: int, serial: int) -> None:
        if self._down[number] == serial:  # else it has failed again
            cluster, instance = self._there(number)
            cluster.fleet.limit_link(instance, 1.0, self._engine.now)
