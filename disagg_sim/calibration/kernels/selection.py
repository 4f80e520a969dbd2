"""Choose which fits of attention parts an efficiency file ships, by their errors on the rows that they saw.

Held-out errors stay a judgement: no choice rests on them. What is left out gives way to the fit of another engine, or
to what ``physics.attention_parts`` assumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disagg_sim.facts.efficiency import INDEX, PROMPT_LENGTH, AttentionPartFit

#: Median and 90 % quantile of the relative error on fitted rows, above which a fit is left out. [1]
MOST_MEDIAN, MOST_P90 = 0.2, 0.6
#: Context that an index of prompts must have seen: what grows with its square cannot be told from shorter ones. [token]
LEAST_CONTEXT = 30_000.0
#: Share of the bf16 peak that an index may reach, where its keys are in bf16: more means that its rows hide it. [1]
PEAK_OF_INDEX = {"msa": 1.0}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A fit that is not shipped, and why."""

    fit: AttentionPartFit
    reason: str

    def __str__(self) -> str:
        """One line."""
        fit = self.fit
        return f"left out: {fit.kind} {fit.part} of {fit.engine} {fit.version}: {self.reason}"


def sound_parts(fits: Sequence[AttentionPartFit]) -> tuple[list[AttentionPartFit], list[LeftOut]]:
    """Split fits into those that are shipped and those that are not; of several versions that with most points counts.

    Parameters
    ----------
    fits
        Of one system, with their errors.

    Returns
    -------
    shipped : list of AttentionPartFit
        In their order.
    left : list of LeftOut
        The others.

    Examples
    --------
    >>> row = {"engine": "vllm", "points": 90, "p90_error": 0.3, "kind": "gdn", "part": "step", "t0": 4e-6}
    >>> old, new = (AttentionPartFit(**row, version=v, median_error=e) for v, e in (("1", 0.1), ("2", 0.25)))
    >>> shipped, left = sound_parts([old, new])
    >>> [fit.version for fit in shipped], str(left[0])
    (['1'], 'left out: gdn step of vllm 2: median error 25 %, at most 20 %')
    """
    left: list[LeftOut] = []
    best: dict[tuple[str, str, str], AttentionPartFit] = {}
    for fit in fits:
        if reason := _fault(fit):
            left.append(LeftOut(fit, reason))
            continue
        key = (fit.engine, fit.kind, fit.part)
        other = best.get(key)
        if other is None or fit.points >= other.points:
            best[key] = fit
        worse = fit if best[key] is not fit else other
        if worse is not None:
            left.append(LeftOut(worse, f"version {best[key].version} has {best[key].points} points, it {worse.points}"))
    return [fit for fit in fits if any(fit is kept for kept in best.values())], left


def _fault(fit: AttentionPartFit) -> str:
    """Why a fit cannot be shipped, "" if it can."""
    if fit.median_error > MOST_MEDIAN:
        return f"median error {100 * fit.median_error:.3g} %, at most {100 * MOST_MEDIAN:g} %"
    if fit.p90_error > MOST_P90:
        return f"p90 error {100 * fit.p90_error:.3g} %, at most {100 * MOST_P90:g} %"
    longest = next((high for size, _, high in fit.valid if size == PROMPT_LENGTH), 0.0)
    if fit.part == INDEX and longest < LEAST_CONTEXT:
        return f"its longest context is {longest:,.0f} tokens, at least {LEAST_CONTEXT:,.0f}"
    most = PEAK_OF_INDEX.get(fit.kind, math.inf)
    if fit.part == INDEX and fit.e_compute is not None and fit.e_compute > most:
        return f"it multiplies at {fit.e_compute:.2f} of the bf16 peak, at most {most:g}: other kernels hide it"
    return ""
