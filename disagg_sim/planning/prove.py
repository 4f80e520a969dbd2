"""Prove a plan by simulation: replay requests at its rate, and adapt the counts of instances until the limits hold.

``proven`` does so for several designs of both modes: the answer is the better one as simulated, not as planned.

A trace is replayed whole, its time stamps scaled to the planned rate. Without one, Poisson arrivals with the lengths of
the question are drawn, and the requests of the first two mean times in the system, in which it fills, are not judged.

Counts are searched without spares. A plan with spares is then played with them: as many instances of each pool as it
has spares fail at once, in full load, and are away for the restart of the stated failures. Their requests begin again
elsewhere, and the limits must hold for those in flight and all that come after. Simulated encoders do not fail: their
spares are away from the beginning.

Past 400 lines: the proofs of one design and of both modes judge the same simulations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.planning.answer import RUNNERS_UP, Plan
from disagg_sim.planning.design import Design, Percentiles
from disagg_sim.planning.limits import SHARES, Limit
from disagg_sim.planning.pools import PrefillChoice
from disagg_sim.planning.ranking import SIMPLER, answer_of, standing, was_run
from disagg_sim.planning.replayed import policy_of, requests_of, run_options, slo_of, time_alone
from disagg_sim.planning.sizing import cost_of, designs_at, near_of
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.simulate import SimulationResult, simulate
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.techniques.encode.play import Encoders
from disagg_sim.workload.trace import Trace

#: Designs of a mode that are proven. [1]
MOST_PROVEN = 6
#: Simulations of a search. [1]
MOST_RUNS = 40
#: Rate over the planned one below which none is tried. [1]
LEAST_RATE = 0.01
#: Relative width at which the search for the rate of a number of GPUs ends. [1]
RATE_STEP = 0.02
#: Instances that are added first, of those of the largest pool, and their growth from one simulation to the next. [1]
FIRST_STEP, GROWTH = 0.02, 1.5
#: GPUs over the planned ones above which no more are tried. [1]
MOST_GROWTH = 3.0
#: Draws of arrivals and lengths under which a design that is checked holds: at a limit one of them says little.
DRAWS = (0, 1)
#: Requests of a simulation by which a design is checked, at most: it takes up to a second. [request]
MOST_CHECKED = 30_000
#: Share of the TTFT limit from which a hand-over says that decode has too few seats. [1]
HAND_OVER = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRun:
    """One simulation of a design."""

    counts: tuple[int, ...]  # instances of its pools [1]
    rate: float  # [request/s]
    requests: int  # that were judged [request]
    ttft: Percentiles  # [s]
    tpot: Percentiles  # [s]
    hand_over: float  # from the end of prefill to the first token, at the percentile of the TTFT limit [s]
    lost: int  # rejected, failed or unfinished [request]
    holds_ttft: bool
    holds_tpot: bool

    @property
    def holds(self) -> bool:
        """Whether both limits hold and no request was lost."""
        return self.holds_ttft and self.holds_tpot and not self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """The simulation in which the spares of all pools are needed at once."""

    run: ProofRun  # of requests in flight at the failure, and of those that come after it
    failed: tuple[int, ...]  # instances of each pool, its spares [1]
    moved: int  # requests that began again elsewhere [request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What simulation says of a planned design, and the design with the counts that it needs."""

    planned: ProofRun  # as planned
    final: ProofRun  # after the counts, or the rate, were adapted; ``planned`` where that was not needed
    design: Design  # of ``final``, with its latencies
    runs: int  # simulations [1]
    failing: Failing | None = None  # with spares; None without

    @property
    def proven(self) -> bool:
        """Whether the final design holds its limits, where it has spares with as many instances failed."""
        return self.final.holds and (self.failing is None or self.failing.run.holds)


def prove(plan: Plan, design: Design | None = None, *, adapt: bool = True, seed: int = 0) -> Proof:
    """Simulate a design of a plan, and adapt it until its limits hold.

    For a rate or users the least counts are searched: of each pool more instances until its limit holds, then fewer as
    long as it does. For a number of GPUs the largest rate is searched.
    """
    chosen = plan.best if design is None else design
    if chosen is None:
        raise InputError(f"there is no design to simulate: {plan.infeasible}")
    runs = _Runs(plan, chosen, seed)
    first = runs.at(tuple(pool.instances for pool in chosen.pools), chosen.rate)
    final = first
    if adapt:
        final = _most_rate(runs, first) if plan.size.gpus is not None else _least_counts(runs, first)
    shown = _shown(plan, chosen, final)
    failing = runs.failing(shown) if any(pool.spares for pool in shown.pools) else None
    return Proof(planned=first, final=final, design=shown, runs=runs.done, failing=failing)


def checked(plan: Plan, design: Design, known: dict[int, int]) -> Design | None:
    """Simulate a design of a kind that closed forms flatter (``Design.flattered``), before it is told.

    Returns the same where it holds its limits under all draws of ``DRAWS``, is of another kind, or cannot be simulated
    in a moment; None where none does.
    """
    if not design.flattered or plan.size.users is not None:
        return design
    try:
        run_options(design, plan.options.max_nic)
        if len(requests_of(plan, design, DRAWS[0])[0]) > MOST_CHECKED:
            return design
    except InputError:  # nothing that says which requests come, or how they are spread
        return design
    planned, by_rate = tuple(pool.instances for pool in design.pools), plan.size.gpus is None
    counts = tuple(max(pool.instances, known.get(id(pool.choice), 0)) for pool in design.pools) if by_rate else planned
    rate, last = design.rate, None
    for seed in DRAWS if plan.options.trace is None else DRAWS[:1]:
        try:
            last = _holding(_Runs(plan, design, seed), counts, rate, by_rate=by_rate)
        except InfeasibleError:  # the simulator sees no request that could keep its limits
            last = None
        if last is None:
            return None
        counts, rate = last.counts, last.rate
    if last is None or (counts == planned and rate == design.rate):
        return design
    known |= {id(pool.choice): count for pool, count in zip(design.pools, counts, strict=True)}
    return _shown(plan, design, last)


def _holding(runs: _Runs, counts: tuple[int, ...], rate: float, *, by_rate: bool) -> ProofRun | None:
    """A run that holds: as planned, with the fewest more instances, or at the most rate below; None where none does."""
    run = runs.at(counts, rate)
    if run.holds:
        return run
    run = _grown(runs, run) if by_rate else _most_rate(runs, run)
    for place, fails in enumerate(counts if run.holds else ()):
        run = _fewer(runs, run, place, fails) if run.counts[place] > fails else run
    return run if run.holds else None


def _shown(plan: Plan, design: Design, final: ProofRun) -> Design:
    """A design as it was in a run, with spares where it has some."""
    shown, case = resized(plan, design, final.counts, final.rate), plan.case_of(design)
    if case.availability is not None:
        shown = case.availability.spared(shown, case.costs)
    return replace(shown, simulated=(final.ttft, final.tpot))


def resized(plan: Plan, design: Design, counts: tuple[int, ...], rate: float) -> Design:
    """Give a design other counts of instances or another rate [request/s]."""
    pools = tuple(
        replace(pool, instances=count, rate=rate, spares=0) for pool, count in zip(design.pools, counts, strict=True)
    )
    both = [each for each in zip(design.pools, pools, strict=True) if each[0].role != "encode"]  # it sends no caches
    share = max((old.instances / new.instances for old, new in both), default=1.0)
    kv_rate = design.kv_rate * share * rate / design.rate
    found = replace(design, pools=pools, spares=None, rate=rate, kv_rate=kv_rate, simulated=None)
    return replace(found, cost=cost_of(plan.case_of(design), found))


def deployed(design: Design) -> ServedDeployment:
    """Describe a design as simulations take it."""
    apart = len({pool.setup.system.name for pool in design.pools}) > 1
    encode, pools = design.encode, [pool for pool in design.pools if pool.role != "encode"]
    parts = {pool.role: (replace(pool.replicas, setup=pool.setup if apart else None),) for pool in pools}
    return ServedDeployment(
        name="planned",
        gpus=sum(pool.gpus for pool in pools),
        encode=Encoders(step=encode.choice.step, instances=encode.gpus + design.pools[0].spares) if encode else None,
        prefill=parts.get("prefill", ()),
        decode=parts.get("decode", ()),
        colocated=parts.get("colocated", ()),
        setup=None if apart else design.pools[-1].setup,
    )


class _Runs:
    """Simulations of one design at several counts and rates, each done once."""

    def __init__(self, plan: Plan, design: Design, seed: int) -> None:
        self.plan, self.design, self.seed = plan, design, seed
        self._known: dict[tuple[tuple[int, ...], float], ProofRun] = {}

    @property
    def done(self) -> int:
        """Simulations so far. [1]"""
        return len(self._known)

    def at(self, counts: tuple[int, ...], rate: float) -> ProofRun:
        """The run at some counts of instances and a rate."""
        key = (counts, rate)
        if key not in self._known:
            self._known[key] = self._run(resized(self.plan, self.design, counts, rate))
        return self._known[key]

    def _run(self, design: Design) -> ProofRun:
        trace, begin = requests_of(self.plan, design, self.seed)
        return judged(design, self._played(design, trace, None), begin)

    def failing(self, design: Design) -> Failing:
        """The run in which as many instances of each pool fail as it has spares."""
        availability = self.plan.case_of(design).availability
        assert availability is not None
        trace, begin = requests_of(self.plan, design, self.seed)
        when = begin or float(trace.arrival[-1]) / 2  # in full load; halfway through a trace
        events, numbered = [], 0
        for pool in (each for each in design.pools if each.role != "encode"):
            numbered += pool.instances + pool.spares
            gone = range(numbered - pool.spares, numbered)
            events += [FailureEvent(at_s=when, kind="instance", number=number) for number in gone]
        failures = Failures(events=tuple(events), restart_s=availability.failing.restart, migration_limit=1)
        pools = tuple(replace(pool, spares=pool.spares * (pool.role != "encode")) for pool in design.pools)
        result = self._played(replace(design, pools=pools), trace, failures)
        run = judged(design, result, max(when - time_alone(self.plan.work), 0.0))
        moved = sum(each.migrated for each in result.records.failures)
        return Failing(run=run, failed=tuple(pool.spares for pool in design.pools), moved=moved)

    def _played(self, design: Design, trace: Trace, failures: Failures | None) -> SimulationResult:
        options = replace(run_options(design, self.plan.options.max_nic), failures=failures)
        return simulate(deployed(design), trace, policy_of(design), slo=slo_of(design), seed=self.seed, options=options)


def judged(design: Design, result: SimulationResult, begin: float) -> ProofRun:
    """Find percentiles of the requests of a simulation from ``begin`` on [s], and whether they keep the limits."""
    work, table = design.work, result.frame()
    table = table[table["arrival_s"] >= begin]
    done = table[table["status"] == "completed"]
    lost = len(table) - len(done)
    ttft = (done["first_token_s"] - done["arrival_s"]).to_numpy()
    gaps = np.maximum(done["output_tokens"].to_numpy() - 1, 1)
    tpot = (done["finish_s"] - done["first_token_s"]).to_numpy() / gaps
    passed = (done["first_token_s"] - done["prefill_end_s"]).to_numpy()
    return ProofRun(
        counts=tuple(pool.instances for pool in design.pools),
        rate=design.rate,
        requests=len(table),
        ttft=_percentiles(ttft),
        tpot=_percentiles(tpot),
        hand_over=float(np.quantile(passed, work.ttft.share)) if passed.size else math.inf,
        lost=lost,
        holds_ttft=_holds(ttft, work.ttft),
        holds_tpot=_holds(tpot, work.tpot),
    )


def _percentiles(values: Floats) -> Percentiles:
    return {name: float(np.quantile(values, share)) if values.size else math.nan for name, share in SHARES.items()}


def _holds(values: Floats, limit: Limit) -> bool:
    return bool(values.size and np.quantile(values, limit.share) <= limit.seconds)


def _least_counts(runs: _Runs, first: ProofRun) -> ProofRun:
    """The fewest instances of each pool, of prefill as its load needs, from where the plan has them."""
    run = _grown(runs, first)
    for place, pool in enumerate(runs.design.pools if run.holds else ()):
        busy = pool.choice.utilisation(run.rate, 1) if isinstance(pool.choice, PrefillChoice) else 0.0
        run = _fewer(runs, run, place, fails=max(math.ceil(busy / runs.plan.work.most_load) - 1, 0))
    return run


def _grown(runs: _Runs, first: ProofRun) -> ProofRun:
    """A run that holds, with more instances of the pools that are late, in growing steps; the last where none holds."""
    run, rate = first, first.rate
    step, most = math.ceil(FIRST_STEP * max(first.counts)), MOST_GROWTH * runs.design.gpus
    while not run.holds and runs.done < MOST_RUNS and resized(runs.plan, runs.design, run.counts, rate).gpus <= most:
        waits = run.hand_over > HAND_OVER * runs.plan.work.ttft.seconds  # for seats of decode
        slow, late = not run.holds_tpot or waits or bool(run.lost), not run.holds_ttft and not waits
        grows = [{"decode": slow, "colocated": True}.get(pool.role, late) for pool in runs.design.pools]
        run = runs.at(tuple(count + step * more for count, more in zip(run.counts, grows, strict=True)), rate)
        step = math.ceil(GROWTH * step)
    return run


def _fewer(runs: _Runs, run: ProofRun, pool: int, fails: int) -> ProofRun:
    """Take instances of one pool away as long as the limits hold: in growing steps, then by bisection."""
    holds, step = run.counts[pool], 1
    best = run
    while holds - fails > 1 and runs.done < MOST_RUNS:
        trial = holds - step if not fails else (holds + fails) // 2
        trial = max(trial, fails + 1)
        other = runs.at((*run.counts[:pool], trial, *run.counts[pool + 1 :]), run.rate)
        if other.holds:
            best, holds, step = other, trial, 2 * step
        else:
            fails = trial
    return best


def _most_rate(runs: _Runs, first: ProofRun) -> ProofRun:
    """The largest rate at which the counts hold, from the planned one; the last run where none holds."""
    counts, step = first.counts, 1.0 + 2 * RATE_STEP
    held, failed = (first, None) if first.holds else (None, first)
    while (held is None or failed is None) and runs.done < MOST_RUNS:
        at = held or failed
        assert at is not None
        if at.rate < LEAST_RATE * first.rate:  # not the load is what it fails at
            return at
        run = runs.at(counts, at.rate * (step if held else 1.0 / step))
        held, failed = (run, failed) if run.holds else (held, run)
        step = step**1.5
    if held is None:
        assert failed is not None
        return failed
    while failed is not None and failed.rate / held.rate > 1.0 + RATE_STEP and runs.done < MOST_RUNS:
        run = runs.at(counts, math.sqrt(held.rate * failed.rate))
        held, failed = (run, failed) if run.holds else (held, run)
    return held


def proven(plan: Plan, *, seed: int = 0) -> tuple[Plan, Proof]:
    """Put proven designs in the place of the planned ones: of both modes, so that the better one is.

    Of each mode designs are proven, the cheapest as planned first, until none of the others could be the answer, or
    ``MOST_PROVEN`` are: the one that planned best may need more than another. Returns the plan with its proven designs,
    and the proof of its best.
    """
    if plan.best is None:
        prove(plan)  # says why not
    tried = {mode: _tried(plan, mode, seed) for mode in ServingMode}
    every = [pair for pairs in tried.values() for pair in pairs]
    if not every:
        prove(plan, seed=seed)  # says why not
    held = [each for _, each in every if each.proven]
    best = _first(plan, held) or min((each for _, each in every), key=lambda each: _value(each.design))
    apart = _first(plan, [each for each in held if each.design.mode != best.design.mode])
    other = None if apart is None else apart.design
    gain = math.inf if other is None else _value(other) / _value(best.design)
    rest = [each.design for each in held if each is not best and each.design is not other]
    later = [each for each in plan.runners_up if all(each is not planned for planned, _ in every)]
    rest += [each for each in later if _value(each) >= _value(best.design)]  # no simulation of a cheaper one holds
    runners = sorted([*([] if other is None else [other]), *sorted(rest, key=_value)[: RUNNERS_UP - 1]], key=_value)
    cheapest = min((each.design for each in held), key=_value, default=best.design)
    told = replace(plan, best=best.design, other=other, gain=gain, runners_up=tuple(runners), cheapest=cheapest)
    return told, best


def _first(plan: Plan, proofs: Sequence[Proof]) -> Proof | None:
    """The answer among proven designs, as among planned ones (``ranking.answer_of``)."""
    if not proofs:
        return None
    of = {id(each.design): each for each in proofs}
    order = sorted((each.design for each in proofs), key=partial(standing, prices=plan.cases[0].prices))
    return of[id(answer_of(order, _value, near_of(plan.cases[0])))]


def _tried(plan: Plan, mode: ServingMode, seed: int) -> list[tuple[Design, Proof]]:
    """Designs of a mode with their proofs, until none of the others could be the answer.

    One whose layouts were run can be, up to ``SIMPLER`` times the cost of the cheapest.
    """
    designs = [each for each in (plan.best, plan.other, *plan.runners_up) if each is not None]
    if plan.size.rate is not None:
        designs += [each for case in plan.cases for each in designs_at(case, plan.size.rate)]
    found: list[tuple[Design, Proof]] = []
    least = least_run = math.inf
    for design in sorted((each for each in dict.fromkeys(designs) if each.mode == mode), key=_value):
        if len(found) == MOST_PROVEN:
            break
        known = was_run(design)
        if _value(design) >= (min(SIMPLER * least, least_run) if known else least):
            continue
        try:
            proof = prove(plan, design, seed=seed)
        except InfeasibleError:  # the simulator sees no request that could keep its limits
            continue
        found.append((design, proof))
        if proof.proven:
            least = min(least, _value(proof.design))
            least_run = min(least_run, _value(proof.design)) if known else least_run
    return found


def _value(design: Design) -> float:
    """Cost of the work, in the unit of the objective times seconds a request."""
    return design.cost / design.rate
