"""What the GPUs of a deployment cost: GPUs, USD per hour at market prices, or watts at their TDP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import list_specs, load_system
from disagg_sim.serving.points import COST_COLUMNS, THROUGHPUT
from disagg_sim.units import HOUR

if TYPE_CHECKING:
    import pandas as pd

#: What throughput may be divided by.
PER = tuple(COST_COLUMNS)


def usd_per_gpu_hour(system: SystemSpec | str, prices: Mapping[str, float] | None = None) -> float:
    """Price of one GPU: the given one, else the middle of the market's range. [USD/h]

    Parameters
    ----------
    system : SystemSpec or str
        A system or its name.
    prices : mapping, optional
        Price by name of the system. [USD/h]

    Raises
    ------
    InputError
        When neither gives a price; names the key.
    """
    name, given = _name(system), prices or {}
    if name in given:
        return float(given[name])
    spec = _spec(system)
    low, high = spec.usd_per_gpu_hour or (0.0, 0.0)
    if not high > 0:
        raise InputError(
            f"usd_per_gpu_hour of {spec.name} is not known; give a price in USD/h, as in prices={{{spec.name!r}: ...}}"
            f"{nearest(spec.name, given)}"
        )
    return (low + high) / 2


def costs_of_gpus(
    systems: Iterable[SystemSpec | str], per: str, prices: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What one GPU of each system costs, by name: 1 ("gpu"), its price [USD/h] ("usd") or its TDP [W] ("watt").

    Raises
    ------
    InputError
        When a price is unknown or out of range, or where one is left out and another is of no known system.
    """
    named = {_name(system): system for system in systems}
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


def with_cost(points: pd.DataFrame, per: str, prices: Mapping[str, float] | None = None) -> pd.DataFrame:
    """A table of points of any mode with the columns of its cost added.

    Parameters
    ----------
    points : DataFrame
        A table of points (``points.COLUMNS``); its systems are looked up by name.
    per : {"gpu", "usd", "watt"}
        "usd" adds ``usd_per_hour`` and ``tokens_per_usd``, "watt" adds ``tdp_watts`` and
        ``tokens_per_joule`` (at the TDP of the GPUs), "gpu" adds nothing.
    prices : mapping, optional
        Price of a GPU by system, in place of the middle of its ``usd_per_gpu_hour``. [USD/h]

    Raises
    ------
    InputError
        An unknown ``per``; a price that is unknown, out of range or without use.
    """
    check_per(per, prices)
    names = {str(name) for column in ("prefill_system", "system") for name in points[column].unique()}
    return add_cost(points, per, costs_of_gpus(sorted(names), per, prices))


def add_cost(points: pd.DataFrame, per: str, costs: Mapping[str, float]) -> pd.DataFrame:
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
    total, throughput = (column.name for column in COST_COLUMNS[per])
    return points.assign(**{total: cost, throughput: tokens_per_s * (HOUR if per == "usd" else 1.0) / cost})


def check_per(per: str, prices: Mapping[str, float] | None) -> None:
    """Raise ``InputError`` for an unknown objective, or prices without use."""
    if per not in PER:
        raise InputError(f"per {per!r} is not one of {', '.join(PER)}{nearest(per, PER)}")
    if prices and per != "usd":
        raise InputError(f"prices act with per='usd' only, not with per={per!r}")


def _name(system: SystemSpec | str) -> str:
    return system if isinstance(system, str) else system.name


def _spec(system: SystemSpec | str) -> SystemSpec:
    return load_system(system) if isinstance(system, str) else system
