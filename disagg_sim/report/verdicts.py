"""Find the better mode of each case of a sweep at a speed, its gain and its probability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from disagg_sim.domain import ServingMode
from disagg_sim.report.words import NOT_REACHED

if TYPE_CHECKING:  # plans need only texts of this module, and sweeps are slow to import
    from disagg_sim.sweep.fidelity import CaseFidelity
    from disagg_sim.sweep.results import CaseResult

#: Least gain and least probability with which one mode is called the better one. [1]
LEAST_GAIN, LEAST_PROBABILITY = 1.1, 0.9
SPLIT, SHARED, EITHER = "disaggregated", "co-located", "either"
X = "tokens_per_s_per_user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeVerdict:
    """The better mode of a case at a speed, as a summary says it."""

    better: str  # ``SPLIT``, ``SHARED``, ``EITHER``, or "" where no mode is so fast
    leads: str  # the mode with the higher throughput, or ""
    gain: float  # its throughput over the other's; inf = the other is not so fast [1]
    low: float  # 80 % band of the gain; NaN = no error bars [1]
    high: float
    probability: float  # that the mode which leads is the better one; NaN = no error bars [1]
    points: Mapping[str, Mapping[str, Any] | None]  # best point of ``SPLIT`` and of ``SHARED``

    @property
    def text(self) -> str:
        """A cell: ``**disaggregated** 2.6× (1.68–3.2), 99 % sure``."""
        if not self.leads:
            return NOT_REACHED
        ahead = "" if self.better == self.leads else " to be ahead"
        sure = "" if math.isnan(self.probability) else f", {_percent(self.probability)} sure{ahead}"
        band = "" if math.isnan(self.low) else f" ({_times(self.low)}–{_times(self.high)})"
        gain = f"{gain_text(self.gain)}×{band}{sure}" if math.isfinite(self.gain) else f"alone reaches it{sure}"
        short = "either will do" if self.gain < LEAST_GAIN else "not sure"
        return f"**{self.better}** {gain}" if self.better == self.leads else f"{short}: {self.leads} {gain}"

    @property
    def take(self) -> Mapping[str, Any] | None:
        """The design to deploy: of the better mode; where either will do, the co-located one, which is simpler."""
        chosen = self.points[SPLIT if self.better == SPLIT else SHARED]
        return chosen if chosen is not None or not self.leads else self.points[self.leads]


def verdict_of(item: CaseResult, fidelity: CaseFidelity | None, speed: float) -> ModeVerdict:
    """Compare the modes of a case at a ``speed`` [token/s].

    One mode is the better one from ``LEAST_GAIN`` on, and, where there are error bars, with ``LEAST_PROBABILITY``.
    """
    column = item.plan.case.throughput

    def best(*, split: bool) -> Mapping[str, Any] | None:
        modes = [mode for mode in item.found if (mode.mode == ServingMode.DISAGGREGATED) == split]
        reached = [point for mode in modes if (point := mode.at(speed)) is not None]
        return max(reached, key=lambda point: point[column], default=None)

    points = {SPLIT: best(split=True), SHARED: best(split=False)}
    ours, theirs = ((0.0 if each is None else float(each[column])) for each in points.values())
    low, high, sure = math.nan, math.nan, math.nan
    if not (ours or theirs):
        return ModeVerdict(better="", leads="", gain=math.nan, low=low, high=high, probability=sure, points=points)
    if fidelity is not None and len(fidelity.gain):
        bars = fidelity.gain[fidelity.gain[X] == speed][["gain_p10", "gain_p90", "probability"]]
        low, high, sure = map(float, bars.iloc[0]) if len(bars) else (low, high, sure)
    leads, gain = (SPLIT, _ratio(ours, theirs)) if ours >= theirs else (SHARED, _ratio(theirs, ours))
    if leads == SHARED:
        low, high, sure = _ratio(1.0, high), _ratio(1.0, low), 1.0 - sure
    clear = gain >= LEAST_GAIN and not sure < LEAST_PROBABILITY
    better = leads if clear else EITHER
    return ModeVerdict(better=better, leads=leads, gain=gain, low=low, high=high, probability=sure, points=points)


def _ratio(above: float, below: float) -> float:
    if math.isnan(above) or math.isnan(below):
        return math.nan
    return above / below if below else math.inf


def gain_text(gain: float) -> str:
    """Format a gain so that rounding does not carry it over ``LEAST_GAIN``."""
    return _times(min(gain, LEAST_GAIN - 0.01) if gain < LEAST_GAIN else gain)


def _times(ratio: float) -> str:
    """Format a ratio of throughputs, with no more digits than its error bars justify."""
    if math.isinf(ratio):
        return "∞"
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def _percent(share: float) -> str:
    """Format a probability from samples: never 0 or 100 %, and rounded down, as 89.6 % is below 90."""
    return "> 99 %" if share > 0.99 else "< 1 %" if share < 0.01 else f"{math.floor(100 * share + 1e-9)} %"
