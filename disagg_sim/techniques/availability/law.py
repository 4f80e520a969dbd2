r"""How many instances serve over time if parts fail, and how many spares an availability needs.

A failure of any of its GPUs stops an instance, all ranks of an EP group together: its **blast radius**. An instance of
n GPUs fails at the rate

.. math:: \lambda = \frac{n}{MTBF_{gpu}} + \frac{n}{MTBF_{link}} + \frac{\lceil n/g \rceil}{MTBF_{node}}
    + \frac{\lceil n/D \rceil}{MTBF_{domain}}

(g GPUs a node, D a domain; links where it needs them) and serves a share :math:`a = 1/(1 + \lambda R)` of the time, R
from a failure until it serves again. Instances smaller than a node, or a domain, share its failures: the parts are a
tree, and the number of instances that serve is counted over it. Availability is the share of time in which at least as
many serve as the load needs. Source: physics page, section 8.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, as_float, quoted
from disagg_sim.facts.failures import FailureSpec
from disagg_sim.facts.hardware import SystemSpec

#: Most spare instances of a pool that are tried. [1]
MOST_SPARES = 1000
#: Share of time below which a pool is taken to be never short. [1]
NEVER = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Blast:
    """Failures that stop an instance, and the instances that fail with it."""

    own: float  # failures that stop it alone [1/s]
    per_node: int  # instances on a node, of which a failure stops all; 1 = it has nodes of its own [1]
    node: float  # failures of that node [1/s]
    per_domain: int  # instances in an NVLink domain, the same [1]
    domain: float  # failures of that domain [1/s]
    restart: float  # from a failure until it serves again [s]

    @property
    def rate(self) -> float:
        """Failures that stop it. [1/s]"""
        return self.own + self.node + self.domain

    @property
    def most_down(self) -> int:
        """Most instances that one failure stops: the blast radius. [1]"""
        return max(self.per_node if self.node else 1, self.per_domain if self.domain else 1)

    @property
    def mtbf(self) -> float:
        """Mean time between failures that stop it; inf = never. [s]"""
        return math.inf if self.rate == 0.0 else 1.0 / self.rate

    def beside(self, other: Blast) -> Blast:
        """Combine the failures of an instance with GPUs on two systems: each failure of either part stops it.

        The larger number of instances a node, or a domain, counts.
        """
        return Blast(
            own=self.own + other.own,
            per_node=max(self.per_node, other.per_node),
            node=self.node + other.node,
            per_domain=max(self.per_domain, other.per_domain),
            domain=self.domain + other.domain,
            restart=max(self.restart, other.restart),
        )

    def serving(self, instances: int) -> Floats:
        """Find the distribution of the number of serving instances; shape (instances + 1,). [1]"""
        nodes = self.per_node if self.node else 1
        domains = max(self.per_domain if self.domain else 1, nodes)
        # a mean is what alternating times of service and of repair have, whatever the shape of the latter
        own, node, domain = (1.0 / (1.0 + rate * self.restart) for rate in (self.own, self.node, self.domain))

        def in_domain(count: int) -> Floats:
            up = _groups(count, nodes, lambda on_node: _all_down(_binomial(on_node, own), node))
            return _all_down(up, domain)

        return _groups(instances, domains, in_domain)


def blast_of(failing: FailureSpec, system: SystemSpec, gpus: int, *, links: bool = False) -> Blast:
    """Find what stops an instance of ``gpus`` GPUs, packed on as few nodes as it needs. [1/s]"""
    node, domain = failing.gpus_per_node, system.nvlink_domain
    spans = links or gpus > domain
    own = gpus * (failing.rate("gpu") + spans * failing.rate("link"))
    return Blast(
        own=own,
        per_node=max(node // gpus, 1),
        node=math.ceil(gpus / node) * failing.rate("node"),
        per_domain=max(domain // gpus, 1),
        domain=math.ceil(gpus / domain) * failing.rate("domain"),
        restart=failing.restart,
    )


def _binomial(count: int, chance: float) -> Floats:
    """Distribution of the successes of ``count`` trials. [1]"""
    if chance in (0.0, 1.0):
        certain: Floats = np.eye(1, count + 1, count if chance else 0)[0]
        return certain
    k = np.arange(count + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    exponent = logs[count] - logs[k] - logs[count - k] + k * math.log(chance) + (count - k) * math.log1p(-chance)
    return np.asarray(np.exp(exponent))


def _all_down(up: Floats, chance: float) -> Floats:
    """Find the distribution of instances that are all down unless their shared part works, with ``chance``. [1]"""
    down = np.zeros_like(up)
    down[0] = 1.0
    mixed: Floats = chance * up + (1.0 - chance) * down
    return mixed


def _groups(count: int, size: int, of_group: Callable[[int], Floats]) -> Floats:
    """Find the distribution over ``count`` instances in independent groups of ``size``; the last may be smaller."""
    whole, rest = divmod(count, size)
    if size == count or (whole == 1 and not rest):
        return of_group(count)
    points = 2 ** int(count).bit_length()
    total = np.fft.rfft(of_group(size), points) ** whole
    if rest:
        total = total * np.fft.rfft(of_group(rest), points)
    return np.maximum(np.fft.irfft(total, points)[: count + 1], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A pool that needs some instances, and what stops one of them."""

    instances: int  # that the load needs [1]
    cost: float  # of an instance, in any unit [any]
    blast: Blast

    def up(self, spares: int) -> float:
        """Share of time in which as many serve as are needed. [1]"""
        return float(self.blast.serving(self.instances + spares)[self.instances :].sum())

    def fewest(self, share: float) -> int:
        """Fewest spares with which as many serve as are needed for a share of the time; above ``MOST_SPARES``: none."""
        high = 0
        while self.up(high) < share:
            if high > MOST_SPARES:
                return high
            high = 2 * high + 1
        return bisect_left(range(high + 1), True, lo=high // 2, hi=high, key=lambda spares: self.up(spares) >= share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spares:
    """What a stated availability takes, and what it gives."""

    target: float  # [1]
    counts: tuple[int, ...]  # spare instances of each pool [1]
    availability: float  # share of time in which every pool has what the load needs [1]
    without: float  # the same without spares [1]
    capacity: float  # expected share of the load that the slowest pool can serve, over time [1]
    mtbf: tuple[float, ...]  # of an instance of each pool; inf = never [s]
    together: tuple[int, ...]  # most instances of each pool that one failure stops [1]


def check_target(target: float) -> None:
    """Raise ``InputError`` for a share of time out of range."""
    if not 0.0 < as_float(target) < 1.0:
        raise InputError(f"availability {quoted(target)} is out of range; allowed: above 0 and below 1, such as 0.999")


def spares_for(needs: Sequence[Need], target: float) -> Spares:
    """Find the cheapest spare instances with which all pools have what the load needs for a share of the time.

    Pools fail independently of each other, so their shares multiply; of each pool one count after the other is tried.
    Returns counts in the order of ``needs``.
    """
    check_target(target)
    found = _cheapest(needs, target)
    if found is None:
        raise InputError(f"availability {target:g} is out of reach with {MOST_SPARES:,} spare instances of a pool")
    counts = found[1]
    pairs = list(zip(needs, counts, strict=True))
    return Spares(
        target=target,
        counts=counts,
        availability=math.prod(need.up(count) for need, count in pairs),
        without=math.prod(need.up(0) for need in needs),
        capacity=expected_share([(need, count) for need, count in pairs]),
        mtbf=tuple(need.blast.mtbf for need in needs),
        together=tuple(min(need.blast.most_down, need.instances + count) for need, count in pairs),
    )


def _cheapest(needs: Sequence[Need], target: float) -> tuple[float, tuple[int, ...]] | None:
    """Cost and counts of the cheapest spares for a share of the time below 1; None where too many would be needed."""
    first, *others = needs
    least = first.fewest(target)
    if least > MOST_SPARES:
        return None
    if not others:
        return least * first.cost, (least,)
    best: tuple[float, tuple[int, ...]] | None = None
    for count in range(least, MOST_SPARES + 1):  # more of the first leave less to do for the others
        share = first.up(count)
        rest = _cheapest(others, target / share) if share > target else None
        if rest is not None and (best is None or count * first.cost + rest[0] < best[0]):
            best = count * first.cost + rest[0], (count, *rest[1])
        if (best is not None and (count + 1) * first.cost >= best[0]) or 1.0 - share < NEVER:
            break
    return best


def expected_share(pools: Sequence[tuple[Need, int]]) -> float:
    r"""Expected share of the load that the slowest pool can serve: :math:`E[\min_s \min(N_s, up_s)/N_s]`. [1]

    Below the least of the means, as pools are short at different times. Returns 1 where nothing fails.

    Two pools of one instance, each of which serves nine tenths of the time, serve together 0.9 * 0.9:

    >>> half = Blast(own=1.0, per_node=1, node=0.0, per_domain=1, domain=0.0, restart=1 / 9)
    >>> one = Need(instances=1, cost=1.0, blast=half)
    >>> round(expected_share([(one, 0)]), 6), round(expected_share([(one, 0), (one, 0)]), 6)
    (0.9, 0.81)
    """
    steps = np.unique(np.concatenate([np.arange(1, need.instances + 1) / need.instances for need, _ in pools]))
    reached = np.ones_like(steps)
    for need, spares in pools:
        serving = need.blast.serving(need.instances + spares)
        at_least = serving[::-1].cumsum()[::-1]
        reached *= at_least[np.ceil(steps * need.instances - 1e-9).astype(int)]
    return float((reached * np.diff(steps, prepend=0.0)).sum())
