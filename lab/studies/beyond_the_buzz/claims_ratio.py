"""Test C11-C15 and C30: the ratio of prefill to decode GPUs, and the loss of a fixed ratio."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from disagg_sim.serving.points import THROUGHPUT
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    HIGH,
    LARGE,
    LOW,
    MIDDLE,
    R1,
    SAME_TIME,
    SMALL,
    Evidence,
    Front,
    largest_rise,
    listed,
    shared,
)
from lab.studies.claims import Finding

RATIO = "ctx_gen_gpu_ratio"
MODELS = (R1, LARGE, MIDDLE, SMALL)  # by the ratio that the paper reads, largest first
LOOSE_READINGS = {R1: 3.64, LARGE: 2.07, MIDDLE: 0.95, SMALL: 0.4}  # figure 9 at the loose end [1]
SWITCHED = "bf16_attention_fig09"
FIXED = ("0.5", "3.5")  # figure 10 [1]
CAPS = (16, 32, 72, 144, 576)  # GPUs of a deployment [1]


@TEXT.claim("C11")
def c11_ratio_falls(evidence: Evidence) -> Finding:
    """Figure 9: the ratio never rises by more than a tenth."""
    rises, own = {}, {}
    for model in MODELS:
        front = evidence.front("fig09", model=model)
        low, high = shared(front)
        ratio = front.column(RATIO)
        inside = (front.x >= low) & (front.x <= high)
        rises[model], own[model] = largest_rise(ratio[inside]), largest_rise(ratio)
    note = f"ratio over the lowest before it, within {LOW:.0f}-{HIGH:.0f} tokens/s/user; whole frontiers: {listed(own)}"
    return Finding(listed(rises), all(rise <= 1.1 for rise in rises.values()), note)


@TEXT.claim("C12")
def c12_spread(evidence: Evidence) -> Finding:
    """Figure 9: loose over tight ratio, by model."""
    spread = _over_models(evidence, _spread)
    first, *_, last = spread.values()
    fronts = {model: evidence.front("fig09", model=model) for model in MODELS}
    ratios = {model: front.column(RATIO) for model, front in fronts.items()}
    own = {model: float(ratio.max() / ratio.min()) for model, ratio in ratios.items()}
    reach = {model: HIGH / float(front.x[-1]) for model, front in fronts.items()}
    switches = {
        "bf16 attention": _over_models(evidence, _spread, sweep=SWITCHED),
        "MLA chunks naive": {R1: _spread(evidence.naive_pools())},
    }
    note = (
        f"from {LOW:.0f} to {HIGH:.0f} tokens/s/user; whole frontiers, down to one request an instance: {listed(own)}; "
        + "; ".join(f"{name}: {listed(values)}" for name, values in switches.items())
        + f". From {LOW:.0f} to the same share of each model's own reach as {HIGH:.0f} is of R1's: "
        + f"{listed(_spread_by_reach(fronts))}; {HIGH:.0f} tokens/s/user as a share of each reach: {listed(reach)}"
    )
    return Finding(listed(spread), _falling(spread) and first >= 10 and last <= 2, note)


@TEXT.claim("C13")
def c13_loose_end(evidence: Evidence) -> Finding:
    """Figure 9: the ratio at the loose end, by model."""
    loose = _over_models(evidence, _loose)
    near = {model: loose[model] / reading for model, reading in LOOSE_READINGS.items()}
    own = {model: float(evidence.front("fig09", model=model).column(RATIO)[0]) for model in MODELS}
    switches = {
        "bf16 attention": _over_models(evidence, _loose, sweep=SWITCHED),
        "MLA chunks naive": {R1: _loose(evidence.naive_pools())},
    }
    spans = "; ".join(f"{model} {evidence.front('fig09', model=model).span}" for model in MODELS)
    note = (
        f"at {LOW:.0f} tokens/s/user or where the curve begins; over the paper's reading: {listed(near, '.2f')}; own "
        f"loose ends: {listed(own)}, own ranges {spans}; "
        + "; ".join(f"{name}: {listed(values)}" for name, values in switches.items())
    )
    return Finding(*loose_ends(evidence), note)


def loose_ends(evidence: Evidence, sweep: str = "fig09") -> tuple[str, bool]:
    """The ratios of C13 in a sweep, and whether they are near the paper's, in its order."""
    loose = _over_models(evidence, _loose, sweep=sweep)
    near = all(1 / 3 <= ratio / LOOSE_READINGS[model] <= 3 for model, ratio in loose.items())
    return listed(loose), _falling(loose) and near


@TEXT.claim("C14")
def c14_fixed_ratios(evidence: Evidence) -> Finding:
    """Figure 10: what 0.5 loses at the loose end and 3.5 at the tight end."""
    best, small, large = (_fixed(evidence, ratio) for ratio in ("optimal", *FIXED))
    low, high = shared(best, small, large)
    least = min(best.least_over(front) for front in (small, large))
    loss_small = 1 - float(small.throughput(low) / best.throughput(low))
    loss_large = 1 - float(large.throughput(high) / best.throughput(high))
    expected = [1 - closed_form(q, float(best.at(RATIO, x))) for q, x in ((0.5, low), (3.5, high))]
    own = [1 - float(f.throughput(x) / best.throughput(x)) for f, x in ((small, best.x[0]), (large, large.x[-1]))]
    note = (
        f"at {low:.0f} and {high:.0f} tokens/s/user, where the best ratio is {best.at(RATIO, low):.2f} and "
        f"{best.at(RATIO, high):.2f} and the closed form of C15 gives {expected[0]:.2f} and {expected[1]:.2f}; at the "
        f"ends of the curves ({best.span}): {own[0]:.2f} and {own[1]:.2f}; optimal over fixed, smallest: {least:.6f}"
    )
    holds = least >= 1 - SAME_TIME and loss_small >= 0.4 and loss_large >= 0.6
    return Finding(f"0.5 loses {loss_small:.2f}, 3.5 loses {loss_large:.2f}", bool(holds), note)


def closed_form(q: float, r: float) -> float:
    """Throughput at the fixed ratio ``q`` over that at the best, ``r`` = R/P, of one pair of configurations. [1]"""
    return min(q, r) / r * (1 + r) / (1 + q)


@TEXT.claim("C15")
def c15_closed_form(evidence: Evidence) -> Finding:
    """Figure 10 against the closed form, at every point of the optimal frontier in the range."""
    best = _fixed(evidence, "optimal")
    p = best.column("prefill_request_rate_per_s") / best.column("prefill_gpus")
    r = best.column("decode_request_rate_per_s") / best.column("decode_gpus")
    errors, whole = [], []
    for text in FIXED:
        fixed = _fixed(evidence, text)
        form = np.array([closed_form(float(text), value) for value in r / p])
        error = np.abs(fixed.throughput(best.x) / best.column(THROUGHPUT) / form - 1)
        low, high = shared(best, fixed)
        errors.append(error[(best.x >= low) & (best.x <= high)])
        whole.append(error[best.x <= fixed.x[-1]])
    largest, everywhere = float(max(e.max() for e in errors)), np.concatenate(whole)
    note = (
        f"{sum(e.size for e in errors)} points within {LOW:.0f}-{HIGH:.0f} tokens/s/user, R/P of the matched pair of "
        f"each; over the whole curves: median {np.median(everywhere):.3f}, largest {everywhere.max():.3f}. The form "
        "speaks of one pair of configurations; the search may take another pair that suits a fixed ratio better"
    )
    return Finding(f"largest error {largest:.3f}", largest <= 0.05, note)


@TEXT.claim("C30")
def c30_few_gpus(evidence: Evidence) -> Finding:
    """Caps on the GPUs of a deployment, 16 to 576."""
    fronts = [evidence.front("gpu_cap", gpu_cap=cap) for cap in CAPS]
    least = min(many.least_over(few) for few, many in pairwise(fronts))
    losses = {}
    for cap, few in zip(CAPS[:-1], fronts[:-1], strict=True):
        x = np.geomspace(*shared(fronts[-1], few), 200)
        losses[cap] = float(np.max(1 - few.throughput(x) / fronts[-1].throughput(x)))
    value = "largest loss against 576: " + ", ".join(f"{cap} GPUs {loss:.2f}" for cap, loss in losses.items())
    note = (
        f"R1 16384/2048, within {LOW:.0f}-{HIGH:.0f} tokens/s/user or the reach of the smaller; smallest ratio of a "
        f"cap to the next smaller one, anywhere: {least:.9f}; own ranges: "
        + "; ".join(f"{cap} GPUs {front.span}" for cap, front in zip(CAPS, fronts, strict=True))
    )
    return Finding(value, least >= 1 - SAME_TIME and max(losses.values()) > 0, note)


def _over_models(evidence: Evidence, measure: Callable[[Front], float], *, sweep: str = "fig09") -> dict[str, float]:
    """A number of every model's frontier."""
    return {model: measure(evidence.front(sweep, model=model)) for model in MODELS}


def _loose(front: Front) -> float:
    return float(front.at(RATIO, LOW))


def _spread(front: Front) -> float:
    low, high = shared(front)
    return float(front.at(RATIO, low) / front.at(RATIO, high))


def _spread_by_reach(fronts: dict[str, Front]) -> dict[str, float]:
    """Spread up to the share of each model's largest interactivity that ``HIGH`` is of R1's. [1]"""
    share = HIGH / fronts[R1].x[-1]
    return {model: float(f.at(RATIO, LOW) / f.at(RATIO, share * f.x[-1])) for model, f in fronts.items()}


def _falling(values: dict[str, float]) -> bool:
    return bool(np.all(np.diff(list(values.values())) < 0))


def _fixed(evidence: Evidence, ratio: str) -> Front:
    return evidence.front("fig10", ctx_gen_ratio=ratio)
