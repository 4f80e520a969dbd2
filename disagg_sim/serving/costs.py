"""Price the GPUs of a deployment: in GPUs, USD per hour at market prices, or watts at their TDP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_system
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.serving.points import COST_COLUMNS, THROUGHPUT
from disagg_sim.units import HOUR

#: What throughput may be divided by.
PER = tuple(COST_COLUMNS)


def usd_per_gpu_hour(system: SystemSpec | str, prices: Mapping[str, float] | None = None) -> float:
    """Find the price of one GPU: the given one, else the middle of the market's range. [USD/h]"""
    name, given = _name(system), prices or {}
    if name in given:
        return float(given[name])
    spec = _spec(system)
    low, high = spec.usd_per_gpu_hour or (0.0, 0.0)
    if not high > 0:
        raise InputError(
            f"usd_per_gpu_hour of {spec.name} is not known; give a price in USD/h, as in --price {spec.name}=3 "
            f"or {{{spec.name!r}: ...}}"
            f"{nearest(spec.name, given)}"
        )
    return (low + high) / 2


#: Beside these: the joules that GPUs draw (``certainty.energy``), and columns of what a deployment draws [W] and of its
#: throughput over that [token/J].
JOULE, DRAWN_WATTS, PER_DRAWN_JOULE = "joule", "drawn_watts", "tokens_per_drawn_joule"

#: What throughput is counted over: "gpu", "usd" at the middle of the market's prices, "watt" at the TDP of the GPUs, or
#: prices of a GPU by system [USD/h], which stand in for the market's.
Per = str | Mapping[str, float]


def costs_of_gpus(systems: Iterable[SystemSpec | str], per: Per) -> dict[str, float]:
    """Price one GPU of each system: 1 ("gpu"), its price [USD/h] or its TDP [W] ("watt").

    >>> [costs_of_gpus(["h200_sxm"], per)["h200_sxm"] for per in ("gpu", "watt", {"h200_sxm": 3})]
    [1.0, 700.0, 3.0]
    """
    named, prices = {_name(system): system for system in systems}, None if isinstance(per, str) else per
    if per == "gpu":
        return dict.fromkeys(named, 1.0)
    known = {*named, *list_specs("hardware")} if prices and named.keys() - prices.keys() else None
    for name, price in (prices or {}).items():
        if known and name not in known:
            raise InputError(f"prices: {name!r} is not a system{nearest(name, known)}")
        if not (price > 0 and math.isfinite(price)):
            raise InputError(f"prices: {name} must be above 0 USD/h, got {price:g}")
    if per == "watt":
        return {name: _spec(system).tdp for name, system in named.items()}
    return {name: usd_per_gpu_hour(system, prices) for name, system in named.items()}


def with_cost(points: pd.DataFrame, per: Per) -> pd.DataFrame:
    """Add the columns of its cost to a table of points of any mode.

    Parameters
    ----------
    points : DataFrame
        A table of points (``points.COLUMNS``); its systems are looked up by name.
    per : {"gpu", "usd", "watt"} or mapping
        "usd" adds ``usd_per_hour`` and ``tokens_per_usd``, "watt" adds ``tdp_watts`` and
        ``tokens_per_joule`` (at the TDP of the GPUs), "gpu" adds nothing. A mapping is "usd" with the price of a GPU
        by system, in place of the middle of its ``usd_per_gpu_hour``. [USD/h]

    Returns
    -------
    DataFrame
        A copy with the columns added; the table itself for "gpu".

    Raises
    ------
    InputError
        An unknown ``per``; a price that is unknown or out of range.

    Examples
    --------
    A deployment of one GPU at 3 USD/h delivers 3600/3 tokens per USD for every token/s:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> points = with_cost(ds.colocated(at, ds.Sharding(), ds.lengths(2048, 256)), {"h200_sxm": 3.0})
    >>> (points.tokens_per_usd / points.tokens_per_s_per_gpu).round(6).unique().tolist()
    [1200.0]
    """
    check_per(per)
    names = {str(name) for column in ("prefill_system", "system") for name in points[column].unique()}
    return add_cost(points, per, costs_of_gpus(sorted(names), per))


def add_cost(points: pd.DataFrame, per: Per, costs: Mapping[str, float]) -> pd.DataFrame:
    """As ``with_cost``, with the cost of a GPU of each system given: [USD/h] or [W]."""
    if per == "gpu":
        return points
    decode_gpus = points["decode_instances"] * points["decode_gpus"]
    prefill_gpus = points["total_gpus"] - decode_gpus
    cost = sum(
        gpus * points[column].astype(object).map(costs).astype(float)
        for column, gpus in (("prefill_system", prefill_gpus), ("system", decode_gpus))
    )
    tokens_per_s = points[THROUGHPUT] * points["total_gpus"]
    unit = per if isinstance(per, str) else "usd"
    total, throughput = (column.name for column in COST_COLUMNS[unit])
    return points.assign(**{total: cost, throughput: tokens_per_s * (HOUR if unit == "usd" else 1.0) / cost})


def throughput_of(per: Per) -> str:
    """Name the column of the throughput that ``add_cost`` leaves in a table."""
    columns = COST_COLUMNS[per if isinstance(per, str) else "usd"]
    return columns[-1].name if columns else THROUGHPUT


def check_per(per: Per) -> None:
    """Raise ``InputError`` for an unknown objective."""
    if not isinstance(per, Mapping) and per not in PER:
        raise InputError(f"per {per!r} is not one of {', '.join(PER)}{nearest(per, PER)}, or prices by system")


def _name(system: SystemSpec | str) -> str:
    return system if isinstance(system, str) else system.name


def _spec(system: SystemSpec | str) -> SystemSpec:
    return load_system(system) if isinstance(system, str) else system
