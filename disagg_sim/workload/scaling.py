r"""Scale the request rate of a trace: divide its time stamps, or change the number of requests at unchanged time.

Dividing the time stamps by r also compresses bursts and the day: a policy that acts every 30 s then acts once for 30 r
seconds of the trace. Sajal et al. measure the distortion (TraceSplitter, EuroSys 2021; TraceUpscaler, EuroSys 2024).
``by="requests"`` leaves time as it is:

* r below 1 thins: a random choice of units, together r times as many requests to within half of the last unit.
* r above 1 superposes: the trace itself, copies of it as other users of the same kind, and a thinned copy for the rest.
  Each copy is rotated by a time drawn from 0 to ``shift_s``, so that two copies of a request do not arrive together,
  while bursts longer than that, and the shape of the day, stay.

Units are kept or dropped whole: sessions, else conversations (found by block ids), else requests. One seed makes
nested traces: every rate has all requests of the lower rates, so that a search over rates compares like with like.

Requests of a trace may also get classes of service and models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, above_zero, check_word
from disagg_sim.workload.arrivals import named_rng
from disagg_sim.workload.request_columns import Labels, PrefixBlocks
from disagg_sim.workload.stream import TraceStream, in_memory
from disagg_sim.workload.trace import MOST_REQUESTS, Trace, joined, too_many

#: How the request rate is scaled: by dividing time stamps, or by fewer or more requests.
TIME, REQUESTS = "time", "requests"
SCALE_BY = (TIME, REQUESTS)
#: Copies are rotated by up to a minute: longer bursts, which loops of minutes follow, keep their contrast. [s]
SHIFT_S = 60.0
#: Largest share of the requests that are taken for one conversation: a prefix of more is a system prompt. [1]
LARGEST_UNIT = 0.05


@overload
def at_rate(trace: Trace, rate: float, by: str = TIME, *, seed: int = 0, shift_s: float = SHIFT_S) -> Trace: ...
@overload
def at_rate(
    trace: Trace | TraceStream, rate: float, by: str = TIME, *, seed: int = 0, shift_s: float = SHIFT_S
) -> Trace | TraceStream: ...
def at_rate(
    trace: Trace | TraceStream, rate: float, by: str = TIME, *, seed: int = 0, shift_s: float = SHIFT_S
) -> Trace | TraceStream:
    """Scale the request rate of a trace by ``rate`` [1].

    By ``"time"``: the same requests, time stamps divided by it; by ``"requests"``: thinned below 1, superposed above,
    all held in memory.
    """
    factor = above_zero("rate", rate)
    if not math.isfinite(factor):
        raise InputError(f"rate must be finite, got {rate}")
    check_word("scale_by", by, SCALE_BY)
    if not 0 <= shift_s < math.inf:
        raise InputError(f"shift_s {shift_s} is out of range; allowed: 0 s or more")
    if by == TIME:
        return trace.scaled(factor)
    if factor == 1:
        return trace
    trace = in_memory(trace)
    copies = math.floor(factor)
    if copies and not math.isfinite(trace.period):
        raise InputError(f"trace {trace.name} of a single request has no rate that copies of it could raise")
    if len(trace) * factor > MOST_REQUESTS:
        raise InputError(too_many(f"trace {trace.name} at {factor:g} times its rate", len(trace) * factor))
    unit = units(trace)
    parts, times = [], []
    for number in range(copies + 1):
        share = 1.0 if number < copies else factor - copies
        rng = named_rng(seed, f"copy {number} of a trace")
        shift = rng.uniform(0.0, shift_s) if number else 0.0
        kept = _kept(unit, share, rng)
        if kept.size:
            parts.append(trace.take(kept))
            times.append(_rotated(trace, unit, shift)[kept])
    if not parts:
        raise InputError(f"rate {factor:g} leaves none of the {len(trace)} requests of trace {trace.name}")
    note = f"{'superposed' if copies else 'thinned'} to {factor:g} times the requests"
    return replace(joined(parts, np.concatenate(times)), notes=(*trace.notes, note), dropped=trace.dropped)


def units(trace: Trace) -> Ints:
    """Number the units of a trace that are kept or left out whole, from 0."""
    if trace.sessions is not None:
        return np.unique(trace.sessions.session, return_inverse=True)[1]
    if trace.prefix is None:
        return np.arange(len(trace))
    return _conversations(trace.prefix, max(1, math.floor(LARGEST_UNIT * len(trace))))


def _conversations(prefix: PrefixBlocks, most: int) -> Ints:
    """Group prompts by leading blocks: by as many as it takes until a group has at most ``most`` prompts."""
    lengths, starts = np.diff(prefix.offsets), prefix.offsets[:-1]
    unit = np.zeros(lengths.size, dtype=np.int64)
    depth = 0
    while (wide := np.flatnonzero(np.bincount(unit)[unit] > most)).size:
        longer = lengths[wide] > depth
        block = np.arange(wide.size)  # a prompt that ends here is a group of its own
        block[longer] = np.unique(prefix.ids[starts[wide[longer]] + depth], return_inverse=True)[1] + wide.size
        pair = unit[wide] * 2 * wide.size + block
        unit[wide] = unit.max() + 1 + np.unique(pair, return_inverse=True)[1]
        depth += 1
    return np.unique(unit, return_inverse=True)[1]


def _kept(unit: Ints, share: float, rng: np.random.Generator) -> NDArray[np.intp]:
    """Choose units at random, as close as possible to a share [1] of the requests; return their rows."""
    sizes = np.bincount(unit)
    order = np.argsort(rng.random(sizes.size))
    have = np.concatenate([[0], np.cumsum(sizes[order])])
    count = int(np.argmin(np.abs(have - share * unit.size)))
    among = np.zeros(sizes.size, dtype=bool)
    among[order[:count]] = True
    return np.flatnonzero(among[unit])


def _rotated(trace: Trace, unit: Ints, shift: float) -> Floats:
    """Shift arrivals by ``shift``; a unit that would begin after the end wraps around to the start. [s]"""
    if not (shift and trace.period):
        return trace.arrival
    begin = trace.arrival[np.unique(unit, return_index=True)[1]][unit]
    moved: Floats = trace.arrival[0] + (begin - trace.arrival[0] + shift) % trace.period + (trace.arrival - begin)
    return moved


def with_classes(trace: Trace, shares: Mapping[str, float], *, seed: int) -> Trace:
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
    """Draw a number from 0 to 1 for each request, the same for all of a session."""
    chances = named_rng(seed, stream).random(len(trace))
    return chances[trace.sessions.first()] if trace.sessions is not None else chances


def _drawn(noun: str, shares: Mapping[str, float], chances: Floats) -> NDArray[np.intp]:
    """Choose a name for each request by the shares; return its index."""
    if not shares:
        raise InputError(f"no {noun} is given; allowed: one or more, each with its share")
    weights = np.cumsum([above_zero(f"share of {noun} {name}", share) for name, share in shares.items()])
    return np.searchsorted(weights / weights[-1], chances, side="right")
