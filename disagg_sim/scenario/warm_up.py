"""Compile what simulations need before they are counted, once for all worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from disagg_sim.scenario.plan import Run
from disagg_sim.simulation.kernel.compiled import COMPILING, code_home, compilation_told
from disagg_sim.simulation.run import run as simulate
from disagg_sim.sweep.run import Listener

#: Requests that make a serving policy run once through its code. [request]
REQUESTS = 8


def warm_up(runs: Sequence[Run], listener: Listener) -> None:
    """Serve a few requests under every policy of some runs, so that its code is compiled and kept.

    The time of the first run is then its own, and so is the time that is left. What is wrong with a policy is told by
    its own runs.
    """
    if not runs:
        return
    if note := code_home().note:
        listener.note(note)
    first = {run.choice.kind: run for run in reversed(runs)}
    with compilation_told(lambda: listener.note(COMPILING)):
        for run in first.values():
            scenario = run.scenario
            with suppress(Exception):
                simulate(
                    run.source.load(scenario.seed).head(REQUESTS),
                    run.deployment,
                    run.choice.policy,
                    at=scenario.setting,
                    slo=scenario.slo,
                    seed=scenario.seed,
                    options=scenario.run,
                )
