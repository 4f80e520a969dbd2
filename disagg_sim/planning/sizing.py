"""Size designs: the cheapest deployment of each mode for a rate, and the most rate of some GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Mapping as Sharding
from disagg_sim.domain import Mode
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.choices import Grids, colocated_choices, decode_choices, grids_of, prefill_choices
from disagg_sim.planning.counts import SizedPool, best_rate, highest, pools
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import drawn, watts_of_pools
from disagg_sim.planning.limits import Work
from disagg_sim.planning.pools import AnyChoice, ColocatedChoice, DecodeChoice, PrefillChoice, gpus_of
from disagg_sim.planning.question import MOST_GPUS, OWN, PlanOptions
from disagg_sim.planning.spares import Availability
from disagg_sim.planning.staged import staged_choices
from disagg_sim.planning.wires import cache_of, linked, wire_of
from disagg_sim.search.layouts import broken_rules
from disagg_sim.search.mappings import enumerate_mappings

#: Sizes of each pool that make a design beside the cheapest. [1]
BEST = 3
#: Designs dearer than the cheapest of their mode by more than this are not looked for. [1]
FARTHEST = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Choices of one case, for pools inside one NVLink domain and across."""

    at: Setup
    prefill_at: Setup
    work: Work
    grids: Grids
    colocated: Sequence[ColocatedChoice]
    inside: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    across: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    costs: Mapping[str, float]  # of a GPU by system, of a spare one where designs cost what they draw
    drawn: bool = False  # whether designs cost what their GPUs draw at the rate [W], not so much a GPU
    availability: Availability | None = None  # for which designs have spares

    def asking_as(self, other: Candidates) -> Candidates:
        """These candidates, designs of which cost and are spared as those of others."""
        return replace(self, costs=other.costs, drawn=other.drawn, availability=other.availability)


def mappings_of(setups: tuple[Setup, Setup], options: PlanOptions) -> tuple[Sharding, Sharding]:
    """Mappings of prefill and of decode that a search takes, as the options of a plan say.

    Where one setup does both, those of decode come first among those of prefill: instances of both phases take them.
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
    return Sharding.joined(decode, shared[shared.pcp > 1]), decode


def candidates(
    setups: tuple[Setup, Setup],
    work: Work,
    mappings: tuple[Sharding, Sharding],
    costs: Mapping[str, float],
    max_nic: float | None,
) -> Candidates:
    """Score grids and keep what is worth sizing.

    Parameters
    ----------
    setups
        Of decode and of prefill.
    work
        Lengths and limits.
    mappings
        Of prefill and of decode.
    costs
        Of a GPU by system.
    max_nic
        Bandwidth for caches that may be used, one way, per GPU. [B/s]

    Returns
    -------
    Candidates
        Choices for pools within an NVLink domain and across.
    """
    return candidates_of(setups, work, grids_of(*setups, mappings, work), costs, max_nic)


def candidates_of(
    setups: tuple[Setup, Setup], work: Work, grids: Grids, costs: Mapping[str, float], max_nic: float | None
) -> Candidates:
    """As ``candidates``, of grids that are scored."""
    at, prefill_at = setups
    work = replace(work, lengths=grids.prefill.lengths)  # a cached prefix is taken up where the model lets it be
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
    return rewired(case, max_nic)


def rewired(case: Candidates, max_nic: float | None) -> Candidates:
    """The same candidates, whose caches move over links of at most some bandwidth. [B/s]"""
    cache = cache_of(case.grids.decode, case.grids.prefill)

    def split(gpus: int) -> tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]:
        return linked(*case.across, cache, wire_of(case.at, case.prefill_at, gpus, max_nic))

    across = split(MOST_GPUS)
    return replace(case, inside=split(1) if case.prefill_at is case.at else across, across=across)


def _sized(choices: Sequence[AnyChoice], rate: float, most: float) -> list[SizedPool]:
    """Pools that serve a rate, fewest GPUs first, none with more than ``most`` or far more than the smallest."""
    found = pools(choices, rate, most, lambda fewest: min(fewest * FARTHEST, most))
    return sorted(found, key=lambda each: (each.gpus, getattr(each.choice, "hold_steps", 0), gpus_of(each.choice)))


def _fewest(choices: Sequence[AnyChoice], rate: float, most: float) -> float:
    """GPUs of the smallest pool that serves a rate; inf where more than ``most`` would be needed. [1]"""
    found = pools(choices, rate, most + 1, lambda fewest: fewest - 1)
    return min((each.gpus for each in found), default=math.inf)


def designs_at(case: Candidates, rate: float, most: float = MOST_GPUS) -> list[Design]:
    """Find designs of both modes that serve a rate within the limits, cheapest first.

    Parameters
    ----------
    case
        From ``candidates``.
    rate
        [request/s]
    most
        GPUs that a deployment may have. [1]

    Returns
    -------
    list of Design
        Of each mode some, of pools of different configurations; none where nothing serves.
    """
    alone, pairs = _thriftiest(case, rate, most) if case.drawn else _smallest(case, rate, most)
    found = [
        Design(
            mode=Mode.COLOCATED,
            pools=(PlannedPool(role="colocated", choice=each.choice, instances=each.instances, rate=rate),),
            rate=rate,
            cost=cost,
            work=case.work,
        )
        for cost, each in alone
    ]
    found += [_disaggregated(case, rate, *pair) for pair in pairs]
    if case.availability is not None:
        spared = [case.availability.spared(design, case.costs) for design in found]
        found = [design for design in spared if design.gpus <= most]
    return sorted(found, key=lambda design: (design.cost, design.gpus))


#: Pools of both phases, and pairs of pools, each behind its cost.
_Found = tuple[list[tuple[float, SizedPool]], list[tuple[float, SizedPool, SizedPool]]]


def _domain(case: Candidates) -> int:
    """GPUs of an NVLink domain that both pools may share; 0 where they have systems of their own. [1]"""
    return case.at.system.nvlink_domain if case.prefill_at is case.at else 0


def _smallest(case: Candidates, rate: float, most: float) -> _Found:
    """Pools of both phases, and pairs of pools, of the fewest GPUs."""
    prefill, decode = (_distinct(_sized(choices, rate, most)) for choices in case.inside)
    pairs = [pair for pair in product(prefill, decode) if pair[0].gpus + pair[1].gpus <= min(_domain(case), most)]
    if not pairs:
        prefill, decode = (_distinct(_sized(choices, rate, most)) for choices in case.across)
        pairs = [pair for pair in product(prefill, decode) if pair[0].gpus + pair[1].gpus <= most]
    own, sends = (case.costs[each.system.name] for each in (case.at, case.prefill_at))
    alone = [(each.gpus * own, each) for each in _distinct(_sized(case.colocated, rate, most))]
    return alone, [(first.gpus * sends + second.gpus * own, first, second) for first, second in pairs]


def _thriftiest(case: Candidates, rate: float, most: float) -> _Found:
    """As ``_smallest``, of those that draw least at the rate."""

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


def _distinct(sized: list[SizedPool]) -> list[SizedPool]:
    """The cheapest of each mapping, a few."""
    found: dict[Sharding, SizedPool] = {}
    for each in sized:
        found.setdefault(each.choice.mapping, each)
    return list(found.values())[:BEST]


def _disaggregated(case: Candidates, rate: float, cost: float, prefill: SizedPool, decode: SizedPool) -> Design:
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
    return Design(mode=Mode.DISAGGREGATED, pools=pools, rate=rate, cost=cost, work=case.work, kv_rate=float(max(moved)))


def cost_of(case: Candidates, design: Design) -> float:
    """Cost of a design without spares, in the unit of the objective: what its GPUs cost, or what they draw."""
    if case.drawn:
        return drawn(design).watts
    return sum(pool.gpus * case.costs[pool.setup.system.name] for pool in design.pools)


def fewest(case: Candidates, mode: Mode, rate: float, most: float) -> float:
    """Cost of the cheapest deployment of one mode for a rate, in the unit of the objective.

    Parameters
    ----------
    case
        From ``candidates``.
    mode
        Co-located, or disaggregated.
    rate
        [request/s]
    most
        GPUs that it may have. [1]

    Returns
    -------
    float
        Infinite where none serves.
    """
    if case.drawn or case.availability is not None:
        return min((each.cost for each in designs_at(case, rate, most) if each.mode == mode), default=math.inf)
    decode, prefill = (case.costs[each.system.name] for each in (case.at, case.prefill_at))
    if mode == Mode.COLOCATED:
        return decode * _fewest(case.colocated, rate, most)
    for choices, limit in ((case.inside, min(_domain(case), most)), (case.across, most)):
        sender, taker = (_fewest(each, rate, limit) for each in choices)
        if sender + taker <= limit:
            return prefill * sender + decode * taker
    return math.inf


def most_rate(case: Candidates, gpus: int, mode: Mode) -> float:
    """Find the highest rate that a deployment of one mode serves on some GPUs within the limits.

    Parameters
    ----------
    case
        From ``candidates``.
    gpus
        Of the deployment. [1]
    mode
        Co-located, or disaggregated.

    Returns
    -------
    float
        0 where the smallest deployment is larger. [request/s]
    """

    case = replace(case, drawn=False)  # which changes what is best, not what serves
    sides = (case.colocated,) if mode == Mode.COLOCATED else case.inside
    if not all(sides):
        return 0.0
    per_gpu = [best_rate(choices) for choices in sides]
    high = gpus / sum(1.0 / each for each in per_gpu if each > 0)
    return highest(lambda rate: math.isfinite(fewest(case, mode, rate, gpus)), high)
