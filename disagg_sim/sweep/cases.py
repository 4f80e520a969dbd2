"""Expand a sweep into cases: one combination of its axes each, with a unique name.

A name has model, system, recipe, profile and traffic, and every other axis that varies in the sweep or differs from its
default. ``axis_columns`` are the same values as columns of the frontier.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from disagg_sim.certainty.energy import COLUMNS_PER
from disagg_sim.certainty.rows import ASSUMED, Origin
from disagg_sim.choices import TWO
from disagg_sim.domain import MAX_PIPELINE_GPUS
from disagg_sim.facts import load
from disagg_sim.facts.hardware import KvTier, SystemSpec
from disagg_sim.facts.profile import profile_and_skew, skewed_profile
from disagg_sim.physics.blocks import forms_of
from disagg_sim.physics.setup import Setup, engine_name, setup
from disagg_sim.question import TECHNIQUES
from disagg_sim.serving.colocation import ColocatedCase as SharedCase
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.points import THROUGHPUT, WITH_SPARES
from disagg_sim.serving.pool_names import Images
from disagg_sim.sweep.kv_links import LINK, LINK_BANDWIDTH
from disagg_sim.sweep.serving_options import NOTHING, ServingOptions
from disagg_sim.sweep.spec import ColocatedOptions, PointLimits, PoolSystems, SweepSpec, same_system
from disagg_sim.sweep.traffic import Traffic
from disagg_sim.techniques.registry import NONE
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths

#: Placeholder where results do not depend on traffic.
_ANY = Traffic(isl=1, osl=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of model, systems, precisions, profile, traffic, limits and assumptions."""

    tags: tuple[str, ...]  # ``ftl1``, ``cap16``: axes that vary in the sweep or differ from the default
    model: str
    pools: PoolSystems
    profile: str
    engine: str
    matching: str
    traffic: Traffic
    limits: PointLimits
    ctx_gen_ratio: Fraction | None  # prefill over decode GPUs; None = the best [1]
    nvlink_domain: int | None  # None = the system's own [1]
    mla_form: str
    sharing: ColocatedOptions
    per: str
    prices: tuple[tuple[str, float], ...]  # [USD/h]
    pool_names: tuple[str, ...] = TWO  # pools of a request in order
    images: Images | None = None  # of a request
    speculation: str = ""  # curve, or method and acceptance; "" = none
    draft_tokens: tuple[int, ...] = ()  # to try; () = all [token]
    kv_tiers: tuple[tuple[str, KvTier], ...] = ()  # in place of the tiers of the systems
    served: ServingOptions = NOTHING  # KV link, spares, energy ... of the deployment
    techniques: str = ""  # of the registry, with their values; "" = no case of the sweep has any

    @property
    def name(self) -> str:
        """Name, unique in a sweep and determined by the values of its axes."""
        sides = [self.pools.system, self.pools.precision]
        if not self.pools.alike:
            sides = [self.pools.prefill_system, self.pools.prefill_precision, "to", *sides]
        sides.append(profile_and_skew(self.profile)[0])
        parts = [self.model, *sides, self.engine, *str(self.traffic).split("/"), *self.tags]
        return "-".join(part for part in parts if part)

    @property
    def throughput(self) -> str:
        """Column of the throughput of its frontiers."""
        return throughput_column(self.per, spares=self.served.columns_of_spares)

    @property
    def system(self) -> str:
        """Name of the system of decode."""
        return self.pools.system

    @property
    def isl(self) -> int:
        """Prompt length, or its mean. [token]"""
        return self.traffic.isl

    @property
    def osl(self) -> int:
        """Output length, or its mean. [token]"""
        return self.traffic.osl

    @property
    def lengths(self) -> Lengths:
        """Lengths of the requests."""
        return _lengths(self.traffic)

    @property
    def decode_system(self) -> SystemSpec:
        """System of decode and of co-located instances, with the NVLink domain of the case."""
        return self._system(self.pools.system)

    @property
    def prefill_system(self) -> SystemSpec:
        """System of prefill, with the NVLink domain of the case."""
        return self._system(self.pools.prefill_system)

    @property
    def decode_setup(self) -> Setup:
        """Setup of decode and of co-located instances."""
        return self.setup_of(self.decode_system, self.pools.precision)

    @property
    def prefill_setup(self) -> Setup:
        """Setup of prefill, with memory for cached prompts."""
        return self._remembering(self.setup_of(self.prefill_system, self.pools.prefill_precision))

    @property
    def shared(self) -> SharedCase:
        """Search space of the co-located modes; reading the sweep has rejected lengths beyond the context limit."""
        return SharedCase(
            at=self._remembering(self.decode_setup),
            lengths=self.lengths,
            ftl_limit=self.limits.ftl_s,
            ttl_limit=self.limits.ttl_s,
            options=Colocation(
                every_step_mixed=self.sharing.every_step_mixed,
                ttl_measure=self.sharing.ttl_measure,
                hold_steps=self.sharing.hold_steps,
                mla_form=self.mla_form,
                allow_long_context=True,
            ),
        )

    @property
    def engines(self) -> tuple[str, str]:
        """Names of the engines of decode and of prefill; "" = none."""
        profile = load.load_profile(self.profile)
        decode, prefill = (
            engine_name(profile, each, self.engine) for each in (self.decode_system, self.prefill_system)
        )
        return decode, prefill

    def setup_of(self, system: SystemSpec, precision: str) -> Setup:
        """Make the setup of the case on a system with a recipe."""
        drafter = load.load_speculation(self.speculation).trying(self.draft_tokens) if self.speculation else None
        names = self.model, system, precision, self.profile, self.engine or None
        return setup(*names, drafter, self.techniques)

    def _remembering(self, at: Setup) -> Setup:
        """Set HBM aside for cached prompts between requests."""
        cache = None if self.traffic.turns is None else self.traffic.turns.cache
        return at if cache is None or not cache.hbm else replace(at, set_aside=cache.hbm)

    def counted(self) -> Case:
        """Compute the cached share of its turns for the model, and limit KV bandwidth to the bandwidth of its link."""
        traffic, limits, link = self.traffic, self.limits, self.served.kv_link
        if link is not None and link.path:
            most = min(limits.nic_limit, link.bandwidth(self.prefill_setup, self.decode_setup))
            limits = replace(limits, nic_limit=most)
        if traffic.turns is not None:
            met = traffic.turns.met(self.prefill_setup, traffic.isl)
            traffic = replace(traffic, met=met)
        return replace(self, traffic=traffic, limits=limits)

    def _system(self, name: str) -> SystemSpec:
        spec = load.load_system(name)
        if self.kv_tiers:
            spec = replace(spec, kv_tiers={**spec.kv_tiers, **dict(self.kv_tiers)})
        return spec if self.nvlink_domain is None else replace(spec, nvlink_domain=self.nvlink_domain)


@lru_cache
def _lengths(traffic: Traffic) -> Lengths:
    return traffic.requests


def why_not_shared(case: Case) -> str:
    """Give the reason why no instance can do both phases of the case, or ""."""
    return "" if case.pools.alike else "pools that differ share no instance"


def cases_of(spec: SweepSpec) -> tuple[Case, ...]:
    """List all combinations of the axes in the order of the file; MLA forms vary only for models with MLA."""
    return tuple(case for model in spec.models for case in _cases_of_model(spec, model))


def _cases_of_model(spec: SweepSpec, model: str) -> list[Case]:
    forms = spec.mla_forms if len(forms_of(load.load_model(model))) > 1 else ("auto",)
    skews = spec.expert_skews if load.load_model(model).is_moe else (0.0,)
    drafts = any(spec.draft_tokens) or not spec.draft_tokens  # only 0 = no drafter
    drafters = spec.speculations if drafts else ("",)
    counted = tuple(product(skews, spec.served, spec.techniques))
    varied = (spec.ctx_gen_ratios, spec.nvlink_domains, forms, drafters, counted)
    axes = (spec.traffic, spec.pools_of(model), spec.limits, *varied)
    cases = [
        Case(
            tags=(),
            model=model,
            pools=pools,
            profile=skewed_profile(spec.profile, skew),
            engine=spec.engine,
            matching=spec.matching,
            traffic=traffic,
            limits=limits.of(traffic),
            ctx_gen_ratio=ratio,
            nvlink_domain=domain,
            mla_form=form,
            sharing=spec.sharing,
            per=spec.per,
            prices=spec.prices if spec.per == "usd" else (),
            pool_names=spec.pool_names,
            images=spec.images,
            speculation=drafter,
            draft_tokens=spec.draft_tokens if drafter else (),
            kv_tiers=spec.kv_tiers,
            served=served,
            techniques=techniques,
        ).counted()
        for traffic, pools, limits, ratio, domain, form, drafter, (skew, served, techniques) in product(*axes)
    ]
    texts, usual = [_axis_texts(case) for case in cases], _axis_texts(_DEFAULTS)
    shown = [axis for axis in usual if {each[axis] for each in texts} != {usual[axis]}]
    return [replace(case, tags=tuple(each[axis] for axis in shown)) for case, each in zip(cases, texts, strict=True)]


def _axis_texts(case: Case) -> dict[str, str]:
    """Write the tag of every axis."""
    limits, sharing = case.limits, case.sharing
    return {
        "ftl_s": f"ftl{_number(limits.ftl_s)}",
        "ttl_s": f"ttl{_number(limits.ttl_s)}",
        "gpu_cap": f"cap{limits.gpu_cap}",
        "max_gpus": f"instance{limits.max_gpus or '_own'}",
        "nic_gb_per_s": f"nic{_number(limits.nic_limit / GB)}",
        "layouts": f"{limits.layouts}_layouts",
        "tp_over_nics": "tp_over_nics" if limits.tp_over_nics else "tp_inside",
        "one_gpu_stages": "one_gpu_stages" if limits.one_gpu_stages else "larger_stages",
        "max_dcp": f"dcp{limits.max_dcp}",
        "max_pcp": f"pcp{limits.max_pcp}",
        "max_redundant_experts": f"redundant{limits.max_redundant_experts}",
        "expert_skew": f"skew{profile_and_skew(case.profile)[1]:.12g}",
        "matching": case.matching,
        "ctx_gen_ratio": f"ratio{'_' * (case.ctx_gen_ratio is None)}{ratio_text(case.ctx_gen_ratio)}",
        "nvlink_domain": f"domain{case.nvlink_domain or '_own'}",
        "mla_form": f"mla_{case.mla_form}",
        "ttl_measure": f"ttl_{sharing.ttl_measure}",
        "every_step_mixed": "every_step_mixed" if sharing.every_step_mixed else "best_mix",
        "hold_steps": "hold_"
        + ("tuned" if sharing.hold_steps is None else "_".join(map(str, sharing.hold_steps)) or "none"),
        "per": f"per_{case.per}",
        "pools": "-".join(case.pool_names),
        "speculation": case.speculation.replace(" ", "_") or "no_speculation",
        **case.served.texts,
        "draft_tokens": "drafts" + "_".join(map(str, case.draft_tokens or ("_all",))),
        "techniques": re.sub(r"[^\w.-]+", "_", case.techniques if case.techniques != NONE else "no_techniques"),
    }


def _number(value: float) -> str:
    return "_none" if math.isinf(value) else f"{value:.12g}"


def ratio_text(ratio: Fraction | None) -> str:
    """Write ``optimal``, ``3.5``, or ``1to3`` if no short decimal number is exact."""
    if ratio is None:
        return "optimal"
    return f"{float(ratio):g}" if Fraction(f"{float(ratio):g}") == ratio else f"{ratio.numerator}to{ratio.denominator}"


def axis_columns(case: Case) -> dict[str, Any]:
    """Make columns of the limits and assumptions of the case, in SI units.

    No cell is empty, so a table reads back as it was written: a missing limit is ``inf``. ``max_instance_gpus`` is the
    effective limit.
    """
    limits, sharing, link = case.limits, case.sharing, case.served.kv_link
    largest = max(MAX_PIPELINE_GPUS, case.decode_system.nvlink_domain)  # with pipeline stages, or one large domain
    columns = {
        "traffic": str(case.traffic),
        "ftl_limit_s": limits.ftl_s,
        "ttl_limit_s": limits.ttl_s,
        "gpu_cap": limits.gpu_cap,
        "max_instance_gpus": min(largest, limits.max_gpus or largest),
        "nic_limit_bytes_per_s": limits.nic_limit,
        "layouts": limits.layouts,
        "tp_over_nics": limits.tp_over_nics,
        "one_gpu_stages": limits.one_gpu_stages,
        "max_dcp": limits.max_dcp,
        "max_pcp": limits.max_pcp,
        "ctx_gen_ratio": ratio_text(case.ctx_gen_ratio),
        "nvlink_domain": case.decode_system.nvlink_domain,
        "mla_form": case.mla_form,
        "ttl_measure": sharing.ttl_measure,
        "every_step_mixed": sharing.every_step_mixed,
    }
    if link is not None:
        columns |= {LINK: str(link), LINK_BANDWIDTH: link.bandwidth(case.prefill_setup, case.decode_setup)}
    return columns | ({TECHNIQUES: case.techniques} if case.techniques else {})


def assumed_columns(case: Case) -> dict[str, Any]:
    """Select the ``axis_columns`` that are needed to compute the times of a row again."""
    return {name: value for name, value in axis_columns(case).items() if name in ASSUMED}


_DEFAULTS = Case(
    tags=(),
    model="",
    pools=same_system("", ""),
    profile="",
    engine="",
    matching="exact",
    traffic=Traffic(isl=1, osl=2),
    limits=PointLimits(),
    ctx_gen_ratio=None,
    nvlink_domain=None,
    mla_form="auto",
    sharing=ColocatedOptions(),
    per="gpu",
    prices=(),
)


def setup_case(case: Case) -> Case:
    """Reset the fields that setups do not depend on: cases with equal setups become equal."""
    traffic = case.traffic if case.traffic.turns else _ANY
    unused: dict[str, Any] = {"tags": (), "matching": "", "ctx_gen_ratio": None, "per": "", "prices": ()}
    return replace(case, **unused, traffic=traffic, limits=PointLimits(), served=NOTHING)


def origin_of(case: Case) -> Origin:
    """Make the ``Origin`` of the points of a case."""
    systems = {spec.name: spec for spec in (case.prefill_system, case.decode_system)}
    return Origin(systems=systems, lengths=case.lengths)


def throughput_column(per: str, *, spares: bool = False) -> str:
    """Name the throughput column of frontiers: per GPU, per USD, or per joule at the TDP or as drawn."""
    return (COLUMNS_PER[per][-1].name if COLUMNS_PER[per] else THROUGHPUT) + WITH_SPARES * spares
