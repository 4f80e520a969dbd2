"""Size designs: the cheapest deployment of each mode for a rate, and the highest rate of a number of GPUs.

Very long prompts also have pipelines that serve one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import BOUNDS, ServingMode, Sharding
from disagg_sim.physics.drafting import accepted_length
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.choices import (
    Grids,
    colocated_choices,
    decode_choices,
    grids_of,
    host_of,
    longer_than_steps,
    prefill_choices,
    staged_rows,
    times_of_passes,
)
from disagg_sim.planning.counts import SizedPool, best_rate, highest, pools
from disagg_sim.planning.design import Availability, Design, PlannedPool
from disagg_sim.planning.energy import drawn, watts_of_pools
from disagg_sim.planning.kv_links import cache_of, linked, wire_of
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.mixed_steps import MixedSteps
from disagg_sim.planning.pool_choice import gpus_of
from disagg_sim.planning.pools import AnyChoice, ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.question import MOST_GPUS, OWN, PlanOptions
from disagg_sim.planning.ranking import NEAR, Standing, ranked, standing_of_pool
from disagg_sim.search.layouts import broken_rules
from disagg_sim.search.mappings import enumerate_mappings

#: Layouts of each pool that become designs: most of those with nearly the fewest GPUs, and how many others fill up a
#: shorter list (one at least). [1]
CLOSE, BEST = 8, 3
#: Pools of more GPUs than this times the fewest are left out. [1]
FARTHEST = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Configurations that one case may use, for pools inside one NVLink domain and across domains."""

    at: Setup
    prefill_at: Setup
    work: Demand
    grids: Grids
    colocated: Sequence[ColocatedChoice]
    inside: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    across: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    costs: Mapping[str, float]  # cost of a GPU by system; with ``drawn`` that of a spare GPU
    drawn: bool = False  # whether the cost of a design is the power that its GPUs draw at the rate [W]
    availability: Availability | None = None  # target for which designs get spares

    def with_costs_of(self, other: Candidates) -> Candidates:
        """Take the costs and the availability target of other candidates."""
        return replace(self, costs=other.costs, drawn=other.drawn, availability=other.availability)


def mappings_of(setups: tuple[Setup, Setup], options: PlanOptions) -> tuple[Sharding, Sharding]:
    """List the mappings of prefill and of decode that the options of a plan allow.

    Where both phases have one setup, the mappings of prefill start with those of decode, as co-located instances need.
    """

    def taken(at: Setup, max_dcp: int, max_pcp: int) -> Sharding:
        found = enumerate_mappings(
            at,
            layouts=options.layouts,
            max_dcp=max_dcp,
            max_pcp=max_pcp,
            max_redundant_experts=options.max_redundant_experts,
        )
        drafted = found if at.speculation is None else replace(found, draft_tokens=1)  # all hold the drafter
        rules, engine = broken_rules(at, drafted), at.engine if options.within == OWN else options.within
        return found[rules[engine] == ""] if engine in rules else found

    at, prefill_at = setups
    decode = taken(at, options.max_dcp, 1)
    if prefill_at is not at:
        return taken(prefill_at, 1, options.max_pcp), decode
    if options.max_pcp == 1:
        return decode, decode
    shared = taken(at, 1, options.max_pcp)
    return Sharding.joined([decode, shared[shared.pcp > 1]]), decode


def candidates(
    setups: tuple[Setup, Setup],
    work: Demand,
    mappings: tuple[Sharding, Sharding],
    costs: Mapping[str, float],
    max_nic: float | None,
) -> Candidates:
    """Score the grids of both phases and keep the choices that are worth sizing.

    Takes ``setups`` (of decode and of prefill), ``mappings`` (of prefill and of decode) and ``max_nic`` [B/s].
    """
    return candidates_of(setups, work, grids_of(*setups, mappings, work), costs, max_nic)


def candidates_of(
    setups: tuple[Setup, Setup], work: Demand, grids: Grids, costs: Mapping[str, float], max_nic: float | None
) -> Candidates:
    """Make the candidates of grids that are scored already."""
    at, prefill_at = setups
    work = replace(work, lengths=grids.prefill.lengths)  # without cached prefixes where the model cannot reuse them
    choices = (prefill_choices(grids.prefill, work), decode_choices(grids.decode, work))
    case = Candidates(
        at=at,
        prefill_at=prefill_at,
        work=work,
        grids=grids,
        colocated=[*staged_choices(grids, work), *colocated_choices(grids, work)] if prefill_at is at else (),
        inside=choices,
        across=choices,
        costs=costs,
    )
    return with_link_limit(case, max_nic)


def with_link_limit(case: Candidates, max_nic: float | None) -> Candidates:
    """Limit the bandwidth over which the caches of the candidates move. [B/s]"""
    cache = cache_of(case.grids.decode, case.grids.prefill)

    def split(gpus: int) -> tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]:
        return linked(*case.across, cache, wire_of(case.at, case.prefill_at, gpus, max_nic))

    across = split(MOST_GPUS)
    return replace(case, inside=split(1) if case.prefill_at is case.at else across, across=across)


def _sized(choices: Sequence[AnyChoice], rate: float, most: float) -> list[SizedPool]:
    """Size pools for a rate, fewest GPUs first; none above ``most`` GPUs or ``FARTHEST`` times the fewest."""
    return sorted(pools(choices, rate, most, lambda fewest, _: min(fewest * FARTHEST, most)), key=_size)


def _size(pool: SizedPool) -> tuple[int, int, int]:
    return pool.gpus, getattr(pool.choice, "hold_steps", 0), gpus_of(pool.choice)


def _worth_pairing(role: str, choices: Sequence[AnyChoice], rate: float, most: float) -> list[SizedPool]:
    """Keep one pool of each layout: the best ranked of its smallest ones; then the best layouts (``CLOSE``, ``BEST``).

    Chunk sizes, batches and budgets make no layouts of their own. None has more than ``most`` GPUs, or ``FARTHEST``
    times the fewest.
    """
    found: list[SizedPool] = []
    fewest_of: dict[Sharding, int] = {}

    def within(fewest: float, coming: float) -> float:
        """GPUs of the last layout that is kept, as soon as all with nearly the fewest GPUs are known."""
        limit = min(fewest * FARTHEST, most)
        if coming <= NEAR * fewest:
            return limit
        far = sorted(gpus for gpus in fewest_of.values() if gpus > NEAR * fewest)
        others = _others(len(fewest_of) - len(far))
        return limit if len(far) < others else min(far[others - 1], limit)

    for each in pools(choices, rate, most, within):
        found.append(each)
        layout = replace(each.choice.mapping, chunk_tokens=0)
        fewest_of[layout] = min(each.gpus, fewest_of.get(layout, each.gpus))
    if not found:
        return []
    layouts: dict[Sharding, list[SizedPool]] = {}
    for each in (order := sorted(found, key=_size)):
        of_layout = layouts.setdefault(replace(each.choice.mapping, chunk_tokens=0), [])
        if not of_layout or each.gpus == of_layout[0].gpus:
            of_layout.append(each)
    close = [each for each in layouts.values() if each[0].gpus <= NEAR * order[0].gpus]
    far = [each for each in layouts.values() if each[0].gpus > NEAR * order[0].gpus]

    def first(alike: list[SizedPool]) -> tuple[Standing, SizedPool]:
        planned = (PlannedPool(role=role, choice=each.choice, instances=each.instances, rate=rate) for each in alike)
        return min(zip(map(standing_of_pool, planned), alike, strict=True), key=lambda pair: pair[0])

    best = sorted(map(first, close), key=lambda pair: pair[0])[:CLOSE]
    return [each for _, each in best] + [first(each)[1] for each in far[: _others(len(close))]]


def _others(close: int) -> int:
    """Count the larger layouts that are kept beside those of nearly the fewest GPUs. [1]"""
    return max(BEST - min(close, CLOSE), 1)


def _fewest(choices: Sequence[AnyChoice], rate: float, most: float) -> float:
    """GPUs of the smallest pool that serves a rate; inf where more than ``most`` would be needed. [1]"""
    found = pools(choices, rate, most + 1, lambda fewest, _: fewest - 1)
    return min((each.gpus for each in found), default=math.inf)


def designs_at(case: Candidates, rate: float, most: float = MOST_GPUS, mode: ServingMode | None = None) -> list[Design]:
    """Find designs of one or both modes that serve a rate within the limits, the best first (``planning.ranking``).

    Takes ``rate`` [request/s]. Returns some designs of each mode, of different configurations; none where no
    deployment serves the rate.
    """
    if mode == ServingMode.COLOCATED:
        case = replace(case, inside=((), ()), across=((), ()))
    elif mode == ServingMode.DISAGGREGATED:
        case = replace(case, colocated=())
    alone, pairs = _thriftiest(case, rate, most) if case.drawn else _smallest(case, rate, most)
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
    found += [disaggregated_of(case, rate, *pair) for pair in pairs]
    if case.availability is not None:
        spared = [case.availability.spared(design, case.costs) for design in found]
        found = [design for design in spared if design.gpus <= most]
    return ranked(found, near_of(case))


def near_of(case: Candidates) -> float:
    """Cost over that of the cheapest within which a ranking ignores cost; 1 where the objective is least power. [1]"""
    return 1.0 if case.drawn else NEAR


#: Co-located pools, and pairs of a prefill and a decode pool, each after its cost.
_Found = tuple[list[tuple[float, SizedPool]], list[tuple[float, SizedPool, SizedPool]]]


def _domain(case: Candidates) -> int:
    """GPUs of an NVLink domain that both pools may share; 0 where they have systems of their own. [1]"""
    return case.at.system.nvlink_domain if case.prefill_at is case.at else 0


def _smallest(case: Candidates, rate: float, most: float) -> _Found:
    """Find the co-located pools and the pairs of pools with the fewest GPUs."""
    pairs: list[tuple[SizedPool, SizedPool]] = []
    for (senders, takers), limit in ((case.inside, min(_domain(case), most)), (case.across, most)):
        prefill = _worth_pairing("prefill", senders, rate, limit)
        decode = _worth_pairing("decode", takers, rate, limit)
        pairs = [pair for pair in product(prefill, decode) if pair[0].gpus + pair[1].gpus <= limit]
        if pairs:
            break
    own, sends = (case.costs[each.system.name] for each in (case.at, case.prefill_at))
    both = _worth_pairing("colocated", case.colocated, rate, most)
    alone = [(each.gpus * own, each) for each in both]
    return alone, [(first.gpus * sends + second.gpus * own, first, second) for first, second in pairs]


def _thriftiest(case: Candidates, rate: float, most: float) -> _Found:
    """Find the co-located pools and the pairs of pools that draw the least power at the rate."""

    def drawing(role: str, choices: Sequence[AnyChoice]) -> tuple[list[SizedPool], Floats]:
        sized = _sized(choices, rate, most)
        pools = [PlannedPool(role=role, choice=each.choice, instances=each.instances, rate=rate) for each in sized]
        return sized, watts_of_pools(pools, case.work.lengths) if pools else np.zeros(0)

    pairs: list[tuple[float, SizedPool, SizedPool]] = []
    for (senders, takers), limit in ((case.inside, min(_domain(case), most)), (case.across, most)):
        (prefill, first), (decode, second) = drawing("prefill", senders), drawing("decode", takers)
        if prefill and decode:
            gpus = np.add.outer([each.gpus for each in prefill], [each.gpus for each in decode])
            watts = np.where(gpus <= limit, np.add.outer(first, second), np.inf)
            for place in np.argsort(watts, axis=None, kind="stable")[: BEST**2]:
                row, column = np.unravel_index(place, watts.shape)
                if math.isfinite(watts[row, column]):
                    pairs.append((float(watts[row, column]), prefill[row], decode[column]))
    alone, watts = drawing("colocated", case.colocated)
    least: dict[Sharding, tuple[float, SizedPool]] = {}
    for place in np.argsort(watts, kind="stable"):
        least.setdefault(alone[place].choice.mapping, (float(watts[place]), alone[place]))
    return list(least.values())[:BEST], sorted(pairs, key=lambda pair: pair[0])[: BEST**2]


def disaggregated_of(case: Candidates, rate: float, cost: float, prefill: SizedPool, decode: SizedPool) -> Design:
    """Make the design of two pools, with the bandwidth that their caches need on the links."""
    grids = case.grids
    pools = (
        PlannedPool(role="prefill", choice=prefill.choice, instances=prefill.instances, rate=rate),
        PlannedPool(role="decode", choice=decode.choice, instances=decode.instances, rate=rate),
    )
    taken = grids.decode.kv_bytes_per_request
    moved = [
        float(bandwidth_per_gpu(rate / pool.instances, size, unique_gpus(case.at.model, pool.mapping)))
        for pool, size in zip(pools, (taken + grids.prefill.stored_bytes_per_request, taken), strict=True)
    ]
    return Design(
        mode=ServingMode.DISAGGREGATED, pools=pools, rate=rate, cost=cost, work=case.work, kv_rate=float(max(moved))
    )


def cost_of(case: Candidates, design: Design) -> float:
    """Cost of a design without spares, in the unit of the objective: what its GPUs cost, or what they draw."""
    if case.drawn:
        return drawn(design).watts
    return sum(pool.gpus * case.costs[pool.setup.system.name] for pool in design.pools)


def fewest(case: Candidates, mode: ServingMode, rate: float, most: float) -> float:
    """Cost of the cheapest deployment of one mode for a rate, in the unit of the objective.

    Takes ``rate`` [request/s]. Returns infinity where none serves.
    """
    if case.drawn or case.availability is not None:
        return min((each.cost for each in designs_at(case, rate, most, mode)), default=math.inf)
    decode, prefill = (case.costs[each.system.name] for each in (case.at, case.prefill_at))
    if mode == ServingMode.COLOCATED:
        return decode * _fewest(case.colocated, rate, most)
    for choices, limit in ((case.inside, min(_domain(case), most)), (case.across, most)):
        sender, taker = (_fewest(each, rate, limit) for each in choices)
        if sender + taker <= limit:
            return prefill * sender + decode * taker
    return math.inf


def most_rate(case: Candidates, gpus: int, mode: ServingMode) -> float:
    """Find the highest rate that a deployment of one mode serves on so many GPUs within the limits.

    Returns 0 where the smallest deployment needs more GPUs, or no instance of a pool serves anything [request/s].
    """
    case = replace(case, drawn=False)  # the objective changes which design is best, not which ones serve
    sides = (case.colocated,) if mode == ServingMode.COLOCATED else case.inside
    per_gpu = [best_rate(choices) for choices in sides]
    if not all(per_gpu):
        return 0.0
    high = gpus / sum(1.0 / each for each in per_gpu)
    return highest(lambda rate: math.isfinite(fewest(case, mode, rate, gpus)), high)


def most_of(case: Candidates, design: Design, gpus: int) -> Design:
    """Grow a design to so many GPUs: the counts of its layouts that serve the highest rate within the limits."""
    layouts = [replace(pool.mapping, chunk_tokens=0) for pool in design.pools]
    first, last = layouts[0], layouts[-1]
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
    return [each for each in choices if replace(each.mapping, chunk_tokens=0) == layout]


def staged_choices(grids: Grids, work: Demand) -> Iterator[OneByOne]:
    """List pipelines of one attention rank that serve one prompt at a time; none where a step holds a whole prompt."""
    if not longer_than_steps(work.lengths):
        return
    prefill, decode, nodes = grids.prefill, grids.decode, work.lengths.prompt_nodes()
    at, none = decode.setup, np.zeros((0, 1))
    for row, own in staged_rows(grids, work):
        ftl, _, load = times_of_passes(prefill, np.array([row]), np.ones(1), nodes)
        mapping = replace(decode.chosen(own, 0), chunk_tokens=int(prefill.mappings.chunk_tokens[row]))
        steps = MixedSteps(  # no prompt is computed beside a decode
            ranks=1,
            budget=math.ceil(nodes.new.max()),
            prompt=work.lengths.mean_new,
            each=work.lengths.gaps / float(accepted_length(at.speculation, mapping.draft_tokens)),
            waits=(0,),
            batch=np.ones(1),
            verified=np.full(1, 1.0 + mapping.draft_tokens),
            step=decode.step[own, :1],
            tokens=np.zeros(0),
            mixed=none,
            single=none,
            late=none,
        )
        yield OneByOne(
            at=at,
            mapping=mapping,
            work=work,
            steps=steps,
            nodes=nodes.new,
            weights=nodes.weight,
            host=host_of(at),
            memory=float(max(prefill.memory_bytes[row, 0], decode.memory_bytes[own, 0])),
            memory_seats=int(decode.batch[np.flatnonzero(decode.feasible[own])[-1]]),
            bound=BOUNDS[decode.bound[own, 0]],
            passes=host_of(at) + (ftl + load)[:, 0, 0],
        )
