"""Find what would change the answer: the nearest change of a limit, a length, a link or a price at which another wins.

Everything else stays as asked. Designs are sized again over the mappings that the plan kept, on the factors of a
ladder, up and down; a flip lies between two of its rungs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from disagg_sim.domain import Mapping, Mode
from disagg_sim.planning.choices import axes_of, grids_of
from disagg_sim.planning.design import Design
from disagg_sim.planning.limits import Work
from disagg_sim.planning.plan import Plan
from disagg_sim.planning.question import MOST_GPUS
from disagg_sim.planning.sizing import Candidates, candidates_of, fewest, rewired
from disagg_sim.planning.wires import wire_of

#: Factors at which another answer is looked for, up and down. [1]
LADDER = (1.25, 1.5, 2.0, 3.0, 4.0)
#: Input and output tokens below which lengths are not taken. [token]
LEAST_ISL, LEAST_OSL = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Another answer, and the change that brings it."""

    axis: str  # "ttft", "tpot", "isl", "osl", "nic" or "price"
    factor: float  # on the value as asked, at which the answer is another; inf or 0 where none in the range does [1]
    before: float  # factor at which it still is the same [1]
    value: float  # of the axis at ``factor``, in its unit: [s], [token], [B/s], [USD/h]
    mode: Mode | None  # that wins there; None where nothing keeps the limits
    system: str  # that wins there


_Change = Callable[[float], tuple[Sequence[Candidates], float]]


def flips(plan: Plan) -> tuple[Flip, ...]:
    """Find the nearest flips of a plan.

    Parameters
    ----------
    plan : Plan
        With a design.

    Returns
    -------
    tuple of Flip
        Nearest first; only those within the ladder, up to a factor of 4. Lengths are changed where they are constant.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> found = flips(ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="20 ms", rate=40))
    >>> {flip.axis for flip in found} <= {"ttft", "tpot", "isl", "osl", "nic", "price"}
    True
    """
    best = plan.best
    if best is None:
        return ()
    cases = plan.cases
    now = (best.mode, best.pools[-1].setup.system.name)
    found = [
        flip
        for axis, change in _axes(plan, cases, best)
        for up in (True, False)
        if (flip := _nearest(axis, change, now, best.rate, up=up)) is not None
    ]
    return tuple(sorted([*found, *_prices(plan, best)], key=lambda flip: abs(math.log(flip.factor))))


def _kept(case: Candidates) -> tuple[Mapping, Mapping]:
    """Mappings that the choices of a case have: of prefill, of decode.

    Where one system does both, those of decode come first among those of prefill; the rest share prompts (PCP).
    """
    prefill, decode = case.across
    sides = [{replace(each.mapping, chunk_tokens=0): None for each in side} for side in (prefill, decode)]
    both = {replace(each.mapping, chunk_tokens=0): None for each in case.colocated}
    if case.prefill_at is case.at:
        every = list({**sides[0], **sides[1], **both})
        decoding = [each for each in every if each.pcp == 1]
        return Mapping.stack([*decoding, *(each for each in every if each.pcp > 1)]), Mapping.stack(decoding)
    return Mapping.stack(list(sides[0])), Mapping.stack(list(sides[1]))


def _again(case: Candidates, work: Work, max_nic: float | None) -> Candidates:
    """Candidates for other links or limits, on the same grids, or for other lengths, of the mappings that were kept."""
    setups = (case.at, case.prefill_at)
    if work.lengths is case.work.lengths:
        if (work.ttft, work.tpot) == (case.work.ttft, case.work.tpot):
            return rewired(case, max_nic)
        return candidates_of(setups, work, case.grids, case.costs, max_nic).asking_as(case)
    grids = grids_of(*setups, _kept(case), work, axes_of(case.across[0], case.grids.prefill.batch))
    return candidates_of(setups, work, grids, case.costs, max_nic).asking_as(case)


def _axes(plan: Plan, cases: Sequence[Candidates], best: Design) -> Iterator[tuple[str, _Change]]:
    work, nic = plan.work, plan.options.max_nic

    def under(changed: Callable[[float], Work | None], value: Callable[[float], float]) -> _Change:
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
    if best.mode == Mode.DISAGGREGATED:
        reached = min(wire_of(case.at, case.prefill_at, MOST_GPUS, nic).bandwidth for case in cases)

        def narrower(factor: float) -> tuple[Sequence[Candidates], float]:
            if factor > 1.0:
                return (), reached
            return tuple(_again(case, work, reached * factor) for case in cases), reached * factor

        yield "nic", narrower


def _lengths(plan: Plan, cases: Sequence[Candidates], isl: float, osl: float) -> Work | None:
    """The work at other lengths; None where the model takes none so long, or they are too short."""
    law = plan.work.lengths
    new_isl, new_osl = round(law.mean_isl * isl), round(law.mean_osl * osl)
    if new_isl < LEAST_ISL or new_osl < LEAST_OSL or new_isl + new_osl > cases[0].at.model.max_context:
        return None
    return replace(plan.work, lengths=law.at(new_isl, new_osl))


_Winner = tuple[Mode | None, str]


def _winner(cases: Sequence[Candidates], rate: float, now: _Winner) -> _Winner:
    """Mode and system of the cheapest deployment for a rate [request/s]; of equal ones that of the plan."""
    costs: dict[_Winner, float] = {}
    for case in cases:
        for mode in (Mode.DISAGGREGATED, Mode.COLOCATED):
            most = _worth_counting(case, mode, min(costs.values(), default=math.inf))
            cost, key = fewest(case, mode, rate, most), (mode, case.at.system.name)
            costs[key] = min(cost, costs.get(key, math.inf))
    best = min(costs, key=lambda key: (costs[key], key != now))
    return best if math.isfinite(costs[best]) else (None, "")


def _worth_counting(case: Candidates, mode: Mode, cost: float) -> int:
    """GPUs beyond which a deployment is dearer than one of some cost, where GPUs alone make its cost. [1]"""
    if mode == Mode.DISAGGREGATED or case.drawn or case.availability is not None or math.isinf(cost):
        return MOST_GPUS
    return min(math.floor(cost / case.costs[case.at.system.name]) + 1, MOST_GPUS)


def _nearest(axis: str, change: _Change, now: _Winner, rate: float, *, up: bool) -> Flip | None:
    """The first rung with another winner; none where the last has the same, so that most directions take one look."""
    found, before = None, 1.0
    for rung in (LADDER[-1], *LADDER[:-1]):
        factor = rung if up else 1.0 / rung
        cases, value = change(factor)
        if not cases:
            return found
        other = _winner(cases, rate, now)
        if other != now:
            found = Flip(axis=axis, factor=factor, before=before, value=value, mode=other[0], system=other[1])
            if rung != LADDER[-1]:
                return found
        elif rung == LADDER[-1]:
            return None
        else:
            before = factor
    return None if found is None else replace(found, before=before)


def _prices(plan: Plan, best: Design) -> Iterator[Flip]:
    """Price of another system's GPU at which the best design on it costs as much, where price is the objective."""
    if plan.options.objective != "usd":
        return
    own = {pool.setup.system.name for pool in best.pools}
    for design in plan.runners_up:
        names = {pool.setup.system.name for pool in design.pools}
        if len(names) == 1 and not names & own:
            (name,) = names
            factor = (best.cost / best.rate) / (design.cost / design.rate)
            price = plan.case_of(design).costs[name]
            yield Flip(axis="price", factor=factor, before=1.0, value=price * factor, mode=design.mode, system=name)
