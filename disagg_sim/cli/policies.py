"""Print serving policies with their options, for ``disagg-sim specs``. Importing it needs the extra ``simulate``."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.errors import SpecError
from disagg_sim.report.lines import option_lines
from disagg_sim.scenario.options import load_policies
from disagg_sim.simulation.policies.registry import policies, policy_named, title_of
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import Failures

_OPTION_HEADER = ("option", "default", "allowed", "meaning")


def policies_of(name: str) -> dict[str, type[Policy]]:
    """Look up a policy by name, or all policies that a Python file registers; all known ones for an empty name."""
    if not name:
        return policies()
    if not name.endswith(".py"):
        return {name: type(policy_named(name))}
    before = set(policies())
    load_policies(name)
    found = {each: policy for each, policy in policies().items() if each not in before}
    if not found:
        raise SpecError(f"{name}: registers no serving policy")
    return found


def print_policies(chosen: Mapping[str, type[Policy]]) -> None:
    """Print for each policy what it does, the parts that it needs and its options; then the keys of ``run``."""
    for name, policy in chosen.items():
        typer.echo(": ".join(filter(None, (name, title_of(policy)))))
        typer.echo(f"takes the parts {', '.join(policy.needs)} of a deployment")
        print_table(option_lines(policy), header=_OPTION_HEADER)
        typer.echo()
    typer.echo("run: keys of a scenario that hold for every policy")
    print_table(option_lines(RunOptions), header=_OPTION_HEADER)
    typer.echo("run.failures: keys of what fails, beside its events")
    print_table(option_lines(Failures), header=_OPTION_HEADER)
