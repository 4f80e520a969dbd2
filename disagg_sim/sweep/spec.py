"""Read a sweep's YAML into a frozen ``SweepSpec``; report all faults of a file at once.

Past 400 lines: every key of a sweep, its form in YAML, and the conflicts between keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator, Tag, WrapValidator

from disagg_sim.certainty.energy import COLUMNS_PER, MATCHED_PER
from disagg_sim.choices import EVEN_RANKS, MOST_DRAFTS, MOST_SKEW, POOLS, RANK_IMBALANCES, TWO
from disagg_sim.domain import ServingMode
from disagg_sim.domain import Sharding as Mappings
from disagg_sim.errors import LONGEST_SHOWN, DisaggSimError, SpecError, quoted
from disagg_sim.facts import load
from disagg_sim.facts.faults import expected, faults_of_call, out_of_range, require_few
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.profile import skewed_profile
from disagg_sim.facts.schema import (
    Axis,
    Named,
    OneOf,
    Range,
    Several,
    Strict,
    Title,
    Unless,
    Written,
    checked_or_faults,
    distinct,
    one_of,
    one_spelling,
)
from disagg_sim.facts.yaml_files import find_document, list_specs, read_mapping, spec_error
from disagg_sim.physics.blocks import MLA_FORMS
from disagg_sim.physics.setup import Setup, engine_names
from disagg_sim.search.layouts import Layouts
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.serving.colocation import TTL_MEASURES, Colocation
from disagg_sim.serving.costs import JOULE, costs_of_gpus
from disagg_sim.serving.disaggregated import MATCHINGS
from disagg_sim.serving.pool_names import Images, pool_faults
from disagg_sim.sweep.serving_options import (
    ENERGY,
    NOTHING,
    OWN_COLUMNS,
    TOKEN_PRICES,
    ExtraColumns,
    ServedKeys,
    ServingOptions,
)
from disagg_sim.sweep.traffic import Entry, Seconds, TierKeys, Traffic, with_constant
from disagg_sim.techniques.facts_keys import with_techniques
from disagg_sim.techniques.prefill_delay.law import delays_to_try
from disagg_sim.techniques.registry import asked_techniques, clashes, combined
from disagg_sim.units import GB

_Pixels = Annotated[int, Range(1, 10**5)]


class ImagesKeys(Strict):
    """Keys of ``images``."""

    images: Annotated[int, Range(1, 10_000)]
    height: _Pixels
    width: _Pixels
    cached: Annotated[float, Range(0.0, 0.999999)] = 0.0


def images_of(keys: ImagesKeys) -> Images:
    """Make the images of a request from the keys of a file."""
    return Images(**dict(keys))


def ratio(value: object) -> Fraction | None:
    """Read a ratio of whole numbers, such as 0.5, 3.5 or "1/3"; return None for ``optimal``."""
    if value == "optimal":
        return None
    try:
        text = "" if isinstance(value, bool) else str(value)[: LONGEST_SHOWN + 1]
        exact = re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\d{1,9}/\d{1,9}", text.strip())  # else an exponent has no bound
        fraction = Fraction(text if exact else float(text)).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{quoted(value)} is not a ratio such as 0.5 or '1/3'; allowed, too: optimal") from None
    if not Fraction(1, 1000) <= fraction <= 1000:
        raise ValueError(out_of_range(quoted(value), 0.001, 1000))
    return fraction


#: ``disaggregated`` first; in the other modes every instance does both phases.
MODES = tuple(mode.value for mode in ServingMode)
#: In place of a co-located mode: the one of each case's engine.
ENGINES_MODE = "engine"
#: Largest length of a request. [token]
MOST_TOKENS = 10**9
#: Default size of a block, so that most cases are one block. The demo takes 12 % less time than with 32,768 design
#: points, and no more memory. [1]
BLOCK_POINTS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class PointLimits:
    """Limits of a design point."""

    ftl_s: float = 10.0  # first-token latency, no queue [s]
    ttl_s: float = math.inf  # token-to-token latency [s]
    gpu_cap: int = 576  # GPUs of a matched pair of pools, or of a co-located instance [1]
    max_gpus: int | None = None  # GPUs of one instance; None = the system's own default [1]
    nic_limit: float = math.inf  # KV egress and ingress per GPU; inf = none [B/s]
    layouts: str = Layouts.LAUNCHABLE.value  # mappings to search, of ``search.layouts.Layouts``
    tp_over_nics: bool = False  # whether TP groups may leave the NVLink domain
    one_gpu_stages: bool = True  # whether a pipeline may have stages of one GPU
    max_dcp: int = 1  # GPUs that share the cached tokens of a KV head, in instances that decode [1]
    max_pcp: int = 1  # attention ranks that share a prompt, in prefill pools [1]
    max_redundant_experts: int = 0  # slots for copies of experts, over all EP ranks [1]

    def of(self, traffic: Traffic) -> PointLimits:
        """Replace the limit on FTL by the limit of the traffic, if it has one."""
        return self if traffic.ftl_s is None else replace(self, ftl_s=traffic.ftl_s)

    def mappings(self, at: Setup, *, prefill: bool = False) -> Mappings:
        """Enumerate the mappings within the limits for an instance that prefills, or one that decodes."""
        return enumerate_mappings(
            at,
            max_gpus=self.max_gpus,
            layouts=self.layouts,
            tp_over_nics=self.tp_over_nics,
            one_gpu_stages=self.one_gpu_stages,
            max_dcp=1 if prefill else self.max_dcp,
            max_pcp=self.max_pcp if prefill else 1,
            max_redundant_experts=self.max_redundant_experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedOptions:
    """How prefill and decode share an instance in the co-located modes."""

    ttl_measure: str = Colocation().ttl_measure  # definition of TTL, of ``serving.colocation.TTL_MEASURES``
    every_step_mixed: bool = False  # piggyback: every step has prefill chunks; else the best mix of steps
    hold_steps: tuple[int, ...] | None = Colocation().hold_steps  # prefill delay, see ``serving.colocation.Colocation``


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSystems:
    """Systems of the pools and their precision recipes."""

    system: str  # of decode and co-located instances
    precision: str
    prefill_system: str
    prefill_precision: str

    def in_recipes(self, recipes: Mapping[str, str]) -> PoolSystems:
        """Replace the recipe of each system that ``recipes`` names."""
        return replace(
            self,
            precision=recipes.get(self.system, self.precision),
            prefill_precision=recipes.get(self.prefill_system, self.prefill_precision),
        )

    @property
    def alike(self) -> bool:
        """Whether both phases could run on one instance."""
        return (self.system, self.precision) == (self.prefill_system, self.prefill_precision)

    def __str__(self) -> str:
        """``h100_sxm/fp8``, or ``a100_sxm_80gb/bf16 to h100_sxm/fp8_bf16kv``."""
        decode = f"{self.system}/{self.precision}"
        return decode if self.alike else f"{self.prefill_system}/{self.prefill_precision} to {decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """One sweep as a person wrote it: every combination of its tuples is a case, in every mode."""

    source: str  # file that it was read from
    name: str
    models: tuple[str, ...]
    pools: tuple[PoolSystems, ...]
    traffic: tuple[Traffic, ...]
    recipes: tuple[tuple[str, str, str], ...] = ()  # (model, system, recipe in place of that of ``pools``)
    modes: tuple[str, ...] = MODES[:1]
    limits: tuple[PointLimits, ...] = (PointLimits(),)
    ctx_gen_ratios: tuple[Fraction | None, ...] = (None,)  # prefill over decode GPUs; None = the best [1]
    nvlink_domains: tuple[int | None, ...] = (None,)  # None = the system's own [1]
    mla_forms: tuple[str, ...] = ("auto",)  # of prefill; decode uses the latent form
    sharing: ColocatedOptions = field(default_factory=ColocatedOptions)
    profile: str = "measured"
    expert_skews: tuple[float, ...] = (0.0,)  # coefficient of variation of the popularity of experts [1]
    engine: str = ""  # "" = the system's own
    matching: str = "exact"
    per: str = "gpu"  # divisor of throughput, of ``certainty.energy.COLUMNS_PER``
    prices: tuple[tuple[str, float], ...] = ()  # (system, price of a GPU) in place of the market's [USD/h]
    block_points: int = BLOCK_POINTS  # design points of a block, roughly [1]
    pool_names: tuple[str, ...] = TWO  # pools of a request in order, of ``choices.POOLS``
    images: Images | None = None  # of a request, for an encode pool
    speculations: tuple[str, ...] = ("",)  # curve, or method and acceptance; "" = no speculative decoding
    draft_tokens: tuple[int, ...] = ()  # to try; () = up to the positions of the acceptance [token]
    kv_tiers: tuple[tuple[str, KvTier], ...] = ()  # in place of the tiers of the systems
    served: tuple[ServingOptions, ...] = (NOTHING,)  # KV link, spares, energy ... of the deployment
    told: ExtraColumns = OWN_COLUMNS  # extra columns of frontiers
    uncertainty: bool = False  # whether ``disagg-sim sweep`` adds error bars, as with ``--uncertainty``
    techniques: tuple[str, ...] = ("",)  # of the registry, with their values; ("",) = none in the file

    def recipes_of(self, model: str) -> dict[str, str]:
        """Map systems to recipes of the model's own."""
        return {system: recipe for name, system, recipe in self.recipes if name == model}

    def pools_of(self, model: str) -> tuple[PoolSystems, ...]:
        """Return the pools with the recipes of a model, without duplicates."""
        own = self.recipes_of(model)
        return tuple(dict.fromkeys(pools.in_recipes(own) for pools in self.pools))


def same_system(system: str, precision: str) -> PoolSystems:
    """Make pools whose phases share one system and recipe."""
    return PoolSystems(system=system, precision=precision, prefill_system=system, prefill_precision=precision)


_USUAL: dict[str, Any] = {each.name: each.default for each in fields(SweepSpec)}
_Model = Annotated[str, load.spec_name("model")]
_System = Annotated[str, load.spec_name("hardware")]
_Recipe = Annotated[str, load.spec_name("precision")]


_Recipes = Named[_System, Several[_Recipe]]


class _Sides(Strict):
    """Keys of ``systems`` where prefill and decode differ."""

    prefill: _Recipes
    decode: _Recipes


def _pairs(recipes: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(system, recipe) for system, several in recipes.items() for recipe in several]


def _unlike(sides: _Sides) -> list[PoolSystems]:
    return [
        PoolSystems(system=system, precision=recipe, prefill_system=first[0], prefill_precision=first[1])
        for first, (system, recipe) in product(_pairs(sides.prefill), _pairs(sides.decode))
    ]


def _pools_form(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return None
    return "sides" if {"prefill", "decode"} & {*value} else "alike"


#: ``{system: precision, ...}``, or ``{prefill: {...}, decode: {...}}``.
_Pools: Any = Annotated[
    Annotated[_Recipes, AfterValidator(lambda given: [same_system(*pair) for pair in _pairs(given)]), Tag("alike")]
    | Annotated[_Sides, AfterValidator(_unlike), Tag("sides")],
    one_of(_pools_form, "not a mapping of system to precision, such as 'h100_sxm: fp8'"),
]


#: ``{model: {system: precision}}``.
_OwnRecipes: Any = Named[_Model, Named[_System, _Recipe]]


def _own_recipes(given: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, str, str], ...]:
    return tuple((model, *pair) for model, recipes in given.items() for pair in recipes.items())


class _Limits(Strict):
    """Keys of ``limits``; each may be a list."""

    ftl_s: Axis[Seconds] = (PointLimits().ftl_s,)
    ttl_s: Axis[Annotated[Seconds, Unless("none", math.inf)]] = (math.inf,)
    gpu_cap: Axis[Annotated[int, Range(2, 10**6)]] = (PointLimits().gpu_cap,)
    max_gpus: Axis[Annotated[int | None, Range(1, 10**4), Unless("own", None)]] = (None,)
    nic_gb_per_s: Axis[Annotated[float, Range(1e-6, 1e6, "GB/s"), Unless("none", math.inf)]] = (math.inf,)
    layouts: Axis[Annotated[str, OneOf(tuple(Layouts))]] = (PointLimits().layouts,)
    tp_over_nics: Axis[bool] = (PointLimits().tp_over_nics,)
    one_gpu_stages: Axis[bool] = (PointLimits().one_gpu_stages,)
    max_dcp: Axis[Annotated[int, Range(1, 64)]] = (PointLimits().max_dcp,)
    max_pcp: Axis[Annotated[int, Range(1, 64)]] = (PointLimits().max_pcp,)
    max_redundant_experts: Axis[Annotated[int, Range(0, 1024)]] = (PointLimits().max_redundant_experts,)


def _combined(limits: _Limits) -> tuple[PointLimits, ...]:
    axes = dict(limits)
    axes["nic_limit"] = tuple(nic * GB for nic in axes.pop("nic_gb_per_s"))
    in_order = {each.name: axes[each.name] for each in fields(PointLimits)}  # the first axis varies slowest
    require_few("", *map(len, in_order.values()))
    return tuple(PointLimits(**dict(zip(in_order, values, strict=True))) for values in product(*in_order.values()))


_Prices = Annotated[dict[_System, Annotated[float, Range(1e-3, 1e4, "USD/h")]], WrapValidator(one_spelling)]


def _speculation(word: str) -> str:
    """Return the canonical spelling of a curve, or of a method with its acceptance."""
    return str(expected(load.load_speculation, word).name)


class _File(ServedKeys):
    """Keys of a sweep's file."""

    name: Title
    models: Axis[_Model]
    systems: Annotated[tuple[PoolSystems, ...], Written(Several[_Pools], lambda each: distinct(tuple(chain(*each))))]
    traffic: Annotated[tuple[Traffic, ...], Written(Several[Entry], with_constant)]
    recipes: Annotated[tuple[tuple[str, str, str], ...], Written(_OwnRecipes, _own_recipes)] = ()
    modes: Axis[Annotated[str, OneOf((*MODES, ENGINES_MODE))]] = MODES[:1]
    limits: Annotated[tuple[PointLimits, ...], Written(_Limits, _combined)] = (PointLimits(),)
    profile: Annotated[str, OneOf(partial(list_specs, "profile"))] = _USUAL["profile"]
    expert_skew: Axis[Annotated[float, Range(0.0, MOST_SKEW)]] = (0.0,)
    engine: Annotated[str, OneOf(engine_names)] = ""
    matching: Annotated[str, OneOf(MATCHINGS)] = _USUAL["matching"]
    ctx_gen_ratio: Axis[Annotated[Fraction | None, PlainValidator(ratio)]] = (None,)
    nvlink_domain: Axis[Annotated[int | None, Range(2, 1024), Unless("own", None)]] = (None,)
    mla_form: Axis[Annotated[str, OneOf(MLA_FORMS)]] = ("auto",)
    ttl_measure: Annotated[str, OneOf(TTL_MEASURES)] = ColocatedOptions().ttl_measure
    every_step_mixed: bool = False
    hold_steps: Annotated[tuple[int, ...] | None, PlainValidator(delays_to_try)] = ColocatedOptions().hold_steps
    per: Annotated[str, OneOf(COLUMNS_PER)] = _USUAL["per"]
    prices: Annotated[
        tuple[tuple[str, float], ...], Written(_Prices, lambda prices: tuple(sorted(prices.items())))
    ] = ()
    block_points: Annotated[int, Range(1, 10**7)] = BLOCK_POINTS
    pools: Axis[Annotated[str, OneOf(POOLS)]] = TWO
    images: Annotated[Images | None, Written(ImagesKeys, images_of)] = None
    speculation: Axis[Annotated[str, AfterValidator(_speculation), Unless("none", "")]] = ("",)
    draft_tokens: Axis[Annotated[int, Range(0, MOST_DRAFTS)]] = ()
    kv_tiers: TierKeys = ()
    rank_imbalance: Axis[Annotated[str, OneOf(RANK_IMBALANCES)]] = (EVEN_RANKS,)
    allow_long_context: bool = False
    uncertainty: bool = False

    def spec(self, source: str) -> SweepSpec:
        """Make the sweep of these keys."""
        shared = {each.name for each in fields(ColocatedOptions)}
        same = {each.name for each in fields(SweepSpec)} - {"pools", "traffic"}
        keys = {name: value for name, value in self if name in same}
        return SweepSpec(
            source=source,
            pools=self.systems,
            traffic=tuple(replace(each, rank_imbalance=word) for each in self.traffic for word in self.rank_imbalance),
            ctx_gen_ratios=self.ctx_gen_ratio,
            nvlink_domains=self.nvlink_domain,
            mla_forms=self.mla_form,
            sharing=ColocatedOptions(**{name: value for name, value in self if name in shared}),
            expert_skews=self.expert_skew,
            pool_names=self.pools,
            speculations=self.speculation,
            served=self.served,
            told=self.extra_columns,
            techniques=combined({each.name: getattr(self, each.name) for each in asked_techniques()}),
            **keys,
        )


def load_sweep(
    name: str, *, profile: str = "", engine: str = "", prices: Mapping[str, float] | None = None
) -> SweepSpec:
    """Read a sweep from a file, or a shipped one by its name.

    ``prices`` of a GPU by system override those of the file. [USD/h]
    """
    path = find_document("sweep", name)
    document = read_mapping(path)
    overrides: dict[str, Any] = {key: value for key, value in (("profile", profile), ("engine", engine)) if value}
    options = {key: f"--{key}" for key in overrides}
    if prices:
        own = document.get("prices", {})
        overrides["prices"] = {**own, **prices} if isinstance(own, Mapping) else own
        options |= {f"prices.{system}": f"--price {system}" for system in prices}
        options |= {} if own else {"prices": "--price"}
    checked = checked_or_faults(with_techniques(_File, axes=True), {**document, **overrides})
    if isinstance(checked, _File):
        spec = checked.spec(str(path))
        faults = [
            *checked.faults(spec.per, max(each.gpu_cap for each in spec.limits)),
            *_conflicts(spec, long_context=checked.allow_long_context),
        ]
        if not faults:
            return spec
    else:
        faults = checked
    raise _error(path, list(dict.fromkeys(faults)), options)


def _error(path: Path, faults: list[str], options: Mapping[str, str]) -> SpecError:
    """Make one error of all faults; each names its option, or else the file."""
    of_options, of_file = [], []
    for fault in faults:
        key, _, reason = fault.partition(":")
        if key in options:
            of_options.append(f"{options[key]}:{reason}")
        else:
            of_file.append(fault)
    return SpecError("\n".join([*of_options, *([str(spec_error(path, of_file))] if of_file else [])]))


def _conflicts(spec: SweepSpec, *, long_context: bool) -> Iterator[str]:
    """Find faults of combined keys, such as recipes that a GPU lacks or prompts beyond a model's context."""
    axes = (spec.models, spec.pools, spec.traffic, spec.limits, spec.ctx_gen_ratios, spec.nvlink_domains)
    many = list(
        faults_of_call("", require_few, "models x systems x traffic x limits ...", *map(len, (*axes, spec.mla_forms)))
    )
    if many:
        yield from many
        return
    for model in (load.load_model(name) for name in spec.models):
        check = partial(model.check_context, allow_long=long_context)
        for traffic in spec.traffic:
            yield from faults_of_call("traffic", check, traffic.isl, traffic.osl)
    yield from _domain_conflicts(spec)
    yield from _idle_keys(spec)
    yield from _idle_recipes(spec)
    yield from _speculation_conflicts(spec)
    yield from _tier_conflicts(spec)
    for pools in spec.pools:
        yield from _pool_conflicts(spec, pools)
    if spec.prices and spec.per != "usd" and TOKEN_PRICES not in spec.told.columns:
        yield f"prices: act with 'per: usd' or 'columns: {TOKEN_PRICES}' only, and per is {spec.per!r}"
    if spec.matching != "exact" and spec.ctx_gen_ratios != (None,):
        yield f"ctx_gen_ratio: a fixed ratio needs 'matching: exact', and matching is {spec.matching!r}"
    yield from _lacking_fits(spec)
    yield from _lacking_power(spec)
    yield from clashes(_on(spec), "sweep")
    yield from pool_faults(
        spec.pool_names,
        spec.images,
        spec.models,
        min(traffic.isl for traffic in spec.traffic),
        {
            "per": spec.per if spec.per == JOULE else "",
            "matching": "" if spec.matching == "exact" else spec.matching,
            "kv_link": next((str(each.kv_link) for each in spec.served[::-1] if each.kv_link), ""),
            "ctx_gen_ratio": next((str(each) for each in spec.ctx_gen_ratios if each is not None), ""),
            "modes": "" if "disaggregated" in spec.modes else ", ".join(spec.modes),
        },
    )


def _on(spec: SweepSpec) -> dict[str, str]:
    """Name the techniques that are on in some case, each with what asks for it, as far as pools may exclude them."""
    split, drafter = "attention" in spec.pool_names, next(filter(None, spec.speculations), "")
    alone = split and "decode" not in spec.pool_names  # no whole instances decode beside them
    dcp, copies = (max(getattr(each, name) for each in spec.limits) for name in ("max_dcp", "max_redundant_experts"))
    spares = max(each.availability or 0.0 for each in spec.served)
    on = {
        "encode": spec.images is not None and "images",
        "context": alone and dcp > 1 and f"limits.max_dcp: {dcp}",
        "experts": alone and copies > 0 and f"limits.max_redundant_experts: {copies}",
        "speculation": drafter and f"speculation: {load.load_speculation(drafter).name!r}",
        "split": split and "pools",
        "availability": spares > 0 and f"availability: {spares:g}",
    }
    return {name: text for name, text in on.items() if text}


def _speculation_conflicts(spec: SweepSpec) -> Iterator[str]:
    """Find curves of other models, and draft tokens without an acceptance or beyond its positions."""
    curves = [load.load_speculation(word) for word in spec.speculations if word]
    if spec.draft_tokens and not curves:
        yield "draft_tokens: acts with 'speculation' only"
    for curve in curves:
        yield from faults_of_call("draft_tokens", curve.trying, spec.draft_tokens)
        for model in spec.models:
            yield from faults_of_call("speculation", curve.check_model, load.load_model(model))


def _tier_conflicts(spec: SweepSpec) -> Iterator[str]:
    """Find tiers that a system lacks, and tiers that no traffic uses."""
    of_turns = {tier for each in spec.traffic if each.turns and each.turns.cache for tier in each.turns.cache.tiers}
    named = of_turns | {tier for each in spec.traffic if each.cached for tier, _ in each.cached.tiers}
    for tier in sorted({name for name, _ in spec.kv_tiers} - named):
        yield f"kv_tiers.{tier}: no traffic keeps prompts there"
    for name in dict.fromkeys(pools.prefill_system for pools in spec.pools):
        system = load.load_system(name)
        system = replace(system, kv_tiers={**system.kv_tiers, **dict(spec.kv_tiers)})
        for tier in sorted(named):
            yield from faults_of_call("traffic", system.tier, tier)
        hbm = max((each.turns.cache.hbm for each in spec.traffic if each.turns and each.turns.cache), default=0.0)
        if hbm >= system.hbm_reported:
            held = f"{system.hbm_reported / GB:.0f} GB"
            yield f"traffic: hbm {hbm / GB:g} GB set aside of each GPU, and {name} has {held}; allowed: less"


def _domain_conflicts(spec: SweepSpec) -> Iterator[str]:
    """Reject ``own`` next to the number it stands for: the case would run twice."""
    if None not in spec.nvlink_domains:
        return
    for pools in spec.pools:
        own = {load.load_system(name).nvlink_domain for name in (pools.prefill_system, pools.system)}
        twice = own.pop()
        if not own and twice in spec.nvlink_domains:
            yield f"nvlink_domain: {twice} equals 'own' on {pools.system}: the case would run twice"


def _idle_keys(spec: SweepSpec) -> Iterator[str]:
    """Find keys that act in no mode of the sweep."""
    sharing, neutral = spec.sharing, type(spec.sharing)()
    uses = (
        ("kv_link", any(each.kv_link for each in spec.served), ("disaggregated",)),
        ("ctx_gen_ratio", spec.ctx_gen_ratios != (None,), ("disaggregated",)),
        ("ttl_measure", sharing.ttl_measure != neutral.ttl_measure, ("colocated", "piggyback")),
        ("every_step_mixed", sharing.every_step_mixed, ("piggyback",)),
        ("hold_steps", sharing.hold_steps != neutral.hold_steps, ("colocated",)),
    )
    for key, given, modes in uses:
        acts = {*modes} if modes == MODES[:1] else {*modes, ENGINES_MODE}
        if given and not acts & {*spec.modes}:
            yield f"{key}: acts in {' and '.join(modes)} only; modes has {', '.join(spec.modes)}"


def _idle_recipes(spec: SweepSpec) -> Iterator[str]:
    """Find recipes of absent models or systems, and FTL limits that the limit of a traffic would make equal."""
    systems = {name for pools in spec.pools for name in (pools.system, pools.prefill_system)}
    for model, system, _ in spec.recipes:
        if model not in spec.models:
            yield f"recipes.{model}: models has {', '.join(spec.models)}"
        elif system not in systems:
            yield f"recipes.{model}.{system}: systems has {', '.join(sorted(systems))}"
    own = any(traffic.ftl_s is not None for traffic in spec.traffic)
    if own and len({limits.ftl_s for limits in spec.limits}) > 1:
        yield "traffic: ftl_s is a limit of its own, and limits.ftl_s has several; the case would run twice"


def _pool_conflicts(spec: SweepSpec, pools: PoolSystems) -> Iterator[str]:
    """Check that both pools run their recipes, share a cache format, suit the modes and have a price."""
    shared = f"systems.{pools.system}" if pools.alike else "systems"
    for model in (load.load_model(name) for name in spec.models):
        used = pools.in_recipes(spec.recipes_of(model.name))
        where = shared if used == pools else f"recipes.{model.name}"
        sides = ((used.system, used.precision), (used.prefill_system, used.prefill_precision))
        try:
            read, written = (
                load.resolve_precision(recipe, model, load.load_system(system)) for system, recipe in sides
            )
        except DisaggSimError as error:
            yield f"{where}: {error}"
            continue
        if read.cache.name != written.cache.name:
            yield (
                f"{'systems' if used == pools else where}: {used} cannot hand over the KV cache: prefill writes "
                f"{written.cache.name}, decode reads {read.cache.name}; take recipes with the same cache format"
            )
    if not pools.alike and "disaggregated" not in spec.modes:
        yield f"systems: {pools} serves disaggregated only; modes has {', '.join(spec.modes)}"
    names = (pools.system, pools.prefill_system)
    per = "usd" if TOKEN_PRICES in spec.told.columns else MATCHED_PER.get(spec.per, spec.per)
    for fault in faults_of_call("prices", costs_of_gpus, names, dict(spec.prices) or per):
        yield f"{fault}; on the command line: --price SYSTEM=USD"


def _lacking_fits(spec: SweepSpec) -> Iterator[str]:
    """Find systems without fits for a fitted profile, and profiles that take no expert skew."""
    for skew in filter(None, spec.expert_skews):
        yield from faults_of_call("expert_skew", load.load_profile, skewed_profile(spec.profile, skew))
    if not load.load_profile(spec.profile).fitted:
        return
    for system in dict.fromkeys(name for pools in spec.pools for name in (pools.system, pools.prefill_system)):
        if load.load_efficiency(system) is None:
            yield f"profile: {spec.profile!r} needs fitted efficiencies, {system} has none; use 'ideal'"


def _lacking_power(spec: SweepSpec) -> Iterator[str]:
    """Find systems without a power file, where energy is asked for."""
    if spec.per != JOULE and ENERGY not in spec.told.columns:
        return
    asked = f"per: {JOULE!r}" if spec.per == JOULE else f"columns: {ENERGY!r}"
    for system in dict.fromkeys(name for pools in spec.pools for name in (pools.system, pools.prefill_system)):
        if load.load_power(system) is None:
            other = "; use 'watt'" * (spec.per == JOULE)
            yield f"{asked} needs hw_specs/power/{system}.yaml, which does not exist{other}"
