"""Say what becomes of requests whose instance is gone, and of those that come while a phase has no instance.

A request that leaves with its instance is lost, or begins again elsewhere as a request with a number of its own: prompt
and emitted tokens are computed anew, and it goes on behind these. While no instance prefills, or none decodes, requests
wait at the front end, and those whose prompt is computed on the instance that holds their cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg_sim.simulation.batches import Batches
from disagg_sim.simulation.engine import NORMAL, Engine
from disagg_sim.simulation.instances import Roster
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.transfers import Transfers
from disagg_sim.simulation.view import ClusterState, ClusterView
from disagg_sim.techniques.prefix.play import PrefixMemory

#: A segment whose end the cluster waits for: request, instance, tokens of the request that exist when it ends [token],
#: instance of the rest, or ``LATER``, and whether the request goes on after it. Plain tuples are made fastest.
ActiveLeg = tuple[int, int, int, int, bool]


class RequestOwner(Protocol):
    """The cluster whose requests lose their instances."""

    parts: Parts
    state: ClusterState
    view: ClusterView
    engine: Engine
    roster: Roster
    prefix: PrefixMemory | None
    batches: Batches
    transfers: Transfers
    going: dict[int, ActiveLeg]  # by segment

    def arrive(self, request: int, known: bool = False) -> None:
        """Place a request, which policies know of already where it is ``known``."""

    def lose(self, request: int) -> None:
        """A request has ended with its instance."""

    def start_next_leg(self, segment: int, going: ActiveLeg) -> None:
        """A request has done its leg on an instance, and takes the next."""

    def discard_first_token(self, segment: int, going: ActiveLeg) -> int:
        """Tokens that exist for the next instance, without a first token that it emits itself. [token]"""


class Recovery:
    """What failures of instances leave behind."""

    def __init__(self, cluster: RequestOwner, migration_limit: int) -> None:
        self._cluster, self._limit = cluster, migration_limit
        self.closed = False  # whether a phase has no instance
        self.held: dict[int, ActiveLeg] = {}  # by segment: those that wait for one to go on
        self.parked: list[int] = []  # requests that wait for one to begin
        self._begun_again: dict[int, int] = {}  # how often, by the first number of a request [1]

    @property
    def waits(self) -> bool:
        """Whether something waits that only an instance can bring on that is to serve again."""
        return bool(self.held or self.parked) or self._cluster.view.shared_requests > 0

    def fail(self, instances: Sequence[int]) -> tuple[int, int]:
        """Instances are gone with all that they had: requests that are lost, and that begin again. [request]"""
        cluster, roster = self._cluster, self._cluster.roster
        roster.fail(instances)
        self.closed = not (roster.prefill.size and roster.decode.size)
        left = [request for instance in instances for request in self._left_by(instance)]
        if (failover := cluster.parts.failover) is not None:
            roster.apply(failover.failed(cluster.view, tuple(instances), tuple(left)), failover.failed)
        return self.leave(left)

    def renumber(self, number: Sequence[int]) -> None:
        """Segments have new numbers, by their old ones."""
        self.held = {number[segment]: going for segment, going in self.held.items()}

    def restore(self, instances: Sequence[int]) -> None:
        """Failed instances serve again, empty."""
        cluster = self._cluster
        cluster.roster.restore(instances)
        if (failover := cluster.parts.failover) is not None:
            cluster.roster.apply(failover.restored(cluster.view, tuple(instances)), failover.restored)

    def stopped(self, instance: int) -> None:
        """An instance was stopped at once."""
        self.leave(self._left_by(instance))

    def leave(self, requests: Sequence[int]) -> tuple[int, int]:
        """Requests have left with their instance, or on their way to it: how many are lost, and begin again."""
        cluster, again = self._cluster, []
        for request in requests:
            first = cluster.state.first_number.get(request, request)
            if self._begun_again.get(first, 0) < self._limit:
                self._begun_again[first] = self._begun_again.get(first, 0) + 1
                again.append(request)
            else:
                cluster.lose(request)
        for number in cluster.state.begin_again(again) if again else ():
            cluster.engine.at(cluster.engine.now, NORMAL, cluster.arrive, number, True)
        return len(requests) - len(again), len(again)

    def serves(self) -> None:
        """An instance serves, or serves in another role."""
        roster = self._cluster.roster
        if self.closed and roster.prefill.size and roster.decode.size:
            self.closed = False
            self._cluster.engine.at(self._cluster.engine.now, NORMAL, self._reopen)

    def _reopen(self) -> None:
        """What has waited for an instance goes on, if there still is one."""
        held, parked = self.held, self.parked
        self.held, self.parked = {}, []
        for segment, going in held.items():
            self._cluster.start_next_leg(segment, going)
        for request in parked:
            self._cluster.arrive(request, True)

    def _left_by(self, instance: int) -> list[int]:
        """Requests that leave with an instance that is gone."""
        cluster, left = self._cluster, []
        between = cluster.transfers.between()  # these are lost with either end
        for segment in [segment for segment, (_, where, *_) in cluster.going.items() if where == instance]:
            if segment not in between:
                left.append(cluster.going.pop(segment)[0])
        for segment in [segment for segment, (_, where, *_) in self.held.items() if where == instance]:
            going = self.held.pop(segment)
            cluster.discard_first_token(segment, going)
            left.append(going[0])
        left += cluster.transfers.died(instance)
        for segment in between - cluster.transfers.between():
            cluster.going.pop(segment, None)
        for request in cluster.batches.abandon(instance):
            cluster.roster.coming[instance] -= 1
            left.append(request)
        if cluster.prefix is not None:
            cluster.prefix.forget(instance)
        return left
