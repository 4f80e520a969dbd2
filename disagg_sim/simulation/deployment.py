"""Describe what serves: equal instances by part. A policy takes the parts that it needs.

Instances of one deployment may serve unlike models, or stand on unlike GPUs: their ``Replicas`` say so with a setup.
Each model has instances, a policy and requests of its own, on one clock (``shares_of``). What models share: the clock,
the GPUs that autoscalers may take, and the nodes that fail. An instance's links are its own, so that transfers of one
model do not slow those of another.

Past 400 lines: the parts of a deployment, what they refuse, and what each model has of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, UnknownNameError, check_kinds, nearest, quoted, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.simulation.instance_variants import FfnPool, placed
from disagg_sim.simulation.options import MOST, MOST_SEQUENCES
from disagg_sim.techniques.encode.play import Encoders
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Parts of a deployment: pools of one phase, instances that do both, and instances that work in pairs.
PARTS = ("prefill", "decode", "colocated", "pairs")

#: Limits that a part may set -> their largest value [1], [token].
LIMITS = {"batch": MOST_SEQUENCES, "token_budget": MOST, "hold_steps": MOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Equal instances, and how they batch where that is not left to the policy.

    ``batch`` is the most whole prompts of a pass in the prefill part, and the most sequences that run together in the
    others; ``token_budget`` is the most tokens of a prefill pass, or of a step of decodes and prefill; ``hold_steps``
    are the most decode steps that prompts wait until every attention rank can take one. What a policy makes of them
    says ``policy.AsPlanned``. ``captured`` counts where a deployment is evaluated; elsewhere every decode step is a
    graph, as files of ``launch`` have it.
    """

    mapping: Sharding
    instances: int  # [1]
    batch: int | None = None  # None = as the policy batches [request]
    token_budget: int | None = None  # None = as the policy says, or as ``batch`` needs [token]
    hold_steps: int | None = None  # None = as the policy says [1]
    #: What they serve, and on what; None = as the deployment.
    setup: Setup | None = field(default=None, compare=False, repr=False)
    captured: int | None = (
        None  # of a rank in the largest decode step run as a CUDA graph; None = as by default [token]
    )
    ffn: FfnPool | None = None  # of instances that decode, GPUs for their feed-forward part; None = none of its own

    def __post_init__(self) -> None:
        """``InputError`` unless the counts are whole numbers in range, and the budget holds a token of each request.

        The setup becomes a part of the mapping, by which all else tells instances apart.
        """
        check_kinds(self)
        mapping = placed(self.mapping, self.setup, self.ffn)
        object.__setattr__(self, "mapping", mapping)
        whole_number("instances", self.instances)
        for name, most in {**LIMITS, "captured": MOST}.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), most=most)
        if self.batch is not None and self.token_budget is not None and self.token_budget < self.batch:
            raise InputError(
                f"token_budget {self.token_budget} is below batch {self.batch}; allowed: from the batch up"
            )

    @property
    def limits(self) -> tuple[int | None, ...]:
        """Values of ``LIMITS``; None where it is left to the policy."""
        return self.batch, self.token_budget, self.hold_steps

    @property
    def gpus(self) -> int:
        """GPUs of all of them. [1]"""
        return int(self.mapping.gpus) * self.instances


def stage_tokens(mapping: Sharding, batch: int, budget: int) -> int:
    """Tokens that enter the first stage at once, of a pass of ``batch`` prompts and ``budget`` tokens. [token]

    The prompts of a rank go in as many parts as there are stages; with CPP a chunk of each of them goes.

    >>> stage_tokens(Sharding(), 8, 8000), stage_tokens(Sharding(pp=4), 8, 8000), stage_tokens(Sharding(pp=4), 2, 2000)
    (8000, 2000, 1000)
    """
    ranks = int(mapping.dp_attn)
    own = -(-batch // ranks)
    if mapping.chunk_tokens:
        return ranks * own * int(mapping.chunk_tokens)
    return ranks * -(-budget * -(-own // min(int(mapping.pp), own)) // batch)


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
    encode: Encoders | None = None  # before prefill, of GPUs beside those that a policy may use; None = no images

    def __post_init__(self) -> None:
        """``InputError`` where entries of one part and mapping batch in different ways: which holds would be open.

        Setups of instances and of the deployment are brought in line: one for all, or one for each.
        """
        check_kinds(self)
        whole_number("gpus", self.gpus)
        self._settle_setups()
        if len(self.systems) > 1 and self.gpus > (most := sum(map(self.gpus_on, self.systems))):
            raise InputError(
                f"deployment {self.name!r}: gpus {self.gpus} on {' and '.join(self.systems)}, and its instances take "
                f"{most}; of several systems allowed: those of the instances"
            )
        for part in PARTS:
            known: dict[Sharding, Replicas] = {}
            for each in getattr(self, part):
                if each.ffn is not None and part != "decode":
                    raise InputError(
                        f"deployment {self.name!r}: {part} has instances with ffn; allowed: in decode, as they compute "
                        "no prompts"
                    )
                same = known.setdefault(each.mapping, each)
                if same.limits != each.limits:
                    batch, budget, held = zip(same.limits, each.limits, strict=True)
                    raise InputError(
                        f"deployment {self.name!r}: two entries of {part} have one mapping and batch differently "
                        f"(batch {batch[0]} and {batch[1]}, token_budget {budget[0]} and {budget[1]}"
                        + f", hold_steps {held[0]} and {held[1]}" * (held[0] != held[1])
                        + "); allowed: one entry a mapping"
                    )

    def _settle_setups(self) -> None:
        """Where instances have unlike setups, each has its own; where all have one, it is the deployment's."""
        each = list(self._every())
        own = {id(replicas.setup): replicas.setup for replicas in each if replicas.setup is not None}
        if not own:
            return
        usual = self.setup
        if usual is None and any(replicas.setup is None for replicas in each):
            raise InputError(
                f"deployment {self.name!r}: some instances have a setup and others none; allowed: a setup of each, or "
                f"of the deployment"
            )
        found = {id(replicas.setup or usual) for replicas in each}
        one = len(found) == 1
        if one:
            usual = next(iter(own.values()))
            object.__setattr__(self, "setup", usual)
        for part in PARTS:
            settled = tuple(replace(at, setup=None if one else at.setup or usual) for at in getattr(self, part))
            object.__setattr__(self, part, settled)

    def _every(self) -> Iterator[Replicas]:
        return (replicas for part in PARTS for replicas in getattr(self, part))

    @property
    def all_gpus(self) -> int:
        """GPUs that a policy may use, and those of the encode pool. [1]"""
        return self.gpus + (0 if self.encode is None else self.encode.instances)

    @property
    def link_gpus(self) -> float:
        """GPUs that one NVLink domain would have to hold; infinity of several systems. [1]"""
        return math.inf if len(self.systems) > 1 else self.gpus

    def first_setup(self, parts: tuple[str, ...]) -> Setup | None:
        """Setup of the first instance of some of its parts; None where it has none of its own."""
        return next((each.setup for part in parts for each in self.part(part)), None)

    @property
    def setups(self) -> tuple[Setup, ...]:
        """All setups of its instances, in the order of its parts; none where the run says."""
        own = [each.setup or self.setup for each in self._every()]
        return tuple({id(at): at for at in own if at is not None}.values())

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that its instances serve; none where the run says."""
        return tuple(dict.fromkeys(at.model.name for at in self.setups))

    def of_model(self, model: str) -> ServedDeployment:
        """Those of its instances that serve a model, and their GPUs."""
        own: dict[str, Any] = {
            part: tuple(each for each in self.part(part) if each.setup and each.setup.model.name == model)
            for part in PARTS
        }
        gpus = {part: sum(each.gpus for each in entries) for part, entries in own.items()}
        return ServedDeployment(name=f"{model} in {self.name}", gpus=largest_choice(gpus), **own)

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that its instances stand on; none where the run says."""
        return tuple(dict.fromkeys(at.system.name for at in self.setups))

    def gpus_on(self, system: str) -> int:
        """GPUs of a system that a policy may use: all, or where there are several systems, those of the instances. [1]

        Of parts that policies choose from, the largest choice counts.
        """
        if len(self.systems) < 2:
            return self.gpus
        return largest_choice(
            {
                part: sum(each.gpus for each in self.part(part) if each.setup and each.setup.system.name == system)
                for part in PARTS
            }
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
        """Raise ``InputError`` when it lacks a part that a policy needs, or these parts exceed its GPUs.

        Or when instances that hand caches over to each other store them in unlike formats, or have unlike drafters.
        Each of several models needs all parts.
        """
        if len(self.models) > 1:
            if self.encode is not None:
                raise InputError(
                    f"deployment {self.name!r}: encode before instances of {' and '.join(self.models)}; allowed: one "
                    "model"
                )
            for model in self.models:
                self.of_model(model).require(policy, parts)
            self._require_gpus(policy, parts)
            return
        lacking = [part for part in parts if not self.part(part)]
        if lacking:
            has = [part for part in PARTS if getattr(self, part)]
            raise InputError(
                f"deployment {self.name!r} has no {' and no '.join(lacking)} instances, which policy {policy!r} "
                f"needs; it has {' and '.join(has) or 'none at all'}"
            )
        self._require_gpus(policy, parts)
        if parts != ("colocated",):
            self._require_one_cache(policy, parts)

    def check_encode(self, trace: Trace, at: Setup, concurrency: int, records: str) -> None:
        """Raise ``InputError`` where its encode pool cannot stand before prefill; see ``Encoders.check``."""
        if self.encode is not None:
            try:
                self.encode.check(trace, at, concurrency, records)
            except InputError as error:
                raise InputError(f"deployment {self.name!r}: {error}") from None

    def _require_gpus(self, policy: str, parts: tuple[str, ...]) -> None:
        """``InputError`` where parts exceed its GPUs."""
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

    def _require_one_cache(self, policy: str, parts: tuple[str, ...]) -> None:
        """``InputError`` where parts that hand over to each other have caches that the next cannot read, or drafters
        that the next does not have.
        """
        found: dict[str, str] = {}
        drafters: dict[str, str] = {}
        for part in parts:
            for each in self.part(part):
                at = each.setup or self.setup
                if at is not None:
                    found.setdefault(at.precision.cache.name, f"{part} on {at.system.name}")
                    drafters.setdefault(at.speculation.name if at.speculation else "none", part)
        if len(found) > 1:
            said = " and ".join(f"{place} in {name}" for name, place in found.items())
            raise InputError(
                f"deployment {self.name!r}: policy {policy!r} hands caches over, and they are stored as {said}; "
                f"allowed: one format"
            )
        if len(drafters) > 1:
            said = ", ".join(f"{name} in {part}" for name, part in drafters.items())
            raise InputError(
                f"deployment {self.name!r}: policy {policy!r} hands caches over, with those of a drafter, and "
                f"speculation is {said}; allowed: the same in all parts"
            )


def largest_choice(gpus: dict[str, int]) -> int:
    """GPUs of the largest choice of parts that a policy may make. [1]"""
    return max(gpus["prefill"] + gpus["decode"], gpus["colocated"], gpus["pairs"])


def served(deployment: Deployment, *, name: str = "planned") -> ServedDeployment:
    """Turn the pools of a matched deployment into parts ``prefill`` and ``decode``."""
    apart = len(deployment.systems) > 1
    return ServedDeployment(
        name=name,
        gpus=deployment.gpus,
        prefill=_replicas(deployment.prefill, apart),
        decode=_replicas(deployment.decode, apart),
        setup=None if apart else deployment.setup,
        planned=deployment,
    )


def _replicas(pool: Pool, apart: bool) -> tuple[Replicas, ...]:
    """Instances of a pool, with the setup of each where pools are on systems ``apart``."""
    return tuple(
        Replicas(
            mapping=each.mapping,
            instances=count,
            batch=each.batch,
            token_budget=_budget(each),
            setup=each.setup if apart else None,
        )
        for each, count in pool.members
    )


def _budget(instance: Instance) -> int | None:
    """Tokens of a full prefill pass; None in decode, and where no grid said for which lengths. [token]"""
    if instance.phase != "prefill" or instance.lengths is None:
        return None
    return math.ceil(instance.batch * instance.lengths.mean_new)


class ModelShare(NamedTuple):
    """One model of a cluster, and what of a trace asks for it."""

    model: str  # its name
    rows: NDArray[np.intp]  # of the trace, ascending; none = all of them
    trace: Trace | TraceStream  # of these rows
    deployment: ServedDeployment  # instances that serve it
    setup: Setup  # of the first of those that a policy takes


def shares_of(
    trace: Trace | TraceStream, deployment: ServedDeployment, parts: Sequence[str], at: Setup | None = None
) -> tuple[ModelShare, ...]:
    """Share requests and instances of a cluster out among its models, in the order of the deployment."""
    home = deployment.first_setup(tuple(parts)) or deployment.setup or at
    if home is None:
        raise InputError(
            f"deployment {deployment.name!r} does not say what it serves: give it "
            f"setup=ds.setup(model, system, precision)"
        )
    models = deployment.models or (home.model.name,)
    if isinstance(trace, Trace):
        _require_served(trace, deployment, models)
    if len(models) < 2:
        return (ModelShare(models[0], np.zeros(0, np.intp), trace, deployment, home),)
    if isinstance(trace, TraceStream) or trace.models is None:
        raise InputError(
            f"trace {trace.name} does not say which model its requests ask for, and deployment {deployment.name!r} "
            f"serves {', '.join(models)}; allowed: a column 'model', or 'models' with their shares (with_models)"
        )
    asked = np.array(trace.models.names)[trace.models.number]
    return tuple(_share(model, trace, deployment, np.flatnonzero(asked == model), tuple(parts)) for model in models)


def _share(
    model: str, trace: Trace, deployment: ServedDeployment, rows: NDArray[np.intp], parts: tuple[str, ...]
) -> ModelShare:
    if not rows.size:
        raise InputError(
            f"trace {trace.name} never asks for {model}, which deployment {deployment.name!r} serves; allowed: one "
            f"request or more of each model"
        )
    own = deployment.of_model(model)
    at = own.first_setup(parts) or own.setup
    if at is None:
        raise InputError(f"deployment {deployment.name!r} has no {' and no '.join(parts)} instances of {model}")
    return ModelShare(model, rows, trace.take(rows), own, at)


def _require_served(trace: Trace, deployment: ServedDeployment, models: tuple[str, ...]) -> None:
    """Raise where a request asks for what nothing serves, or a session for several models."""
    if trace.models is None:
        return
    for number in np.unique(trace.models.number).tolist():
        name = trace.models.names[number]
        if name not in models:
            raise UnknownNameError(
                f"trace {trace.name} asks for model {quoted(name)}{nearest(name, models)}; deployment "
                f"{deployment.name!r} serves {', '.join(models)}"
            )
    if trace.sessions is not None and np.any(trace.models.number != trace.models.number[trace.sessions.first()]):
        raise InputError(f"trace {trace.name} has a session that asks for several models; allowed: one a session")
