"""Find what would change the answer: the nearest change of a limit, a length, a link or a price at which another wins.

Everything else stays as asked. A value is multiplied by the factors of a ladder, up and down, and designs are sized
again over the mappings that the plan kept; a flip lies between two rungs. The nearest flips are then planned anew, as
the user asked, and told only if the answer is another one there, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.candidates import Candidates, candidates_of, under_limits
from disagg_sim.planning.choices import axes_of, grids_of
from disagg_sim.planning.design import Design
from disagg_sim.planning.kv_links import wire_of
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.question import MOST_GPUS
from disagg_sim.planning.ranking import SIMPLER, first_mode
from disagg_sim.planning.sizing import fewest, gpus_for
from disagg_sim.search.layouts import Layouts
from disagg_sim.simulation.instance_variants import ffn_of

#: Factors at which another answer is looked for, up and down. [1]
LADDER = (1.25, 1.5, 2.0, 3.0, 4.0)
#: Changes that are planned anew, the nearest first, and most rungs of each. [1]
MOST_ASKED, RUNGS = 4, 2
#: Factor by which a limit is loosened to say what it costs; least saving that is told, a share of the cost. [1]
LOOSER, TOLD = 1.5, 0.03
#: Fewest input and output tokens that are tried. [token]
LEAST_ISL, LEAST_OSL = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlip:
    """Another answer, and the change that brings it."""

    axis: str  # "ttft", "tpot", "isl", "osl", "nic" or "price"
    factor: float  # on the value as asked, at which the answer is another [1]
    before: float  # last factor that was asked and has the same answer; 1 is the question itself [1]
    value: float  # of the axis at ``factor``, in its unit: [s], [token], [B/s], [USD/h]
    mode: ServingMode | None  # that wins there; None where nothing keeps the limits
    system: str  # that wins there
    split: bool = False  # whether attention and feed-forward ranks of decode are apart there


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitCost:
    """What a limit costs: the answer to the same question under a looser one."""

    axis: str  # "ttft" or "tpot"
    value: float  # of the looser limit [s]
    gpus: int  # of the answer under it [1]
    rate: float  # that it serves [request/s]
    cost: float  # of a request, over that of the plan [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What would change an answer, what its limits cost, and what was set aside."""

    flips: tuple[AnswerFlip, ...]
    limits: tuple[LimitCost, ...]
    aside: Design | None  # that would cost less; None where none does


def changes_of(plan: Plan) -> Changes:
    """Find what would change an answer, what its limits cost, and what was set aside."""
    return Changes(flips=flips(plan), limits=limit_costs(plan), aside=set_aside(plan))


_Change = Callable[[float], tuple[Sequence[Candidates], float]]


def flips(plan: Plan) -> tuple[AnswerFlip, ...]:
    """Find the nearest flips of a plan.

    Returns the nearest first.
    """
    best = plan.best
    if best is None:
        return ()
    cases = plan.cases
    now = _kind(best)
    rungs = [
        (nearest, further)
        for axis, change in _axes(plan, cases, best)
        for further in (_nearest(axis, change, now, best.rate, up=up) for up in (True, False))
        for nearest in islice(further, 1)
    ]
    rungs.sort(key=lambda each: abs(math.log(each[0].factor)))
    asked = (_verified(plan, chain([nearest], further), now) for nearest, further in rungs[:MOST_ASKED])
    found = [flip for flip in asked if flip is not None]
    return tuple(sorted([*found, *_prices(plan, best)], key=lambda flip: abs(math.log(flip.factor))))


def _kept(case: Candidates) -> tuple[Sharding, Sharding]:
    """List the mappings of a case's choices: of prefill, first those of decode, and of decode instances not split."""
    prefill, decode = case.across[0], [each for each in case.across[1] if ffn_of(each.mapping) is None]
    sides = [{replace(each.mapping, chunk_tokens=0): None for each in side} for side in (prefill, decode)]
    both = {replace(each.mapping, chunk_tokens=0): None for each in case.colocated}
    if case.prefill_at is case.at:
        every = list({**sides[0], **sides[1], **both})
        decoding = [each for each in every if each.pcp == 1]
        return Sharding.stack([*decoding, *(each for each in every if each.pcp > 1)]), Sharding.stack(decoding)
    own = Sharding.stack(list(sides[1])) if sides[1] else case.grids.decode.mappings[:1]
    return Sharding.stack(list(sides[0])), own


def _again(case: Candidates, work: Demand, max_nic: float | None) -> Candidates:
    """Candidates for other links or limits, on the same grids, or for other lengths, of the mappings that were kept."""
    if work.lengths is case.work.lengths:
        return under_limits(case, work, max_nic)
    setups = (case.at, case.prefill_at)
    grids = grids_of(*setups, _kept(case), work, axes_of(case.across[0], case.grids.prefill.batch))
    further = None if case.further is None else case.further.under(work.lengths)
    return candidates_of(setups, work, grids, case.costs, max_nic, further).with_costs_of(case)


def _axes(plan: Plan, cases: Sequence[Candidates], best: Design) -> Iterator[tuple[str, _Change]]:
    work, nic = plan.work, plan.options.max_nic

    def under(changed: Callable[[float], Demand | None], value: Callable[[float], float]) -> _Change:
        def change(factor: float) -> tuple[Sequence[Candidates], float]:
            other = changed(factor)
            found = () if other is None else tuple(_again(case, other, nic) for case in cases)
            return found, value(factor)

        return change

    ttft, tpot, law = work.ttft, work.tpot, work.lengths
    yield (
        "ttft",
        under(lambda f: replace(work, ttft=replace(ttft, seconds=ttft.seconds * f)), lambda f: ttft.seconds * f),
    )
    yield (
        "tpot",
        under(lambda f: replace(work, tpot=replace(tpot, seconds=tpot.seconds * f)), lambda f: tpot.seconds * f),
    )
    if law.constant:
        yield "isl", under(lambda f: _lengths(plan, cases, f, 1.0), lambda f: law.mean_isl * f)
        yield "osl", under(lambda f: _lengths(plan, cases, 1.0, f), lambda f: law.mean_osl * f)
    if best.mode == ServingMode.DISAGGREGATED:
        reached = _reached(plan)

        def narrower(factor: float) -> tuple[Sequence[Candidates], float]:
            if factor > 1.0:
                return (), reached
            return tuple(_again(case, work, reached * factor) for case in cases), reached * factor

        yield "nic", narrower


def _reached(plan: Plan) -> float:
    """Bandwidth for caches that every case reaches, per GPU. [B/s]"""
    return min(wire_of(case.at, case.prefill_at, MOST_GPUS, plan.options.max_nic).bandwidth for case in plan.cases)


def _lengths(plan: Plan, cases: Sequence[Candidates], isl: float, osl: float) -> Demand | None:
    """The work at other lengths; None where the model takes none so long, or they are too short."""
    law = plan.work.lengths
    new_isl, new_osl = round(law.mean_isl * isl), round(law.mean_osl * osl)
    of_images = 0 if (encode := cases[0].encode) is None else encode.step.tokens
    if new_isl < max(LEAST_ISL, of_images) or new_osl < LEAST_OSL or new_isl + new_osl > cases[0].at.model.max_context:
        return None
    return replace(plan.work, lengths=law.at(new_isl, new_osl))


_Winner = tuple[ServingMode | None, str, bool]  # mode, system, and whether decode instances are split


def _kind(design: Design | None) -> _Winner:
    """What is told of an answer; of none where nothing keeps the limits."""
    if design is None:
        return None, "", False
    last = design.pools[-1]
    return design.mode, last.setup.system.name, ffn_of(last.mapping) is not None


def _kinds(case: Candidates) -> Iterator[tuple[bool, Candidates]]:
    """The candidates with whole and with split decode instances, where both compete, and whether these are split."""
    both = dict.fromkeys(ffn_of(each.mapping) is not None for each in case.across[1])
    for split in both or (False,):
        inside, across = (
            (senders, [each for each in takers if (ffn_of(each.mapping) is not None) is split])
            for senders, takers in (case.inside, case.across)
        )
        yield split, case if len(both) < 2 else replace(case, inside=inside, across=across)


def _winner(cases: Sequence[Candidates], rate: float, now: _Winner) -> _Winner:
    """The kind of the cheapest deployment for a rate [request/s]; of equal ones that of the plan."""
    costs: dict[_Winner, float] = {}
    kinds = [(split, each) for case in cases for split, each in _kinds(case)]
    if len({(split, case.at.system.name) for split, case in kinds}) == 1 and not any(case.colocated for case in cases):
        kinds = [(split, replace(case, drawn=False)) for split, case in kinds]  # it matters only whether any serves
    for split, case in kinds:
        for mode in (ServingMode.DISAGGREGATED, ServingMode.COLOCATED):
            most = gpus_for(case, SIMPLER * min(costs.values(), default=math.inf))
            cost, key = fewest(case, mode, rate, most), (mode, case.at.system.name, split)
            costs[key] = min(cost, costs.get(key, math.inf))
    best = min(costs, key=lambda key: (costs[key], key != now))
    if math.isinf(costs[best]):
        return _kind(None)
    _, system, split = best
    joint, apart = (
        costs.get((mode, system, split), math.inf) for mode in (ServingMode.COLOCATED, ServingMode.DISAGGREGATED)
    )
    if apart <= joint <= SIMPLER * apart:  # whether the simpler mode comes first: one of one attention rank is
        alone = [
            replace(case, colocated=[each for each in case.colocated if each.mapping.dp_attn == 1])
            for own, case in kinds
            if (case.at.system.name, own) == (system, split)
        ]
        joint = min(fewest(each, ServingMode.COLOCATED, rate, gpus_for(each, SIMPLER * apart)) for each in alone)
    return first_mode({ServingMode.COLOCATED: joint, ServingMode.DISAGGREGATED: apart}), system, split


def _nearest(axis: str, change: _Change, now: _Winner, rate: float, *, up: bool) -> Iterator[AnswerFlip]:
    """Rungs with another winner, the nearest first; the last is tried first, and if it has the same, there is none."""
    last = None
    for rung in (LADDER[-1], *LADDER[:-1]):
        factor = rung if up else 1.0 / rung
        cases, value = change(factor)
        if not cases:
            continue
        mode, system, split = other = _winner(cases, rate, now)
        flip = AnswerFlip(axis=axis, factor=factor, before=1.0, value=value, mode=mode, system=system, split=split)
        if rung == LADDER[-1]:
            if other == now:
                return
            last = flip
        elif other != now:
            yield flip
    if last is not None:
        yield last


def _verified(plan: Plan, found: Iterable[AnswerFlip], now: _Winner) -> AnswerFlip | None:
    """The nearest of some rungs at which the question, asked again, has another answer; None where none has."""
    before = 1.0
    for flip in islice(found, RUNGS):
        other = _kind(_asked_at(plan, flip.axis, flip.factor).best)
        if other != now:
            return replace(flip, mode=other[0], system=other[1], split=other[2], before=before)
        before = flip.factor
    return None


def _asked_at(plan: Plan, axis: str, factor: float, below: float = math.inf) -> Plan:
    """The plan of the same question with one value changed, if a request may cost less than ``below``."""
    assert plan.ask is not None
    work, law = plan.work, plan.work.lengths
    if axis in ("ttft", "tpot"):
        limit = getattr(work, axis)
        return plan.ask(others=1, below=below, **{axis: replace(limit, seconds=limit.seconds * factor)})
    if axis == "nic":
        return plan.ask(others=1, below=below, options=replace(plan.options, max_nic=_reached(plan) * factor))
    isl, osl = (factor, 1.0) if axis == "isl" else (1.0, factor)
    return plan.ask(others=1, below=below, lengths=law.at(round(law.mean_isl * isl), round(law.mean_osl * osl)))


def limit_costs(plan: Plan) -> tuple[LimitCost, ...]:
    """Ask again with each limit loosened by ``LOOSER``: those that cost at least the share ``TOLD`` of the answer."""
    if plan.best is None or plan.ask is None:
        return ()
    found = []
    own = plan.best.cost / plan.best.rate
    for axis in ("ttft", "tpot"):
        best = _asked_at(plan, axis, LOOSER, (1.0 - TOLD) * own).best
        if best is not None and best.cost / best.rate <= (1.0 - TOLD) * own:
            value = getattr(plan.work, axis).seconds * LOOSER
            found.append(
                LimitCost(axis=axis, value=value, gpus=best.gpus, rate=best.rate, cost=best.cost / best.rate / own)
            )
    return tuple(found)


def set_aside(plan: Plan) -> Design | None:
    """Find the design that would cost least if no layout were set aside: of any count of GPUs, known or not.

    Returns None where it costs no less than the best.
    """
    if plan.best is None or plan.ask is None:
        return None
    wide, own = plan, (1.0 - 1e-9) * plan.best.cost / plan.best.rate
    if plan.options.layouts == Layouts.SUPPORTED:
        wide = plan.ask(others=1, below=own, options=replace(plan.options, layouts=Layouts.LAUNCHABLE.value))
    found = wide.cheapest
    return found if found is not None and found.cost / found.rate < own else None


def _prices(plan: Plan, best: Design) -> Iterator[AnswerFlip]:
    """Price of another system's GPU at which the best design on it costs as much, where price is the objective."""
    if plan.options.objective != "usd":
        return
    own = {at.system.name for pool in best.pools for at, _ in pool.parts}
    for design in plan.runners_up:
        names = {at.system.name for pool in design.pools for at, _ in pool.parts}
        if len(names) == 1 and not names & own:
            (name,) = names
            factor = (best.cost / best.rate) / (design.cost / design.rate)
            price = plan.case_of(design).costs[name]
            yield AnswerFlip(
                axis="price", factor=factor, before=1.0, value=price * factor, mode=design.mode, system=name
            )
