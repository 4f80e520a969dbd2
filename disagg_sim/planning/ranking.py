"""Put designs in the order in which an engineer would deploy them. The one place that ranks.

Forecasts of two designs that differ by a percent or two do not tell which is cheaper. So of designs that cost nearly
the same, one whose layouts runs confirm comes first, then one on fewer hosts an instance, then the cheaper (of as many
GPUs those of the lower price, as given or of the market), then the faster, then the smaller. Layouts that runs confirm,
and then the simpler mode, come first up to a tenth above the cost of the cheapest design of all. Of the two modes co-
located serving is the simpler: one pool, and no caches to move. That does not count where its ranks have attention each
for itself (attention DP): they wait for each other, which closed forms understate (``Design.flattered``) and no
measurement at hand has judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.facts.load import load_efficiency
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.search.layouts import why_unserved
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.simulation.instance_variants import ffn_of

#: Cost over that of the cheapest of its mode up to which a design costs nearly the same (chosen: forecasts of two
#: designs are seldom told apart by less). [1]
NEAR = 1.03
#: Cost of co-located over disaggregated serving up to which the simpler mode comes first, and of layouts that were run
#: over others (chosen: simulated gains spread by more about those of plans, ``planning.assurance.GAIN_ERROR``). [1]
SIMPLER = 1.10


#: Share of the rate less than which no design is said to serve less: it would read 0.0 %. [1]
TOLD_LESS = 5e-4
#: Times over each other less 1 up to which those of two systems that share kernels are one forecast (chosen). [1]
ALIKE = 0.01
UNKNOWN, MORE_UNKNOWN = "no run confirms its layouts", "no run confirms more of its layouts"
#: Prices of GPUs: those of the market.
NO_PRICES: Mapping[str, float] = MappingProxyType({})


class Standing(NamedTuple):
    """What puts designs of nearly one cost in order; the smaller comes first."""

    unknown: int  # pools whose layouts no run of their kind and size confirms [1]
    hosts: int  # of an instance, in doublings, added over its pools: 0 = one host or a part of one, 1 = two ... [1]
    cost: float  # in the unit of the objective, or GPUs
    price: float  # of its GPUs, where GPUs alone make its cost; inf = not known, 0 of a pool [USD/h]
    held: bool  # whether prompts are held back, which takes an option of the engine
    late: float  # TTFT and TPOT at the percentiles of their limits, over these, multiplied [1]
    gpus: int  # of its largest instance [1]


@lru_cache(maxsize=64)  # designs share pools, and are ranked several times
def standing_of_pool(pool: PlannedPool) -> Standing:
    """Find what puts a pool in order among those of nearly as many GPUs.

    Returns ``cost`` in GPUs [1].
    """
    at, mapping, work = pool.setup, pool.mapping, pool.choice.work
    seen, late = pool.rate * work.surge, 1.0
    for limit, name in ((work.ttft, "ttft"), (work.tpot, "tpot")):
        if (latency := getattr(pool.choice, name, None)) is not None:  # a pool of one phase has one of the two
            late *= latency(seen, pool.instances, limit.share) / limit.seconds
    gpus = int(mapping.gpus)
    return Standing(
        unknown=int(is_unknown(pool)),
        hosts=(math.ceil(gpus / at.system.host_gpus) - 1).bit_length(),
        cost=float(pool.gpus),
        price=0.0,
        held=bool(getattr(pool.choice, "hold_steps", 0)),
        late=float(f"{late:.9g}"),  # alike but for rounding is alike
        gpus=gpus,
    )


def _price(pool: PlannedPool, prices: Mapping[str, float]) -> float:
    """Price of a pool's GPUs, as given or of the market; inf where that of one is not known. [USD/h]"""
    known = [(gpus, at.system) for at, gpus in pool.parts]
    return sum(
        gpus * usd_per_gpu_hour(one, prices) if one.usd_per_gpu_hour or one.name in prices else math.inf
        for gpus, one in known
    )


def is_unknown(pool: PlannedPool) -> bool:
    """Whether no run confirms such a layout: of no split one; encoders have one layout, which tells none apart."""
    return pool.role != "encode" and _never_served(pool.setup, pool.mapping, pool.role == "prefill")


@lru_cache(maxsize=1024)
def _never_served(at: Setup, mapping: Sharding, prefill: bool) -> bool:
    return ffn_of(mapping) is not None or why_unserved(at, mapping, prefill=prefill)[0] != ""


def standing(
    design: Design,
    prices: Mapping[str, float] = NO_PRICES,
    of_pool: Callable[[PlannedPool], Standing] = standing_of_pool,
) -> Standing:
    """Find what puts a design in order among those of nearly its cost, by what ``of_pool`` finds for each pool.

    Takes ``prices`` of GPUs that are given, by system [USD/h].
    """
    pools = [of_pool(design.first if pool.role == "prefill" else pool) for pool in design.pools]
    return Standing(
        unknown=sum(each.unknown for each in pools),
        hosts=sum(each.hosts for each in pools),
        cost=design.cost,
        price=float(f"{sum(_price(pool, prices) for pool in design.pools):.9g}"),
        held=any(each.held for each in pools),
        late=float(f"{math.prod(each.late for each in pools):.9g}"),
        gpus=max(each.gpus for each in pools),
    )


def was_run(design: Design) -> bool:
    """Tell whether runs of their kinds and sizes confirm all layouts of a design."""
    return not any(map(is_unknown, design.pools))


def ranked(designs: Iterable[Design], near: float = NEAR, prices: Mapping[str, float] = NO_PRICES) -> list[Design]:
    """Put designs of one rate in order, the answer first.

    Returns the answer; then by mode what costs nearly as much as the cheapest, in the order of their standing, and
    behind these the others by cost.
    """
    every = list(designs)
    least = {mode: least_cost([each for each in every if each.mode == mode]) for mode in {each.mode for each in every}}
    close = [each for each in every if each.cost <= near * least[each.mode]]
    rest = sorted(
        (each for each in every if each.cost > near * least[each.mode]), key=lambda each: (each.cost, each.gpus)
    )
    order = [*sorted(close, key=lambda each: standing(each, prices)), *rest]
    first = answer_of(order, lambda each: each.cost, near) if order else None
    return order if first is None else [first, *(each for each in order if each is not first)]


def answer_of(order: Sequence[Design], cost: Callable[[Design], float], near: float) -> Design:
    """Choose the answer among designs in their order: it costs at most ``SIMPLER`` times the least of all."""
    cheap = _run_first(order, cost)
    least = {mode: min(cost(each) for each in cheap if each.mode == mode) for mode in {each.mode for each in cheap}}
    heads = {
        mode: next(each for each in cheap if each.mode == mode and cost(each) <= near * least[mode]) for mode in least
    }
    mode = first_mode({mode: cost(head) for mode, head in heads.items()}, simpler=is_simpler(heads.values()))
    return heads[mode]


def _run_first(designs: Sequence[Design], cost: Callable[[Design], float]) -> list[Design]:
    """Those that cost at most ``SIMPLER`` times the least, only those whose layouts were run where some were."""
    most = SIMPLER * min(map(cost, designs))
    cheap = [each for each in designs if cost(each) <= most]
    return [each for each in cheap if was_run(each)] or cheap


def least_cost(designs: Sequence[Design]) -> float:
    """Cost up to ``NEAR`` times which designs are near: the least, or the least of run ones up to ``SIMPLER`` times."""
    return min(each.cost for each in _run_first(designs, lambda each: each.cost))


def is_simpler(heads: Iterable[Design]) -> bool:
    """Say whether the co-located one of the best designs of both modes is the simpler: one attention rank, one system.

    Systems that are timed by the kernels of one count as one.
    """
    lasts = [each.pools[-1] for each in heads]
    alone = all(pool.mapping.dp_attn == 1 for pool in lasts if pool.role == "colocated")
    return alone and len({_timed_on(pool.setup.system.name) for pool in lasts}) == 1


@lru_cache(maxsize=64)
def _timed_on(system: str) -> str:
    """The system whose kernels time a system."""
    fits = load_efficiency(system)
    return system if fits is None else fits.measured_on


def first_mode(costs: Mapping[ServingMode, float], *, simpler: bool = True) -> ServingMode:
    """Choose the mode that comes first: the cheaper one, or the simpler if it costs little more."""
    joint, split = (costs.get(mode, math.inf) for mode in (ServingMode.COLOCATED, ServingMode.DISAGGREGATED))
    first = joint <= SIMPLER * split if simpler else joint < split
    return ServingMode.COLOCATED if first else ServingMode.DISAGGREGATED


def passed_over(best: Design, other: Design, prices: Mapping[str, float] = NO_PRICES) -> str:
    """Write the first thing in the order of designs by which another one is behind the best, and what speaks for it."""
    why, alike = _behind(best, other, prices), _of_one_forecast(best, other)
    why = alike if alike and why == "slower" else "; ".join(filter(None, (why, alike)))
    return f"{why}; runs confirm all its layouts" if was_run(other) and not was_run(best) else why


def _of_one_forecast(best: Design, other: Design) -> str:
    """Say that the times of two designs agree because those of their systems rest on the kernels of one; else ""."""
    pools = [(one.setup.system.name, two.setup.system.name) for one, two in zip(best.pools, other.pools, strict=False)]
    names = {name for pair in pools if pair[0] != pair[1] for name in pair}
    origins = {_timed_on(name) for name in names}
    if len(origins) != 1 or best.mode != other.mode:
        return ""
    times = ((best.ttft, other.ttft), (best.tpot, other.tpot))
    if not all(abs(one[name] / two[name] - 1.0) <= ALIKE for one, two in times for name in one):
        return ""
    return f"not told apart: times of {' and '.join(sorted(names - origins))} are those of {origins.pop()}"


def _behind(best: Design, other: Design, prices: Mapping[str, float]) -> str:
    more, apart = other.gpus - best.gpus, other.mode != best.mode
    of_gpus = (best.cost, other.cost) == (best.gpus, other.gpus)
    dearer = f"{more} GPU{'s' * (more != 1)} more" if of_gpus else f"{other.cost / best.cost - 1:.0%} dearer"
    less = 1.0 - other.rate / best.rate
    if less > max(TOLD_LESS, other.cost / best.cost - 1.0):  # users meet each design at a rate of its own
        return f"serves {less:.{0 if less >= 0.01 else 1}%} less"
    if other.cost > (best.cost if apart else NEAR * best.cost):
        return dearer
    ahead, behind = standing(best, prices), standing(other, prices)
    unknown = UNKNOWN if ahead.unknown == 0 else MORE_UNKNOWN
    if apart and behind.unknown > ahead.unknown:
        return unknown
    if apart:
        split = other.mode == ServingMode.DISAGGREGATED
        return f"two pools gain less than {SIMPLER - 1:.0%}" if split else "no simpler than two pools"
    reasons = {
        "unknown": unknown,
        "hosts": "an instance takes more hosts",
        "cost": dearer,
        "price": "GPUs of a higher price" if math.isfinite(behind.price) else "the price of its GPUs is not known",
        "held": "needs prefill delay",
        "late": "slower",
        "gpus": "larger instances",
    }
    return next((reasons[name] for name in reasons if getattr(behind, name) > getattr(ahead, name)), "as good")
