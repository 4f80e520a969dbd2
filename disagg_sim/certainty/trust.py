"""Label what a number rests on: measured, fitted, inherited or assumed. The one place that says so."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from disagg_sim.certainty.contributions import contributions_of
from disagg_sim.certainty.designs import times_of
from disagg_sim.certainty.rows import design_of
from disagg_sim.facts.efficiency import ASSUMED, Fit
from disagg_sim.search.grid import PhaseGrid


class Trust(StrEnum):
    """What a number rests on, best first."""

    MEASURED = "measured"  # seen on this hardware, as it is
    FITTED = "fitted"  # computed with fits to measurements of this hardware
    INHERITED = "inherited"  # computed with fits to measurements of other hardware
    ASSUMED = "assumed"  # computed with numbers that nobody has measured, or taken as given


def trust_of(fits: Sequence[Fit]) -> Trust:
    """Label an operator by the fits behind its time: the weakest counts.

    Parameters
    ----------
    fits
        That speak together; none is an assumption of the profile.

    Returns
    -------
    Trust
        Fitted, inherited or assumed.

    Examples
    --------
    >>> trust_of([]).value
    'assumed'
    """
    if not fits or any(fit.engine == ASSUMED for fit in fits):
        return Trust.ASSUMED
    return Trust.INHERITED if any(fit.inherited_from for fit in fits) else Trust.FITTED


def trust_shares(grid: PhaseGrid, row: int, column: int) -> dict[Trust, float]:
    """Share out the time of a decode step, or of a pass of prefill, by what its parts rest on.

    The host's part of an engine is fitted to served runs.

    Parameters
    ----------
    grid
        Scored points of one phase.
    row, column
        Which of them.

    Returns
    -------
    dict of Trust to float
        Shares above 0, best label first; together 1. [1]

    Examples
    --------
    Fits of an H100 time it, fits of another Hopper an H20, in all parts that nobody timed there:

    >>> import disagg_sim as ds
    >>> def shares(system):
    ...     at = ds.setup("llama_3_1_8b", system, "fp8")
    ...     return trust_shares(ds.decode_grid(at, ds.Mapping(), ds.lengths(2048, 256), batch=[64]), 0, 0)
    >>> shares("h100_sxm")[Trust.FITTED] > 0.8 > shares("h20_sxm").get(Trust.FITTED, 0.0)
    True
    """
    designs = design_of(grid, row, column)
    index = 0 if grid.phase == "decode" else 2
    total = float(np.sum(times_of(designs)[index]))
    found = dict.fromkeys(Trust, 0.0)
    for part in contributions_of(designs):
        found[trust_of(part.fits)] += float(np.sum(part.seconds[index])) / total
    found[Trust.FITTED] += max(1.0 - sum(found.values()), 0.0)
    return {label: share for label, share in found.items() if share > 0.0}
