"""Give the requests of a trace classes of service: each with a limit and a priority of its own in a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from disagg_sim.errors import InputError, above_zero
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.request_columns import Classes
from disagg_sim.workload.trace import Trace


def with_classes(trace: Trace, shares: Mapping[str, float], *, seed: int = 0) -> Trace:
    """Draw a class for each request, for a session as a whole.

    Parameters
    ----------
    trace
        Whose own classes, if any, are replaced.
    shares
        Class -> share of the requests; only their ratios count. [1]
    seed
        Of the draw.

    Returns
    -------
    Trace
        The same requests with ``classes``.

    Raises
    ------
    InputError
        No class, or a share that is not above 0.

    Examples
    --------
    >>> trace = Trace(arrival=np.arange(1000.0), input_tokens=np.full(1000, 9), output_tokens=np.full(1000, 9))
    >>> found = with_classes(trace, {"interactive": 3, "batch": 1}, seed=1).classes
    >>> found.names, 0.7 < float((found.number == 0).mean()) < 0.8
    (('interactive', 'batch'), True)
    """
    if not shares:
        raise InputError("no class is given; allowed: one or more, each with its share")
    weights = np.cumsum([above_zero(f"share of class {name}", share) for name, share in shares.items()])
    chance = named_rng(seed, "classes").random(len(trace))
    if trace.sessions is not None:
        chance = chance[trace.sessions.first()]
    number = np.searchsorted(weights / weights[-1], chance, side="right")
    return replace(trace, classes=Classes(names=tuple(shares), number=number))
