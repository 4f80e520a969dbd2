"""Let what ``failures`` says fail in a run, and bring it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from disagg_sim.errors import InputError, quoted
from disagg_sim.simulation.engine import FIRST
from disagg_sim.simulation.failures import RANDOM, Failure, FailureEvent, Failures, gpus_held
from disagg_sim.simulation.kv_link import KvLink
from disagg_sim.simulation.records import Decision
from disagg_sim.simulation.recovery import Recovery
from disagg_sim.simulation.wishes import State

if TYPE_CHECKING:
    from disagg_sim.simulation.cluster import Cluster

#: States of an instance that can fail.
ALIVE = (State.STARTING, State.READY, State.DRAINING, State.FLIPPING)


class Outages:
    """All failures of a run.

    Parameters
    ----------
    failures : Failures
        What fails.
    cluster : Cluster
        Clock and random streams, instances, network.
    recovery : Recovery
        Of its requests.
    """

    def __init__(self, failures: Failures, cluster: Cluster, recovery: Recovery) -> None:
        self._failures, self._cluster, self._recovery = failures, cluster, recovery
        self._engine, self._roster, self._link = cluster.engine, cluster.roster, cluster.link
        engine, roster, link, site = cluster.engine, cluster.roster, cluster.link, cluster.site
        if len(site.deployment.systems) > 1:
            raise InputError(f"failures on {' and '.join(site.deployment.systems)}; allowed: on GPUs of one system")
        self._gpus, self._node_gpus = site.deployment.gpus, site.setup.system.nvlink_domain
        self.happened: list[Failure] = []
        self._down: dict[int, int] = {}  # failures of the link of an instance so far [1]
        self._awaited = 0  # restarts to come [1]
        nodes = -(-self._gpus // self._node_gpus)
        count = {"gpu": self._gpus, "node": nodes, "instance": len(roster.role), "link": len(roster.role)}
        for event in failures.events:
            if event.number >= count[event.kind]:
                most, of = count[event.kind] - 1, "instance" if event.kind == "link" else event.kind
                raise InputError(
                    f"failures: {event.kind} {event.number} is none of this run; allowed: 0 to {most}, the {of}s at "
                    f"its start"
                )
            if event.kind == "link":
                self._require_fair(link)
            engine.at(event.at_s, FIRST, self._strike, event)
        for kind, name in RANDOM.items():
            mean = getattr(failures, name)
            if mean < math.inf:
                if kind == "link":
                    self._require_fair(link)
                self._draw(kind, nodes if kind == "node" else self._gpus, mean)

    @property
    def restarts(self) -> int:
        """Instances that will serve again. [1]"""
        return self._awaited

    def _require_fair(self, link: KvLink) -> None:
        if link.sharing != "fair":
            raise InputError(f"failures of links with link sharing {quoted(link.sharing)}; allowed: fair")

    def _draw(self, kind: str, count: int, mean: float) -> None:
        """The next failure of one of ``count``, each of which fails after ``mean`` [s]."""
        rng = self._engine.rng(f"failures of {kind}s")
        wait, number = float(rng.exponential(mean / count)), int(rng.integers(count))
        self._engine.at(self._engine.now + wait, FIRST, self._drawn, kind, count, mean, number)

    def _drawn(self, kind: str, count: int, mean: float, number: int) -> None:
        if self._cluster.at_work:
            if kind == "link":  # of a GPU: that of the instance on it
                for instance in self._on((number,)):
                    self._strike(FailureEvent(at_s=self._engine.now, kind=kind, number=instance))
            else:
                self._strike(FailureEvent(at_s=self._engine.now, kind=kind, number=number))
            self._draw(kind, count, mean)

    def _strike(self, event: FailureEvent) -> None:
        """Something fails now, if the run is not over."""
        if not self._cluster.at_work:
            return
        now, until = self._engine.now, self._engine.now + self._failures.lasts(event)
        if event.kind == "link":
            instance = event.number
            there = (instance,) if self._roster.state[instance] in ALIVE else ()
            if there:
                self._log(event, there, until)
                self._cut(instance, self._failures.link_share if event.share is None else event.share, until)
            self.happened.append(Failure(now, event.kind, instance, there, until, 0, 0))
            return
        if event.kind == "instance":
            hit: tuple[int, ...] = (event.number,)
        elif event.kind == "gpu":
            hit = self._on((event.number,))
        else:
            first = event.number * self._node_gpus
            hit = self._on(range(first, min(first + self._node_gpus, self._gpus)))
        hit = tuple(each for each in hit if self._roster.state[each] in ALIVE)
        self._log(event, hit, until)
        lost, migrated = self._recovery.fail(hit) if hit else (0, 0)
        back = tuple(each for each in hit if self._roster.state[each] == State.FAILED)
        self.happened.append(Failure(now, event.kind, event.number, hit, until, lost, migrated))
        if back and until < math.inf:
            self._awaited += len(back)
            self._engine.at(until, FIRST, self._restore, back)

    def _log(self, event: FailureEvent, instances: tuple[int, ...], until: float) -> None:
        what, when = f"{event.kind} {event.number} failed", f"until {until:g} s" if until < math.inf else "for good"
        log = self._roster.decisions
        log += [Decision(self._engine.now, "failure", instance, what, when) for instance in instances]

    def _on(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Instances that hold some of these GPUs."""
        roster = self._roster
        held = gpus_held(
            roster.gpus, np.array(roster.start_s), np.array(roster.stop_s), gpus=self._gpus, node_gpus=self._node_gpus
        )
        alive = [each for each, state in enumerate(roster.state) if state != State.STOPPED]
        return tuple(each for each in alive if np.isin(held[each], gpus).any())

    def _restore(self, instances: tuple[int, ...]) -> None:
        self._awaited -= len(instances)
        self._recovery.restore(instances)

    def _cut(self, instance: int, share: float, until: float) -> None:
        """The link of an instance keeps a share of its bandwidth."""
        self._down[instance] = serial = self._down.get(instance, 0) + 1
        self._link.limit(instance, share)
        if until < math.inf:
            self._engine.at(until, FIRST, self._mend, instance, serial)

    def _mend(self, instance: int, serial: int) -> None:
        if self._down[instance] == serial:  # else it has failed again
            self._link.limit(instance, 1.0)
