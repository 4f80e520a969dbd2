"""A planned deployment as values: its pools, what requests see, what binds, and its spares for an availability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from disagg_sim.certainty.designs import Designs
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.facts.failures import FailureSpec
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.counts import highest
from disagg_sim.planning.kv_links import behind, handing
from disagg_sim.planning.limits import SHARES, Demand
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.pools import AnyChoice, ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.simulation.deployment import Replicas
from disagg_sim.simulation.instance_variants import bare, ffn_of
from disagg_sim.simulation.options import MOST
from disagg_sim.techniques.availability.law import Blast, Need, Spares, blast_of, check_target, spares_for
from disagg_sim.techniques.encode.plan import EncodeChoice, Encoding
from disagg_sim.techniques.split.plan import SplitChoice

#: Latencies at the percentiles that are printed. [s]
Percentiles = dict[str, float]


class PoolPart(NamedTuple):
    """GPUs of a pool that do the same."""

    role: str  # that of the pool, or "attention" or "ffn"
    setup: Setup
    mapping: Sharding  # of an instance; of ranks that are apart the degrees of their half of the layers
    gpus: int  # spares included [1]
    memory: float  # on the fullest GPU [B]
    microbatches: int = 1  # that alternate between attention and feed-forward ranks [1]
    idle: float = math.nan  # share of a full step in which these ranks wait for the others [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPool:
    """Equal instances of one role."""

    role: str  # "encode", "prefill", "decode" or "colocated"
    choice: AnyChoice
    instances: int  # that the load needs [1]
    rate: float  # of the pool [request/s]
    spares: int = 0  # instances beside these, for a stated availability [1]

    def __repr__(self) -> str:
        """Without the tables of its choice."""
        more = f" + {self.spares}" if self.spares else ""
        return f"PlannedPool({self.role}: {self.instances}{more} x {self.mapping} on {self.setup.system.name})"

    @property
    def setup(self) -> Setup:
        """Model, system, recipe and engine."""
        return self.choice.at

    @property
    def mapping(self) -> Sharding:
        """Of one instance."""
        return self.choice.mapping

    @property
    def gpus(self) -> int:
        """Of the pool, spares included. [1]"""
        return int(self.mapping.gpus) * (self.instances + self.spares)

    @property
    def parts(self) -> tuple[tuple[Setup, int], ...]:
        """Its GPUs by what they do, spares included: attention and feed-forward ranks may be apart. [1]"""
        return tuple((half.setup, half.gpus) for half in self.halves)

    @property
    def halves(self) -> tuple[PoolPart, ...]:
        """Itself, or its attention and its feed-forward ranks where they are apart."""
        choice, ffn = self.choice, ffn_of(self.mapping)
        if ffn is None or not isinstance(choice, SplitChoice):
            return (PoolPart(self.role, self.setup, self.mapping, self.gpus, choice.memory),)
        at, gpus = ffn.setup or self.setup, int(ffn.mapping.gpus) * (self.instances + self.spares)
        (idle, waits), m = choice.idle, ffn.microbatches
        own = replace(ffn.mapping, dp_attn=1) if at.model.is_moe else replace(ffn.mapping, ep=1)
        attention = replace(bare(self.mapping), ep=1)
        return (
            PoolPart("attention", self.setup, attention, self.gpus - gpus, choice.memory, m, idle),
            PoolPart("ffn", at, own, gpus, choice.ffn_memory, m, waits),
        )

    @property
    def each(self) -> dict[str, int]:
        """GPUs of an instance by system: of one, or of two where feed-forward ranks have their own. [1]"""
        found: dict[str, int] = {}
        for at, gpus in replace(self, instances=1, spares=0).parts:
            found[at.system.name] = found.get(at.system.name, 0) + gpus
        return found

    @property
    def batch(self) -> int:
        """Most prompts of a pass of prefill, most sequences of a decode step, what a GPU encodes at once. [request]"""
        choice = self.choice
        if isinstance(choice, PrefillChoice):
            return int(choice.batch[-1])
        return 1 if isinstance(choice, EncodeChoice) else int(choice.seats)

    @property
    def replicas(self) -> Replicas:
        """The instances with their limits, as simulations and launchers take them."""
        choice, budget, held = self.choice, None, None
        if isinstance(choice, PrefillChoice):
            budget = math.ceil(self.batch * choice.work.lengths.mean_new)
        elif isinstance(choice, ColocatedChoice):
            budget, held = choice.budget, choice.hold_steps or None
        instances = self.instances + self.spares
        return Replicas(
            mapping=self.mapping,
            instances=instances,
            batch=self.batch,
            token_budget=budget,
            hold_steps=held,
            captured=MOST,
            ffn=ffn_of(self.mapping),
        )

    @property
    def utilisation(self) -> float:
        """Rate over what its instances do at full load. [1]"""
        if isinstance(self.choice, PrefillChoice):
            return self.choice.utilisation(self.rate, self.instances)
        if isinstance(self.choice, EncodeChoice):
            return self.rate * self.choice.step.each_s / self.instances
        if isinstance(self.choice, OneByOne):
            return self.rate * self.choice.service.mean / self.instances
        return self.rate / (self.instances * self.choice.most * self.choice.work.spare)

    @property
    def sequences(self) -> float:
        """Sequences that an instance decodes at once, on average; 0 where it does not. [request]"""
        choice = self.choice
        if isinstance(choice, DecodeChoice | ColocatedChoice):
            return choice.occupied(self.rate, self.instances).mean
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One way to serve the work at a rate."""

    mode: ServingMode
    pools: tuple[PlannedPool, ...]  # in the order in which a request passes them
    rate: float  # [request/s]
    cost: float  # of all GPUs in the unit of the objective: GPUs [1], [USD/h], or [W], at the TDP or drawn
    work: Demand = field(repr=False)
    kv_rate: float = 0.0  # largest egress or ingress of a GPU, at the planned rate [B/s]
    spares: Spares | None = field(default=None, compare=False)  # None where no availability is asked for
    simulated: tuple[Percentiles, Percentiles] | None = field(default=None, compare=False)  # TTFT, TPOT; None = planned

    @property
    def gpus(self) -> int:
        """Of all pools. [1]"""
        return sum(pool.gpus for pool in self.pools)

    @property
    def first(self) -> PlannedPool:
        """The pool that prefills; its TTFT has in it what requests wait for before it, and until decode takes them."""
        return self.first_at(self.rate)

    def first_at(self, rate: float) -> PlannedPool:
        """The same at another rate, at which decode runs other steps."""
        *_, pool, last = (None, *self.pools)
        if pool is None or not isinstance(pool.choice, PrefillChoice):
            return last
        assert isinstance(last.choice, DecodeChoice)
        sender, encode = pool.choice, self.encode
        if encode is not None:
            sender = behind(sender, *encode)
        return replace(pool, choice=handing(sender, last.choice, rate, last.instances))

    @property
    def encode(self) -> Encoding | None:
        """The pool that encodes images before prefill; None without one."""
        pool = self.pools[0]
        return Encoding(pool.choice, pool.instances) if isinstance(pool.choice, EncodeChoice) else None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens. [token/s]"""
        return self.rate * self.work.lengths.mean_osl

    @property
    def ttft(self) -> Percentiles:
        """Arrival to first token, queue included, by percentile. [s]"""
        if self.simulated is not None:
            return self.simulated[0]
        return {name: self._ttft(self.rate_for(share), share) for name, share in SHARES.items()}

    def _ttft(self, rate: float, share: float) -> float:
        pool = self.first_at(rate)
        assert isinstance(pool.choice, PrefillChoice | ColocatedChoice)
        return pool.choice.ttft(rate, pool.instances, share)

    @property
    def tpot(self) -> Percentiles:
        """Mean gap of a request's tokens after the first, by percentile. [s]"""
        if self.simulated is not None:
            return self.simulated[1]
        pool = self.pools[-1]
        assert isinstance(pool.choice, DecodeChoice | ColocatedChoice)
        return {name: pool.choice.tpot(self.rate_for(share), pool.instances, share) for name, share in SHARES.items()}

    def rate_for(self, share: float) -> float:
        """Rate that counts for a percentile: of a median the mean, else that of the surges of a trace. [request/s]"""
        return self.rate * (self.work.surge if share > SHARES["p50"] else 1.0)

    @property
    def flattered(self) -> bool:
        """Whether closed forms say too little of its latencies: of varied lengths, and of co-located attention DP.

        Long prompts keep a pool longer than their mean does; all ranks wait for the one with the longest step.
        """
        apart = int(self.pools[-1].mapping.dp_attn) > 1
        return self.work.lengths.isl.size > 1 or (self.mode == ServingMode.COLOCATED and apart)

    @property
    def capacity(self) -> float:
        """Highest rate at which these instances keep the limits; never below the planned rate. [request/s]"""
        return max(self.keeping(self.work.ttft.seconds, self.work.tpot.seconds), self.rate)

    def keeping(self, ttft: float, tpot: float) -> float:
        """Highest rate at which these instances keep such limits [s]; 0 where they keep them at none. [request/s]

        A simulated design is off by as much as it is at its own rate, and serves at most what one instance of a pool
        more or less would make of it.
        """
        work, most = self.work, math.inf
        if self.simulated is not None:
            planned = replace(self, simulated=None)
            ttft *= planned.ttft[work.ttft.percentile] / self.ttft[work.ttft.percentile]
            tpot *= planned.tpot[work.tpot.percentile] / self.tpot[work.tpot.percentile]
            counts = [pool.instances for pool in self.pools if pool.instances > 1]
            most = self.rate * min((each / (each - 1) for each in counts), default=math.inf)
        asked = replace(
            work, ttft=replace(work.ttft, seconds=ttft), tpot=replace(work.tpot, seconds=tpot), most_load=1.0
        )

        def sides(rate: float) -> list[tuple[AnyChoice, int]]:
            first = self.first_at(rate * work.surge if work.ttft.share > SHARES["p50"] else rate)
            passed = (first if pool.role == first.role else pool for pool in self.pools)
            return [
                (
                    one.under(asked) if isinstance(one := pool.choice, ColocatedChoice) else replace(one, work=asked),
                    pool.instances,
                )
                for pool in passed
            ]

        def serves(rate: float) -> bool:
            return all(choice.holds(rate / work.spare, instances) for choice, instances in sides(rate))

        bound = min(most, *(choice.most * work.spare * instances for choice, instances in sides(self.rate)))
        return highest(serves, bound) if bound > 0 else 0.0

    @property
    def hosts(self) -> dict[str, tuple[int, int]]:
        """Hosts of each system that its instances fill, and GPUs of these that none of them has. [1]"""
        sizes = {at.system.name: at.system.host_gpus for pool in self.pools for at, _ in pool.parts}
        used, taken = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
        for pool, (name, each) in ((one, part) for one in self.pools for part in one.each.items()):
            count = pool.instances + pool.spares
            whole = sizes[name] * math.ceil(each / sizes[name]) if each > sizes[name] else each
            used[name] += each * count
            taken[name] += whole * count  # an instance on several hosts fills them
        counts = {name: math.ceil(taken[name] / sizes[name]) for name in sizes}
        return {name: (count, count * sizes[name] - used[name]) for name, count in counts.items()}

    @property
    def in_flight(self) -> float:
        """Requests in flight, on average: by Little's law those before their first token, and those that decode."""
        if self.simulated is not None:  # whose means are not kept: medians stand for them
            return self.rate * (self.ttft["p50"] + self.work.lengths.gaps * self.tpot["p50"])
        first, last = self.first, self.pools[-1]
        assert isinstance(first.choice, PrefillChoice | ColocatedChoice)
        waiting = self.rate * first.choice.mean_ttft(self.rate, first.instances)
        if isinstance(last.choice, OneByOne):  # whose seat is taken by prefill, too
            return waiting + self.rate * self.work.lengths.gaps * self.tpot["p50"]
        return waiting + last.instances * last.sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """A stated availability, and how often parts fail: what a plan adds spares for."""

    target: float  # share of time in which every pool has the instances that the load needs [1]
    failing: FailureSpec

    def __post_init__(self) -> None:
        """``InputError`` for a target out of range."""
        check_target(self.target)

    def spared(self, design: Design, costs: Mapping[str, float]) -> Design:
        """The design with the cheapest spares for the target, and its cost with them."""
        needs = [self.need(design, pool, costs) for pool in design.pools]
        found = spares_for(needs, self.target)
        pools = tuple(replace(pool, spares=count) for pool, count in zip(design.pools, found.counts, strict=True))
        cost = design.cost + sum(need.cost * count for need, count in zip(needs, found.counts, strict=True))
        return replace(design, pools=pools, cost=cost, spares=found)

    def need(self, design: Design, pool: PlannedPool, costs: Mapping[str, float]) -> Need:
        """What a pool of the design needs; links count where caches, or tokens of a layer, go over NICs."""
        systems, gpus = {at.system.name: at.system for at, _ in pool.parts}, pool.each
        across = len(design.pools) > 1 and design.gpus > pool.setup.system.nvlink_domain
        links = across or len(gpus) > 1
        first, *others = (blast_of(self.failing, systems[name], count, links=links) for name, count in gpus.items())
        cost = sum(count * costs[name] for name, count in gpus.items())
        return Need(instances=pool.instances, cost=cost, blast=reduce(Blast.beside, others, first))

    def of_designs(self, one: Designs) -> tuple[list[tuple[str, int]], Spares]:
        """Name and GPUs of an instance of each pool of a design of one row, and its fewest spare GPUs for the target.

        An instance of one phase hands caches over, over NICs where the other pool has no place in its NVLink domain.
        """
        pools = [] if one.shared or "prefill" not in one.phases else [("prefill", one.prefill_at, one.prefill_mapping)]
        pools += [] if one.mode == "prefill" else [("co-located" if one.shared else "decode", one.at, one.mapping)]
        counts = {"prefill": one.prefill_instances}
        total = float(one.total_gpus[0]) + (len(pools) == 1 and not one.shared)
        named, needs = [], []
        for name, at, mapping in pools:
            gpus = int(mapping.gpus[0])
            links = not one.shared and total > at.system.nvlink_domain
            blast = blast_of(self.failing, at.system, gpus, links=links)
            count = int(counts.get(name, one.instances)[0])
            named.append((name, gpus))
            needs.append(Need(instances=count, cost=gpus, blast=blast))
        return named, spares_for(needs, self.target)
