r"""Compute how sure a plan is: the probability that its mode is the better one, bands, and evidence for its times.

Error bars are those of frontiers (``certainty.error_bars``): designs near the TPOT limit, timed with factors drawn for
every operator and engine, the same for both modes. Frontiers have neither queues nor whole instances, so each sample
keeps the ratio of the plan's gain to that of the frontiers at nominal times:

.. math:: g_s = \frac{D_s(x)}{C_s(x)} \cdot \frac{g}{D(x)/C(x)}

with the throughput D of disaggregated and C of co-located serving at the interactivity x of the limit, in a sample s or
at nominal times, and the gain g of the plan.

Closed forms of queues and whole instances err, too. Simulations of plans say by how much: the logarithm of the gain is
off by a normal error of mean :math:`\mu_g` and s.d. :math:`\sigma_g` (``GAIN_ERROR``), that of the rate that a
deployment serves within the limits by :math:`\mu_r`, :math:`\sigma_r` (``RATE_ERROR``). So

.. math:: P(\text{better}) = \operatorname{mean}_s \Phi\left(\frac{\ln g_s + \mu_g}{\sigma_g}\right), \qquad
          P(\text{holds}) = \operatorname{mean}_s \Phi\left(\frac{\ln (K_s/r) + \mu_r}{\sigma_r}\right)

with the rate r and the highest rate K_s at which the planned instances keep the limits in a sample. Where a pass of
prefill takes a_s times its forecast and a step b_s times, time in the pool is stretched by that factor: waits for
prefill at the rate r are a_s times those at the rate a_s r with nominal times. The time of a request outside its pass
(HTTP, tokenising, scheduling) exceeds its forecast h by e_s seconds, whatever the load. So

.. math:: K_s = \min\left(\frac{1}{a_s} K\left(h + \frac{L_{TTFT} - h - e_s}{a_s}, \infty\right),\;
          \frac{1}{b_s} K(\infty, L_{TPOT}/b_s)\right)

where K has the queues of the plan (``Design.keeping``). For co-located instances the factor q_s of their throughput
replaces 1/a_s and 1/b_s. The probability that one limit holds uses the term of that limit alone.

Encoding takes c_s times its forecast E, which nobody has measured: the budget of TTFT is less by :math:`(c_s - a_s) E`,
and encoders serve at most 1/c_s of what they do as planned. The hand-over H to decode is of decode steps, b_s times as
long, and of the transfer of a cache, whose spread is ``kv_transfer``: it takes :math:`H_s - a_s H` off.

TTFT at the percentile of its limit is a sum of causes, each with a band in seconds from its own samples (``causes``);
the band of the whole is that of the sums. The queue is that at the rate :math:`a_s r` with the error of rates; it has
no end at a rate that the deployment serves within no limits. So the band ends above the limit where the probability
that TTFT holds is below 90 %.

Past 400 lines: the samples of a plan, its odds and the causes of its TTFT share their factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Mask
from disagg_sim.certainty.error_bars import Uncertainty, assumed_factor, kv_factor, uncertainty
from disagg_sim.certainty.rows import Origin
from disagg_sim.certainty.trust import Shares, added
from disagg_sim.choices import MOST_HEADROOM
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.candidates import Candidates
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.kv_links import hand_over, transfer_between
from disagg_sim.planning.limits import NO_LIMIT
from disagg_sim.planning.pool_evidence import PoolEvidence, evidence_of
from disagg_sim.planning.pools import AnyChoice, ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.sizing import ALONE
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT

#: Samples of the factors. [1]
SAMPLES = 400
#: Ends of a band: 80 % of the samples lie between them. [1]
ENDS = (0.1, 0.9)
#: Quantiles of a forecast's error that bands include. [1]
FACTOR_SHARES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
_NORMAL = NormalDist()
#: Interactivity of the designs that are sampled, over that of the TPOT limit: from, to. [1]
NEAR = (0.75, 1.8)
#: Most GPUs of a matched pair of pools in the sampled frontiers; the gain of the plan has counts of its own. [1]
MATCHED = 4096


class Error(NamedTuple):
    """Normal error of the logarithm of a forecast."""

    mean: float  # of simulated over planned [1]
    deviation: float  # [1]


#: Errors of the gain and of the rate of plans: simulated over planned gains, and planned GPUs over those that keep the
#: limits in simulation, from the first 60 questions of ``benchmarks/plan_outcomes.py`` (2026-11-28), tested on the
#: other 60 (fidelity page). Their means are below a standard error, and taken as 0. [1]
GAIN_ERROR, RATE_ERROR = Error(0.0, 0.13), Error(0.0, 0.12)
EXACT = Error(0.0, 0.0)
#: Rounds in which a plan grows until it is sure enough, and the relative width of the search for its size. [1]
ROUNDS, NARROW = 5, 1e-3

#: Groups of equally many samples with similar latencies, each of which gets one rate. [1]
GROUPS = 20

Band = tuple[float, float]
#: Passes and steps that no popularity of experts moves. [1]
NO_TEXT: tuple[Band, Band] = ((1.0, 1.0), (1.0, 1.0))


class Cause(NamedTuple):
    """Part of TTFT at the percentile of its limit."""

    cause: str  # "engine", "encoding", "pass", "queue", "transfer" or "decode steps"
    forecast: float  # [s]
    band: Band  # [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assurance:
    """How sure a plan is; bands hold 80 % of the samples."""

    probability: float  # that the mode of the plan is the better one; NaN without another mode [1]
    gain: Band  # of the planned mode over the other [1]
    holds: float  # probability that both limits hold at the planned rate [1]
    ttft_holds: float  # probability that the TTFT limit holds, with its load on the pool [1]
    tpot_holds: float  # probability that the TPOT limit holds, with its load on the pool [1]
    within_reach: float  # the most that more instances make of ``holds``: requests alone keep both limits [1]
    most: float  # highest rate of the same GPUs within the limits, as forecast, over the planned rate [1]
    capacity: Band  # the same with the error bars [1]
    ttft: Band  # time of a pass of prefill over its forecast [1]
    beside: Band  # time of a request before its first token outside its pass: HTTP, tokenising, scheduling [s]
    tpot: Band  # time of a step over its forecast [1]
    encoding: Band  # time of encoding over its forecast; NaN without an encode pool [1]
    ttft_s: Band  # TTFT at the percentile of its limit, queue included [s]
    ttft_causes: tuple[Cause, ...]  # whose times add up to it
    text: tuple[Band, Band]  # pass and step with the least and the most skewed experts of text, over their forecast [1]
    pools: tuple[PoolEvidence, ...]
    throughput: Shares  # GPU time of all pools by trust label [1]


def assurance(plan: Plan) -> Assurance:
    """Compute how sure a plan is.

    Returns probabilities [1], bands as factors [1], evidence of every pool.
    """
    best = plan.best
    if best is None:
        raise InputError(f"the plan has no design: {plan.infeasible}")
    gains, own = np.zeros(0), _own(plan)
    if plan.other is not None:
        limits = plan.work.ttft.seconds, plan.work.tpot.seconds
        at = {each.mode: each for each in (best, plan.other)}
        tables = [table for mode, design in at.items() for table in _points(plan, plan.case_of(design), mode, limits)]
        gains = _gains(plan, _sampled(plan, tables), 1.0 / limits[1]) if tables else gains
    most, kept, causes = best.capacity / best.rate, own.kept(best), own.causes(best, RATE_ERROR)
    planned = OwnTimes(np.ones(1), np.ones(1), np.ones(1), np.zeros(1)).causes(best) if causes else {}
    step, first = ((float(low), float(high)) for low, high in own.text)
    pools = tuple(evidence_of(plan, pool) for pool in best.pools)
    return Assurance(
        probability=_chance(gains, GAIN_ERROR),
        gain=_band(_spread(gains, GAIN_ERROR)),
        holds=_chance(np.minimum(*kept), RATE_ERROR),
        ttft_holds=_chance(kept[0], RATE_ERROR),
        tpot_holds=_chance(kept[1], RATE_ERROR),
        within_reach=_reach(np.minimum(*kept)),
        most=most,
        capacity=_band(_spread(np.minimum(*kept), RATE_ERROR)),
        ttft=_band(own.prefill),
        beside=_band(np.maximum(_host(best) + own.beside, 0.0)),
        tpot=_band(own.step),
        encoding=_band(np.zeros(0) if best.encode is None else own.encoding),
        ttft_s=_band(sum(causes.values(), np.zeros(1)) if causes else np.zeros(0)),
        ttft_causes=tuple(Cause(name, float(planned[name].flat[0]), _band(each)) for name, each in causes.items()),
        text=(first, step),
        pools=pools,
        throughput=added([(pool.gpus, each.rests_on) for pool, each in zip(best.pools, pools, strict=True)]),
    )


def _points(plan: Plan, case: Candidates, mode: ServingMode, limits: tuple[float, float]) -> Iterator[pd.DataFrame]:
    """Yield the designs of one mode that may be the best near the limits of FTL and TTL [s]."""
    lengths, work, (first, slowest) = plan.work.lengths, plan.work, (limits[0], limits[1] / NEAR[0])
    try:
        if mode == ServingMode.COLOCATED:
            table = piggyback(case.at, _mappings(case.colocated), lengths, ftl_limit=first, ttl_limit=slowest)
        else:
            prefill, decode = case.across
            sizes = np.unique([int(each.batch[-1]) for each in prefill])
            chunks = np.unique([int(each.mapping.chunk_tokens) for each in prefill])
            table = disaggregated(
                prefill_grid(case.prefill_at, _mappings(prefill), lengths, batch=sizes, chunk_tokens=chunks),
                decode_grid(case.at, _mappings(decode), lengths),
                ftl_limit=first,
                ttl_limit=slowest,
                gpu_cap=MATCHED,
            )
    except InfeasibleError:
        return
    if table.empty:
        return
    fast = table[INTERACTIVITY] * work.tpot.seconds
    fast /= max(fast.min(), 1.0)  # where all designs are faster than the limit, take those near the slowest
    near = (fast >= NEAR[0]) & (fast <= NEAR[1])
    away = np.abs(np.log(fast))
    yield table[near if near.any() else away == away.min()]  # where none is near the limit, take the nearest


def _mappings(choices: Iterable[AnyChoice]) -> list[Sharding]:
    """List the mappings of choices without their chunk sizes, each once."""
    return list(dict.fromkeys(replace(choice.mapping, chunk_tokens=0) for choice in choices))


def _sampled(plan: Plan, tables: list[pd.DataFrame]) -> Uncertainty:
    systems = {spec.name: spec for case in plan.cases for spec in (case.at.system, case.prefill_at.system)}
    model = plan.cases[0].at.model
    engines = {
        each.overheads.name: each.overheads for each in (case.at for case in plan.cases) if each.overheads is not None
    }
    origin = Origin(systems=systems, models={model.name: model}, engines=engines, lengths=plan.work.lengths)
    return uncertainty(pd.concat(tables, ignore_index=True), samples=SAMPLES, origin=origin)


def _best(found: Uncertainty, mine: Mask, limit: float) -> tuple[Floats, float]:
    """Find the best throughput of some rows at an interactivity, in every sample and at nominal times. [token/s]"""
    x, y = 1.0 / found.ttl[mine], found.throughput[mine]
    sampled = np.array([float(best_from(x[:, s], y[:, s], limit)) for s in range(x.shape[1])])
    points = found.points[mine]
    return sampled, float(best_from(points[INTERACTIVITY], points[THROUGHPUT], limit))


def _gains(plan: Plan, found: Uncertainty, limit: float) -> Floats:
    """Find the gain of the planned mode in every sample; empty where a mode has no throughput at the limit. [1]"""
    assert plan.best is not None
    split = found.points["mode"].astype(str) == ServingMode.DISAGGREGATED
    mine = np.asarray(split == (plan.best.mode == ServingMode.DISAGGREGATED))
    (own, nominal), (others, nominal_other) = _best(found, mine, limit), _best(found, ~mine, limit)
    if not (nominal > 0 and nominal_other > 0):
        return np.zeros(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = own / others * (plan.gain * nominal_other / nominal)
    return np.asarray(gain[~np.isnan(gain)])


class OwnTimes(NamedTuple):
    """Sampled times and throughput of a plan's best design over their forecasts, (samples,); empty without samples."""

    prefill: Floats  # time of a pass of prefill [1]
    step: Floats  # time of a step [1]
    throughput: Floats  # [1]
    beside: Floats  # time of a request before its first token outside its pass, less its forecast [s]
    encoding: Floats = np.ones(1)  # time of encoding [1]
    transfer: Floats = np.ones(1)  # time of the transfer of a cache [1]
    text: Floats = np.ones((2, 2))  # step and pass with the least and the most skewed experts of text [1]

    def kept(self, design: Design) -> tuple[Floats, Floats]:
        """Find the highest rates, over the planned one, at which TTFT and TPOT keep their limits, (samples,). [1]"""
        work, host, shared = design.work, _host(design), design.mode == ServingMode.COLOCATED
        design = _apart(design)

        def of(limits: Floats, keeping: Callable[[float], float], slower: Floats) -> Floats:
            rates = np.zeros(limits.size)
            for alike in filter(len, np.array_split(np.argsort(limits), GROUPS)):
                rates[alike] = keeping(float(np.median(limits[alike])))
            return np.asarray((self.throughput if shared else 1.0 / slower) * rates / design.rate)

        steps, moved, whole = self._handed(design.first, design.pools[-1], work.ttft.share)
        apart, most = steps + moved - self.prefill * whole, math.inf
        if (encode := design.encode) is not None:
            choice, gpus = encode
            apart = apart + choice.alone_s * (self.encoding - self.prefill)
            most = gpus / (choice.step.each_s * design.rate)
        left = host + np.maximum(work.ttft.seconds - host - self.beside - apart, 0.0) / self.prefill
        first = of(left, lambda limit: design.keeping(limit, math.inf), self.prefill)
        first = np.minimum(first, most / self.encoding)
        return first, of(work.tpot.seconds / self.step, lambda limit: design.keeping(math.inf, limit), self.step)

    def causes(self, design: Design, error: Error = EXACT) -> dict[str, Floats]:
        """Parts of TTFT at the percentile of its limit, (samples,) or (factors, samples) of an error of rates. [s]"""
        if not self.prefill.size:
            return {}
        design, share, shared = _apart(design), design.work.ttft.share, design.mode == ServingMode.COLOCATED
        rate, encode = design.rate_for(share), design.encode
        pool = design.first_at(rate)
        choice = pool.choice
        assert isinstance(choice, PrefillChoice | ColocatedChoice)
        steps, moved, whole = self._handed(pool, design.pools[-1], share)

        alone, off = choice.ttft(rate * ALONE, pool.instances, share) - choice.host - whole, 1.0
        if design.simulated is not None:  # what closed forms leave out is of others
            planned = replace(design, simulated=None).ttft[design.work.ttft.percentile]
            if not math.isfinite(planned):  # its queue is known at no other rate
                return {}
            off = design.ttft[design.work.ttft.percentile] / planned
        most, factors = design.keeping(math.inf, math.inf) / design.rate, np.unique(_spread(np.ones(1), error))
        busy = np.outer(factors, 1.0 / self.throughput if shared else self.prefill)
        queue, order = np.full(busy.size, math.inf), np.argsort(busy, axis=None)
        for alike in filter(len, np.array_split(order[: int(np.count_nonzero(busy <= most))], GROUPS)):
            waited = choice.ttft(rate * float(np.median(busy.flat[alike])), pool.instances, share)
            queue[alike] = max(off * waited - choice.host - whole - alone, 0.0)
        queue = queue.reshape(busy.shape)
        found = {"engine": np.maximum(choice.host + self.beside, 0.0)}
        if encode is not None:
            found["encoding"] = encode[0].alone_s * self.encoding
            alone -= encode[0].alone_s
            over = np.outer(factors, self.encoding) * encode[0].step.each_s * design.rate > encode[1]
            queue[over] = math.inf
        found |= {"pass": self.prefill * alone, "queue": self.prefill * queue}
        return found if shared else found | {"transfer": moved, "decode steps": steps}

    def _handed(self, first: PlannedPool, taker: PlannedPool, share: float) -> tuple[Floats, Floats, float]:
        """Decode steps of a hand-over that a share of them does not exceed, and what its transfer adds, (samples,);
        their forecast. [s]
        """
        sender, receiver = first.choice, taker.choice
        if not (isinstance(sender, PrefillChoice) and isinstance(receiver, DecodeChoice) and sender.link is not None):
            return 0.0 * self.step, 0.0 * self.step, 0.0
        time, ahead = transfer_between(sender, receiver), receiver.at.steps_ahead(receiver.mapping)
        alone, mean, whole = float(hand_over(0.0, 1.0, ahead)), sender.hand_over.mean, sender.hand_over.at(share)
        step = mean / alone
        if step < time:
            step = (mean - time) / float(hand_over(2.0, 1.0, ahead) - 2.0)
        steps = (whole - mean + alone * step) * self.step
        more = hand_over(time * self.transfer, step * self.step, ahead) - alone * step * self.step
        return steps, np.maximum(np.round(more, 12), 0.0), whole  # nothing within a step


def _apart(design: Design) -> Design:
    """Copy its choices, which keep what they know of a rate: no one else asks the rates of samples."""
    return replace(design, pools=tuple(replace(pool, choice=replace(pool.choice)) for pool in design.pools))


def _host(design: Design) -> float:
    """Forecast time of a request before its first token outside its pass. [s]"""
    first = design.first.choice
    assert isinstance(first, PrefillChoice | ColocatedChoice)
    return first.host


def _own(plan: Plan) -> OwnTimes:
    """Sample the frontier point that has the layouts of the best design and the step time nearest to its own."""
    best = plan.best
    assert best is not None
    if len(best.pools[-1].halves) > 1:  # which no frontier has
        return OwnTimes(*np.zeros((4, 0)))
    sides: list[Any] = [[pool.choice] for pool in (best.first, best.pools[-1])]
    alone = replace(plan.case_of(best), colocated=sides[0], across=(sides[0], sides[1]))
    work = best.work  # a limit that the design misses does not bound its own times
    held = (best.ttft, work.ttft), (best.tpot, work.tpot)
    first, later = (each if seen[each.percentile] <= each.seconds else NO_LIMIT for seen, each in held)
    if not (tables := list(_points(plan, alone, best.mode, (first.seconds, later.seconds)))):
        return OwnTimes(*np.zeros((4, 0)))
    found = _sampled(plan, tables)
    row = int(np.argmin(np.abs(np.log(found.points["ttl_s"].to_numpy(dtype=float) / best.tpot["p50"]))))
    samples = {"ftl_s": found.ftl, "ttl_s": found.ttl, THROUGHPUT: found.throughput}
    prefill, step, throughput = (values[row] / float(found.points[name].iloc[row]) for name, values in samples.items())
    drawn = assumed_factor("encode", SAMPLES), kv_factor(SAMPLES), found.text[row]
    return OwnTimes(prefill, step, throughput, found.beside[row], *drawn)


def _chance(values: Floats, error: Error) -> float:
    """Find the probability that a value is above 1, given the error of its logarithm; NaN without values. [1]"""
    if not values.size:
        return math.nan
    with np.errstate(divide="ignore"):
        scores = (np.log(values) + error.mean) / error.deviation
    return float(np.mean([_NORMAL.cdf(each) for each in scores]))


def _spread(values: Floats, error: Error) -> Floats:
    """Multiply every value by equally likely factors of its error. [1]"""
    scores = np.array([_NORMAL.inv_cdf(share) for share in FACTOR_SHARES])
    return np.outer(values, np.exp(error.mean + error.deviation * scores)).ravel()


def surer(plan: Plan, confidence: float | None) -> Plan:
    """Give a plan the least headroom with which its limits hold with a probability of at least ``confidence``.

    Takes ``confidence`` (None = return the plan unchanged [1]).
    """
    if confidence is None:
        return plan
    if any(case.further is not None and case.further.split is not None for case in plan.cases):
        raise InputError("confidence: attention and ffn pools have no error bars, as nobody has measured them")
    before = plan
    for _ in range(ROUNDS):
        if plan.best is None or plan.ask is None:
            return plan
        kept = np.minimum(*_own(plan).kept(plan.best))
        if not _reach(kept) > confidence:
            return plan
        if _chance(kept, RATE_ERROR) >= confidence:
            return _cheapest(before, plan, confidence)
        low, high = 1.0, 2.0
        while _chance(kept * high, RATE_ERROR) < confidence:
            high *= 2.0
        while high - low > NARROW:
            middle = (low + high) / 2
            low, high = (low, middle) if _chance(kept * middle, RATE_ERROR) >= confidence else (middle, high)
        before, plan = plan, _larger(plan, high)
    return plan


def _cheapest(unsure: Plan, sure: Plan, confidence: float) -> Plan:
    """Search the headroom between two plans: with more of it, a plan has other layouts, and may be surer than asked."""
    for _ in range(ROUNDS):
        if not _request_cost(unsure) < (1.0 - NARROW) * _request_cost(sure):
            break
        assert sure.ask is not None
        middle = math.sqrt((1.0 + unsure.options.headroom) * (1.0 + sure.options.headroom)) - 1.0
        tried = sure.ask(options=replace(sure.options, headroom=middle))
        if tried.best is None:
            break
        holds = _chance(np.minimum(*_own(tried).kept(tried.best)), RATE_ERROR) >= confidence
        if holds and _request_cost(tried) <= _request_cost(sure):
            sure = tried
        else:
            unsure = tried
    return sure


def _request_cost(plan: Plan) -> float:
    assert plan.best is not None
    return plan.best.cost / plan.best.rate


def _larger(plan: Plan, factor: float) -> Plan:
    """Plan with so much more headroom, or as much as it takes for an instance more: counts are whole. [1]"""
    assert plan.ask is not None, "a plan can be asked for again"
    step, found = factor, plan
    for _ in range(ROUNDS):
        headroom = min(step * (1.0 + plan.options.headroom) - 1.0, MOST_HEADROOM)
        found = plan.ask(options=replace(plan.options, headroom=headroom))
        if found.best is None or plan.size.gpus is not None or _counts(found) != _counts(plan):
            return found
        step += step - 1.0
    return found


def _counts(plan: Plan) -> list[tuple[Sharding, int, int]]:
    return [] if plan.best is None else [(pool.mapping, pool.batch, pool.instances) for pool in plan.best.pools]


def _reach(kept: Floats) -> float:
    """Find the share of samples in which requests that meet no other keep both limits; NaN without samples. [1]"""
    return float(np.mean(kept > 0)) if kept.size else math.nan


def _band(values: Floats) -> Band:
    if not values.size:
        return math.nan, math.nan
    low, high = np.quantile(values, ENDS, method="inverted_cdf")
    return float(low), float(high)
