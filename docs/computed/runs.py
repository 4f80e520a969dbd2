"""Tables that take minutes: simulations, and a study as a whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pandas as pd

from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario
from docs.computed import slow, table
from tests.simulation.plans import holding, plans


@cache
def azure() -> pd.DataFrame:
    """The shipped scenario of eight policies on eight H100, a row a run."""
    with TemporaryDirectory() as root:
        plan = plan_scenario(load_scenario("azure_conv_on_h100"))
        return run_scenario(plan, Path(root), jobs=1, listener=Mock()).summary


@slow
def azure_policies() -> str:
    """Attainment of every policy of that scenario by rate, and its GPU-hours at the rate of the trace."""
    found = azure().set_index(["policy", "rate_scale"])
    rates = found.index.unique("rate_scale")
    rows = []
    for policy in found.index.unique("policy"):
        shares = (f"{100 * found.loc[(policy, rate), 'slo_attainment']:.1f} %" for rate in rates)
        rows.append([f"`{policy}`", *shares, f"{found.loc[(policy, rates[0]), 'gpu_hours']:.2f}"])
    return table(["policy", *(f"{rate:g} times the rate" for rate in rates), f"GPU-hours at {rates[0]:g}"], rows)


@slow
def azure_best() -> str:
    """The policies that hold the limits longest, and how the others do. [%]"""
    top = azure()[azure()["rate_scale"] == azure()["rate_scale"].max()].sort_values("slo_attainment", ascending=False)
    names, shares = top["policy"].tolist(), [f"{100 * share:.0f}" for share in top["slo_attainment"]]
    first, second, *others = shares
    both = f"{first} % (`{names[0]}`) and {second} % (`{names[1]}`) of the requests"
    return f"{both}, with the others for {others[-1]} to {others[0]} %"


@slow
def plans_that_hold() -> str:
    """How many plans serve 99 % of the requests in time under Poisson arrivals, at two shares of their rate."""
    found = list(plans())
    most, less = (holding(found, load, poisson=True) for load in (0.8, 0.95))
    return f"{most} at 0.8 of the planned rate and {less} at 0.95"
