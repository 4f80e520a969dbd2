"""Turn requests away at the door of an overloaded cluster, before any policy places them.

A queue that every request joins makes all of them late: under overload, first come, first served has next to no
goodput. Each kind below is a frozen dataclass of options that makes the part of one run. A policy that admits by a rule
of its own keeps it: both have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.options import MOST, Checked, option
from disagg_sim.simulation.policy import Admission
from disagg_sim.simulation.records import RequestLimits
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView

#: What ``sheds`` says; negative priorities are called sheddable by the Gateway API inference extension of Kubernetes.
SHEDS = "which requests may be rejected: all, or only sheddable ones, whose class has a priority below 0"


@runtime_checkable
class AdmissionKind(Protocol):
    """Options of an admission control."""

    def build(self, site: Site, limits: RequestLimits) -> Admission:
        """The part of one run, with what its requests are promised once they are placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy(Checked):
    """Reject while every instance is busy: more tokens to prefill, or more of its blocks in use, than its thresholds.

    As Dynamo's frontend does (``--active-prefill-tokens-threshold``, ``--active-decode-blocks-threshold``; see "Request
    Rejection" in its documentation): an instance over one of them is busy, and a request is rejected when all that
    could prefill it, or all that could decode it, are. 10,000 tokens and 0.85 are the values of the example there.
    """

    prefill_tokens: int = option(
        10_000, "prompt tokens not yet computed above which an instance is busy", unit="token", low=0, high=MOST
    )
    decode_blocks: float = option(
        0.85, "share of its KV blocks in use above which an instance is busy; 1: never", low=0.0, high=1.0
    )
    sheds: str = option("all", SHEDS, choices=("all", "sheddable"))

    def build(self, site: Site, limits: RequestLimits) -> Admission:
        """See ``AdmissionKind``."""
        return _spared(_ByThresholds(self, site), self.sheds, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTtft(Checked):
    """Reject a request whose predicted TTFT exceeds its limit: it would waste the work that others need to be in time.

    The prediction is the best of all instances that prefill: prompt tokens before it and its own, over the rate at
    which the instance prefills the expected traffic when it does nothing else. Where they exceed a step, whole steps
    count, since later arrivals fill the last one. Decodes beside it, transfers and waits for memory are not in it;
    ``share`` leaves room for them.
    """

    share: float = option(1.0, "of the TTFT limit that the prediction may take", low=0.0, above=True, high=MOST)
    sheds: str = option("all", SHEDS, choices=("all", "sheddable"))

    def build(self, site: Site, limits: RequestLimits) -> Admission:
        """See ``AdmissionKind``."""
        return _spared(_ByPrediction(self.share, limits.ttft, site.prompt_tokens), self.sheds, limits)


#: Kinds of admission control by the names that scenarios give them.
ADMISSIONS: dict[str, type[Busy] | type[PredictedTtft]] = {"busy": Busy, "predicted_ttft": PredictedTtft}


def _waiting(view: ClusterView, prompt_tokens: float) -> Floats:
    """Prompt tokens before a new request on each instance that prefills, with its part of the shared queue. [token]

    Of prompts that wait for a batch on an instance that prefills alone, the number is known: ``prompt_tokens`` each.
    """
    there = view.prefill
    alone = ~np.isin(there, view.decode)
    batched = np.array([view.coming[instance] for instance in there.tolist()]) * alone * prompt_tokens
    waiting: Floats = view.queued_prompt_tokens[there] + batched + view.shared_prompt_tokens / max(there.size, 1)
    return waiting


class _ByThresholds:
    def __init__(self, limits: Busy, site: Site) -> None:
        self._limits, self._prompt_tokens = limits, site.prompt_tokens

    def admit(self, view: ClusterView, request: int) -> bool:  # noqa: ARG002 - all requests alike
        """See ``Admission``."""
        prefill, decode = view.prefill, view.decode
        full = 1.0 - view.free_blocks / view.total_blocks > self._limits.decode_blocks
        queued = _waiting(view, self._prompt_tokens) > self._limits.prefill_tokens
        crowded = queued | full[prefill] & np.isin(prefill, decode)
        return not (crowded.all() or full[decode].all())


class _ByPrediction:
    def __init__(self, share: float, limit: Floats, prompt_tokens: float) -> None:
        self._share, self._limit, self._prompt_tokens = share, limit, prompt_tokens

    def admit(self, view: ClusterView, request: int) -> bool:
        """See ``Admission``."""
        there = view.prefill
        step = view.inst["token_budget"][there]
        tokens = _waiting(view, self._prompt_tokens) + view.input_tokens[request]
        tokens = np.where(tokens > step, np.ceil(tokens / step) * step, tokens)
        predicted = tokens / (view.prefill_rate[there] * self._prompt_tokens)
        return bool(predicted.min() <= self._share * self._limit[request])


class _Sparing:
    """Asks a part about sheddable requests alone."""

    def __init__(self, part: Admission, priority: Ints) -> None:
        self._part, self._priority = part, priority

    def admit(self, view: ClusterView, request: int) -> bool:
        """See ``Admission``."""
        return bool(self._priority[request] >= 0) or self._part.admit(view, request)


def _spared(part: Admission, sheds: str, limits: RequestLimits) -> Admission:
    return part if sheds == "all" else _Sparing(part, limits.priority)


class Both:
    """What two parts admit."""

    def __init__(self, first: Admission, second: Admission) -> None:
        self._parts = (first, second)

    def admit(self, view: ClusterView, request: int) -> bool:
        """See ``Admission``."""
        return all(part.admit(view, request) for part in self._parts)
