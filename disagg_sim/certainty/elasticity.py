r"""Compute elasticities of latency and throughput to hardware parameters along a frontier.

The elasticity of y to a parameter p is :math:`\partial \ln y / \partial \ln p`: 0.6 says that one percent more of p
brings 0.6 % more of y. If every rate grew by one percent and every latency fell by as much, throughput would grow by
one percent; so over rates and inverse latencies of the hardware elasticities sum to 1, less the share of what does not
change with it: host, and the fixed times of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import FACTOR, elasticity_of
from disagg_sim.certainty.designs import Designs, Scores, scores_of, times_of
from disagg_sim.certainty.error_bars import near_frontier
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of
from disagg_sim.errors import InputError, check_word
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.setup import Setup
from disagg_sim.search.pareto import pareto_mask
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT

#: From systems by name to the points that a search finds on them.
Search = Callable[[Mapping[str, SystemSpec]], "pd.DataFrame"]

#: Relative change of a parameter for a frontier: as wide as the steps between its designs. [1]
WIDE = 0.05
#: The same for capacity, which acts through the few largest batches. [1]
WIDE_CAPACITY = 0.1
CAPACITY = "hbm_capacity"
#: Vendor facts that are rates, and the fields of ``SystemSpec`` that hold them.
_RATES = ("hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth")
#: What elasticities are taken to: rates, latencies of links, capacity.
PARAMETERS = ("flops", *_RATES, "nvlink_latency", "nic_latency", CAPACITY)


def scaled(at: Setup, parameter: str, factor: float) -> Setup:
    """The setting with one number of its hardware times ``factor``.

    ``flops`` is the peak in every arithmetic. Latencies are no vendor's facts but fits: those of collectives and of the
    exchange inside a domain (``nvlink_latency``) or over NICs (``nic_latency``), and of a hop between stages.
    """
    if parameter.endswith("_latency"):
        return _with_latency(at, parameter, factor)
    return at.changed(system=scaled_system(at.system, parameter, factor))


def scaled_system(system: SystemSpec, parameter: str, factor: float) -> SystemSpec:
    """The system with one of its numbers times ``factor``: a rate, or the capacity of its memory."""
    if parameter == "flops":
        return replace(system, peak_flops={name: peak * factor for name, peak in system.peak_flops.items()})
    if parameter == CAPACITY:
        return replace(system, hbm_capacity=system.hbm_capacity * factor, hbm_reported=system.hbm_reported * factor)
    changed: dict[str, Any] = {parameter: getattr(system, parameter) * factor}
    return replace(system, **changed)


def _with_latency(at: Setup, parameter: str, factor: float) -> Setup:
    profile, rates, links = at.profile, at.rates, dict[str, Any]()
    if parameter == "nic_latency":
        side, latencies = "across", ["nic_latency", "p2p_latency_across"]
    else:
        side, latencies = "inside", ["p2p_latency_inside"]
        names = ("all_reduce", "all_gather", "reduce_scatter")
        links = {name: getattr(rates, name).with_latency(factor) for name in names}
        links["prepare"] = None if rates.prepare is None else rates.prepare.with_latency(factor)
    own: dict[str, Any] = {name: getattr(profile, name) * factor for name in latencies}
    for name, both in (("dispatch", rates.dispatch), ("combine", rates.combine)):
        links[name] = {
            phase: replace(rate, **{side: getattr(rate, side).with_latency(factor)}) for phase, rate in both.items()
        }
    return replace(at, profile=replace(profile, **own), rates=replace(rates, **links))


def sensitivity(
    points: pd.DataFrame,
    *,
    parameters: Sequence[str] = PARAMETERS,
    search: Search | None = None,
    origin: Origin = SHIPPED,
) -> pd.DataFrame:
    r"""Compute elasticities of latencies and throughput to the hardware, at the designs of a frontier and along it.

    .. math:: \epsilon_x(y) = \partial \ln y / \partial \ln x

    Parameters
    ----------
    points : DataFrame
        A frontier or a whole table of points of ONE case (``points.COLUMNS``), of one or more modes; the more points,
        the better what a changed frontier would choose instead is known.
    parameters : sequence of str
        Of ``PARAMETERS``: "flops", "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth", "nvlink_latency",
        "nic_latency", "hbm_capacity".
    search : callable, optional
        From systems by name to the points that the search finds on them, all modes below one another. Capacity acts
        through the batches that fit, so without a search its elasticity of the frontier is NaN.
    origin
        As in ``rescore``.

    Returns
    -------
    DataFrame
        One row for each point of the nominal frontier and parameter: ``mode``, ``tokens_per_s_per_user``,
        ``tokens_per_s_per_gpu`` [token/s], ``parameter``; at the same design ``ttl``, ``ftl``, ``throughput`` (the
        counts of a matched pair follow, else all would hang on the pool that rounding left slower); and
        ``frontier``, of the best throughput at the same interactivity, designs and counts chosen anew [1].

    Raises
    ------
    InputError
        No points, an unknown parameter, and as ``rescore``.

    Examples
    --------
    At the speed of light one GPU waits for its FLOP/s or its memory only, so the two elasticities add up to 1:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile="ideal")
    >>> options = ds.Colocation(batch=(1,), prefill_batch=(1,))
    >>> points = ds.colocated(at, ds.Sharding(), ds.lengths(1000, 101), options=options)
    >>> found = sensitivity(points, parameters=("flops", "hbm_bandwidth"))
    >>> f"{found['throughput'].sum():.3f}", f"{found['ttl'].sum():.3f}"
    ('1.000', '-1.000')
    """
    for parameter in parameters:
        check_word("parameter", parameter, PARAMETERS)
    if not len(points):
        raise InputError("no points: elasticities need one or more")
    near = near_frontier(points)
    groups = list(designs_of(near, origin))
    lines = []
    for parameter in parameters:
        ends = [
            _gathered(groups, len(near), [_scored(designs, parameter, 1.0 + step) for designs in groups])
            for step in (-WIDE, WIDE)
        ]
        at_design = _gathered(groups, len(near), [elasticities_of(designs, parameter) for designs in groups])
        if parameter == CAPACITY:
            known = {at.system.name: at.system for designs in groups for at in (designs.at, designs.prefill_at)}
            found = [
                search and search({name: scaled_system(system, CAPACITY, factor) for name, system in known.items()})
                for factor in (1.0 - WIDE_CAPACITY, 1.0 + WIDE_CAPACITY)
            ]
        for mode in dict.fromkeys(near["mode"].astype(str)):
            mine = (near["mode"].astype(str) == mode).to_numpy()
            x, y = (near.loc[mine, name].to_numpy(dtype=float) for name in (INTERACTIVITY, THROUGHPUT))
            best = np.flatnonzero(pareto_mask(x, y))
            best = best[np.argsort(x[best])]
            if parameter == CAPACITY:
                curves, step = [_of_mode(each, mode) for each in found], WIDE_CAPACITY
            else:
                curves, step = [(1.0 / end.ttl[mine], end.throughput[mine]) for end in ends], WIDE
            columns = {name: getattr(at_design, name)[mine][best] for name in ("ttl", "ftl", "throughput")}
            below, above = (smooth_front(*curve, x[best]) for curve in curves)
            with np.errstate(divide="ignore", invalid="ignore"):
                columns["frontier"] = np.log(above / below) / np.log((1.0 + step) / (1.0 - step))
            base = {"mode": mode, INTERACTIVITY: x[best], THROUGHPUT: y[best], "parameter": parameter}
            lines.append(pd.DataFrame(base | columns))
    return pd.concat(lines, ignore_index=True)


def elasticities_of(designs: Designs, parameter: str) -> Scores:
    """Elasticities of latencies and throughput at the designs themselves, exact, (rows,); NaN of what they lack. [1]"""
    if parameter == CAPACITY:
        return Scores(*(np.zeros(designs.rows.size) for _ in Scores._fields))
    with np.errstate(invalid="ignore", divide="ignore"):  # kernels that no pass chooses, latencies that are none
        scores = _scored(designs, parameter, FACTOR)
        return Scores(*map(elasticity_of, scores))


def _scored(designs: Designs, parameter: str, factor: Any) -> Scores:
    """Scores under a changed parameter, with counts that follow."""
    changed = designs
    if parameter != CAPACITY:
        changed = designs.under(
            decode=scaled(designs.at, parameter, factor), prefill=scaled(designs.prefill_at, parameter, factor)
        )
    return scores_of(changed, times_of(changed), rematch=True)


def _gathered(groups: Sequence[Designs], rows: int, found: Sequence[Scores]) -> Scores:
    """Values of groups in the order of the table, (rows,)."""
    result = Scores(*(np.empty(rows) for _ in Scores._fields))
    for designs, scores in zip(groups, found, strict=True):
        for whole, values in zip(result, scores, strict=True):
            whole[designs.rows] = values
    return result


def smooth_front(x: Floats, y: Floats, at: Floats) -> Floats:
    """Best throughput at an interactivity, linear in logarithms between points; NaN beyond the fastest one."""
    if not x.size:
        return np.full(at.shape, np.nan)
    keep = np.flatnonzero(pareto_mask(x, y))
    keep = keep[np.argsort(x[keep])]
    logs = np.interp(np.log(at), np.log(x[keep]), np.log(y[keep]), right=np.nan)
    return np.asarray(np.exp(logs))


def _of_mode(points: pd.DataFrame | None, mode: str) -> tuple[Floats, Floats]:
    if points is None:
        return np.empty(0), np.empty(0)
    mine = points[points["mode"].astype(str) == mode]
    return mine[INTERACTIVITY].to_numpy(dtype=float), mine[THROUGHPUT].to_numpy(dtype=float)
