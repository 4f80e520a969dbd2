"""Test C1-C4, C11-C17, C25-C27 and C30: gains of disaggregation, of larger domains and of piggybacking, and ratios."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.search.grid import decode_grid
from disagg_sim.serving.gains import COLOCATED, Gain, gain, pointwise_gain
from disagg_sim.serving.points import THROUGHPUT
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
    largest_rise,
    listed,
    shared,
    third,
)
from lab.studies.claims import Told, Ways

LITTLE = (0.9, 1.25)  # an area ratio, or G near 1, that counts as little gain [1]
IN_DOMAIN = (R1, MIDDLE)  # models of figure 11
SMALL_DOMAIN = 8  # GPUs [1]
PLACES = 201  # of interactivity, on a linear axis [1]
FIGURE_8 = ((16_384, 2048), (16_384, 16_384), (2048, 2048), (2048, 16_384))


def gain_of(fronts: tuple[Front, Front], *, own: bool = False) -> Gain:
    """Disaggregated over co-located on a log axis, in 20-100 tokens/s/user or in the range that both reach."""
    ours, theirs = fronts
    limits = {} if own else {"low": LOW, "high": HIGH}
    return gain(ours.curve, theirs.curve, axis="log", **limits)


@TEXT.claim("C1")
def c1_prefill_heavy(evidence: Evidence) -> Told:
    """Figure 8: the area ratio of prefill-heavy traffic leads, over the range that both curves reach."""
    areas = {f"{i}/{o}": gain_of(evidence.both("fig08", isl=i, osl=o), own=True).area_ratio for i, o in FIGURE_8}
    first, _, even, last = areas.values()
    share = {}  # X/p of a cycle, from 1/X = 1/p + 1/r
    for i, o in FIGURE_8:
        front = evidence.front("fig08", modes=("colocated",), isl=i, osl=o)
        x, p = (front.at(f"{phase}request_rate_per_s", 50.0) for phase in ("", "prefill_"))
        share[f"{i}/{o}"] = float(x / p)
    note = f"share of a co-located cycle in prefill at 50 tokens/s/user: {listed(share, '.2f')}"
    return listed(areas), first > even and first > last and first >= 1.15 * last, note


@TEXT.claim("C2")
def c2_model_size(evidence: Evidence) -> Told:
    """Figure 7: the area ratio grows with the model."""
    areas = {name: gain_of(evidence.both("fig07", model=name)).area_ratio for name in (SMALL, MIDDLE, LARGE)}
    small, middle, large = areas.values()
    return listed(areas), small < middle < large


@TEXT.claim("C3")
@TEXT.authors("C3", ways=Ways(False, True, "over the whole range that both curves reach"))
def c3_little_gain(evidence: Evidence, own: bool = False) -> Told:
    """Figures 7 and 1: area ratios of small models and of generation-heavy traffic."""
    fronts = {
        f"{SMALL} 4096/256": evidence.both("fig07", model=SMALL),
        f"{R1} 1024/32768": evidence.both("fig01", isl=1024, osl=32_768),
    }
    areas = {name: gain_of(pair, own=own).area_ratio for name, pair in fronts.items()}
    reached = gain_of(evidence.both("fig07", model=SMALL), own=True)
    note = f"own range of {SMALL}: {reached.low:.0f}-{reached.high:.0f} tokens/s/user"
    return listed(areas), all(LITTLE[0] <= area <= LITTLE[1] for area in areas.values()), note


@TEXT.claim("C4")
def c4_medium_latency(evidence: Evidence) -> Told:
    """Figure 6: G is largest inside the range, and near 1 in its loosest and its tightest tenth on a log axis."""
    values, holds = [], True
    for model in (R1, MIDDLE):
        fronts = evidence.both("fig06", model=model, isl=LONG_PROMPTS[0])
        low, high = shared(*fronts)
        step = (high / low) ** 0.1
        best = gain_of(fronts)
        ends = (np.geomspace(a, b * (1 - 1e-12), 50) for a, b in ((low, low * step), (high / step, high)))
        loose, tight = (float(pointwise_gain(fronts[0].curve, fronts[1].curve, x).mean()) for x in ends)
        holds &= low < best.largest_at < high and all(LITTLE[0] <= end <= LITTLE[1] for end in (loose, tight))
        values.append(f"{model} {best.largest:.3g} at {best.largest_at:.0f}, ends {loose:.3g} and {tight:.3g}")
    return "; ".join(values), holds


@TEXT.authors("C4")
def heights(evidence: Evidence) -> Told:
    """Figure 6: where whole curves lie furthest apart, relative to the peak, on its linear axis."""
    said, holds = [], True
    for model in (R1, MIDDLE):
        ours, theirs = evidence.both("fig06", model=model, isl=LONG_PROMPTS[0])
        x = np.linspace(max(ours.x[0], theirs.x[0]), min(ours.x[-1], theirs.x[-1]), PLACES)
        apart = (ours.throughput(x) - theirs.throughput(x)) / float(ours.throughput(x).max())
        best = int(apart.argmax())
        holds = holds and PLACES // 10 < best < PLACES - 1 - PLACES // 10
        said.append(
            f"{model} {apart[best]:.2f} at {x[best]:.0f} of {x[0]:.0f} to {x[-1]:.0f} tokens/s/user, {apart[0]:.2f} "
            f"and {apart[-1]:.2f} at the ends"
        )
    return f"difference over the peak: {'; '.join(said)}", holds


@TEXT.claim("C16")
def c16_never_worse(evidence: Evidence) -> Told:
    """Figure 11: 72 over 8 GPUs a domain, at every point of the smaller one, and somewhere above it."""
    least, gains = {}, {}
    for model in IN_DOMAIN:
        large, small = _domains(evidence, model)
        least[model] = large.least_over(small)
        gains[model] = bool((large.column("tokens_per_s_per_gpu") > small.throughput(large.x)).any())
    value = "; ".join(f"{model} smallest ratio {ratio:.9f}" for model, ratio in least.items())
    return value, all(ratio >= 1 - SAME_TIME for ratio in least.values()) and all(gains.values())


@TEXT.claim("C17")
def c17_where(evidence: Evidence) -> Told:
    """Figure 11: where along the curve the larger domain gains most, on a log axis of the shared range."""
    places, notes = {}, []
    for model in IN_DOMAIN:
        found = gain(*(front.curve for front in _domains(evidence, model)))
        places[model] = math.log(found.largest_at / found.low) / math.log(found.high / found.low)
        notes.append(
            f"{model} gains {found.largest:.3g} at {found.largest_at:.0f} of {found.low:.0f}-{found.high:.0f} "
            "tokens/s/user"
        )
    holds = 0.25 <= places[R1] <= 0.75 and places[MIDDLE] >= 0.5
    return "; ".join(f"{model} {place:.2f}" for model, place in places.items()), holds, "; ".join(notes)


def _domains(evidence: Evidence, model: str) -> tuple[Front, Front]:
    large, small = (evidence.front("fig11", model=model, nvlink_domain=size) for size in (DOMAIN, SMALL_DOMAIN))
    return large, small


RATIO = "ctx_gen_gpu_ratio"
MODELS = (R1, LARGE, MIDDLE, SMALL)  # by the ratio that the paper reads, largest first
LOOSE_READINGS = {R1: 3.64, LARGE: 2.07, MIDDLE: 0.95, SMALL: 0.4}  # figure 9 at the loose end [1]
SWITCHED = "bf16_attention_fig09"
FIXED = ("0.5", "3.5")  # figure 10 [1]
CAPS = (16, 32, 72, 144, 576)  # GPUs of a deployment [1]


@TEXT.claim("C11")
def c11_ratio_falls(evidence: Evidence) -> Told:
    """Figure 9: the ratio never rises by more than a tenth over the lowest before it."""
    rises = {}
    for model in MODELS:
        front = evidence.front("fig09", model=model)
        low, high = shared(front)
        rises[model] = largest_rise(front.column(RATIO)[(front.x >= low) & (front.x <= high)])
    return listed(rises), all(rise <= 1.1 for rise in rises.values())


@TEXT.claim("C12")
def c12_spread(evidence: Evidence) -> Told:
    """Figure 9: loose over tight ratio, by model."""
    spread = {}
    for model in MODELS:
        front = evidence.front("fig09", model=model)
        loose, tight = front.at(RATIO, shared(front))
        spread[model] = float(loose / tight)
    first, *_, last = spread.values()
    return listed(spread), _falling(spread) and first >= 10 and last <= 2


@TEXT.claim("C13")
@TEXT.authors("C13", ways=Ways("fig09", SWITCHED, "attention in bf16"))
def c13_loose_end(evidence: Evidence, sweep: str = "fig09") -> Told:
    """Figure 9: the ratio at the loose end, by model, in the paper's order and near it."""
    loose = {model: float(evidence.front(sweep, model=model).at(RATIO, LOW)) for model in MODELS}
    near = all(1 / 3 <= ratio / LOOSE_READINGS[model] <= 3 for model, ratio in loose.items())
    return listed(loose), _falling(loose) and near


@TEXT.claim("C14")
def c14_fixed_ratios(evidence: Evidence) -> Told:
    """Figure 10: what 0.5 loses at the loose end and 3.5 at the tight end."""
    best, small, large = (_fixed(evidence, ratio) for ratio in ("optimal", *FIXED))
    low, high = shared(best, small, large)
    least = min(best.least_over(front) for front in (small, large))
    loss_small = 1 - float(small.throughput(low) / best.throughput(low))
    loss_large = 1 - float(large.throughput(high) / best.throughput(high))
    holds = least >= 1 - SAME_TIME and loss_small >= 0.4 and loss_large >= 0.6
    return f"0.5 loses {loss_small:.2f}, 3.5 loses {loss_large:.2f}", bool(holds)


@TEXT.claim("C15")
def c15_closed_form(evidence: Evidence) -> Told:
    """Figure 10 against the closed form at every point of the optimal frontier in range: throughput at the fixed ratio
    q over that at the best, r = R/P of the matched pair.
    """
    best = _fixed(evidence, "optimal")
    p = best.column("prefill_request_rate_per_s") / best.column("prefill_gpus")
    r = best.column("decode_request_rate_per_s") / best.column("decode_gpus") / p
    largest = 0.0
    for text in FIXED:
        fixed, q = _fixed(evidence, text), float(text)
        form = np.minimum(q, r) / r * (1 + r) / (1 + q)
        error = np.abs(fixed.throughput(best.x) / best.column(THROUGHPUT) / form - 1)
        low, high = shared(best, fixed)
        largest = max(largest, float(error[(best.x >= low) & (best.x <= high)].max()))
    return f"largest error {largest:.3f}", largest <= 0.05


@TEXT.claim("C30")
def c30_few_gpus(evidence: Evidence) -> Told:
    """Caps on the GPUs of a deployment, 16 to 576."""
    fronts = [evidence.front("gpu_cap", gpu_cap=cap) for cap in CAPS]
    least = min(many.least_over(few) for few, many in pairwise(fronts))
    losses = {}
    for cap, few in zip(CAPS[:-1], fronts[:-1], strict=True):
        x = np.geomspace(*shared(fronts[-1], few), 200)
        losses[cap] = float(np.max(1 - few.throughput(x) / fronts[-1].throughput(x)))
    value = "largest loss against 576: " + ", ".join(f"{cap} GPUs {loss:.2f}" for cap, loss in losses.items())
    return value, least >= 1 - SAME_TIME and max(losses.values()) > 0


def _falling(values: dict[str, float]) -> bool:
    return bool(np.all(np.diff(list(values.values())) < 0))


def _fixed(evidence: Evidence, ratio: str) -> Front:
    return evidence.front("fig10", ctx_gen_ratio=ratio)


MIXED = "fig06_every_step_mixed"


@TEXT.claim("C25")
def c25_piggyback(evidence: Evidence) -> Told:
    """Figure 6: every step mixed, over the best co-located mode."""
    latent, base = evidence.front(MIXED, modes=("piggyback",), model=R1, mla_form="naive"), _base(evidence, R1)
    grouped, other = evidence.front(MIXED, modes=("piggyback",), model=MIDDLE), _base(evidence, MIDDLE)
    middle = _ratio(latent, base, third(*shared(latent, base), 1))
    loose = np.concatenate([_ratio(grouped, other, third(*shared(grouped, other), part)) for part in (0, 1)])
    value = f"{R1} down to {middle.min():.2f} in the middle third, {MIDDLE} down to {loose.min():.2f} in the loose two"
    return value, bool(middle.min() < 0.9 and loose.min() > 0.9)


@TEXT.claim("C26")
def c26_cached(evidence: Evidence) -> Told:
    """Figure 6: every step mixed with the projected past kept in memory."""
    naive, cached = (
        evidence.front(MIXED, modes=("piggyback",), model=R1, mla_form=form) for form in ("naive", "cached")
    )
    base = _base(evidence, R1)
    x = third(*shared(naive, cached, base), 1)
    before, after = _ratio(naive, base, x), _ratio(cached, base, x)
    filled = cached.at("decode_memory_bytes", x) / evidence.pool(decode_grid, R1).memory_limit
    return (
        f"naive {before.min():.2f}-{before.max():.2f}, cached {after.min():.2f}-{after.max():.2f}",
        bool(np.all(filled[after <= 0.95] >= 0.95)),
        f"mean over the middle third of {LOW:.0f}-{HIGH:.0f}: {before.mean():.2f} naive, {after.mean():.2f} cached; "
        f"memory filled to {filled.min():.2f}-{filled.max():.2f} of the limit",
    )


@TEXT.authors("C26")
def mitigated(evidence: Evidence) -> Told:
    """Every step mixed with the projected past kept in memory, over the same without."""
    naive, cached = (
        evidence.front(MIXED, modes=("piggyback",), model=R1, mla_form=form) for form in ("naive", "cached")
    )
    x = third(*shared(naive, cached), 1)
    ratio = cached.throughput(x) / naive.throughput(x)
    return f"{ratio.min():.2f} to {ratio.max():.2f} times over the middle third", bool(ratio.min() > 1)


@TEXT.claim("C27")
def c27_decode_heavy(evidence: Evidence) -> Told:
    """Figure 8: every step mixed over no piggyback, by traffic and from third to third of the curve."""
    areas, falls = {}, {}
    for isl, osl in FIGURE_8[::3]:
        plain = evidence.front("fig08", modes=("colocated",), isl=isl, osl=osl)
        mixed = evidence.front("fig08_every_step_mixed", modes=("piggyback",), isl=isl, osl=osl)
        name = f"{isl}/{osl}"
        areas[name] = gain(mixed.curve, plain.curve, low=LOW, high=HIGH).area_ratio
        falls[name] = [float(_ratio(mixed, plain, third(*shared(plain), part)).mean()) for part in range(3)]
    prefill, decode = areas.values()
    falling = all(loose >= middle >= tight for loose, middle, tight in falls.values())
    along = "; ".join(f"{name} {', '.join(f'{value:.2f}' for value in parts)}" for name, parts in falls.items())
    return listed(areas), decode > prefill and falling, f"means of the thirds, loose to tight: {along}"


def _base(evidence: Evidence, model: str) -> Front:
    return evidence.front("fig06", modes=COLOCATED, model=model)


def _ratio(front: Front, base: Front, x: Floats) -> Floats:
    return front.throughput(x) / base.throughput(x)
