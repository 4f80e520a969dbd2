"""Test C1-C4, C16 and C17: gains of disaggregation and of a larger NVLink domain."""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.serving.gains import Gain, gain, pointwise_gain
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    DOMAIN,
    HIGH,
    LARGE,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    SAME_TIME,
    SMALL,
    Evidence,
    Front,
    listed,
    shared,
)
from lab.studies.claims import Finding

LITTLE = (0.9, 1.25)  # an area ratio, or G near 1, that counts as little gain [1]
IN_DOMAIN = (R1, MIDDLE)  # models of figure 11
SMALL_DOMAIN = 8  # GPUs [1]
FIGURE_8 = ((16_384, 2048), (16_384, 16_384), (2048, 2048), (2048, 16_384))


def gain_of(fronts: tuple[Front, Front], *, own: bool = False) -> Gain:
    """Disaggregated over co-located on a log axis, in 20-100 tokens/s/user or in the range that both reach."""
    ours, theirs = fronts
    limits = {} if own else {"low": LOW, "high": HIGH}
    return gain(ours.curve, theirs.curve, axis="log", **limits)


def prefill_share(evidence: Evidence, sweep: str, x: float, **where: object) -> float:
    """Share of a co-located cycle that goes to prefill, at interactivity ``x``: X/p, from 1/X = 1/p + 1/r. [1]"""
    front = evidence.front(sweep, modes=("colocated",), **where)
    return float(front.at("request_rate_per_s", x) / front.at("prefill_request_rate_per_s", x))


@TEXT.claim("C1")
def c1_prefill_heavy(evidence: Evidence) -> Finding:
    """Figure 8: the area ratio of prefill-heavy traffic leads."""
    fronts = {f"{isl}/{osl}": evidence.both("fig08", isl=isl, osl=osl) for isl, osl in FIGURE_8}
    areas = {name: gain_of(pair, own=True).area_ratio for name, pair in fronts.items()}
    inside = {name: gain_of(pair).area_ratio for name, pair in fronts.items()}
    first, _, even, last = areas.values()
    share = {f"{i}/{o}": prefill_share(evidence, "fig08", 50.0, isl=i, osl=o) for i, o in FIGURE_8}
    note = (
        f"A on a log axis over the range that both reach; over {LOW:.0f}-{HIGH:.0f}: {listed(inside)}; share of a "
        f"co-located cycle in prefill at 50 tokens/s/user, what disaggregation can give back: {listed(share, '.2f')}"
    )
    return Finding(listed(areas), first > even and first > last and first >= 1.15 * last, note)


@TEXT.claim("C2")
def c2_model_size(evidence: Evidence) -> Finding:
    """Figure 7: the area ratio grows with the model."""
    fronts = {name: evidence.both("fig07", model=name) for name in (SMALL, MIDDLE, LARGE)}
    areas = {name: gain_of(pair).area_ratio for name, pair in fronts.items()}
    own = {name: gain_of(pair, own=True) for name, pair in fronts.items()}
    spans = "; ".join(f"{name} {g.area_ratio:.3g} over {g.low:.0f}-{g.high:.0f}" for name, g in own.items())
    small, middle, large = areas.values()
    share = {name: prefill_share(evidence, "fig07", 50.0, model=name) for name in fronts}
    note = f"own ranges: {spans}; share of a co-located cycle in prefill at 50 tokens/s/user: {listed(share, '.2f')}"
    return Finding(listed(areas), small < middle < large, note)


@TEXT.claim("C3")
def c3_little_gain(evidence: Evidence) -> Finding:
    """Figures 7 and 1: small models and generation-heavy traffic."""
    own, heavy_own = (gain_of(pair, own=True) for pair in _little_fronts(evidence).values())
    loose, tight = (prefill_share(evidence, "fig07", x, model=SMALL) for x in (LOW, own.high))
    note = (
        f"own ranges: {SMALL} {own.area_ratio:.3g} over {own.low:.0f}-{own.high:.0f} (4096 prompt tokens for 256 "
        f"output tokens: prefill takes {loose:.2f} of a co-located cycle at the loose end and {tight:.2f} at the tight "
        f"end), {R1} {heavy_own.area_ratio:.3g} over {heavy_own.low:.0f}-{heavy_own.high:.0f}"
    )
    return Finding(*little(evidence), note)


def little(evidence: Evidence, *, own: bool = False) -> tuple[str, bool]:
    """Area ratios of C3, and whether all are little gain."""
    areas = {name: gain_of(pair, own=own).area_ratio for name, pair in _little_fronts(evidence).items()}
    return listed(areas), all(LITTLE[0] <= area <= LITTLE[1] for area in areas.values())


def _little_fronts(evidence: Evidence) -> dict[str, tuple[Front, Front]]:
    return {
        f"{SMALL} 4096/256": evidence.both("fig07", model=SMALL),
        f"{R1} 1024/32768": evidence.both("fig01", isl=1024, osl=32_768),
    }


@TEXT.claim("C4")
def c4_medium_latency(evidence: Evidence) -> Finding:
    """Figure 6: G is largest inside the range, and near 1 at its ends."""
    values, notes, holds = [], [], True
    for model in (R1, MIDDLE):
        fronts = evidence.both("fig06", model=model, isl=LONG_PROMPTS[0])
        low, high = shared(*fronts)
        best = gain_of(fronts)
        loose, tight = (_mean_gain(fronts, *ends) for ends in _tenths(low, high))
        holds &= low < best.largest_at < high and all(LITTLE[0] <= end <= LITTLE[1] for end in (loose, tight))
        values.append(f"{model} {best.largest:.3g} at {best.largest_at:.0f}, ends {loose:.3g} and {tight:.3g}")
        whole = gain_of(fronts, own=True)
        ends = [_mean_gain(fronts, *each) for each in _tenths(whole.low, whole.high)]
        widest = (float(min(front.x[0] for front in fronts)), float(min(front.x[-1] for front in fronts)))
        widest_ends = [_mean_gain(fronts, *each) for each in _tenths(*widest)]
        share = prefill_share(evidence, "fig06", low, model=model)
        notes.append(
            f"{model} over its own {whole.low:.0f}-{whole.high:.0f}: {whole.largest:.3g} at {whole.largest_at:.0f}, "
            f"ends {ends[0]:.3g} and {ends[1]:.3g}; prefill takes {share:.2f} of a co-located cycle at {low:.0f}; from "
            f"{widest[0]:.1f}, where the first of the two curves begins, to {widest[1]:.0f} the ends are "
            f"{widest_ends[0]:.2f} and {widest_ends[1]:.2f}"
        )
    return Finding("; ".join(values), holds, f"near 1 read as {LITTLE[0]}-{LITTLE[1]}; " + "; ".join(notes))


def _tenths(low: float, high: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """The loosest and the tightest tenth of a range on a log axis. [token/s]"""
    step = (high / low) ** 0.1
    return (low, low * step), (high / step, high)


def _mean_gain(fronts: tuple[Front, Front], low: float, high: float) -> float:
    """Mean of G over a range on a log axis. [1]"""
    x = np.geomspace(low, high * (1 - 1e-12), 50)
    return float(np.mean(pointwise_gain(fronts[0].curve, fronts[1].curve, x)))


@TEXT.claim("C16")
def c16_never_worse(evidence: Evidence) -> Finding:
    """Figure 11: 72 over 8 GPUs a domain, at every point of the smaller one, and somewhere above it."""
    least, gains, notes = {}, {}, []
    for model in IN_DOMAIN:
        large, small = _domains(evidence, model)
        least[model] = large.least_over(small)
        gains[model] = bool((large.column("tokens_per_s_per_gpu") > small.throughput(large.x)).any())
        notes.append(f"{model} {large.x[-1]:.0f} against {small.x[-1]:.0f}")
    value = "; ".join(f"{model} smallest ratio {ratio:.9f}" for model, ratio in least.items())
    holds = all(ratio >= 1 - SAME_TIME for ratio in least.values()) and all(gains.values())
    largest = "; ".join(f"{model} {_domain_gain(evidence, model).largest:.3g}" for model in IN_DOMAIN)
    reach = "; ".join(notes)
    note = f"largest ratio where both reach: {largest}; reach with 72 and with 8 GPUs in tokens/s/user: {reach}"
    return Finding(value, holds, note)


@TEXT.claim("C17")
def c17_where(evidence: Evidence) -> Finding:
    """Figure 11: where along the curve the larger domain gains most."""
    places, notes = {}, []
    for model in IN_DOMAIN:
        found = _domain_gain(evidence, model)
        places[model] = _place(found)
        switched = _domain_gain(evidence, model, "bf16_attention_fig11")
        near = gain(*(front.curve for front in _domains(evidence, model)), low=LOW, high=HIGH)
        reach = [front.x[-1] for front in _domains(evidence, model)]
        notes.append(
            f"{model} gains {found.largest:.3g} at {found.largest_at:.0f} of {found.low:.0f}-{found.high:.0f} "
            f"tokens/s/user (bf16 attention {switched.largest:.3g} at {switched.largest_at:.0f}, place "
            f"{_place(switched):.2f}; within {LOW:.0f}-{HIGH:.0f}: {near.largest:.3g} at {near.largest_at:.0f}) and "
            f"reaches {reach[0]:.0f} in place of {reach[1]:.0f}"
        )
    holds = 0.25 <= places[R1] <= 0.75 and places[MIDDLE] >= 0.5
    value = "; ".join(f"{model} {place:.2f}" for model, place in places.items())
    return Finding(value, holds, "0 = loosest, 1 = tightest of the shared range on a log axis; " + "; ".join(notes))


def _domains(evidence: Evidence, model: str, sweep: str = "fig11") -> tuple[Front, Front]:
    return (
        evidence.front(sweep, model=model, nvlink_domain=DOMAIN),
        evidence.front(sweep, model=model, nvlink_domain=SMALL_DOMAIN),
    )


def _domain_gain(evidence: Evidence, model: str, sweep: str = "fig11") -> Gain:
    large, small = _domains(evidence, model, sweep)
    return gain(large.curve, small.curve)


def _place(found: Gain) -> float:
    """Place of the largest gain in its range on a log axis. [1]"""
    return math.log(found.largest_at / found.low) / math.log(found.high / found.low)
