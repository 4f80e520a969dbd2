"""Tables that take minutes: simulations, and a study as a whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pandas as pd

from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario
from docs.computed import plain_fits, slow, table
from docs.computed.studies import held, stored
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import Evidence
from lab.studies.beyond_the_buzz.frontiers import Frontiers
from lab.studies.claims import evaluate
from lab.studies.claims import holding as counted
from tests.simulation.plans import holding, plans

#: Efficiency profiles, as studies order them.
PROFILES = ("measured", "optimistic", "ideal")


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


def verdicts() -> list[dict[str, Any]]:
    """How many claims hold under each profile with plain rooflines, and which miss."""
    with plain_fits(), TemporaryDirectory() as folder:
        frontiers = Frontiers(Path(folder), jobs=1)  # workers that are there already would keep the shipped files
        frontiers.prepare(frontiers.names, PROFILES)
        evidence = {profile: Evidence(frontiers, profile) for profile in PROFILES}
        return counted(evaluate(TEXT.claims, evidence)).to_dict("records")


@slow
def beyond_the_buzz_rooflines() -> str:
    """How many hold by our acceptances with one smooth roofline a kernel and regime, and which verdicts turn."""
    own = {line["profile"]: line["fails"].split() for line in held(stored("beyond_the_buzz"), "our_verdict")}
    rows = []
    for smooth in verdicts():
        profile, others = smooth["profile"], smooth["fails"].split()
        hold = [each for each in own[profile] if each not in others]
        miss = [each for each in others if each not in own[profile]]
        rows.append((f"`{profile}`", f"{smooth['holds']} of {smooth['of']}", " ".join(hold), " ".join(miss)))
    return table(("profile", "hold with rooflines", "hold there alone", "miss there alone"), rows)
