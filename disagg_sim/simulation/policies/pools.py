"""Resize a prefill pool and a decode pool within a budget of GPUs."""

from __future__ import annotations

from typing import NamedTuple

from disagg_sim.domain import Sharding
from disagg_sim.simulation.instance_variants import require_one_system
from disagg_sim.simulation.policies.loads import Choice, least_decode, least_prefill
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Role, Start, Stop, Wish

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class Sizes(NamedTuple):
    """Instances of the two pools. [1]"""

    prefill: int
    decode: int

    @property
    def words(self) -> str:
        """For reasons."""
        return f"{self.prefill}P + {self.decode}D"


def within(wanted: Sizes, gpus: Sizes, budget: int, least: int = 1) -> Sizes:
    """The sizes wanted, or both cut in proportion until they fit a budget of GPUs, each at least ``least``.

    What rounding down leaves of the budget goes to the pool that was cut more.

    >>> within(Sizes(6, 4), Sizes(1, 2), 8)
    Sizes(prefill=4, decode=2)
    """
    size = [max(count, least) for count in wanted]
    wanted = Sizes(*size)
    need = size[0] * gpus[0] + size[1] * gpus[1]
    if need <= budget:
        return wanted
    size = [max(least, count * budget // need) for count in size]
    for pool, other in ((0, 1), (1, 0)):  # where the least of one is more than its share
        size[pool] = min(size[pool], max(least, (budget - size[other] * gpus[other]) // gpus[pool]))
    left = budget - size[0] * gpus[0] - size[1] * gpus[1]
    for pool in sorted((0, 1), key=lambda pool: size[pool] / wanted[pool]):
        while gpus[pool] <= left and size[pool] < wanted[pool]:
            size[pool] += 1
            left -= gpus[pool]
    return Sizes(*size)


class Pools:
    """Moves the two pools towards the sizes that a planner wants; each is on one system; ``idlest`` stops first."""

    def __init__(
        self,
        site: Site,
        *,
        drain: bool = True,
        idlest: Choice = least_prefill,
        mappings: tuple[Sharding, Sharding] | None = None,
    ) -> None:
        parts = {part: tuple(each.mapping for each in site.deployment.part(part)) for part in ("prefill", "decode")}
        for part, own in parts.items():
            require_one_system(f"deployment {site.deployment.name!r}: {part}, which the policy sizes,", own)
        self.mappings: tuple[Sharding, Sharding] = mappings or (parts["prefill"][0], parts["decode"][0])
        self.gpus = Sizes(*(mapping.gpus for mapping in self.mappings))
        self._systems = tuple(site.setup_of(mapping).system.name for mapping in self.mappings)
        self._drain = drain
        self._idlest: tuple[Choice, Choice] = idlest, least_decode

    def there(self, view: ClusterView) -> Sizes:
        """Instances that serve or start."""
        return Sizes(
            int(view.prefill.size) + len(view.starting(PREFILL)), int(view.decode.size) + len(view.starting(DECODE))
        )

    def starting(self, view: ClusterView) -> bool:
        """Whether an instance is on its way up."""
        return bool(view.starting(PREFILL) or view.starting(DECODE))

    def within(self, view: ClusterView, wanted: Sizes, least: int = 1) -> Sizes:
        """The sizes wanted, or both cut until they fit the GPUs; pools on unlike systems each have their own."""
        budgets = [view.gpus_for(mapping) for mapping in self.mappings]
        if self._systems[0] == self._systems[1]:
            return within(wanted, self.gpus, budgets[0], least)
        pairs = zip(wanted, budgets, self.gpus, strict=True)
        return Sizes(*(max(min(count, budget // gpus), least) for count, budget, gpus in pairs))

    def steps(self, view: ClusterView, wanted: Sizes, reason: str) -> list[Wish]:
        """Start instances while GPUs are free; stop starting ones first, then the idlest serving ones."""
        there, systems = self.there(view), self._systems
        free = {system: view.free_gpus_for(own) for system, own in zip(systems, self.mappings, strict=True)}
        stops: list[Wish] = []
        starts: list[Wish] = []
        sides = zip((PREFILL, DECODE), self.mappings, systems, there, wanted, strict=True)
        for role, mapping, system, have, want in sides:
            grow = min(want - have, free[system] // mapping.gpus)
            if grow > 0:
                starts += [Start(mapping, role, reason)] * grow
                free[system] -= grow * mapping.gpus
            if want < have:
                stops += self._stops(view, role, have - want, reason)
        return stops + starts

    def _stops(self, view: ClusterView, role: Role, count: int, reason: str) -> list[Wish]:
        chosen = view.starting(role)[::-1][:count]
        ready = view.prefill if role is PREFILL else view.decode
        idlest = self._idlest[role]
        while len(chosen) < count and ready.size > 1:
            instance = idlest(view, ready)
            chosen.append(instance)
            ready = ready[ready != instance]
        return [Stop(int(instance), reason, self._drain) for instance in chosen]
