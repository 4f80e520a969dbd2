"""Passes of a grid whose attention-DP ranks wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.prefill import PrefillPass, prefill_pass
from disagg_sim.physics.passes.prompts import PromptPasses
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.workload.lengths import Lengths


def uneven_passes(
    at: Setup, lengths: Lengths, mapping: Sharding, batch: Numeric, chunk_tokens: Numeric, forms: tuple[str, ...]
) -> list[PrefillPass] | None:
    """Time passes whose DP ranks wait for each other.

    Each rank loads pasts from tiers below HBM by itself, so a load counts as of an even rank. Pasts of a tier are
    computed again where that brings the first token of the mean prompt sooner. Returns one of each form; None where
    prompts of a pass count as alike [s].

    Eight ranks with a prompt each wait for the longest of the eight:

    >>> import disagg_sim as ds
    >>> at, wide = ds.setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=8, ep=8)
    >>> chat = ds.lengths("log_normal_4096_512", rank_imbalance="least_load")
    >>> even = ds.prefill_grid(at, wide, ds.lengths("log_normal_4096_512"), batch=[8])
    >>> (slowest,) = uneven_passes(at, chat, wide, 8.0, 0, ("naive",))
    >>> f"{slowest.busy / (8.0 / even.request_rate[0, 0]):.1f} times as long"
    '3.3 times as long'
    """
    if lengths.prompts_on_ranks() is None:
        return None
    reuse = None if lengths.cached is None else lengths.cached.reuse
    below = {name: tier for name, _ in (reuse.tiers if reuse else ()) if (tier := at.system.tier(name)) is not None}
    slower = sorted(below, key=lambda name: below[name].bandwidth)
    passes, means = PromptPasses(at, mapping, batch, chunk_tokens, forms[:1]), (lengths.mean_isl, lengths.mean_past)
    again: Any = sum(passes.passes(*means, tier)[0].load == 0 for tier in below.values())  # of the slower
    found = _slowest(at, lengths, mapping, batch, chunk_tokens, forms, ())
    for count in range(1, len(slower) + 1):
        if np.any(again >= count):
            others = _slowest(at, lengths, mapping, batch, chunk_tokens, forms, tuple(slower[:count]))
            found = [taken.where(again >= count, other) for taken, other in zip(others, found, strict=True)]
    return found


def _slowest(
    at: Setup,
    lengths: Lengths,
    mapping: Sharding,
    batch: Numeric,
    chunk_tokens: Numeric,
    forms: tuple[str, ...],
    again: tuple[str, ...],
) -> list[PrefillPass]:
    """Passes of the slowest ranks of each form, pasts in the tiers ``again`` computed again and the others loaded."""
    ranks, dp, isl = lengths.prompts_on_ranks(again), mapping.dp_attn, lengths.mean_isl
    assert ranks is not None
    past, load = 0.0, 0.0 * np.asarray(batch)
    for _, held, weight, name in lengths.prompt_nodes().each():
        if name not in again:
            past += weight * held
            load = load + weight * load_time(at, mapping, batch=batch, past=held, tier=at.system.tier(name))
    each: dict[str, Any] = {"batch": batch, "isl": isl, "past": past}
    if np.any(np.asarray(chunk_tokens) > 0):
        each |= {"chunk_tokens": chunk_tokens, "slowest": ranks.chunked(batch, dp, chunk_tokens)}
        passes = [chunked_prefill_pass(at, mapping, mla_form=form, **each) for form in forms]
    else:
        prompts = ranks.prefill(batch, dp)
        passes = [prefill_pass(at, mapping, mla_form=form, slowest=prompts, **each) for form in forms]
    return [done._replace(load=load) for done in passes]
