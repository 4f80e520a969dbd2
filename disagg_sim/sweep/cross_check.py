"""Faults of a sweep that only the combination of its keys shows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from disagg_sim.facts import load
from disagg_sim.serving.costs import costs_of_gpus
from disagg_sim.sweep.reader import Reader

if TYPE_CHECKING:
    from disagg_sim.sweep.spec import Pools, SweepSpec


def cross_check(reader: Reader, spec: SweepSpec, *, long_context: bool) -> None:
    """Recipes that a GPU lacks, prompts beyond a model's context: what only the combination shows."""
    axes = (spec.models, spec.pools, spec.traffic, spec.limits, spec.ctx_gen_ratios, spec.nvlink_domains)
    if not reader.crossed("models x systems x traffic x limits ...", *map(len, (*axes, spec.mla_forms))):
        return
    _check_traffic(reader, spec, long_context=long_context)
    _check_domains(reader, spec)
    _check_idle(reader, spec)
    for pools in spec.pools:
        _check_pools(reader, spec, pools)
    if spec.prices and spec.per != "usd":
        reader.faults.append(f"prices: act with 'per: usd' only, and per is {spec.per!r}")
    if spec.matching != "exact" and spec.ctx_gen_ratios != (None,):
        reader.faults.append(f"ctx_gen_ratio: a fixed ratio needs 'matching: exact', and matching is {spec.matching!r}")
    reader.faults[:] = dict.fromkeys(reader.faults)  # a fault that several models share is said once
    _check_fits(reader, spec)


def _check_traffic(reader: Reader, spec: SweepSpec, *, long_context: bool) -> None:
    for model in (load.load_model(name) for name in spec.models):
        for traffic in spec.traffic:
            reader.attempt("traffic", partial(model.check_context, traffic.isl, traffic.osl, allow_long=long_context))
    for traffic in spec.traffic:
        if traffic.law and "disaggregated" not in spec.modes:
            reader.faults.append(
                f"traffic: {traffic} has lengths that vary, which only the mode disaggregated serves; "
                f"modes has {', '.join(spec.modes)}"
            )


def _check_domains(reader: Reader, spec: SweepSpec) -> None:
    """``own`` beside the very number that it stands for would be one case twice."""
    if None not in spec.nvlink_domains:
        return
    for pools in spec.pools:
        own = {load.load_system(name).nvlink_domain for name in (pools.prefill_system, pools.system)}
        twice = own.pop()
        if not own and twice in spec.nvlink_domains:
            reader.faults.append(f"nvlink_domain: {twice} is what 'own' stands for on {pools.system}: a case twice")


def _check_idle(reader: Reader, spec: SweepSpec) -> None:
    """Keys that act in no mode of the sweep."""
    sharing, neutral = spec.sharing, type(spec.sharing)()
    uses = (
        ("ctx_gen_ratio", spec.ctx_gen_ratios != (None,), ("disaggregated",)),
        ("ttl_measure", sharing.ttl_measure != neutral.ttl_measure, ("colocated", "piggyback")),
        ("every_step_mixed", sharing.every_step_mixed, ("piggyback",)),
        ("interference", sharing.interference != neutral.interference, ("piggyback",)),
    )
    for key, given, modes in uses:
        if given and not {*modes} & {*spec.modes}:
            reader.faults.append(f"{key}: acts in {' and '.join(modes)} only; modes has {', '.join(spec.modes)}")


def _check_pools(reader: Reader, spec: SweepSpec, pools: Pools) -> None:
    """Whether both sides run their recipes, hand over the cache, suit the modes and have a price."""
    where = f"systems.{pools.system}" if pools.alike else "systems"
    for model in (load.load_model(name) for name in spec.models):
        sides = ((pools.system, pools.precision), (pools.prefill_system, pools.prefill_precision))
        read, written = (
            reader.attempt(where, load.resolve_precision, recipe, model, load.load_system(system))
            for system, recipe in sides
        )
        if read is not None and written is not None and read.cache.name != written.cache.name:
            reader.faults.append(
                f"systems: {pools} cannot hand over the KV cache: prefill writes {written.cache.name}, "
                f"decode reads {read.cache.name}; take recipes with the same cache format"
            )
    if not pools.alike and "disaggregated" not in spec.modes:
        reader.faults.append(f"systems: {pools} serves disaggregated only; modes has {', '.join(spec.modes)}")
    names = (pools.system, pools.prefill_system)
    if reader.attempt("prices", costs_of_gpus, names, spec.per, dict(spec.prices)) is None:
        reader.faults[-1] += "; on the command line: --price SYSTEM=USD"


def _check_fits(reader: Reader, spec: SweepSpec) -> None:
    """A fitted profile needs fits of each system."""
    if not load.load_profile(spec.profile).fitted:
        return
    for system in dict.fromkeys(name for pools in spec.pools for name in (pools.system, pools.prefill_system)):
        if load.load_efficiency(system) is None:
            reader.faults.append(f"profile: {spec.profile!r} needs fitted efficiencies, {system} has none; use 'ideal'")
