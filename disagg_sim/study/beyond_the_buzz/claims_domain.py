"""C16 and C17: what a larger NVLink domain is worth."""

from __future__ import annotations

import math

from disagg_sim.serving.gains import Gain, gain
from disagg_sim.study.beyond_the_buzz.evidence import (
    DOMAIN,
    HIGH,
    LOW,
    MIDDLE,
    R1,
    SAME_TIME,
    Evidence,
    Finding,
    Front,
    never_below,
    throughput,
)

MODELS = (R1, MIDDLE)
SMALL_DOMAIN = 8  # GPUs [1]


def c16_never_worse(evidence: Evidence) -> Finding:
    """Figure 11: 72 over 8 GPUs a domain, at every point of the smaller one, and somewhere above it."""
    least, gains, notes = {}, {}, []
    for model in MODELS:
        large, small = _domains(evidence, model)
        least[model] = never_below(large, small)[0]
        gains[model] = bool((large.column("tokens_per_s_per_gpu") > throughput(small, large.x)).any())
        notes.append(f"{model} {large.x[-1]:.0f} against {small.x[-1]:.0f}")
    value = "; ".join(f"{model} smallest ratio {ratio:.9f}" for model, ratio in least.items())
    holds = all(ratio >= 1 - SAME_TIME for ratio in least.values()) and all(gains.values())
    largest = "; ".join(f"{model} {_gain(evidence, model).largest:.3g}" for model in MODELS)
    reach = "; ".join(notes)
    note = f"largest ratio where both reach: {largest}; reach with 72 and with 8 GPUs in tokens/s/user: {reach}"
    return Finding(value, holds, note)


def c17_where(evidence: Evidence) -> Finding:
    """Figure 11: where along the curve the larger domain gains most."""
    places, notes = {}, []
    for model in MODELS:
        found = _gain(evidence, model)
        places[model] = _place(found)
        switched = _gain(evidence, model, "bf16_attention_fig11")
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


def _gain(evidence: Evidence, model: str, sweep: str = "fig11") -> Gain:
    large, small = _domains(evidence, model, sweep)
    return gain(large.curve, small.curve)


def _place(found: Gain) -> float:
    """Place of the largest gain in its range on a log axis. [1]"""
    return math.log(found.largest_at / found.low) / math.log(found.high / found.low)
