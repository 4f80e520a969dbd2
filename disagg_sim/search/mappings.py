"""Enumerate the ways to shard a model over the GPUs of an instance; count rejected ways by reason.

Inside a pipeline stage ``tp_attn*dp_attn = tp_ffn*ep``: TP, EP, TEP (tp_attn > 1 with ep > 1), DEP
(dp_attn > 1 with ep > 1) and every mixture of them; dense models have TP x PP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from disagg_sim.domain import MAX_DOMAIN_GPUS, MAX_INSTANCE_GPUS, MAX_PIPELINE_GPUS, SHARDING, UNSAID, Sharding
from disagg_sim.errors import InputError, check_word, whole_number
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.setup import Setup
from disagg_sim.search.layouts import Layouts, refusals

#: Degrees 3*2^k and 36*2^k, for NVLink domains of a multiple of 36 GPUs.
ODD_DEGREES = (3, 6, 12, 24, 36, 48, 72, 96, 144, 192, 288, 384, 576)
ODD_DOMAIN = 36
#: Reason of rejection with ``one_gpu_stages: false``.
ONE_GPU_STAGES = "pipeline stages of one GPU"


def mappings_for(at: Setup, mappings: Sharding | list[Sharding]) -> Sharding:
    """Stack mappings as columns of shape (rows,); check single ones against model and system.

    A pipeline that does not divide the layers has stages of two lengths. TP may leave the NVLink domain.
    """
    if isinstance(mappings, Sharding) and np.ndim(mappings.pp):
        return mappings
    rows = mappings if isinstance(mappings, list | tuple) else [mappings]
    for mapping in rows:
        if not isinstance(mapping, Sharding):
            raise InputError(f"{mapping!r} is not a mapping; allowed: a Sharding or a list of them")
        _require(at, mapping)
    return Sharding.stack(rows)


def _require(at: Setup, m: Sharding) -> None:
    """Refuse a mapping that the model cannot have on the system."""
    if m.stage_gpus != m.tp_ffn * m.ep:
        raise InputError(
            f"mapping tp_attn {m.tp_attn} x dp_attn {m.dp_attn} x pcp {m.pcp} != tp_ffn {m.tp_ffn} x ep {m.ep}: "
            "attention and FFN of a stage must use the same GPUs"
        )
    reason = _pipeline_refusal(at.model, m.pp, even=False) or _stage_refusal(at, m, tp_over_nics=True)
    if not at.model.is_moe and max(m.dp_attn, m.ep) > 1:
        reason = "a dense model has neither dp_attn nor ep above 1"
    if reason is not None:
        given = ", ".join(f"{name} {value}" for name in SHARDING if (value := getattr(m, name)) != UNSAID.get(name))
        raise InputError(f"mapping {given} is impossible for {at.model.name} on {at.system.name}: {reason}")


def degrees(system: SystemSpec, limit: int) -> tuple[int, ...]:
    """List degrees to try up to ``limit``: powers of two, and ``ODD_DEGREES`` in domains of a multiple of 36 GPUs."""
    powers = [2**k for k in range(limit.bit_length()) if 2**k <= limit]
    domain = system.nvlink_domain
    odd = [d for d in ODD_DEGREES if d <= min(limit, domain)] if domain % ODD_DOMAIN == 0 else []
    return tuple(sorted({*powers, *odd}))


def enumerate_mappings(
    at: Setup,
    *,
    max_gpus: int | None = None,
    layouts: str = Layouts.LAUNCHABLE,
    tp_over_nics: bool = False,
    one_gpu_stages: bool = True,
    max_dcp: int = 1,
    max_pcp: int = 1,
    max_redundant_experts: int = 0,
) -> Sharding:
    """Enumerate the mappings of one instance of a model on a system (physics page, section 3).

    TP stays inside the NVLink domain unless ``tp_over_nics``; EP, DP attention and PP may leave it. Where EP over all
    GPUs of a stage does not divide the experts, it gets the fewest redundant slots that give all GPUs equally many.
    An instance has at most 64 GPUs, or one NVLink domain of 72 or more, or 128 GPUs with PP.

    Parameters
    ----------
    at : Setup
        Model and system.
    max_gpus : int, optional
        Most GPUs of an instance, with and without PP, below the limits above. [1]
    layouts : {"launchable", "supported", "served", "all"}
        Layouts that some engine can start; those that also fill or divide hosts and domains; those of a kind that
        was run; or all (``search.layouts``).
    tp_over_nics : bool
        Whether TP groups may leave the NVLink domain: their all-reduce then crosses NICs.
    one_gpu_stages : bool
        Whether a pipeline may have stages of one GPU.
    max_dcp, max_pcp : int
        Most GPUs that share the cached tokens of a KV head, in instances that decode; most attention ranks that
        share a prompt, in prefill. [1]
    max_redundant_experts : int
        Most slots for copies of experts over all EP ranks, to balance their loads; one, two, four, ... slots per rank
        are tried above the fewest. [1]

    Returns
    -------
    Sharding
        Columns of shape (rows,), in lexicographic order; ``refused`` counts the other candidates by reason.

    Raises
    ------
    InputError
        Values out of range, an unknown word for ``layouts``.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> table = enumerate_mappings(setup("llama_3_1_8b", "h100_sxm", "fp8"), max_gpus=2)
    >>> [(each.tp_attn, each.pp) for each in table]
    [(1, 1), (1, 2), (2, 1)]
    """
    if max_gpus is not None:
        max_gpus = whole_number("max_gpus", max_gpus)
    check_word("layouts", layouts, Layouts)
    rows: list[tuple[int, ...]] = []  # values in the order of ``SHARDING``
    refused: Counter[str] = Counter()
    most = whole_number("max_dcp", max_dcp), whole_number("max_pcp", max_pcp)
    copies = whole_number("max_redundant_experts", max_redundant_experts, 0)
    for one, reason in _candidates(at, max_gpus, most, copies, tp_over_nics=tp_over_nics):
        if one is None or reason:
            refused[reason] += 1
        else:
            rows.append(tuple(getattr(one, name) for name in SHARDING))
    columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, len(SHARDING)).T
    named: dict[str, Any] = dict(zip(SHARDING, columns, strict=True))
    none = np.zeros(len(rows), dtype=np.int64)
    table = Sharding(**named, chunk_tokens=none, draft_tokens=none)
    reasons = refusals(at, table, layouts)
    if not one_gpu_stages:
        reasons[(reasons == "") & (table.pp > 1) & (table.stage_gpus == 1)] = ONE_GPU_STAGES
    refused.update(reason for reason in reasons if reason)
    return replace(table[reasons == ""], refused=tuple(sorted(refused.items())))


def _candidates(
    at: Setup, max_gpus: int | None, most: tuple[int, int], copies: int, *, tp_over_nics: bool
) -> Iterator[tuple[Sharding | None, str]]:
    """Yield each mapping to try with the reason that rejects it, or ""; None for a depth or size that is too large."""
    model, system = at.model, at.system
    whole_domain = system.nvlink_domain >= MAX_DOMAIN_GPUS
    flat_limit = system.nvlink_domain if whole_domain else MAX_INSTANCE_GPUS
    flat_limit = min(flat_limit, max_gpus or flat_limit)
    deep_limit = min(MAX_PIPELINE_GPUS, max_gpus or MAX_PIPELINE_GPUS)
    tried = degrees(system, flat_limit)
    of_experts = tried if model.is_moe else (1,)
    dcps, pcps = (tuple(each for each in tried if each <= limit) for limit in most)
    for pp in degrees(system, deep_limit):
        if (reason := _pipeline_refusal(model, pp, even=True)) is not None:
            yield None, reason
            continue
        limit = flat_limit if pp == 1 else deep_limit // pp
        for tp_attn, dp_attn, ep, pcp in product(tried, of_experts, of_experts, pcps):
            gpus = tp_attn * dp_attn * pcp
            if gpus % ep:
                continue
            if gpus > limit:
                yield None, f"more than {limit} GPUs in a stage at pp {pp}"
                continue
            one = Sharding(tp_attn=tp_attn, dp_attn=dp_attn, tp_ffn=gpus // ep, ep=ep, pp=pp, pcp=pcp)
            if ep == gpus and (slots := least_redundant_slots(model, ep)):
                one = replace(one, redundant_slots=slots)
            for dcp, slots in product(dcps, _slots(model, one, copies)):
                if tp_attn % dcp == 0:
                    shared = replace(one, dcp=dcp, redundant_slots=slots)
                    yield shared, _stage_refusal(at, shared, tp_over_nics=tp_over_nics) or ""


def _slots(model: ModelSpec, mapping: Sharding, most: int) -> tuple[int, ...]:
    """List redundant slots to try: those of the mapping; one, two, four, ... per rank above the least, to ``most``."""
    ep, own = mapping.ep, mapping.redundant_slots
    least = least_redundant_slots(model, ep) if ep > 1 else None
    if least is None:
        return (own,)
    more = (least + ep * 2**k for k in range(max(most // ep, 0).bit_length()))
    return (own, *(slots for slots in more if slots <= most))


def least_redundant_slots(model: ModelSpec, ep: int) -> int | None:
    """Find the fewest redundant slots that give ``ep`` ranks equally many experts; None if no engine has as many. [1]

    256 experts on 24 ranks need 264 places, on 192 ranks 384:

    >>> from disagg_sim.facts.load import load_model
    >>> [least_redundant_slots(load_model("deepseek_r1"), ep) for ep in (32, 24, 48, 192)]
    [0, 8, 32, None]
    """
    each = [layer.ffn.least_redundant_slots(ep) for layer, _ in layers_of(model)]
    return None if None in each else max(slots for slots in each if slots is not None)


def _pipeline_refusal(model: ModelSpec, pp: int, *, even: bool) -> str | None:
    layers = len(model.layers)
    if pp > layers:
        return f"pp above {layers} layers"
    if even and pp & (pp - 1) and layers % pp:
        return f"pp {pp} does not divide {layers} layers"
    return None


def _stage_refusal(at: Setup, mapping: Sharding, *, tp_over_nics: bool) -> str | None:
    model, system = at.cached_layers, at.system
    if max(mapping.tp_attn, mapping.tp_ffn if model.is_moe else 1) > system.nvlink_domain:
        if not tp_over_nics:
            return f"TP leaves the NVLink domain of {system.nvlink_domain}"
        if mapping.token_ranks > 1 and mapping.tp_ffn > system.nvlink_domain:
            return f"expert TP after attention DP leaves the NVLink domain of {system.nvlink_domain}"
    if mapping.dcp > system.nvlink_domain:
        return f"dcp leaves the NVLink domain of {system.nvlink_domain}"
    for layer, _ in layers_of(model):
        reason = layer.attention.rejects(mapping.tp_attn) or layer.ffn.rejects(mapping)
        if reason is None and mapping.dcp > 1:
            reason = layer.attention.rejects_sharing(mapping.tp_attn, mapping.dcp)
        if reason is None and mapping.pcp > 1 and layer.attention.spec.scans:
            reason = f"pcp: {layer.attention.spec.kind} walks through a prompt in order"
        if reason is not None:
            return reason
    if mapping.dcp > 1 and all(layer.attention.spec.shared_rows is None for layer, _ in layers_of(model)):
        return "dcp: every layer keeps all of its tokens"
    return None


def without_pcp(table: Sharding) -> Sharding:
    """Refuse PCP in mappings of decode, where no prompt is shared.

    >>> without_pcp(Sharding(tp_attn=2, tp_ffn=4, pcp=2))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: pcp 2 in decode: PCP shares prompts only; allowed: 1, or dcp to share the cache
    """
    if (most := np.max(table.pcp, initial=1)) > 1:
        raise InputError(f"pcp {most:g} in decode: PCP shares prompts only; allowed: 1, or dcp to share the cache")
    return table
