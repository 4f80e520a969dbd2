"""Plan a deployment: disaggregated or co-located, with which pools, how sure, and what would change the answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from disagg_sim.choices import EVEN_RANKS
from disagg_sim.errors import InputError, MissingExtraError, quoted
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_failures
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.physics.power import power_at
from disagg_sim.planning.answer import RUNNERS_UP, Plan, answer
from disagg_sim.planning.candidates import Candidates, candidates_of, further_pools, mappings_of, under_limits
from disagg_sim.planning.choices import grids_of
from disagg_sim.planning.design import Availability, Design
from disagg_sim.planning.limits import MOST_LOAD, TPOT, TTFT, Demand, limit_of
from disagg_sim.planning.question import ANY, PlanOptions, Size, any_systems, systems_of, usable_systems
from disagg_sim.planning.sizing import may_cost
from disagg_sim.serving.costs import JOULE, costs_of_gpus
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.workload.lengths import Lengths, uneven
from disagg_sim.workload.lengths import lengths as lengths_of
from disagg_sim.workload.trace import Trace
from disagg_sim.workload.turns import TurnCaches, mean_turns, trace_lengths, turn_lengths

#: Requests of a window over which arrivals are counted. [request]
WINDOW = 20
#: Least length of a surge, in TTFT limits and in requests on average: of fewer, random arrivals would look like surges.
#: [1], [request]
SURGE, LEAST_SURGE = 10.0, 400.0
#: Plans at most: each corrects the hit rate of the one before.
MOST_PLANS = 6
#: Changes below which a plan stands: of the new tokens of a turn, over them, and of the share of a tier. [1]
SETTLED = 0.02

USUAL = PlanOptions()


def plan(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    lengths: Lengths | Trace | TrafficCase,
    *,
    ttft: Any = TTFT,
    tpot: Any = TPOT,
    rate: float | None = None,
    gpus: int | None = None,
    options: PlanOptions = USUAL,
) -> Plan:
    """Plan a deployment: disaggregated or co-located, with how many GPUs in which pools.

    Counts of instances include queueing (``planning.queueing``): requests arrive at random, and a limit holds for a
    share of them.

    Parameters
    ----------
    model : ModelSpec, str or Path
        Spec, name, or file.
    system : SystemSpec, str or sequence
        Systems that compete: names with commas between them, a list, or ``"any"``.
    lengths : Lengths, Trace or TrafficCase
        Lengths of the requests: from ``ds.lengths``, from a case of ``ds.load_traffic(name).cases``, or from a trace,
        which also gives how unevenly requests arrive.
    ttft, tpot : float or str
        Limits of requests: seconds, or ``"500 ms@p99"``; without a percentile p90; 2 s and 50 ms by default.
    rate : float, optional
        Request rate to serve at the least cost. [request/s]
    gpus : int, optional
        GPUs on which to serve the highest rate, in place of a rate. [1]
    options : PlanOptions
        Users in place of rate and GPUs, objective, recipe, engine, second system for prefill, KV bandwidth, prices,
        encode, attention and feed-forward pools.

    Returns
    -------
    Plan
        Limits that no deployment keeps are an answer (``infeasible``), not an error.

    Raises
    ------
    UnknownNameError, InputError
        Unknown names, with the nearest one; values out of range; no size or two.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> found = plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), ttft="1 s", tpot="20 ms", rate=40)
    >>> found.best.mode.value, found.best.gpus <= 4
    ('colocated', True)
    """
    return _planned(model, system, lengths, ttft=ttft, tpot=tpot, rate=rate, gpus=gpus, options=options)


def _planned(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    lengths: Lengths | Trace | TrafficCase,
    *,
    ttft: Any,
    tpot: Any,
    rate: float | None,
    gpus: int | None,
    options: PlanOptions,
    others: int = RUNNERS_UP,
    below: float = math.inf,
    scored: Plan | None = None,
) -> Plan:
    """Plan with up to ``others`` beside the best, none if no design costs less than ``below``; grids of ``scored``."""
    size = Size(rate=rate, gpus=gpus, users=options.users)
    work, options = demand_of(lengths, ttft=ttft, tpot=tpot, rate=rate, options=options)
    if scored is None:
        cases, left_out = _cases(model, system, work, gpus, options)
    else:
        limited = [replace(work, lengths=each.work.lengths) for each in scored.cases]
        cases = [under_limits(*each, options.max_nic) for each in zip(scored.cases, limited, strict=True)]
        left_out = list(scored.left_out)
    asked = {"lengths": lengths, "ttft": ttft, "tpot": tpot, "rate": rate, "gpus": gpus, "options": options}
    question = Plan(
        size=size, options=options, cases=tuple(cases), left_out=tuple(left_out), source=source_of(lengths, work)
    )
    question = replace(question, ask=partial(_again, question, model, system, asked))
    if rate is not None and not any(may_cost(case, rate, below * rate) for case in cases):
        return question
    check = partial(played_if_flattered, question, {})
    found = answer(question, check, others, below)
    if options.objective != JOULE or found.best is None or others < RUNNERS_UP:  # a look at one change tells no other
        return found
    plain = tuple(replace(case, drawn=False, costs=dict.fromkeys(case.costs, 1.0)) for case in cases)
    return replace(found, fewest=answer(replace(question, cases=plain), check, others).best)


def _cases(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    work: Demand,
    gpus: int | None,
    options: PlanOptions,
) -> tuple[list[Candidates], list[str]]:
    """Make the candidates of all systems that can be planned for, and say why others cannot."""
    setups, left_out = usable_systems(model, systems_of(system), options)
    if str(system).strip() == ANY:
        untimed = ", ".join(each.name for each in any_systems()[1])
        left_out.append(
            f"{untimed}: their times rest on kernels of another generation or vendor; name one to compare it"
        )
    cases, unpriced = [], []
    for decode, prefill in setups:
        for pair in dict.fromkeys(((decode, prefill), (decode, decode))):  # two systems compete with one alone
            further = further_pools(pair, work.lengths, gpus, options)
            apart = () if further is None else further.setups
            try:
                if options.objective == JOULE:  # power of a GPU that waits [W]
                    costs = {at.system.name: power_at(at).idle for at in (decode, prefill, *apart)}
                else:
                    costs = costs_of_gpus([at.system for at in (decode, prefill, *apart)], options.per)
            except InputError:
                if len(setups) == 1:
                    raise
                unpriced.append(decode.system.name)
                break
            try:
                mappings = mappings_of(pair, options)
            except InputError as refused:
                if len(setups) == 1:
                    raise
                left_out.append(str(refused))
                break
            grids = grids_of(*pair, mappings, work)
            each = candidates_of(pair, work, grids, costs, options.max_nic, further)
            each = replace(each, prices=options.prices, drawn=options.objective == JOULE)
            if options.availability is not None:
                failing = load_failures(options.failures)
                each = replace(each, availability=Availability(target=options.availability, failing=failing))
            cases.append(each)
    if unpriced:
        what = "power" if options.objective == JOULE else "price"
        left_out.append(f"no {what} is known of {', '.join(unpriced)}")
    if not cases:
        raise InputError(f"no system can be planned for: {'; '.join(left_out)}")
    return cases, left_out


def demand_of(
    lengths: Lengths | Trace | TrafficCase, *, ttft: Any, tpot: Any, rate: float | None, options: PlanOptions
) -> tuple[Demand, PlanOptions]:
    """Read lengths, limits and how unevenly requests arrive; return them and the options with the trace set."""
    trace = lengths if isinstance(lengths, Trace) else options.trace
    if trace is not None and not 0.0 < trace.rate < math.inf:
        raise InputError(f"trace {trace.name} has no request rate: it has one request, or all arrive at once")
    if not isinstance(lengths, Lengths | Trace | TrafficCase):
        allowed = "what ds.lengths makes, a trace, or a case of a traffic"
        raise InputError(f"lengths {quoted(lengths)}; allowed: {allowed}")
    law = lengths if isinstance(lengths, Lengths) else lengths_of(lengths)
    work = Demand(
        lengths=law if options.rank_imbalance == EVEN_RANKS else uneven(law, options.rank_imbalance),
        ttft=limit_of(ttft, "ttft"),
        tpot=limit_of(tpot, "tpot"),
        hold_steps=options.delays,
        headroom=options.headroom,
        most_load=MOST_LOAD if options.users is None else 1.0,  # users wait for slower answers: no queue grows for long
    )
    if trace is None:
        return work, options
    dispersion, surge = unevenness(
        trace, trace.rate if rate is None else rate, work.ttft.seconds, max(work.ttft.share, work.tpot.share)
    )
    return replace(work, dispersion=dispersion, surge=surge), replace(options, trace=trace)


def source_of(lengths: Lengths | Trace | TrafficCase, work: Demand) -> TrafficCase | tuple[int, int] | None:
    """Find what a simulation draws requests from: a case, or one ISL and OSL [token]; None = neither is known."""
    if isinstance(lengths, TrafficCase):
        return lengths
    law = work.lengths
    return (round(law.mean_isl), round(law.mean_osl)) if law.isl.size == 1 and law.mean_osl.is_integer() else None


def played_if_flattered(question: Plan, known: dict[int, int], design: Design) -> Design | None:
    """Correct a design by simulation if its kind is one that the closed forms overrate; return others unchanged."""
    if not design.flattered:
        return design
    try:
        from disagg_sim.planning.prove import checked  # the simulator takes a second to load
        from disagg_sim.simulation.kernel.compiled import COMPILING, on_compilation

        with on_compilation(lambda: print(COMPILING, file=sys.stderr)):
            return checked(question, design, known)
    except MissingExtraError:
        return design


def _again(question: Plan, model: Any, system: Any, asked: dict[str, Any], **changed: Any) -> Plan:
    """Plan again with some arguments of the question changed, perhaps the lengths."""
    limits = changed.keys() <= {"ttft", "tpot", "others", "below", "options"}  # which choose no grids of alike requests
    limits &= replace(changed.get("options", question.options), max_nic=question.options.max_nic) == question.options
    scored = question if limits and question.work.lengths.constant else None
    return _planned(model, system, **(asked | changed), scored=scored)


def unevenness(trace: Trace, rate: float, ttft: float, share: float) -> tuple[float, float]:
    """Find how unevenly the requests of a trace arrive: in short windows, and in surges that outlast a queue.

    Takes ``rate`` [request/s], ``ttft`` [s] and ``share`` (of the requests that keep their limits [1]). Returns
    ``dispersion`` (variance over mean of the requests in windows of about ``WINDOW`` requests, the median over the
    stretches of the trace that are as long as a surge; 1 for Poisson arrivals, and at least 1 [1]) and ``surge``
    (request rate over the mean rate that ``share`` of the requests arrive at or below, by such stretches; at least 1
    [1]).
    """
    long = max(SURGE * ttft * rate, LEAST_SURGE)  # requests of a surge
    surges = max(round(len(trace) / long), 1)
    counts = np.histogram(trace.arrival, bins=surges)[0]
    order = np.sort(counts)
    seen = np.cumsum(order) / order.sum()
    surge = float(order[np.searchsorted(seen, share)] / counts.mean())
    windows = surges * max(int(long // WINDOW), 1)
    if windows < 2 or not trace.duration > 0:
        return 1.0, max(surge, 1.0)
    fine = np.histogram(trace.arrival, bins=windows)[0].reshape(surges, -1)
    some = fine[fine.sum(axis=1) > 0]
    spread = float(np.median(some.var(axis=1) / some.mean(axis=1)))  # median: a step in the rate is not unevenness
    return max(spread, 1.0), max(surge, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """A plan, and what the turns that it serves find."""

    plan: Plan
    caches: TurnCaches  # of its best design
    lengths: Lengths  # that it was made for


def plan_turns(traffic: str | Trace, memory: GpuCaches, planned: Callable[[Lengths], Plan]) -> TurnPlan:
    """Plan for the turns of a traffic's sessions, or a trace, whose hit rate follows from what the GPUs remember.

    The more is found, the fewer GPUs are needed, and the less they remember: plans are made until the new tokens of a
    turn and the tiers of its past stay. Sessions stick to an instance.

    Takes ``planned`` (makes the plan for some lengths, with ``memory.hbm`` set aside (``PlanOptions.set_aside``)).
    Returns the last plan where they do not settle, or one without a design.
    """
    caches = TurnCaches(sessions_per_s=1.0, rooms=(("hbm", math.inf),))
    law = _law_of_turns(traffic, caches)
    for _ in range(MOST_PLANS):
        plan = planned(law)
        if plan.best is None:
            break
        pool, rate = plan.best.first, plan.best.rate
        own = replace(memory, gpus=int(pool.mapping.gpus), caches=pool.instances)
        served = pool.setup.cached_layers, pool.setup.precision
        sessions_per_s = rate / mean_turns(traffic) if isinstance(traffic, str) else rate
        caches = own.met(served, pool.setup.system, law.mean_isl, sessions_per_s=sessions_per_s)
        found = _law_of_turns(traffic, caches)
        if _alike(found, law):
            break
        law = found
    return TurnPlan(plan=plan, caches=caches, lengths=law)


def _law_of_turns(traffic: str | Trace, caches: TurnCaches) -> Lengths:
    return turn_lengths(traffic, caches) if isinstance(traffic, str) else trace_lengths(traffic, caches)


def _alike(found: Lengths, law: Lengths) -> bool:
    """Whether turns find as much, and in the same tiers."""
    first, second = (dict(each.cached.reuse.tiers) if each.cached is not None else {} for each in (found, law))
    apart = [abs(first.get(name, 0.0) - second.get(name, 0.0)) for name in {*first, *second}]
    return abs(found.mean_new / law.mean_new - 1.0) < SETTLED and max(apart, default=0.0) < SETTLED
