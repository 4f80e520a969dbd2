"""Look up policies by name: the built-in ones, and those of the user's own files once these are loaded."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from disagg_sim.errors import UnknownNameError, nearest, quoted
from disagg_sim.simulation.faults import own_faults
from disagg_sim.simulation.policies.arrow.policy import Arrow
from disagg_sim.simulation.policies.dopd.policy import Dopd
from disagg_sim.simulation.policies.dynamo.load import DynamoLoad
from disagg_sim.simulation.policies.dynamo.sla import DynamoSla
from disagg_sim.simulation.policies.dynaserve.policy import DynaServe
from disagg_sim.simulation.policies.fixed import Disaggregated, LeastLoad, RoundRobin, Vllm
from disagg_sim.simulation.policy import POLICIES, Policy

#: What this package ships; importing their modules has registered them.
BUILT_IN = (Arrow, Disaggregated, Dopd, DynamoLoad, DynamoSla, DynaServe, LeastLoad, RoundRobin, Vllm)
for each in sorted(POLICIES):  # by their names, whatever module each is in
    POLICIES[each] = POLICIES.pop(each)


def policies() -> dict[str, type[Policy]]:
    """List all registered policies by name, the built-in ones first.

    Those of a user's file are there once it was loaded.

    >>> policies()["dopd"].__name__, policies()["vllm"].needs
    ('Dopd', ('colocated',))
    """
    return POLICIES


def title_of(policy: type[Policy]) -> str:
    """Say what a policy does: the first line of its docstring; empty where the class has none of its own."""
    written = (policy.__doc__ or "").strip()
    made = written.startswith(f"{policy.__name__}(")  # ``dataclass`` puts the signature where nothing stands
    return "" if made or not written else written.splitlines()[0]


def policy_named(name: str, **options: Any) -> Policy:
    """Make the registered policy of that name with some of its options changed.

    Parameters
    ----------
    name
        Of ``policies()``.
    options
        Fields of the policy; the others keep their defaults.

    Returns
    -------
    Policy
        For ``run`` and ``simulate``.

    Raises
    ------
    UnknownNameError
        No such policy, or no such option of it; the text names the nearest.
    PolicyError
        A user's own policy that cannot be made, with the error that it raised as the cause.

    Examples
    --------
    >>> policy_named("vllm", token_budget=512).token_budget
    512
    """
    if name not in policies():
        names = ", ".join(sorted(POLICIES))
        raise UnknownNameError(f"unknown policy {quoted(name)}{nearest(name, POLICIES)}; known: {names}")
    known = [field.name for field in fields(POLICIES[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise UnknownNameError(
                f"policy {name!r} has no option {quoted(option)}{nearest(option, known)}; "
                f"it has {', '.join(known) or 'none'}"
            )
    with own_faults(f"policy {name!r}", POLICIES[name].__module__):
        return POLICIES[name](**options)
