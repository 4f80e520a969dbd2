"""What serves: equal instances by part. A system takes the parts that it needs of one deployment."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.domain import Deployment, Mapping, Pool
from disagg_sim.errors import InputError, whole_number
from disagg_sim.physics.phases import Degrees
from disagg_sim.shown import Shown

#: Parts of a deployment: pools of one phase, instances that do both, and instances that work in pairs.
PARTS = ("prefill", "decode", "colocated", "pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Equal instances."""

    mapping: Mapping
    instances: int  # [1]

    def __post_init__(self) -> None:
        """``InputError`` unless the count is a whole number from 1."""
        whole_number("instances", self.instances)

    @property
    def gpus(self) -> int:
        """GPUs of all of them. [1]"""
        return self.mapping.gpus * self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDeployment(Shown):
    """Parts that systems choose from; each system has all GPUs for its own parts."""

    name: str
    gpus: int  # that a system may use [1]
    prefill: tuple[Replicas, ...] = ()
    decode: tuple[Replicas, ...] = ()
    colocated: tuple[Replicas, ...] = ()
    pairs: tuple[Replicas, ...] = ()  # two instances a pair; without them the co-located ones pair up

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

    def require(self, system: str, parts: tuple[str, ...]) -> None:
        """Raise ``InputError`` when it lacks a part that a system needs, or these parts exceed its GPUs."""
        lacking = [part for part in parts if not self.part(part)]
        if lacking:
            has = [part for part in PARTS if getattr(self, part)]
            raise InputError(
                f"deployment {self.name!r} has no {' and no '.join(lacking)} instances, which system {system!r} "
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
                f"deployment {self.name!r}: the instances of system {system!r} take {used} GPUs ({each}), "
                f"{used - self.gpus} more than its {self.gpus}"
            )


def degrees_of(mapping: Mapping) -> Degrees:
    """Sharding degrees of an instance as the physics takes them."""
    return Degrees(
        tp_attn=mapping.tp_attn, dp_attn=mapping.dp_attn, tp_ffn=mapping.tp_ffn, ep=mapping.ep, pp=mapping.pp
    )


def served(deployment: Deployment, *, name: str = "planned") -> ServedDeployment:
    """The pools of a matched deployment as parts ``prefill`` and ``decode``.

    Parameters
    ----------
    deployment : Deployment
        Such as ``MatchPlan.deployment``; mappings and counts of its pools are kept, batches are not: the
        simulated instances batch as their system does.
    name : str
        What results call it.
    """
    return ServedDeployment(
        name=name,
        gpus=deployment.prefill.gpus + deployment.decode.gpus,
        prefill=_replicas(deployment.prefill),
        decode=_replicas(deployment.decode),
    )


def _replicas(pool: Pool) -> tuple[Replicas, ...]:
    return tuple(Replicas(mapping=instance.mapping, instances=count) for instance, count in pool.members)
