"""State what a plan is asked for, and check it: one line for what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from disagg_sim.choices import (
    EVEN_RANKS,
    FAILURES,
    HEADROOM,
    MOST_HEADROOM,
    OBJECTIVES,
    POOLS,
    RANK_IMBALANCES,
    TUNED_DELAY,
)
from disagg_sim.errors import (
    DisaggSimError,
    InputError,
    UnknownNameError,
    above_zero,
    check_kinds,
    check_word,
    nearest,
    whole_number,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_efficiency, load_model, load_precision, load_system
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import skewed_profile
from disagg_sim.facts.speculation import Speculation
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.serving.costs import Per
from disagg_sim.serving.pool_names import Images
from disagg_sim.techniques.availability.law import check_target
from disagg_sim.techniques.prefill_delay.law import parse_prefill_delay
from disagg_sim.workload.trace import Trace

#: In place of names of systems: all that are shipped and have fits.
ANY = "any"
#: Recipes in the order in which they are taken where none is named: the first whose arithmetic the GPU has.
USUAL_PRECISIONS = ("nvfp4_fp8kv", "fp8", "bf16")
#: Beginning of the names of models whose checkpoints hold experts in MXFP4, and their recipe.
MXFP4_MODELS, MXFP4 = "gpt_oss", "mxfp4"
#: Most GPUs that are planned for. [1]
MOST_GPUS = 100_000
#: In place of an engine that mappings must suit: that of the times.
OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan may use and what it is best at, beside model, systems, lengths, limits and size."""

    users: int | None = None  # requests in flight, in place of a rate: each user sends the next when one has ended [1]
    objective: str = "gpus"  # of ``OBJECTIVES``
    prefill_system: str | None = None  # of the prefill pool; None = as decode
    pools: tuple[str, ...] = ()  # that requests pass, of ``POOLS``; () = prefill and decode, or instances of both
    images: Images | None = None  # of a request, for an encode pool; None = none
    ffn_system: str | None = None  # of feed-forward ranks; None = that of attention
    precision: str | None = None  # recipe; None = the usual one of model and system
    engine: str | None = None  # None = each system's
    profile: str = "measured"
    layouts: str = "supported"  # as ``enumerate_mappings``
    max_dcp: int = 1  # most GPUs that share the cached tokens of a KV head, of instances that decode [1]
    max_pcp: int = 1  # most attention ranks that share a prompt, of prefill pools [1]
    max_redundant_experts: int = 0  # most slots for copies of experts, over all EP ranks [1]
    expert_skew: float = 0.0  # coefficient of variation of the popularity of experts [1]
    within: str | None = OWN  # engine that must be able to start the mappings; ``OWN`` = that of the times; None = any
    max_nic: float | None = None  # of KV caches, one way, per GPU; None = what the links reach [B/s]
    prices: Mapping[str, float] = field(default_factory=dict)  # of a GPU by system, in place of the market's [USD/h]
    availability: float | None = None  # share of time with full capacity, for which spares are added; None = none [1]
    failures: str = FAILURES  # name or path of a file of failure rates (``hw_specs/failures/``)
    speculation: Speculation | None = None  # drafter of all instances, and the numbers of drafts that compete
    set_aside: float = 0.0  # of each GPU of instances that prefill, for prompts between requests [B]
    rank_imbalance: str = EVEN_RANKS  # how requests find their DP rank, of ``choices.RANK_IMBALANCES``
    hold_prompts: str | int = TUNED_DELAY  # most decode steps that prompts of co-located instances wait until every
    # attention rank has one; or "none", or "tuned", as far as that saves GPUs and the engine can [1]
    headroom: float = HEADROOM  # share of the rate that every pool could serve beside it [1]
    techniques: str = ""  # of the registry with their values, as ``setup``
    trace: Trace | None = None  # whose arrivals count: how bursty they are, and what a simulation replays

    @property
    def per(self) -> Per:
        """Unit of cost of a GPU: own prices or the market's, or what the objective counts."""
        return self.prices or "usd" if self.objective == "usd" else OBJECTIVES[self.objective]

    @property
    def delays(self) -> tuple[int, ...] | None:
        """Decode steps by which prompts may be delayed at most; None = tuned. [1]"""
        return parse_prefill_delay(self.hold_prompts)

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range."""
        check_kinds(self)
        check_word("objective", self.objective, OBJECTIVES)
        known = (*list_specs("layout"), OWN)
        if self.within is not None and self.within not in known:
            said = f"within {self.within!r} is unknown{nearest(self.within, known)}; allowed: {', '.join(known)}"
            raise UnknownNameError(said)
        if self.users is not None:
            whole_number("users", self.users)
        whole_number("max_dcp", self.max_dcp)
        whole_number("max_pcp", self.max_pcp)
        whole_number("max_redundant_experts", self.max_redundant_experts, 0)
        parse_prefill_delay(self.hold_prompts)
        for name in self.pools:
            check_word("pools", name, POOLS)
        if self.max_nic is not None:
            above_zero("max_nic", self.max_nic, "B/s")
        if not 0.0 <= self.set_aside < math.inf:
            raise InputError(f"set_aside {self.set_aside:g} is out of range; allowed: from 0 B, finite")
        check_word("rank_imbalance", self.rank_imbalance, RANK_IMBALANCES)
        if self.availability is not None:
            check_target(self.availability)
        if not 0.0 <= self.headroom <= MOST_HEADROOM:
            raise InputError(
                f"headroom {self.headroom:g} is out of range; allowed: from 0 to {MOST_HEADROOM:g}, 0.2 = a fifth"
            )
        for name, price in self.prices.items():
            above_zero(f"price of {name}", price, "USD/h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is to be served: a rate, as much as GPUs can, or a number of users. One of the three."""

    rate: float | None = None  # [request/s]
    gpus: int | None = None  # [1]
    users: int | None = None  # in flight [request]

    def __post_init__(self) -> None:
        """``InputError`` unless exactly one is given and in range."""
        given = {name: value for name in ("rate", "gpus", "users") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise InputError(f"give one of gpus, rate and users: how much is to be served; got {said}")
        if self.rate is not None and above_zero("rate", self.rate, "requests/s") == math.inf:
            raise InputError("rate must be finite, got inf (of a trace whose requests arrive at once?); give a rate")
        if self.gpus is not None:
            whole_number("gpus", self.gpus, most=MOST_GPUS)


def systems_of(names: str | SystemSpec | Path | Sequence[str | SystemSpec | Path]) -> list[SystemSpec]:
    """Load the systems that compete.

    Takes ``names`` (a spec, names with commas between them, a list of these, or ``"any"``: those of ``any_systems``).
    Returns each once, in the order given.
    """
    if isinstance(names, SystemSpec):
        return [names]
    if isinstance(names, str):
        parts = [part.strip() for part in names.split(",") if part.strip()]
        if parts == [ANY]:
            return any_systems()[0]
        if not parts:
            raise InputError("system is empty; give names such as h100_sxm, with commas between them, or any")
        names = parts
    if isinstance(names, Path):
        names = [names]
    found = [each if isinstance(each, SystemSpec) else load_system(each) for each in names]
    return list({each.name: each for each in found}.values())


def any_systems() -> tuple[list[SystemSpec], list[SystemSpec]]:
    """Load the shipped systems without a power cap: those timed on kernels of their generation, and the rest.

    A forecast from another vendor's or generation's kernels may be twice as fast as the GPU, and the fastest would win.
    """
    found: tuple[list[SystemSpec], list[SystemSpec]] = ([], [])
    for system in map(load_system, list_specs("hardware")):
        fits = load_efficiency(system.name)
        timed = fits is not None and _generation(load_system(fits.measured_on)) == _generation(system)
        if system.power_cap is None:
            found[not timed].append(system)
    return found


def _generation(system: SystemSpec) -> str:
    """Name the generation of a GPU: Blackwell of Blackwell Ultra."""
    return system.architecture.partition(" ")[0]


def usual_precision(model: ModelSpec, system: SystemSpec, cache: str = "") -> str:
    """Name the recipe that is planned with where none is named: the first that the system runs and has fits of.

    Takes ``cache`` (format that the KV cache must have, because another pool has written it; "" = any).
    """
    usual = (MXFP4, *USUAL_PRECISIONS) if model.name.startswith(MXFP4_MODELS) else USUAL_PRECISIONS
    others = tuple(name for name in list_specs("precision") if name not in usual)

    def able(names: Sequence[str]) -> list[str]:
        recipes = [load_precision(name).resolve(model) for name in names]
        runs = [each for each in recipes if each.arithmetics <= set(system.peak_flops) and timed(each)]
        return [str(each.name) for each in runs if cache in ("", each.cache.name)]

    def timed(recipe: Precision) -> bool:
        """Whether matrix multiplies in its formats were fitted, on the system or on the one that it inherits from."""
        fits = load_efficiency(system.name)
        dense = (*recipe.projections, recipe.ffn, recipe.head, recipe.router)
        return fits is None or {each.name for each in dense} <= {fit.format for fit in fits.gemm}

    if model.recipe or model.no_recipe:
        if model.recipe and able([model.recipe]):
            return model.recipe
        why = model.no_recipe or f"{system.name} does not run {model.recipe}{cache and f' with a KV cache in {cache}'}"
        known = "such as fp8 or bf16" if model.no_recipe else f"of {', '.join(able((*usual, *others)))}"
        raise InputError(f"the checkpoint {model.name}: {why}; say the precision to plan with instead, {known}")
    if found := able((*usual, *others) if cache else usual):
        return found[0]
    raise InputError(f"no precision recipe that {system.name} can run has a KV cache in {cache}")


def setups_of(model: str | Path | ModelSpec, system: SystemSpec, options: PlanOptions) -> tuple[Setup, Setup]:
    """Make the setups of decode and of prefill; the same one where both run on one system."""
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    recipe = options.precision or usual_precision(spec, system)
    drafter = options.speculation
    if not spec.is_moe and (options.expert_skew or options.max_redundant_experts):
        raise InputError(f"expert_skew and max_redundant_experts are of models with experts; {spec.name} has none")
    profile = skewed_profile(options.profile, options.expert_skew)
    at = setup(spec, system, recipe, profile, options.engine, drafter, options.techniques)
    if options.delays and at.overheads is not None and not at.overheads.holds_prompts:
        raise InputError(
            f"hold_prompts {options.hold_prompts}: launch writes no prefill delay for {at.engine}; "
            "allowed with it: none, tuned"
        )
    if options.prefill_system is None:
        both = replace(at, set_aside=options.set_aside) if options.set_aside else at
        return both, both
    sender = load_system(options.prefill_system)
    recipe = options.precision or usual_precision(spec, sender, at.precision.cache.name)
    sends = setup(spec, sender, recipe, profile, options.engine, drafter, options.techniques)
    return at, replace(sends, set_aside=options.set_aside)


def usable_systems(
    model: str | Path | ModelSpec, systems: Sequence[SystemSpec], options: PlanOptions
) -> tuple[list[tuple[Setup, Setup]], list[str]]:
    """Make the setups of all systems that can be planned for, and say why others cannot; one alone must do."""
    found: list[tuple[Setup, Setup]] = []
    said: dict[str, list[str]] = {}
    drafters: list[Speculation | None] = [None]
    if (asked := options.speculation) is not None:  # a choice of 0 drafts: pools without a drafter compete
        drafts = tuple(each for each in asked.choices if each)
        drafters = [*([asked.trying(drafts)] if drafts else []), *([None] if 0 in asked.choices else [])]
    for system in systems:
        try:
            for drafter in drafters:
                found.append(setups_of(model, system, replace(options, speculation=drafter)))
        except DisaggSimError as error:
            if len(systems) == 1 or isinstance(error, UnknownNameError):
                raise
            said.setdefault(str(error), []).append(system.name)
    return found, [f"{', '.join(names)}: {why}" for why, names in said.items()]
