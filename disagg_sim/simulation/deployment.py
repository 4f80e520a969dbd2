"""Describe what serves: equal instances by part. A policy takes the parts that it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.simulation.options import MOST, MOST_SEQUENCES

#: Parts of a deployment: pools of one phase, instances that do both, and instances that work in pairs.
PARTS = ("prefill", "decode", "colocated", "pairs")

#: Limits that a part may set -> their largest value [1], [token].
LIMITS = {"batch": MOST_SEQUENCES, "token_budget": MOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Equal instances, and how they batch where that is not left to the policy.

    ``batch`` is the most whole prompts of a pass in the prefill part, and the most sequences that run together in the
    others; ``token_budget`` is the most tokens of a prefill pass, or of a step of decodes and prefill. What a
    policy makes of them says ``policy.AsPlanned``.
    """

    mapping: Mapping
    instances: int  # [1]
    batch: int | None = None  # None = as the policy batches [request]
    token_budget: int | None = None  # None = as the policy says, or as ``batch`` needs [token]

    def __post_init__(self) -> None:
        """``InputError`` unless the counts are whole numbers in range, and the budget holds a token of each request."""
        whole_number("instances", self.instances)
        for name, most in LIMITS.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), most=most)
        if self.batch is not None and self.token_budget is not None and self.token_budget < self.batch:
            raise InputError(
                f"token_budget {self.token_budget} is below batch {self.batch}; allowed: from the batch up"
            )

    @property
    def gpus(self) -> int:
        """GPUs of all of them. [1]"""
        return int(self.mapping.gpus) * self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDeployment(Shown):
    """Parts that policies choose from; each policy has all GPUs for its own parts."""

    name: str
    gpus: int  # that a policy may use [1]
    prefill: tuple[Replicas, ...] = ()
    decode: tuple[Replicas, ...] = ()
    colocated: tuple[Replicas, ...] = ()
    pairs: tuple[Replicas, ...] = ()  # two instances a pair; without them the co-located ones pair up
    setup: Setup | None = field(default=None, compare=False)  # what it serves; None where the run says
    planned: Deployment | None = field(default=None, compare=False)  # that it was matched as; None by hand

    def __post_init__(self) -> None:
        """``InputError`` where entries of one part and mapping batch in different ways: which holds would be open."""
        for part in PARTS:
            known: dict[Mapping, Replicas] = {}
            for each in getattr(self, part):
                same = known.setdefault(each.mapping, each)
                if (same.batch, same.token_budget) != (each.batch, each.token_budget):
                    raise InputError(
                        f"deployment {self.name!r}: two entries of {part} have one mapping and batch differently "
                        f"(batch {same.batch} and {each.batch}, token_budget {same.token_budget} and "
                        f"{each.token_budget}); allowed: one entry a mapping"
                    )

    def part(self, name: str) -> tuple[Replicas, ...]:
        """Instances of one of ``PARTS``; empty when the deployment has none."""
        found: dict[str, tuple[Replicas, ...]] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "colocated": self.colocated,
            "pairs": self.pairs or self.colocated,
        }
        return found[name]

    def gpus_of(self, *parts: str) -> int:
        """GPUs of some of its parts together. [1]"""
        return sum(replicas.gpus for part in parts for replicas in self.part(part))

    def require(self, policy: str, parts: tuple[str, ...]) -> None:
        """Raise ``InputError`` when it lacks a part that a policy needs, or these parts exceed its GPUs."""
        lacking = [part for part in parts if not self.part(part)]
        if lacking:
            has = [part for part in PARTS if getattr(self, part)]
            raise InputError(
                f"deployment {self.name!r} has no {' and no '.join(lacking)} instances, which policy {policy!r} "
                f"needs; it has {' and '.join(has) or 'none at all'}"
            )
        used = self.gpus_of(*parts)
        if used > self.gpus:
            each = " + ".join(
                f"{part} {replicas.instances} x {replicas.mapping.gpus}"
                for part in parts
                for replicas in self.part(part)
            )
            raise InputError(
                f"deployment {self.name!r}: the instances of policy {policy!r} take {used} GPUs ({each}), "
                f"{used - self.gpus} more than its {self.gpus}"
            )


def served(deployment: Deployment, *, name: str = "planned") -> ServedDeployment:
    """Turn the pools of a matched deployment into parts ``prefill`` and ``decode``.

    Parameters
    ----------
    deployment : Deployment
        Such as ``MatchPlan.deployment``; mappings, batches and counts of its pools are kept. A prefill pass
        has the tokens of its batch of prompts at the mean length that was planned for.
    name : str
        What results call it.

    Returns
    -------
    ServedDeployment
        Counts [1], batches [request], token budgets [token].

    Raises
    ------
    InputError
        Pools on different systems.

    Examples
    --------
    >>> parts = {"batch": 8, "latency_s": 0.1, "request_rate_per_s": 2.0, "memory_bytes": 1e9}
    >>> prefill, decode = (Instance(phase=name, mapping=Mapping(), **parts) for name in ("prefill", "decode"))
    >>> served(Deployment(prefill=Pool(((prefill, 2),)), decode=Pool(((decode, 3),)))).gpus
    5
    """
    return ServedDeployment(
        name=name,
        gpus=deployment.gpus,
        prefill=_replicas(deployment.prefill),
        decode=_replicas(deployment.decode),
        setup=deployment.setup,
        planned=deployment,
    )


def _replicas(pool: Pool) -> tuple[Replicas, ...]:
    return tuple(
        Replicas(mapping=each.mapping, instances=count, batch=each.batch, token_budget=_budget(each))
        for each, count in pool.members
    )


def _budget(instance: Instance) -> int | None:
    """Tokens of a full prefill pass; None in decode, and where no grid said for which lengths. [token]"""
    if instance.phase != "prefill" or instance.lengths is None:
        return None
    return math.ceil(instance.batch * instance.lengths.mean_isl)
