"""C1-C4: how much disaggregation gains over the best co-located mode, and where."""

from __future__ import annotations

import numpy as np

from disagg_sim.serving.gains import Gain, gain, pointwise_gain
from disagg_sim.study.beyond_the_buzz.evidence import (
    HIGH,
    LARGE,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    SMALL,
    Evidence,
    Finding,
    Front,
    listed,
    shared,
)

LITTLE = (0.9, 1.25)  # an area ratio, or G near 1, that counts as little gain [1]
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


def c3_little_gain(evidence: Evidence) -> Finding:
    """Figures 7 and 1: small models and generation-heavy traffic."""
    small, heavy = evidence.both("fig07", model=SMALL), evidence.both("fig01", isl=1024, osl=32_768)
    areas = {f"{SMALL} 4096/256": gain_of(small).area_ratio, f"{R1} 1024/32768": gain_of(heavy).area_ratio}
    own, heavy_own = gain_of(small, own=True), gain_of(heavy, own=True)
    loose, tight = (prefill_share(evidence, "fig07", x, model=SMALL) for x in (LOW, own.high))
    note = (
        f"own ranges: {SMALL} {own.area_ratio:.3g} over {own.low:.0f}-{own.high:.0f} (4096 prompt tokens for 256 "
        f"output tokens: prefill takes {loose:.2f} of a co-located cycle at the loose end and {tight:.2f} at the tight "
        f"end), {R1} {heavy_own.area_ratio:.3g} over {heavy_own.low:.0f}-{heavy_own.high:.0f}"
    )
    return Finding(listed(areas), all(LITTLE[0] <= area <= LITTLE[1] for area in areas.values()), note)


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
