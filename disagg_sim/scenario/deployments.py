"""Read the deployments of a scenario: groups of equal instances by part, which may differ in model and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from disagg_sim import domain
from disagg_sim.choices import MOST_DRAFTS
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.facts import load
from disagg_sim.facts.faults import SeveralFaultsError, expected
from disagg_sim.facts.profile import profile_and_skew
from disagg_sim.facts.schema import OneOf, Range, Several, Strict, Written
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.setup import Setup, engine_names, setup
from disagg_sim.simulation.deployment import LIMITS, PARTS, Replicas, ServedDeployment, largest_choice
from disagg_sim.simulation.instance_variants import FfnPool
from disagg_sim.simulation.options import MOST_TOKENS
from disagg_sim.techniques.encode.physics import encode_step
from disagg_sim.techniques.encode.play import Encoders
from disagg_sim.techniques.registry import asked_techniques, words_of
from disagg_sim.techniques.split.search import ffn_mapping

#: Limits of the instances of a part -> their largest value [1], [token], [token].
PART_LIMITS = {**LIMITS, "chunk_tokens": MOST_TOKENS}
#: Parts whose passes of whole prompts a pipeline may cut into chunks.
CHUNKING = ("prefill", "colocated")
#: In the key ``speculation``: no speculative decoding.
NO_SPECULATION = "none"
#: Keys that say what instances serve, and on what: of the scenario, and of instances that differ.
SERVES = ("model", "system", "precision", "profile", "engine", "speculation")

#: Keys of ``SERVES`` that an encode pool may say.
ENCODES = ("system", "precision")

_PROFILES = OneOf(partial(list_specs, "profile"))
_Degree = Annotated[int, Range(1, 1024)]


@lru_cache(maxsize=32)
def setup_named(
    model: str, system: str, precision: str, profile: str, engine: str, speculation: str = "", techniques: str = ""
) -> Setup:
    """Make the setup of names, the same object each time; ``engine`` "" is the system's, ``speculation`` "" none."""
    drafter = load.load_speculation(speculation) if speculation not in ("", NO_SPECULATION) else None
    return setup(model, system, precision, profile, engine or None, drafter, techniques)


def _setup_of(names: Mapping[str, Any]) -> Setup:
    """Make the setup of the values of ``SERVES``, and of the techniques among them."""
    return setup_named(*(names[key] for key in SERVES), techniques_of(names))


def techniques_of(keys: Mapping[str, Any]) -> str:
    """Write the techniques among the keys of a file, with their values."""
    return words_of({each.name: keys.get(each.name) for each in asked_techniques()})


def speculation_named(word: str) -> str:
    """Check the word for a drafter and its acceptance, and give its name."""
    return word if word == NO_SPECULATION else str(expected(load.load_speculation, word).name)


def profile_named(word: str) -> str:
    """Check the name of a profile, with or without the variation of the popularity of its experts."""
    base, skew = expected(profile_and_skew, word)
    _PROFILES.check(base)
    return str(expected(load.load_profile, word).name) if skew else base


#: As files write it.
Profile = Annotated[str, AfterValidator(profile_named)]


class _Ffn(Strict):
    """GPUs of their own for the feed-forward part of an instance, and what they are."""

    gpus: _Degree
    tp: Annotated[int, Range(0, 1024)] = 0
    microbatches: Annotated[int, Range(1, 64)] = FfnPool(mapping=domain.Sharding()).microbatches
    system: Annotated[str, load.spec_name("hardware")] = ""
    precision: Annotated[str, load.spec_name("precision")] = ""


class InstanceGroup(NamedTuple):
    """Equal instances, and what they serve where that is not what the scenario says."""

    replicas: Replicas
    serves: dict[str, str]  # of ``SERVES``
    draft_tokens: int | None  # of a decode step; None = as the scenario [token]
    ffn: _Ffn | None  # None = none of its own


class _Instances(Strict):
    """Degrees, count and limits of equal instances; what is not given of the limits is left to the policy."""

    tp: _Degree = 1
    dp: _Degree = 1
    ep: _Degree = 1
    pp: _Degree = 1
    redundant_slots: Annotated[int, Range(0, 1024)] = 0
    dcp: _Degree = 1
    pcp: _Degree = 1
    instances: Annotated[int, Range(1, 10**5)] = 1
    batch: Annotated[int | None, Range(1, PART_LIMITS["batch"])] = None
    token_budget: Annotated[int | None, Range(1, PART_LIMITS["token_budget"])] = None
    chunk_tokens: Annotated[int | None, Range(1, PART_LIMITS["chunk_tokens"])] = None
    hold_steps: Annotated[int | None, Range(1, PART_LIMITS["hold_steps"])] = None
    model: Annotated[str, load.spec_name("model")] = ""
    system: Annotated[str, load.spec_name("hardware")] = ""
    precision: Annotated[str, load.spec_name("precision")] = ""
    profile: Profile = ""
    engine: Annotated[str, OneOf(engine_names)] = ""
    speculation: Annotated[str, AfterValidator(speculation_named)] = ""
    draft_tokens: Annotated[int | None, Range(0, MOST_DRAFTS)] = None
    ffn: _Ffn | None = None


def _group(part: str, keys: _Instances) -> InstanceGroup:
    stage, chunk = keys.tp * keys.dp * keys.pcp, keys.chunk_tokens
    faults: list[tuple[tuple[str, ...], str]] = []
    if stage % keys.ep:
        faults.append(((), f"ep {keys.ep} does not divide the {stage} GPUs of a stage (tp x dp x pcp)"))
    if chunk is not None and (keys.pp == 1 or part not in CHUNKING):
        said = f"{chunk} cuts the prompts of a pass for the stages of a pipeline; allowed: with pp above 1, in "
        faults.append((("chunk_tokens",), said + " and ".join(CHUNKING)))
    if keys.ffn is not None and part != "decode":
        faults.append((("ffn",), f"is in {part}; allowed: in decode"))
    elif keys.ffn is not None and keys.ep > 1:
        faults.append((("ffn",), f"ep {keys.ep}: experts lie on the GPUs of ffn; allowed: ep 1"))
    if faults:
        raise SeveralFaultsError(faults)
    ep = keys.dp if keys.ffn is not None else keys.ep
    mapping = domain.Sharding(
        tp_attn=keys.tp,
        dp_attn=keys.dp,
        tp_ffn=stage // ep,
        ep=ep,
        pp=keys.pp,
        redundant_slots=keys.redundant_slots,
        dcp=keys.dcp,
        pcp=keys.pcp,
        chunk_tokens=chunk or 0,
    )
    limits = {name: getattr(keys, name) for name in LIMITS}
    replicas = expected(lambda: Replicas(mapping=mapping, instances=keys.instances, **limits))
    return InstanceGroup(
        replicas, {key: name for key in SERVES if (name := getattr(keys, key))}, keys.draft_tokens, keys.ffn
    )


def _part(name: str) -> Written:
    """``{tp: 2, instances: 2}``, or a list of these."""
    return Written(Several[Annotated[InstanceGroup, Written(_Instances, partial(_group, name))]], tuple)


class EncodeKeys(Strict):
    """GPUs that encode images before prefill, and the images of a request."""

    instances: Annotated[int, Range(1, 10**5)] = 1
    images: Annotated[int, Range(1, 10**5)] = 1
    height: Annotated[int, Range(1, 10**5)]
    width: Annotated[int, Range(1, 10**5)]
    cached: Annotated[float, Range(0.0, 0.999_999)] = 0.0
    system: Annotated[str, load.spec_name("hardware")] = ""
    precision: Annotated[str, load.spec_name("precision")] = ""


class DeploymentKeys(Strict):
    """Instances by part, and the encode pool before them."""

    gpus: Annotated[int | None, Range(1, 10**6)] = None
    encode: EncodeKeys | None = None
    prefill: Annotated[tuple[InstanceGroup, ...], _part("prefill")] = ()
    decode: Annotated[tuple[InstanceGroup, ...], _part("decode")] = ()
    colocated: Annotated[tuple[InstanceGroup, ...], _part("colocated")] = ()
    pairs: Annotated[tuple[InstanceGroup, ...], _part("pairs")] = ()

    def served(self, name: str, usual: Mapping[str, Any]) -> ServedDeployment:
        """The deployment of a name, with the GPUs of its largest choice of parts where none are given.

        Instances serve the ``usual`` values of ``SERVES``, with its ``draft_tokens``, where they do not say something
        else.
        """
        groups: dict[str, tuple[InstanceGroup, ...]] = {part: getattr(self, part) for part in PARTS}
        if not any(groups.values()):
            raise InputError(f"has no instances; allowed: {', '.join(PARTS)}")
        some = any(each.serves for entries in groups.values() for each in entries)
        found = {part: tuple(_placed(each, usual, own=some) for each in groups[part]) for part in PARTS}
        sums = {part: sum(each.gpus for each in entries) for part, entries in found.items()}
        prefill, decode, colocated, pairs = found.values()
        return ServedDeployment(
            name=name,
            gpus=self.gpus or largest_choice(sums),
            prefill=prefill,
            decode=decode,
            colocated=colocated,
            pairs=pairs,
            encode=None if self.encode is None else _encoders(self.encode, usual),
        )


def _encoders(keys: EncodeKeys, usual: Mapping[str, Any]) -> Encoders:
    """The encode pool, on the usual system unless it says another."""
    names = {**usual, "speculation": "", **{key: name for key in ENCODES if (name := getattr(keys, key))}}
    at = _setup_of(names)
    step = encode_step(at, images=keys.images, height=keys.height, width=keys.width, cached=keys.cached)
    return Encoders(step=step, instances=keys.instances)


def _placed(group: InstanceGroup, usual: Mapping[str, Any], *, own: bool) -> Replicas:
    """Instances with their draft tokens and, where some say what they serve, a setup of their ``own``."""
    replicas, names = group.replicas, {**usual, **group.serves}
    drafts = group.draft_tokens
    if drafts is None:
        drafts = 0 if names["speculation"] in ("", NO_SPECULATION) else usual.get("draft_tokens", 0)
    at = _setup_of(names)
    return replace(
        replicas,
        mapping=replace(replicas.mapping, draft_tokens=drafts),
        setup=at if own else None,
        ffn=None if group.ffn is None else _ffn_pool(group.ffn, names, at),
    )


def _ffn_pool(keys: _Ffn, names: Mapping[str, Any], at: Setup) -> FfnPool:
    """GPUs for the feed-forward part, on the system of the attention GPUs unless they say another."""
    said = {key: name for key in ("system", "precision") if (name := getattr(keys, key))}
    own = {**names, **({"engine": ""} if "system" in said else {}), **said}
    theirs = _setup_of(own) if said else None
    mapping = ffn_mapping(theirs or at, keys.gpus, keys.tp)
    return FfnPool(mapping=mapping, microbatches=keys.microbatches, setup=theirs)


def served_by_name(given: Mapping[str, DeploymentKeys], info: Any) -> tuple[ServedDeployment, ...]:
    """Make the deployments of a file.

    The result is in the order of the file; none where the file does not say what they serve, which is a fault by
    itself.
    """
    found: list[ServedDeployment] = []
    if any(key not in info.data for key in SERVES):
        return ()
    faults = []
    for name, keys in given.items():
        try:
            found.append(keys.served(name, info.data))
        except DisaggSimError as error:
            faults.append(((name,), str(error)))
    if faults:
        raise SeveralFaultsError(faults)
    return tuple(found)
