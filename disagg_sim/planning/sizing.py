"""Size designs: the cheapest deployment of each mode for a rate, and the highest rate of a number of GPUs.

Very long prompts also have pipelines that serve one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from operator import itemgetter
from typing import TypeVar

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu, unique_gpus
from disagg_sim.planning.candidates import Candidates
from disagg_sim.planning.counts import SizedPool, best_rate, first_of, gpus_of, highest, pools
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import drawn, watts_of_pools
from disagg_sim.planning.kv_links import behind, handing, transfer_between
from disagg_sim.planning.mixed_steps import ROUNDED
from disagg_sim.planning.pools import AnyChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.question import MOST_GPUS
from disagg_sim.planning.ranking import NEAR, Standing, is_unknown, ranked, standing_of_pool

#: Layouts of each pool that become designs: most of those with nearly the fewest GPUs, and how many others fill up a
#: shorter list (one at least). [1]
CLOSE, BEST = 8, 3
#: Pools of more GPUs than this times the fewest are left out. [1]
FARTHEST = 2.0
#: Share of the planned rate at which requests come alone. [1]
ALONE = 1e-6

_Pool = SizedPool[AnyChoice]


def _sized(choices: Sequence[AnyChoice], rate: float, most: float, handed: _Handed | None = None) -> list[_Pool]:
    """Size pools for a rate, fewest GPUs first; none above ``most`` GPUs or ``FARTHEST`` times the fewest."""
    return sorted(pools(choices, rate, most, lambda fewest, _: min(fewest * FARTHEST, most), handed), key=_size)


def _size(pool: _Pool) -> tuple[int, int, int]:
    return pool.gpus, getattr(pool.choice, "hold_steps", 0), gpus_of(pool.choice)


def _worth_pairing(
    role: str, choices: Sequence[AnyChoice], rate: float, most: float, handed: _Handed | None = None
) -> list[_Pool]:
    """Keep one pool of each layout: the best ranked of its smallest ones; then the best layouts (``CLOSE``, ``BEST``).

    Chunk sizes, batches and budgets make no layouts of their own. None has more than ``most`` GPUs, or ``FARTHEST``
    times the fewest. Where none of them was run, the smallest that was is kept, too.
    """
    found: list[_Pool] = []
    fewest_of: dict[Sharding, int] = {}
    run: set[Sharding] = set()
    layout_of = {at: _layout(mapping) for at, mapping in {id(each.mapping): each.mapping for each in choices}.items()}

    def within(fewest: float, coming: float) -> float:
        """GPUs of the last layout that is kept, as soon as all with nearly the fewest GPUs are known."""
        limit = min(fewest * FARTHEST, most)
        if coming <= NEAR * fewest or not run:
            return limit
        far = sorted(gpus for gpus in fewest_of.values() if gpus > NEAR * fewest)
        others = _others(len(fewest_of) - len(far))
        return limit if len(far) < others else min(far[others - 1], limit)

    def smallest(choice: AnyChoice) -> float:
        """GPUs of the smallest pool of its layout so far: larger ones are not kept."""
        return fewest_of.get(layout_of[id(choice.mapping)], math.inf)

    for each in pools(choices, rate, most, within, handed, smallest):
        found.append(each)
        layout = layout_of[id(each.choice.mapping)]
        if layout not in fewest_of and not is_unknown(_planned(role, each, rate)):
            run.add(layout)
        fewest_of[layout] = min(each.gpus, fewest_of.get(layout, each.gpus))
    if not found:
        return []
    layouts: dict[Sharding, list[_Pool]] = {}
    for each in (order := sorted(found, key=_size)):
        layout = layout_of[id(each.choice.mapping)]
        if each.gpus == fewest_of[layout]:
            layouts.setdefault(layout, []).append(each)
    close = [each for each in layouts.values() if each[0].gpus <= NEAR * order[0].gpus]
    far = [each for each in layouts.values() if each[0].gpus > NEAR * order[0].gpus]

    def first(alike: list[_Pool]) -> tuple[Standing, _Pool]:
        planned = (_planned(role, each, rate) for each in alike)
        return min(zip(map(standing_of_pool, planned), alike, strict=True), key=lambda pair: pair[0])

    best = sorted(map(first, close), key=lambda pair: pair[0])[:CLOSE]
    others = map(first, far)
    kept = [*best, *islice(others, _others(len(close)))]
    if all(rank.unknown for rank, _ in kept):
        kept += islice((pair for pair in others if not pair[0].unknown), 1)
    return [each for _, each in kept]


def _planned(role: str, pool: _Pool, rate: float) -> PlannedPool:
    return PlannedPool(role=role, choice=pool.choice, instances=pool.instances, rate=rate)


def _others(close: int) -> int:
    """Count the larger layouts that are kept beside those of nearly the fewest GPUs. [1]"""
    return max(BEST - min(close, CLOSE), 1)


def _fewest(choices: Sequence[AnyChoice], rate: float, most: float, handed: _Handed | None = None) -> float:
    """GPUs of the smallest pool that serves a rate; inf where more than ``most`` would be needed. [1]"""
    found = pools(choices, rate, most + 1, lambda fewest, _: fewest - 1, handed)
    return min((each.gpus for each in found), default=math.inf)


def designs_at(case: Candidates, rate: float, most: float = MOST_GPUS, mode: ServingMode | None = None) -> list[Design]:
    """Find some designs of one or both modes that serve a rate [request/s] within the limits, the best first."""
    if mode == ServingMode.COLOCATED:
        case = replace(case, inside=((), ()), across=((), ()))
    elif mode == ServingMode.DISAGGREGATED:
        case = replace(case, colocated=())
    alone, chains = _thriftiest(case, rate, most) if case.drawn else _smallest(case, rate, most)
    found = [
        Design(
            mode=ServingMode.COLOCATED,
            pools=(PlannedPool(role="colocated", choice=each.choice, instances=each.instances, rate=rate),),
            rate=rate,
            cost=cost,
            work=case.work,
        )
        for cost, each in alone
    ]
    found += [disaggregated_of(case, rate, cost, *passed) for cost, passed in chains]
    if case.availability is not None:
        spared = [case.availability.spared(design, case.costs) for design in found]
        found = [design for design in spared if design.gpus <= most]
    return ranked(found, near_of(case), case.prices)


def near_of(case: Candidates) -> float:
    """Cost over that of the cheapest within which a ranking ignores cost; 1 where the objective is least power. [1]

    Layouts that were run come first up to ``ranking.SIMPLER`` whatever it is.
    """
    return 1.0 if case.drawn else NEAR


#: Pools that a request passes one after the other.
_Chain = tuple[_Pool, ...]
#: Co-located pools, and chains of other pools, each after its cost.
_Found = tuple[list[tuple[float, _Pool]], list[tuple[float, _Chain]]]


def _before(
    case: Candidates, senders: Sequence[PrefillChoice], rate: float
) -> Iterator[tuple[_Chain, Sequence[PrefillChoice]]]:
    """Encode pools that are worth trying, none where there are no images, and the choices of prefill behind each."""
    if case.encode is None:
        yield (), senders
        return
    for count in case.encode.counts(rate):
        yield (SizedPool(case.encode, count),), [behind(each, case.encode, count) for each in senders]


class _Handed:
    """Choices of prefill before a decode pool, made where they are asked for, and what they are without it."""

    def __init__(self, case: Candidates, taker: _Pool, rate: float) -> None:
        assert isinstance(taker.choice, DecodeChoice)
        self._to = taker.choice, case.work.sized(rate), taker.instances
        self._of: dict[AnyChoice, AnyChoice] = {}

    def __call__(self, sender: AnyChoice) -> AnyChoice:
        """The same before the decode pool."""
        assert isinstance(sender, PrefillChoice)
        made = handing(sender, *self._to)
        self._of[made] = sender
        return made

    def plain(self, pools: Sequence[_Pool]) -> list[_Pool]:
        """The same without the decode pool."""
        return [each._replace(choice=self._of[each.choice]) for each in pools]


def _in_time(
    case: Candidates, senders: Sequence[PrefillChoice], decode: Sequence[_Pool], rate: float, most: float
) -> list[_Pool]:
    """Decode pools with as many more instances as a prompt that comes alone needs: fewer sequences take shorter steps.

    Those that no number of instances within ``most`` GPUs helps are left out.
    """
    if not all(each.link for each in senders):
        return list(decode)  # caches move as fast as needed
    rate, found = case.work.sized(rate), []
    for pool in decode if senders else ():
        taker = pool.choice
        assert isinstance(taker, DecodeChoice)
        first = min(senders, key=lambda each: each.alone_s + transfer_between(each, taker))

        def takes(count: int, taker: DecodeChoice = taker, first: PrefillChoice = first) -> bool:
            return handing(first, taker, rate, count).holds(rate * ALONE, 1)

        count = first_of(pool.instances, int(most // gpus_of(taker)), takes)
        found += [] if count is None else [pool._replace(instances=count)]
    return found


def _gpus(chain: _Chain) -> int:
    return sum(pool.gpus for pool in chain)


def _smallest(case: Candidates, rate: float, most: float) -> _Found:
    """Find the co-located pools and the chains of pools with the fewest GPUs."""
    chains: list[_Chain] = []
    for (senders, takers), limit in ((case.inside, min(case.domain, most)), (case.across, most)):
        decode = _in_time(case, senders, _worth_pairing("decode", takers, rate, limit), rate, limit)
        for (before, passed), taker in product(_before(case, senders, rate) if decode else (), decode):
            handed = _Handed(case, taker, rate)
            prefill = _worth_pairing("prefill", passed, rate, limit - taker.gpus - _gpus(before), handed)
            chains += [(*before, each, taker) for each in handed.plain(prefill)]
        if chains:
            break
    both = _worth_pairing("colocated", case.colocated, rate, most)
    return [(_price(case, (each,)), each) for each in both], [(_price(case, chain), chain) for chain in chains]


def _price(case: Candidates, chain: _Chain) -> float:
    """Cost of the GPUs of pools."""
    parts = (part for pool in chain for part in _planned("", pool, 0.0).parts)
    return sum(gpus * case.costs[at.system.name] for at, gpus in parts)


def _thriftiest(case: Candidates, rate: float, most: float) -> _Found:
    """Find the co-located pools and the chains of pools that draw the least power at the rate."""
    known: dict[tuple[AnyChoice, int], float] = {}

    def watts(role: str, sized: Sequence[_Pool]) -> list[float]:
        new = [each for each in sized if each not in known]
        if new:
            powers = watts_of_pools([_planned(role, each, rate) for each in new], case.work.lengths)
            known.update(zip(new, powers.tolist(), strict=True))
        return [known[each] for each in sized]

    def drawing(role: str, sized: Sequence[_Pool]) -> list[tuple[_Pool, float]]:
        return list(zip(sized, watts(role, sized), strict=True))

    chains: list[tuple[float, _Chain]] = []
    for (senders, takers), limit in ((case.inside, min(case.domain, most)), (case.across, most)):
        decode = drawing("decode", _in_time(case, senders, _sized(takers, rate, most), rate, limit))
        for (before, passed), (taker, own) in product(_before(case, senders, rate) if decode else (), decode):
            handed = _Handed(case, taker, rate)
            prefill = handed.plain(_sized(passed, rate, limit - taker.gpus - _gpus(before), handed))
            others = own + sum(watts("encode", before))
            chains += [
                (power + others, (*before, each, taker))
                for each, power in zip(prefill, watts("prefill", prefill), strict=True)
            ]
    alone: dict[Sharding, tuple[float, _Pool]] = {}
    for each, power in sorted(drawing("colocated", _sized(case.colocated, rate, most)), key=itemgetter(1)):
        alone.setdefault(each.choice.mapping, (power, each))
    return list(alone.values())[:BEST], sorted(chains, key=itemgetter(0))[: BEST**2]


def disaggregated_of(case: Candidates, rate: float, cost: float, *pools: _Pool) -> Design:
    """Make the design of pools of encode, if any, prefill and decode, with the bandwidth that caches need on links."""
    grids = case.grids
    roles = ("encode", "prefill", "decode")[-len(pools) :]
    planned = tuple(_planned(role, pool, rate) for role, pool in zip(roles, pools, strict=True))
    taken = grids.decode.kv_bytes_per_request
    moved = [
        float(bandwidth_per_gpu(rate / pool.instances, size, unique_gpus(case.at.model, pool.mapping)))
        for pool, size in zip(planned[-2:], (taken + grids.prefill.stored_bytes_per_request, taken), strict=True)
    ]
    return Design(
        mode=ServingMode.DISAGGREGATED, pools=planned, rate=rate, cost=cost, work=case.work, kv_rate=float(max(moved))
    )


def cost_of(case: Candidates, design: Design) -> float:
    """Cost of a design without spares, in the unit of the objective: what its GPUs cost, or what they draw."""
    if case.drawn:
        return drawn(design).watts
    return sum(gpus * case.costs[at.system.name] for pool in design.pools for at, gpus in pool.parts)


def fewest(case: Candidates, mode: ServingMode, rate: float, most: float) -> float:
    """Cost of the cheapest deployment of one mode for a rate [request/s], in the unit of the objective; inf = none."""
    if case.drawn or case.availability is not None:
        return min((each.cost for each in designs_at(case, rate, most, mode)), default=math.inf)
    decode, prefill = (case.costs[each.system.name] for each in (case.at, case.prefill_at))
    if mode == ServingMode.COLOCATED:
        return decode * _fewest(case.colocated, rate, most)
    for (senders, takers), limit in ((case.inside, min(case.domain, most)), (case.across, most)):
        cheapest = math.inf
        decoding = _in_time(case, senders, _sized(takers, rate, limit), rate, limit)
        for (before, passed), taker in product(_before(case, senders, rate) if decoding else (), decoding):
            room = min(limit - taker.gpus, (cheapest - decode * taker.gpus) / prefill) - _gpus(before)
            sender = _gpus(before) + _fewest(passed, rate, room, _Handed(case, taker, rate))
            cheapest = min(cheapest, prefill * sender + decode * taker.gpus)
        if math.isfinite(cheapest):
            return cheapest
    return math.inf


def may_cost(case: Candidates, rate: float, cost: float) -> bool:
    """Say whether a deployment for a rate [request/s] might cost no more than ``cost``; True where not known."""
    if math.isinf(cost) or case.drawn or case.availability is not None or case.further is not None:
        return True
    most, limit = gpus_for(case, cost), cost * (1.0 + ROUNDED)
    return any(fewest(case, mode, rate, most) <= limit for mode in (ServingMode.COLOCATED, ServingMode.DISAGGREGATED))


def gpus_for(case: Candidates, cost: float) -> int:
    """Find how many GPUs a deployment may have before it costs more than ``cost``, if only GPUs cost. [1]"""
    if case.drawn or case.availability is not None or math.isinf(cost):
        return MOST_GPUS
    return min(math.floor(cost / min(case.costs.values())) + 1, MOST_GPUS)


def most_rate(case: Candidates, gpus: int, mode: ServingMode) -> float:
    """Find the highest rate that a deployment of one mode serves on so many GPUs within the limits. [request/s]"""
    case = replace(case, drawn=False)  # the objective changes which design is best, not which ones serve
    sides: Sequence[Sequence[AnyChoice]] = (case.colocated,)
    if mode == ServingMode.DISAGGREGATED:
        sides = case.inside if case.encode is None else ((case.encode,), *case.inside)
    per_gpu = [best_rate(choices) for choices in sides]
    if not all(per_gpu):
        return 0.0
    high = gpus / sum(1.0 / each for each in per_gpu)
    return highest(lambda rate: math.isfinite(fewest(case, mode, rate, gpus)), high)


def most_of(case: Candidates, design: Design, gpus: int) -> Design:
    """Grow a design to so many GPUs: the counts of its layouts that serve the highest rate within the limits."""
    first, last = _layout(design.first.mapping), _layout(design.pools[-1].mapping)
    both = _alike(case.colocated, first) if design.mode == ServingMode.COLOCATED else []
    inside = _alike(case.inside[0], first), _alike(case.inside[1], last)
    across = _alike(case.across[0], first), _alike(case.across[1], last)
    own = replace(case, colocated=both, inside=inside, across=across)
    rate = most_rate(own, gpus, design.mode)
    if rate <= design.rate:
        return design
    return next(iter(designs_at(own, rate, gpus, design.mode)), design)


_Some = TypeVar("_Some", bound=AnyChoice)


def _alike(choices: Sequence[_Some], layout: Sharding) -> list[_Some]:
    """Pick the choices of one layout, with any chunk size."""
    return [each for each in choices if _layout(each.mapping) == layout]


def _layout(mapping: Sharding) -> Sharding:
    """A mapping with any chunk size; one with feed-forward ranks of its own is only itself."""
    return replace(mapping, chunk_tokens=0) if mapping.chunk_tokens else mapping
