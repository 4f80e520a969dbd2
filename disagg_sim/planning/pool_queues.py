"""Size encode pools before prefill, and instances split over attention and feed-forward GPUs, with their queues.

Prefill and whole decode instances are those of every plan (``planning.pools``). A split instance is a decode choice
whose step is that of both pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from disagg_sim.planning.counts import highest, least
from disagg_sim.planning.encode_queue import EncodeChoice, Encoding
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.pool_choice import gpus_of
from disagg_sim.planning.pools import DecodeChoice, PrefillChoice
from disagg_sim.search.splits import SplitGrid
from disagg_sim.serving.pool_options import SplitSide
from disagg_sim.simulation.instance_variants import FfnPool, ffn_of, placed

_Choice = TypeVar("_Choice", PrefillChoice, DecodeChoice)


def split_choices(grid: SplitGrid, work: Demand) -> list[DecodeChoice]:
    """The fastest split configurations of each size within the TPOT limit; links as wide as needed."""
    side = SplitSide(grid, work.tpot.seconds, math.inf, within_domain=True)
    return [_split(grid, work, row, column) for row, column in zip(side.rows, side.columns, strict=True)]


def _split(grid: SplitGrid, work: Demand, row: int, column: int) -> DecodeChoice:
    one = grid.instance(row, column)
    theirs = None if grid.ffn_setup is grid.setup else grid.ffn_setup
    ffn = FfnPool(mapping=one.ffn, microbatches=one.microbatches, setup=theirs)
    batch = grid.batch[row]
    return DecodeChoice(
        at=grid.setup,
        mapping=placed(one.attention, None, ffn),
        work=work,
        seats=one.batch,
        batch=batch[: column + 1].astype(float),
        step=grid.latency[row, : column + 1],
        link_rate=math.inf,
        memory=float(grid.attention_bytes[row, column]),
        memory_seats=int(batch[np.flatnonzero(grid.feasible[row])[-1]]),
        bound="",
    )


@dataclass(frozen=True, slots=True)
class Sized:
    """Pools that serve a rate."""

    prefill: PrefillChoice  # whose TTFT has the encoding in it
    decode: DecodeChoice
    instances: tuple[int, int]  # of prefill and decode [1]
    encoders: int  # GPUs of the encode pool; 0 = none [1]
    cost: float  # of all GPUs, in the unit of the objective

    @property
    def gpus(self) -> int:
        """Of all pools. [1]"""
        return self.encoders + self.instances[0] * gpus_of(self.prefill) + self.instances[1] * gpus_of(self.decode)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolChoices:
    """Configurations of the pools of one case, for deployments inside one NVLink domain and across."""

    encode: EncodeChoice | None  # None = no images
    inside: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    across: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    domain: int  # GPUs of an NVLink domain that all pools may share; 0 = they have systems of their own [1]
    costs: dict[str, float]  # of a GPU by system

    def sized(self, rate: float, most: float) -> Sized | None:
        """The cheapest pools that keep the limits at a rate [request/s], of up to ``most`` GPUs [1]; None without."""
        for (senders, takers), limit in ((self.inside, min(self.domain, most)), (self.across, most)):
            decode = self._cheapest(takers, rate, limit)
            if decode is None:
                continue
            taker, takes = decode
            room = limit - takes * gpus_of(taker)
            if found := [*self._before(senders, rate, room)]:
                encoders, (sender, sends) = min(found, key=lambda each: self._before_cost(each[0], *each[1]))
                cost = self._before_cost(encoders, sender, sends) + takes * self._price(taker)
                return Sized(sender, taker, (sends, takes), encoders, cost)
        return None

    def most_rate(self, gpus: int) -> float:
        """Highest rate that some GPUs serve; 0 where none do. [request/s]"""
        if not all(self.across):
            return 0.0
        needs = [1.0 / max(each.most / gpus_of(each) for each in choices) for choices in self.across]
        high = gpus / (sum(needs) + (0.0 if self.encode is None else self.encode.each_s))
        return highest(lambda rate: self.sized(rate, gpus) is not None, high)

    def _before(
        self, senders: Sequence[PrefillChoice], rate: float, room: float
    ) -> Iterator[tuple[int, tuple[PrefillChoice, int]]]:
        """GPUs that encode, and the cheapest prefill pool behind them."""
        for count in (0,) if self.encode is None else self.encode.counts(rate):
            pool = self._cheapest(self._behind(count, senders), rate, room - count)
            if pool is not None:
                yield count, pool

    def _behind(self, encoders: int, senders: Sequence[PrefillChoice]) -> Sequence[PrefillChoice]:
        """The choices of prefill behind an encode pool."""
        if self.encode is None:
            return senders
        encoding = Encoding(self.encode, encoders)
        return [replace(each, encode=encoding) for each in senders]

    def _before_cost(self, encoders: int, sender: PrefillChoice, sends: int) -> float:
        """Cost of an encode and a prefill pool, which have one system."""
        return encoders * self.costs[sender.at.system.name] + sends * self._price(sender)

    def _price(self, choice: PrefillChoice | DecodeChoice) -> float:
        """Cost of an instance, of whose GPUs some may be of another system."""
        ffn, gpus = ffn_of(choice.mapping), gpus_of(choice)
        theirs = 0 if ffn is None else int(ffn.mapping.gpus)
        own = choice.at if ffn is None or ffn.setup is None else ffn.setup
        return (gpus - theirs) * self.costs[choice.at.system.name] + theirs * self.costs[own.system.name]

    def _cheapest(self, choices: Sequence[_Choice], rate: float, most: float) -> tuple[_Choice, int] | None:
        """The cheapest pool that keeps its limit at a rate."""
        usable = [each for each in choices if each.most > 0]
        order = sorted(usable, key=lambda each: math.ceil(rate / each.most) * self._price(each))
        best: tuple[_Choice, int] | None = None
        cost = math.inf
        for each in order:
            price = self._price(each)
            if math.ceil(rate / each.most) * price >= cost:
                break
            room = most // gpus_of(each)
            room = room if math.isinf(cost) else min(room, math.ceil(cost / price) - 1)
            instances = least(each, rate, int(room)) if room >= 1 else None
            if instances is not None:
                best, cost = (each, instances), instances * price
        return best
