"""Label what a number rests on: measured, fitted, inherited or assumed. The one place that says so.

A latency or a throughput is composed of the times of many operators, each with a label of its own. Its label is shares:
the part of it that is time of operators of each label, such as ``fitted 92 %, assumed 8 %``. Both are homogeneous in
the times of their operators (``certainty.contributions``), so the shares are derivatives, and add up to 1. A throughput
counts the time of every pool by the GPUs that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.certainty.batching import batched_times
from disagg_sim.certainty.contributions import (
    Adjust,
    Contribution,
    adjusted,
    elasticity_of,
    fits_of,
    key_of,
    sizes_of,
    with_derivative,
)
from disagg_sim.certainty.designs import Designs, Scores, Times, scores_of
from disagg_sim.certainty.rows import SHIPPED, Origin, design_of, designs_of
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.efficiency import ASSUMED, AllToAllFit, Fit
from disagg_sim.facts.load import load_engine, load_system
from disagg_sim.physics.collectives import timed_ranks
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator
from disagg_sim.search.layouts import checked_kinds, class_of
from disagg_sim.search.phase_grid import PhaseGrid


class Trust(StrEnum):
    """What a number rests on, best first."""

    MEASURED = "measured"
    FITTED = "fitted"
    INHERITED = "inherited"
    ASSUMED = "assumed"


#: What the labels mean, for people.
MEANING = {
    Trust.MEASURED: "a fact of the vendor or of the model, or measured on this very kind of system and layout",
    Trust.FITTED: "computed with curves fitted to measurements of this system, or of served runs of its class",
    Trust.INHERITED: "computed with curves fitted to another system, scaled by the published rates of both",
    Trust.ASSUMED: "computed with a constant that nobody has measured here, or taken as given",
}
#: Column of a frontier with the shares of its throughput, in words.
COLUMN = "rests_on"
LITTLE = 0.02  # shares that are left out of words [1]
_GUESSED = ("assumption", "placeholder")  # how a source begins, or what it holds, where nobody has measured it
_DOUBTED = "low confidence"
_HOST = ("step_host", "sequence_host", "rank_host", "kernel_launch")  # numbers of an engine that are host time

Shares = dict[Trust, float]
#: Times of the passes of each of some designs, under marks on the costs of a setup; the last axis is (rows,). [s]
MarkedTimes = Callable[[Sequence[Designs], Callable[[Setup], Adjust]], list[Times]]
_ORDER = tuple(Trust)
_FITTED, _INHERITED, _ASSUMED = map(_ORDER.index, (Trust.FITTED, Trust.INHERITED, Trust.ASSUMED))


def trust_of(fits: Sequence[Fit], sizes: Mapping[str, Any] | None = None) -> Trust:
    """Label an operator by the fits behind its time: the weakest counts."""
    return _ORDER[int(np.max(_places(fits, sizes or {})))]


def labels_of(part: Contribution) -> NDArray[np.object_]:
    """Label an operator of some designs, (rows,)."""
    places = _places(part.fits, {size: largest for size, (_, largest) in part.sizes.items()})
    found: NDArray[np.object_] = np.array(list(map(str, _ORDER)), dtype=object)[np.broadcast_to(places, part.rows)]
    return found


def _places(fits: Sequence[Fit], sizes: Mapping[str, Any]) -> Any:
    """Place of the label of an operator among all labels: a number, or an array of the shape of its sizes."""
    measured = [fit for fit in fits if fit.engine != ASSUMED]
    if not measured or any(fit.stands_for for fit in measured):  # nobody has timed the kernel that runs
        return _ASSUMED
    own = _INHERITED if any(fit.inherited_from for fit in measured) else _FITTED
    if len(measured) < len(fits) and "num_gpus" in sizes:  # more ranks than were timed: a law lent by another system
        ranks, timed = np.asarray(sizes["num_gpus"]), timed_ranks(measured)
        lent = max((high for fit in fits for size, _, high in fit.valid if size == "num_gpus"), default=0.0)
        return np.where(ranks <= timed, own, np.where(ranks <= lent, _INHERITED, _ASSUMED))
    if "node_num" in sizes and not any(isinstance(fit, AllToAllFit) and fit.link == "nic" for fit in measured):
        return np.where(np.asarray(sizes["node_num"]) > 1.0, _ASSUMED, own)  # of NICs the vendor's bandwidth is known
    return own


def trust_of_entry(place: str, entry: str) -> Trust:
    """Label a number of a spec file that no kernel fit made.

    >>> [trust_of_entry(f"hw_specs/{place}.yaml:9", entry).value for place, entry in (
    ...     ("engines/vllm", "step_host"), ("profiles/measured", "host"), ("h100_sxm", "hbm_bandwidth"),
    ...     ("rtx_pro_6000", "nic_bandwidth"))]
    ['fitted', 'assumed', 'measured', 'assumed']
    """
    file = PurePath(place.partition(":")[0])
    if "engines" in file.parts:
        return _of_engine(load_engine(file.stem).sources.get(entry, ""))
    if "profiles" in file.parts:
        return Trust.ASSUMED
    said = load_system(file.stem).sources.get(entry, "")
    return Trust.ASSUMED if said.startswith(_GUESSED) or _DOUBTED in said else Trust.MEASURED


def _of_engine(source: str) -> Trust:
    return Trust.FITTED if source.startswith(("fitted", "measured")) else Trust.ASSUMED


def trust_of_host(at: Setup) -> Trust:
    """Label the host's part of passes: that of an engine is fitted to served runs."""
    engine = at.overheads
    if engine is None:
        return Trust.ASSUMED
    used = [engine.sources.get(key, "") for key in _HOST if getattr(engine, key)]
    if any(_of_engine(source) == Trust.ASSUMED for source in used):
        return Trust.ASSUMED
    served = class_of(at.system) in {systems for _, systems, _ in checked_kinds()}
    return Trust.FITTED if served else Trust.INHERITED


def shares_of_designs(designs: Designs) -> dict[Trust, Scores]:
    """Share out latencies and throughput of designs by what their parts rest on.

    Returns shares of ``ftl``, ``ttl`` and ``throughput``, shape (rows,), which add up to 1 over the labels; NaN of a
    latency that the designs do not have [1].
    """
    (found,) = shares_of_each([designs], _marked_times)
    return found


def shares_of_each(designs: Sequence[Designs], timed: MarkedTimes) -> list[dict[Trust, Scores]]:
    """Shares of each of some designs, as ``shares_of_designs``; ``timed`` times their passes under marks."""
    hosts = [max((trust_of_host(at) for at in (one.at, one.prefill_at)), key=_ORDER.index) for one in designs]
    found: dict[int, dict[Trust, Scores]] = {}
    for host in dict.fromkeys(hosts):
        alike = [place for place, own in enumerate(hosts) if own == host]
        others = tuple(label for label in Trust if label not in (Trust.MEASURED, host))
        for place, carried in zip(alike, _carried([designs[place] for place in alike], others, timed), strict=True):
            of: dict[Trust, Scores] = {
                label: Scores(*(part[row] for part in carried)) for row, label in enumerate(others)
            }
            of[host] = Scores(*(np.maximum(1.0 - sum(parts), 0.0) for parts in zip(*of.values(), strict=True)))
            found[place] = {label: of[label] for label in Trust if label in of}
    return [found[place] for place in range(len(designs))]


def _marked_times(designs: Sequence[Designs], marks: Callable[[Setup], Adjust]) -> list[Times]:
    return batched_times(designs, lambda at: adjusted(at, marks(at)))


def _carried(designs: Sequence[Designs], labels: tuple[Trust, ...], timed: MarkedTimes) -> list[Scores]:
    """Shares of the operators of each label: the derivative by a factor on their times, (labels, rows). [1]"""
    found = []
    with np.errstate(invalid="ignore", divide="ignore"):  # kernels that no pass chooses, latencies that are none
        for one, times in zip(designs, timed(designs, lambda at: _marks(at, labels)), strict=True):
            scores = scores_of(one, times, rematch=True)
            shares = (np.abs(elasticity_of(part)) for part in scores)
            found.append(Scores(*(np.broadcast_to(part, (len(labels), one.rows.size)) for part in shares)))
    return found


def _marks(at: Setup, labels: tuple[Trust, ...]) -> Adjust:
    """Put the step of a derivative on the time of every operator of a label, along a leading axis."""
    wanted = np.array([_ORDER.index(label) for label in labels])
    fits = cache(lambda key: tuple(fits_of(at.rates, *key)))

    def adjust(op: Operator, cost: Cost) -> Cost:
        places = np.asarray(_places(fits(key_of(op)), sizes_of(op)))
        places = places.reshape((1,) * (max(np.ndim(cost.time), 1) - places.ndim) + places.shape)
        mine = places == wanted.reshape(-1, *(1,) * places.ndim)
        return cost * with_derivative(1.0, mine) if np.any(mine) else cost

    return adjust


def trust_shares(grid: PhaseGrid, row: int, column: int) -> Shares:
    """Share out the time of a decode step, or that of a prefill pass on its GPUs, by what it rests on. [1]"""
    found = shares_of_designs(design_of(grid, row, column))
    return _of_row({label: scores.throughput for label, scores in found.items()}, 0)


def trust_of_points(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> dict[str, list[Shares]]:
    """Share out latencies and throughput of every row of a table by what they rest on. [1]"""
    found: dict[str, list[Shares]] = {name: [{} for _ in range(len(points))] for name in Scores._fields}
    every = list(designs_of(points, replace(origin, exact=False)))
    for designs, shares in zip(every, shares_of_each(every, _marked_times), strict=True):
        for name, rows in found.items():
            mine = {label: getattr(scores, name) for label, scores in shares.items()}
            for place, row in enumerate(designs.rows.tolist()):
                rows[row] = _of_row(mine, place)
    return found


def _of_row(shares: Mapping[Trust, Any], row: int) -> Shares:
    return {label: float(values[row]) for label, values in shares.items() if values[row] > 0.0}


def added(parts: Sequence[tuple[float, Shares]]) -> Shares:
    """Add up shares of several parts, by the weight of each."""
    total = sum(weight for weight, _ in parts)
    whole = {label: sum(weight * shares.get(label, 0.0) for weight, shares in parts) / total for label in Trust}
    return {label: share for label, share in whole.items() if share > 0.0}


def shares_text(shares: Shares) -> str:
    """Write shares in words, best label first, those below 2 % left out."""
    return ", ".join(f"{label} {100 * shares[label]:.0f} %" for label in Trust if shares.get(label, 0.0) >= LITTLE)


def shares_of_text(text: str) -> Shares:
    """Read shares back from words, as the column ``COLUMN`` holds them."""
    try:
        parts = [each.split() for each in text.split(", ") if each]
        return {Trust(label): int(percent) / 100 for label, percent, _ in parts}
    except ValueError:
        raise InputError(
            f"{COLUMN} {quoted(text)}; allowed: labels with their shares, 'fitted 92 %, assumed 8 %'"
        ) from None


def rests_on(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> pd.Series:
    """Say in words what the throughput of every row of a table rests on: the column ``COLUMN``.

    Parameters
    ----------
    points, origin
        As in ``trust_of_points``.

    Returns
    -------
    Series of str
        Index of ``points``.

    Examples
    --------
    Nothing of the speed of light has been measured:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile="ideal")
    >>> options = ds.Colocation(batch=(8,), prefill_batch=(1,))
    >>> ds.rests_on(ds.colocated(at, ds.Sharding(), ds.lengths(1024, 128), options=options)).tolist()
    ['assumed 100 %']
    """
    every = list(designs_of(points, replace(origin, exact=False)))
    return words_of_shares(points, every, shares_of_each(every, _marked_times))


def words_of_shares(
    points: pd.DataFrame, every: Sequence[Designs], shares: Sequence[Mapping[Trust, Scores]]
) -> pd.Series:
    """Words of ``rests_on`` for a table whose designs have these shares."""
    words = np.full(len(points), "", dtype=object)
    for designs, found in zip(every, shares, strict=True):
        mine = {label: scores.throughput for label, scores in found.items()}
        words[designs.rows] = [shares_text(_of_row(mine, place)) for place in range(designs.rows.size)]
    return pd.Series(words, index=points.index, name=COLUMN, dtype=object)
