"""Give the requests of a trace classes of service, with limits of their own in a simulation, and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, above_zero
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.request_columns import Labels
from disagg_sim.workload.trace import Trace


def with_classes(trace: Trace, shares: Mapping[str, float], *, seed: int = 0) -> Trace:
    """Draw a class for each request, for a session as a whole."""
    number = _drawn("class", shares, _chances(trace, "classes", seed))
    return replace(trace, classes=Labels(names=tuple(shares), number=number))


def with_models(
    trace: Trace, shares: Mapping[str, float] | Mapping[str, Mapping[str, float]], *, seed: int = 0
) -> Trace:
    """Draw the model that each request asks for, for a session as a whole."""
    chances = _chances(trace, "models", seed)
    by_class = {name: own for name, own in shares.items() if isinstance(own, Mapping)}
    if not by_class:
        plain = {name: share for name, share in shares.items() if not isinstance(share, Mapping)}
        return replace(trace, models=Labels(names=tuple(plain), number=_drawn("model", plain, chances)))
    known = trace.classes.names if trace.classes is not None else ()
    if set(by_class) != set(known) or len(by_class) < len(shares):
        raise InputError(
            f"models by class: shares are given for {', '.join(shares)}; trace {trace.name} has the classes "
            f"{', '.join(known) or 'none'}; allowed: models of each class, or one share for each model"
        )
    assert trace.classes is not None
    names = tuple(dict.fromkeys(model for own in by_class.values() for model in own))
    number = np.zeros(len(trace), dtype=np.int64)
    for place, name in enumerate(known):
        rows = np.flatnonzero(trace.classes.number == place)
        own = by_class[name]
        number[rows] = np.array([names.index(model) for model in own])[_drawn("model", own, chances[rows])]
    return replace(trace, models=Labels(names=names, number=number))


def _chances(trace: Trace, stream: str, seed: int) -> Floats:
    """A number from 0 to 1 for each request, the same for all of a session."""
    chances = named_rng(seed, stream).random(len(trace))
    return chances[trace.sessions.first()] if trace.sessions is not None else chances


def _drawn(noun: str, shares: Mapping[str, float], chances: Floats) -> NDArray[np.intp]:
    """Place among the words with shares of each request."""
    if not shares:
        raise InputError(f"no {noun} is given; allowed: one or more, each with its share")
    weights = np.cumsum([above_zero(f"share of {noun} {name}", share) for name, share in shares.items()])
    return np.searchsorted(weights / weights[-1], chances, side="right")
