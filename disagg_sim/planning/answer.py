"""Choose the answer to a question among the designs of its cases, or name the limits that none keeps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from disagg_sim.domain import ServingMode
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.notebook import Shown
from disagg_sim.planning.candidates import Candidates, DecodeGrid, under_limits
from disagg_sim.planning.counts import gpus_of
from disagg_sim.planning.design import Design
from disagg_sim.planning.kv_links import least_hand_over
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pools import AnyChoice
from disagg_sim.planning.question import MOST_GPUS, PlanOptions, Size
from disagg_sim.planning.ranking import NEAR, SIMPLER, answer_of, ranked, standing, was_run
from disagg_sim.planning.sizing import cost_of, designs_at, gpus_for, most_of, most_rate, near_of
from disagg_sim.search.phase_grid import PhaseGrid, least
from disagg_sim.units import GB

#: Designs that are told beside the best. [1]
RUNNERS_UP = 3
#: Rates below the most that GPUs serve, in its parts, at which other designs for as many GPUs are looked for. [1]
FEWER = (NEAR, 1.1, 1.25, 1.5, 2.0)
#: Factors by which a limit is loosened in turn, until something keeps it. [1]
LOOSER = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
#: What is told where only closed forms have a design.
NONE_HOLDS = "designs keep the limits as planned, but none when it is simulated; a looser limit leaves more room"
#: Gives a design, the same or one that holds its limits where this one does not; None where none does.
Check = Callable[[Design], Design | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(Shown):
    """A deployment with what it does, and the designs that come after it."""

    size: Size
    options: PlanOptions
    cases: tuple[Candidates, ...] = field(repr=False)  # one a system, or a pair of them
    best: Design | None = None  # None where nothing keeps the limits
    runners_up: tuple[Design, ...] = ()
    other: Design | None = None  # the best of the other mode, for as much work; None where there is none
    gain: float = (
        math.nan
    )  # cost of the other mode over its own, or its rate over the other's; below 1 where the other is a
    # little cheaper, and this one simpler; inf without another [1]
    infeasible: str = ""  # what binds, and the nearest limits that do; empty where there is a plan
    left_out: tuple[str, ...] = ()  # systems that cannot be planned for, with the reason
    cheapest: Design | None = None  # of the least cost for as much work, whatever else speaks against it
    ask: Callable[..., Plan] | None = field(default=None, repr=False)  # the question again, with other arguments
    fewest: Design | None = None  # of the fewest GPUs, or with the most rate, where joules are the objective
    source: TrafficCase | tuple[int, int] | None  # what requests are drawn from

    @property
    def work(self) -> Demand:
        """Lengths and limits of the question."""
        return self.cases[0].work

    @property
    def halves_compete(self) -> bool:
        """Whether decode instances with attention and feed-forward ranks apart compete with whole ones."""
        further = self.cases[0].further
        return further is not None and further.split is not None and further.whole

    @property
    def case(self) -> Candidates:
        """That of the best design."""
        assert self.best is not None
        return self.case_of(self.best)

    def case_of(self, design: Design) -> Candidates:
        """That of one of its designs."""
        first, last = design.first.setup, design.pools[-1].setup
        return next(case for case in self.cases if case.at is last and case.prefill_at is first)


def answer(asked: Plan, check: Check, others: int = RUNNERS_UP, below: float = math.inf) -> Plan:
    """Choose among the designs of all cases; what is told, so many beside the best, went through ``check``.

    An answer that costs more than ``below`` a request need not be found.
    """
    chosen = choose(asked.cases, asked.size, check, others, below)
    if chosen is None and below < math.inf:
        return asked
    if chosen is None:
        said = why_infeasible(asked.cases, asked.size, asked.options.max_nic)
        if choose(asked.cases, asked.size, lambda each: each, others) is not None:
            said = NONE_HOLDS
        return replace(asked, infeasible=said)
    best, after, other, gain, cheapest = chosen
    return replace(asked, best=best, runners_up=after, other=other, gain=gain, cheapest=cheapest)


def _runners_up(
    best: Design, other: Design | None, designs: Sequence[Design], others: int, cost: Callable[[Design], float]
) -> tuple[Design, ...]:
    """The best of the other mode, the best whose layouts were run, on other systems, the next of kinds of their own."""
    found = [] if other is None else [other]
    if others >= RUNNERS_UP and not was_run(best):
        run = min((each for each in designs if was_run(each)), key=cost, default=other)
        found += [] if run is None or run in found else [run]
    for alike in (_systems, _kind, lambda each: each.pools):
        known = {alike(each) for each in (best, *found)}
        for each in designs:
            if len(found) < others and alike(each) not in known:
                found.append(each)
                known.add(alike(each))
    return tuple(found)


def _systems(design: Design) -> Any:
    """Names of the systems of a design."""
    return frozenset(pool.setup.system.name for pool in design.pools)


def _kind(design: Design) -> Any:
    """What tells designs apart for a reader: mode, systems, and the layout of decode."""
    return design.mode, _systems(design), design.pools[-1].mapping


#: Best, runners-up, best of the other mode, what that costs over the best, cheapest of all.
_Chosen = tuple[Design, tuple[Design, ...], Design | None, float, Design]


def choose(
    cases: Sequence[Candidates], size: Size, check: Check, others: int, below: float = math.inf
) -> _Chosen | None:
    """Choose what is printed, for a rate, users or GPUs; None where nothing serves."""
    if size.gpus is not None:
        return _of_gpus(cases, size.gpus, check, others)
    return _of_rate(cases, size, check, others, SIMPLER * below)


def _of_rate(cases: Sequence[Candidates], size: Size, check: Check, others: int, dearest: float) -> _Chosen | None:
    """Designs for a rate or users: the best, those after it, that of the other mode, and its cost over the best's.

    Those for a rate that cost more than ``dearest`` a request may be left out.
    """
    designs: list[Design] = []
    for case in cases:
        if size.rate is not None:
            found = designs_at(case, size.rate, gpus_for(case, dearest * size.rate))
        else:
            found = designs_of_users(case, size.users or 1)
        designs += found
        if others < RUNNERS_UP:  # the answer alone counts, and it costs at most SIMPLER times the least
            dearest = min([dearest, *(SIMPLER * _cost(each) for each in found if not each.flattered)])
    known: dict[int, Design] = {}
    while designs:
        designs = ranked(designs, near_of(cases[0]), cases[0].prices)
        chosen = _among(designs, others)
        for told in (chosen[0], *chosen[1], chosen[4]):
            checked = told if id(told) in known else check(told)
            known |= {id(each): each for each in (told, checked) if each is not None}  # kept: no id comes again
            if checked is not told:  # all are ranked again
                designs = [*(each for each in designs if each is not told), *([] if checked is None else [checked])]
                break
        else:
            return chosen
    return None


def _among(designs: Sequence[Design], others: int) -> _Chosen:
    """What is told of designs for one rate, the answer first."""
    best = designs[0]
    other = next((each for each in designs if each.mode != best.mode), None)
    after = sorted(_runners_up(best, other, designs, others, _cost), key=_cost)
    gain = math.inf if other is None else other.cost / best.cost
    return best, tuple(after), other, gain, min(designs, key=lambda each: (each.cost, each is not best))


def _cost(design: Design) -> float:
    return design.cost / design.rate


def _of_gpus(cases: Sequence[Candidates], gpus: int, check: Check, others: int) -> _Chosen | None:
    """As ``_of_rate``, for the most that some GPUs serve: each design with the most that so many GPUs serve of it."""
    value = partial(_value, drawn=cases[0].drawn)
    modes = (ServingMode.DISAGGREGATED, ServingMode.COLOCATED)
    found = [each for mode, case in product(modes, cases) for each in _most_of_mode(case, gpus, mode, check)]
    if not found:
        return None
    found.sort(key=value, reverse=True)
    place = partial(standing, prices=cases[0].prices)

    def first(designs: Sequence[Design]) -> Design:
        return answer_of(sorted(designs, key=place), lambda each: 1.0 / value(each), near_of(cases[0]))

    rate, kinds = first(found).rate, {_kind(each) for each in found}
    for factor, case in product(FEWER if others else (), cases):
        for each in designs_at(case, rate / factor, gpus):
            new = len(kinds) <= others and _kind(each) not in kinds
            if new or (others >= RUNNERS_UP and was_run(each) and not any(map(was_run, found))):
                kinds.add(_kind(each))
                checked = check(most_of(case, each, gpus))
                found += [] if checked is None else [checked]
    designs = sorted(found, key=value, reverse=True)
    best = first(designs)
    apart = [each for each in designs if each.mode != best.mode]
    other = first(apart) if apart else None
    after = sorted(_runners_up(best, other, designs, others, lambda each: -value(each)), key=value, reverse=True)
    gain = math.inf if other is None else value(best) / value(other)
    return best, tuple(after), other, gain, max(designs, key=lambda each: (value(each), each is best))


def _most_of_mode(case: Candidates, gpus: int, mode: ServingMode, check: Check) -> Iterator[Design]:
    """The design of one mode with nearly the most that some GPUs serve, and one whose layouts were run, if it serves
    little less; each corrected by ``check``, and the next where it does not hold as planned.
    """
    most = most_rate(case, gpus, mode)
    if not most > 0:
        return
    near = sorted(designs_at(case, most / NEAR, gpus, mode), key=partial(standing, prices=case.prices))
    run = [] if near and was_run(near[0]) else filter(was_run, designs_at(case, most / SIMPLER, gpus, mode))
    for designs in (near, ranked(run, near_of(case), case.prices)):
        for each in designs:
            made = most_of(case, each, gpus)
            checked = check(made)
            if checked is not None:
                yield checked
            if checked is made:
                break


def _value(design: Design, *, drawn: bool) -> float:
    """Requests over cost, by the mean cost of a GPU [request/s]; over what is drawn, where that is it. [request/J]"""
    return design.rate / design.cost * (1 if drawn else design.gpus)


def why_infeasible(cases: Sequence[Candidates], size: Size, max_nic: float | None) -> str:
    """Name the limit that nothing keeps, and values that something does; ``max_nic`` is a bandwidth [B/s]."""
    said: dict[str, list[str]] = {}
    for case in cases:
        sender = "" if case.prefill_at is case.at else f" behind prefill on {case.prefill_at.system.name}"
        where = f"{case.at.model.name} in {case.at.precision.name} on {case.at.system.name}{sender}"
        said.setdefault(_why(case, size, max_nic), []).append(where)
    return "; ".join(f"{' and '.join(dict.fromkeys(where))}: {why}" for why, where in said.items())


def _why(case: Candidates, size: Size, max_nic: float | None) -> str:
    """The same of one case."""
    prefill, decode = case.grids.prefill, case.decoding
    if said := min(map(_of_memory, decode), key=len) or _of_memory(prefill):
        return said
    work, told = case.work, []
    fastest = min(least(grid.latency, grid.feasible) for grid in decode)
    if fastest > work.tpot.seconds:
        told.append(f"no mapping decodes in the TPOT limit of {_ms(work.tpot)}; the best step is {_ms(fastest)}")
    encoding = 0.0 if case.encode is None else case.encode.alone_s
    first = case.prefill_at.request_host + least(prefill.latency, prefill.feasible) + encoding
    if first > work.ttft.seconds:
        encoded = f" and {_ms(encoding)} of encoding" if encoding else ""
        told.append(
            f"no mapping prefills a prompt in the TTFT limit of {_ms(work.ttft)}; the best pass with the host's share"
            f"{encoded} is {_ms(first)}"
        )
    if told:
        return "; ".join(told)
    if size.gpus is not None:
        smallest = min(
            min((gpus_of(each) for each in case.colocated), default=math.inf),
            sum(min((gpus_of(each) for each in choices), default=math.inf) for choices in case.across)
            + (case.encode is not None),
        )
        if size.gpus < smallest < math.inf:
            few = "1 GPU is" if size.gpus == 1 else f"{size.gpus} GPUs are"
            return f"{few} too few; the smallest deployment has {smallest:g}"
    why = "no number of instances keeps both limits with queueing"
    hand_over = least_hand_over(*case.across)
    if not case.colocated and first + hand_over > work.ttft.seconds:
        why = (
            f"no cache gets to decode in the TTFT limit of {_ms(work.ttft)}; the best hand-over takes {_ms(hand_over)}"
        )
    return f"{why}{_nearest(case, size, max_nic)}"


def _of_memory(grid: DecodeGrid) -> str:
    """Say that nothing of a grid fits in memory; nothing where something does."""
    if not isinstance(grid, PhaseGrid):
        return "" if grid.feasible.any() else "no attention and feed-forward ranks fit in memory"
    if not len(grid.mappings):
        return f"no {grid.phase} layout that an engine can start"
    if grid.feasible.any():
        return ""
    lacking = least(grid.memory_bytes - grid.memory_limit, np.ones_like(grid.feasible))
    return f"no {grid.phase} mapping fits in memory; the closest lacks {lacking / GB:.1f} GB a GPU"


def _nearest(case: Candidates, size: Size, max_nic: float | None) -> str:
    """Limits, one loosened at a time, that a deployment of no more GPUs than there are keeps; in words."""
    work, most = case.work, MOST_GPUS if size.gpus is None else size.gpus

    def kept(looser: Demand) -> bool:
        return bool(designs_at(under_limits(case, looser, max_nic), size.rate or 1e-3, most))

    found = []
    for name in ("ttft", "tpot"):
        limit: Limit = getattr(work, name)
        looser = [replace(limit, seconds=limit.seconds * factor) for factor in LOOSER]
        works = [replace(work, ttft=each) if name == "ttft" else replace(work, tpot=each) for each in looser]
        if kept(works[-1]):
            nearest = looser[bisect_left(works[:-1], True, key=kept)]
            found.append(f"a {name.upper()} limit of {_ms(nearest)}")
    return f"; {' or '.join(found)} would do" if found else ""


def _ms(limit: Limit | float) -> str:
    seconds = limit if isinstance(limit, float) else limit.seconds
    text = f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"
    return text if isinstance(limit, float) else f"{text} ({limit.percentile})"


#: Share by which the rate goes up in a round, at least. [1]
STEP = 5e-3
#: Relative width at which the search for a design's own rate ends. [1]
NARROW = 1e-7


def designs_of_users(case: Candidates, users: int) -> list[Design]:
    r"""Find designs of both modes that serve some users within the limits, cheapest first, each at its own rate.

    Each user sends the next request when the last has ended. A design with fewer instances is slower, and slower
    answers are asked for less often: so many users meet each design at a rate of its own, the one at which so many
    requests are in flight (Little's law). A design serves the users where it keeps its limits at that rate. From below,
    the rate goes up to the least own rate of the cheapest designs, until one of them keeps its limits at its own:

    .. math:: r_{k+1} = \min_{d \in D(r_k)} r_d, \qquad N_d(r_d) = N

    Returns some designs of each mode; none where nothing serves.
    """
    work = case.work
    found: dict[ServingMode, list[Design]] = {ServingMode.DISAGGREGATED: [], ServingMode.COLOCATED: []}
    rate = users / (work.ttft.seconds + work.lengths.gaps * work.tpot.seconds) / 2  # a mean may exceed a median's limit
    seen: dict[tuple[tuple[AnyChoice, int], ...], Design] = {}
    known: dict[tuple[tuple[AnyChoice, int], ...], float] = {}
    while math.isfinite(rate):
        faster = math.inf
        for design in designs_at(case, rate):
            kept, key = found[design.mode], tuple((pool.choice, pool.instances) for pool in design.pools)
            seen.setdefault(key, design)
            cheaper = design.cost < min((each.cost for each in kept), default=math.inf)
            higher = key not in known and design.in_flight < users  # its own rate is above this one
            if higher and not (cheaper and (math.isinf(faster) or _with_rate(design, faster).in_flight >= users)):
                continue  # and not the next
            own = known[key] if key in known else known.setdefault(key, own_rate(seen[key], users))
            if own <= rate:
                kept.append(at_rate(case, design, own))
            elif cheaper:
                faster = min(faster, own)
        rate = max(faster, rate * (1.0 + STEP))
    every = dict.fromkeys(each for kept in found.values() for each in kept)  # in the order of their rates
    return sorted(every, key=lambda each: (each.cost, each.gpus))


def own_rate(design: Design, users: int) -> float:
    """Find the rate at which a design has so many requests in flight. [request/s]"""
    low, high = sorted((design.rate, users / design.in_flight * design.rate))  # the longer they take, the fewer come
    while high - low > NARROW * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _with_rate(design, middle).in_flight >= users else (middle, high)
    return high


def _with_rate(design: Design, rate: float) -> Design:
    pools = tuple(replace(pool, rate=rate) for pool in design.pools)
    return replace(design, pools=pools, rate=rate, kv_rate=design.kv_rate * rate / design.rate)


def at_rate(case: Candidates, design: Design, rate: float) -> Design:
    """Give a design another rate, with the KV bandwidth and the cost that follow."""
    found = _with_rate(design, rate)
    if not case.drawn:
        return found
    return replace(found, cost=design.cost + cost_of(case, found) - cost_of(case, design))  # its spares draw as before
