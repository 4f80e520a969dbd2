"""Tell how far a layout has been checked: served runs of its kind, or an engine of today that can start it.

A **kind** of layout is how it shards attention, experts and layers, for a family of models on a class of systems; its
degrees do not matter, except that an instance must not be larger than those measured. All functions take columns of
mappings.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Mask
from disagg_sim.domain import SHARDING, Sharding
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.layouts import CheckedKind, DraftRules
from disagg_sim.facts.load import load_evidence, load_layout_rules
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.setup import Setup

#: Shipped files of the kinds that were run: those whose forecasts were compared with served runs, and prefill pools.
CHECKED, CHECKED_PREFILL = "measured", "prefill"
#: Error of its forecasts above which the runs of a kind confirm none: three times the usual band (chosen). [1]
FAR_OFF = 0.5
#: Format of weights with a scale for each block, which a cut must leave whole.
BLOCK_FORMAT = "fp8_block"


class Layouts(StrEnum):
    """Which mappings a search takes."""

    SERVED = "served"  # of a kind that was run and not forecast ``FAR_OFF``, no larger than these runs
    SUPPORTED = "supported"  # that some engine of today can start, on whole hosts and domains (``unsupported``)
    LAUNCHABLE = "launchable"  # that some engine of today can start
    ALL = "all"


#: How far a layout has been checked, best first; words of tables start with one of them.
SERVED, LAUNCHABLE, NOT_LAUNCHABLE = EVIDENCE = ("served", "launchable", "not launchable")
#: What reasons of ``Layouts.SUPPORTED`` start with.
NOT_SUPPORTED = "not supported"


def family_of(model: ModelSpec) -> str:
    """Name the family of a model by what its layouts differ in: ``dense``, ``MoE``, ``MoE with MLA``."""
    latent = " with MLA" if "mla" in model.attention_kinds else ""
    return f"{'MoE' if model.is_moe else 'dense'}{latent}"


def class_of(system: SystemSpec) -> str:
    """Name the class of a system by generation and NVLink domain: ``Hopper, domain of 8``."""
    return f"{system.architecture.split()[0]}, domain of {system.nvlink_domain}"


def layouts_of(mapping: Sharding) -> NDArray[np.object_]:
    """Name how each mapping shards attention, experts and layers: "TP", "DP, EP", "TP, EP, PP"; shape (rows,)."""
    tp, dp, tp_ffn, ep, pp, gpus = (
        np.atleast_1d(np.asarray(each))
        for each in (mapping.tp_attn, mapping.dp_attn, mapping.tp_ffn, mapping.ep, mapping.pp, mapping.stage_gpus)
    )
    attention = np.where(dp > 1, np.where(tp > 1, "DP of TP groups", "DP"), "TP").astype(object)
    over_experts = np.where(ep > 1, np.where(tp_ffn > 1, ", EP of TP groups", ", EP"), "").astype(object)
    cut = np.where((dp > 1) & (ep == 1), ", expert TP", "").astype(object)
    dcp, pcp = (np.atleast_1d(np.asarray(each)) for each in (mapping.dcp, mapping.pcp))
    context = np.where(dcp > 1, ", DCP", "").astype(object) + np.where(pcp > 1, ", PCP", "").astype(object)
    stage = attention + over_experts + cut + context
    flat = np.where(gpus > 1, stage, "one GPU").astype(object)
    deep = np.where(gpus > 1, stage + ", PP", "PP of one-GPU stages")
    return np.asarray(np.where(pp > 1, deep, flat), dtype=object)


@lru_cache(maxsize=4)
def checked_kinds(name: str = CHECKED) -> dict[tuple[str, str, str], CheckedKind]:
    """Load the checked kinds by family, class of systems and layout, with their runs [1] and forecast error [1]."""
    return {(kind.family, kind.systems, kind.layout): kind for kind in load_evidence(name).kinds}


def _known_kinds(*, prefill: bool) -> dict[tuple[str, str, str], CheckedKind]:
    """Load the kinds that were run; for prefill pools also those of runs that only prefilled."""
    known = checked_kinds()
    return {**checked_kinds(CHECKED_PREFILL), **known} if prefill else known


def checked_kind(at: Setup, mapping: Sharding, *, prefill: bool = False) -> CheckedKind | None:
    """Find operating points of served layouts of the kind of one mapping, and the error of their forecast, if any.

    >>> from disagg_sim.physics.setup import setup
    >>> checked_kind(setup("llama_3_1_8b", "h100_sxm", "fp8"), Sharding(tp_attn=2, tp_ffn=2)).points > 100
    True
    """
    (layout,) = layouts_of(mapping)
    return _known_kinds(prefill=prefill).get((family_of(at.model), class_of(at.system), str(layout)))


def why_unserved(at: Setup, mapping: Sharding, *, prefill: bool = False) -> NDArray[np.object_]:
    """Tell why no run confirms the forecast of each mapping, (rows,); ``""`` where one of its kind and size does.

    >>> from disagg_sim.physics.setup import setup
    >>> why_unserved(setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), Sharding(pp=4)).tolist()
    ['PP of one-GPU stages never served']
    """
    said, place = np.unique(layouts_of(mapping).astype(str), return_inverse=True)
    family, systems, known = family_of(at.model), class_of(at.system), _known_kinds(prefill=prefill)
    kinds = [known.get((family, systems, str(layout))) for layout in said]
    most = np.array([kind.most_gpus if kind and not _far_off(kind) else 0 for kind in kinds])[place]
    words = [_reason(text, kind) for text, kind in zip(said, kinds, strict=True)]
    within = np.atleast_1d(np.asarray(mapping.gpus)) <= most
    return np.asarray(np.where(within, "", np.array(words, dtype=object)[place]), dtype=object)


def _far_off(kind: CheckedKind) -> bool:
    return kind.error is not None and kind.error > FAR_OFF


def _reason(layout: str, kind: CheckedKind | None) -> str:
    if kind is None:
        return f"{layout} never served"
    if _far_off(kind):
        return f"{layout} served, forecasts of a quarter of its runs more than {kind.error:.0%} off"
    return f"{layout} served up to {kind.most_gpus} GPUs"


def unsupported(at: Setup, mapping: Sharding) -> NDArray[np.object_]:
    """Name the rule of GPU counts that each mapping breaks: no operator would place it, even if an engine starts it.

    Returns "" where instance and stages divide a host or fill whole ones, and an instance beyond an NVLink domain fills
    whole domains, each stage whole ones, too; shape (rows,).
    """
    host, domain = at.system.host_gpus, at.system.nvlink_domain
    gpus, stage = (np.atleast_1d(np.asarray(each)) for each in np.broadcast_arrays(mapping.gpus, mapping.stage_gpus))
    said = np.full(gpus.shape, "", dtype=object)
    for place, (whole, part) in enumerate(zip(gpus.tolist(), stage.tolist(), strict=True)):
        if odd := next((n for n in (whole, part) if n % host and host % n), 0):
            said[place] = f"{odd} GPU{'s' * (odd > 1)} on hosts of {host}"
        elif whole > domain and whole % domain:
            said[place] = f"{whole} GPUs on NVLink domains of {domain}"
        elif whole > domain and part % domain:
            said[place] = f"stages of {part} GPU{'s' * (part > 1)} over {whole // domain} NVLink domains of {domain}"
    return said


def broken_rules(at: Setup, mapping: Sharding) -> dict[str, NDArray[np.object_]]:
    """Find the rule that each mapping breaks, (rows,), by engine; empty text where the engine can start the mapping."""
    rows = {name: np.atleast_1d(np.asarray(value)) for name, value in _degrees(mapping).items()}
    drafted = np.atleast_1d(np.asarray(mapping.draft_tokens)) > 0
    return {engine: _broken(at, rows, drafted, engine) for engine in list_specs("layout")}


def why_not_launchable(at: Setup, mapping: Sharding) -> NDArray[np.object_]:
    """Rules for which no engine of today can start each mapping; "" where one can. Shape (rows,)."""
    broken = broken_rules(at, mapping)
    rules = np.stack(list(broken.values()))
    every, alike = (rules != "").all(axis=0), (rules == rules[0]).all(axis=0)
    each: Any = np.full(rules.shape[1], "", dtype=object)
    for number, (engine, rule) in enumerate(broken.items()):
        each = each + f"{'; ' * (number > 0)}{engine}: " + rule
    return np.asarray(np.where(every, np.where(alike, rules[0], each), ""), dtype=object)


def evidence(at: Setup, mapping: Sharding, *, prefill: bool = False) -> NDArray[np.object_]:
    """How far each mapping was checked, (rows,): words that start with one of ``EVIDENCE``, and a reason."""
    refused, unserved = why_not_launchable(at, mapping), why_unserved(at, mapping, prefill=prefill)
    known = np.where(unserved == "", SERVED, f"{LAUNCHABLE}: " + unserved)
    return np.asarray(np.where(refused == "", known, f"{NOT_LAUNCHABLE}: " + refused), dtype=object)


def refusals(at: Setup, mapping: Sharding, layouts: str) -> NDArray[np.object_]:
    """Why a search for ``layouts`` leaves each mapping out; "" where it takes it. Shape (rows,)."""
    if layouts == Layouts.ALL:
        return np.full(len(mapping), "", dtype=object)
    found = evidence(at, mapping)
    taken = (SERVED,) if layouts == Layouts.SERVED else (SERVED, LAUNCHABLE)
    refused = np.array(["" if text.partition(":")[0] in taken else text for text in found], dtype=object)
    if layouts != Layouts.SUPPORTED:
        return refused
    counted = unsupported(at, mapping)
    counted[counted != ""] = f"{NOT_SUPPORTED}: " + counted[counted != ""]
    return np.asarray(np.where(refused == "", counted, refused), dtype=object)


def _degrees(mapping: Sharding) -> dict[str, Any]:
    return {name: getattr(mapping, name) for name in SHARDING}


def _broken(at: Setup, rows: dict[str, Any], drafted: Mask, engine: str) -> NDArray[np.object_]:
    rules = load_layout_rules(engine)
    said = np.full(np.broadcast(*rows.values(), drafted).shape, "", dtype=object)

    def unless(allowed: Any, rule: str) -> None:
        said[(said == "") & ~np.asarray(allowed)] = rule

    block = rules.weight_block
    for layer, _ in layers_of(at.model):
        for what, width, cut, form in layer.ffn.cuts(at.precision, Sharding(**rows)):
            if form.name == BLOCK_FORMAT:
                whole = (cut == 1) | (width % (cut * block) == 0)
                unless(whole, f"{what} of width {width} cut inside blocks of {block} of {BLOCK_FORMAT}")
    if rules.attention_groups == "one_or_all":
        unless((rows["tp_attn"] == 1) | (rows["dp_attn"] == 1), "attention DP over groups of GPUs")
    if rules.expert_groups == "one_or_all":
        unless((rows["tp_ffn"] == 1) | (rows["ep"] == 1), "EP over groups of GPUs")
    dcp, pcp = np.asarray(rows["dcp"]) > 1, np.asarray(rows["pcp"]) > 1
    if np.any(dcp) or np.any(pcp):
        for ranks, where, how in ((dcp, rules.dcp, "DCP"), (pcp, rules.pcp, "PCP")):
            unless(~ranks | (where.with_dp | (rows["dp_attn"] == 1)), f"{how} with attention DP")
            on = not where.architectures or at.system.architecture.split()[0] in where.architectures
            unless(~ranks | on, f"{how} on {at.system.architecture}")
            for layer, _ in layers_of(at.model):
                spec = layer.attention.spec
                keeps = spec.shared_rows is None if how == "DCP" else False
                allowed = spec.kind in (where.beside if keeps else where.kinds) or not layer.attention.present
                beside = "beside layers that keep all tokens" if keeps else f"of {spec.kind} attention"
                unless(~ranks | allowed, f"{how} {beside}")
    if not rules.redundant_slots:
        unless(rows["redundant_slots"] == 0, "redundant expert slots")
    if not rules.pipelines:
        unless(rows["pp"] == 1, "pipelines")
    for allowed, rule in _drafts_allowed(at, rows, rules.drafts):
        unless(~drafted | allowed, rule)
    return said


def _drafts_allowed(at: Setup, rows: dict[str, Any], rules: DraftRules) -> Iterator[tuple[Any, str]]:
    """Which mappings may draft, and the rule for those that may not."""
    if at.speculation is None:
        return
    method = at.speculation.method
    if method not in rules.over_stages:
        yield rows["pp"] == 1, f"drafts of {method} over pipeline stages"
    if method not in rules.with_dp:
        yield rows["dp_attn"] == 1, f"drafts of {method} beside attention DP"
