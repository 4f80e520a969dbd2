"""DynaServe's predictor that learns: pass times calibrated while it serves, batches as they were of late.

Section 4.1 calibrates pass times with those observed, section 4.2 keeps them by composition, and the composition of
batches to come is that of recent ones. A real scheduler sees every pass; here each request is an occasion to look at
what has happened on an instance since the last one: its passes, their tokens and their time. ``WEIGHT`` is that of one
pass in the moving averages. Until an instance has prefilled and decoded, its passes are played by the step table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.simulation.policies.dynaserve.predictor import Search, SplitRequest
from disagg_sim.simulation.view import ClusterView

#: Of the newest pass in the averages. [1]
WEIGHT = 0.3


class Counts(NamedTuple):
    """What an instance has done so far."""

    steps: float  # passes with decodes [1]
    passes: float  # passes with prefill [1]
    prefill: float  # tokens that these computed [token]
    decode: float  # tokens that decodes emitted [token]
    busy_s: float  # [s]


@dataclass(slots=True)
class Recent:
    """Averages over the last passes of an instance."""

    chunk: float = math.nan  # prefill tokens of a pass that has some [token]
    decodes: float = math.nan  # of a pass that has some [1]
    share: float = math.nan  # of the passes that have prefill [1]
    factor: float = 1.0  # observed time over that of the step table [1]


def moved(average: float, observed: float, passes: float) -> float:
    """Let an average follow the mean of so many passes, one after the other."""
    return observed if math.isnan(average) else observed + (average - observed) * (1.0 - WEIGHT) ** passes


class History:
    """The averages of all instances."""

    def __init__(self, instances: int) -> None:
        self._recent = [Recent() for _ in range(instances)]
        self._before: Floats = np.zeros((instances, len(Counts._fields)))

    def look(self, view: ClusterView, instance: int) -> Recent | None:
        """Learn what has happened on an instance since the last look; None until it has prefilled and decoded."""
        recent, passes_so_far = self._recent[instance], view.inst["passes"][instance]
        columns = (view.decode_steps, None, view.prefill_tokens, view.decode_tokens, view.busy_time)
        now = np.array([passes_so_far if each is None else each[instance] for each in columns], dtype=float)
        new, self._before[instance] = Counts(*(now - self._before[instance]).tolist()), now
        if new.passes > 0:
            recent.chunk = moved(recent.chunk, new.prefill / new.passes, new.passes)
        if new.steps > 0:
            recent.decodes = moved(recent.decodes, new.decode / new.steps, new.steps)
        if math.isnan(recent.chunk) or math.isnan(recent.decodes):
            return None
        if (count := max(new.steps, new.passes)) > 0:
            recent.share = moved(recent.share, new.passes / count, count)
            mixed, plain = self._times(view, instance)
            expected = new.passes * mixed + (count - new.passes) * plain
            recent.factor = moved(recent.factor, new.busy_s / expected, count)
        return recent

    def _times(self, view: ClusterView, instance: int) -> tuple[float, float]:
        """Passes with and without prefill, by the step table. [s], [s]"""
        recent, running = self._recent[instance], int(view.running_requests[instance])
        context = float(view.running_tokens[instance]) / running if running else 0.0
        decodes, table = round(recent.decodes), view.table(instance)
        return table.step_time(decodes, context, max(round(recent.chunk), 1)), table.step_time(decodes, context)

    def part_s(self, view: ClusterView, instance: int, queued: float, part: tuple[int, int, int]) -> float:
        """Time of a part of a request behind ``queued`` prompt tokens: from, to, and tokens of the prompt. [s]"""
        have, until, prompt = part
        recent = self._recent[instance]
        mixed, plain = (recent.factor * each for each in self._times(view, instance))
        compute = max(min(until, prompt) - have, 0)
        emit = until - max(have, prompt) - (compute > 0)  # the pass that completes the prompt emits one
        prefill_s = (queued + compute) / recent.chunk * mixed if compute else 0.0
        return prefill_s + max(emit, 0) * (recent.share * mixed + (1.0 - recent.share) * plain)


def halved(wanted: SplitRequest, search: Search, ends: Callable[[int], tuple[float, float]]) -> int:
    """Bisection of the split as in ``finish_times``, by a function of the split that has both ends. [token]"""
    low, high, ratio = 0.0, 1.0, wanted.prompt / wanted.expected
    for turn in range(search.rounds + 1):
        split = min(max(math.ceil(ratio * wanted.expected - 1e-9), 1), wanted.expected)
        first, second = ends(split)
        if turn == search.rounds or abs(first - second) <= max(search.tolerance * max(first, second), search.least_s):
            break
        low, high = (low, ratio) if first > second else (ratio, high)
        ratio = 0.5 * (low + high)
    return split
