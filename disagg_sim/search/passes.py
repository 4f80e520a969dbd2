"""Passes of prompts under a distribution of lengths, whose attention-DP ranks wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.prefill import PrefillPass, prefill_pass
from disagg_sim.physics.passes.prompts import PromptPasses
from disagg_sim.workload.distributions import Prompts
from disagg_sim.workload.lengths import Lengths


def expected_passes(
    timed: PromptPasses, lengths: Lengths, prompts: Prompts, counted: tuple[float, float] | None = None
) -> list[PrefillPass]:
    """Average passes over the prompts, or over the ranks that wait for each other where prompts of a pass differ.

    Takes the ``prompts`` that stand for all and, if the FTL of one counts, its length and past [token]. Returns one of
    each form [s].
    """
    even = timed.expected(list(prompts.each()), counted)
    if timed.lone or (slowest := slowest_passes(timed, lengths)) is None:
        return even
    found = [slow.where(timed.mapping.dp_attn > 1, each) for slow, each in zip(slowest, even, strict=True)]
    return found if counted is None else [done._replace(ftl=each.ftl) for done, each in zip(found, even, strict=True)]


def slowest_passes(timed: PromptPasses, lengths: Lengths) -> list[PrefillPass] | None:
    """Time passes whose DP ranks wait for each other.

    Each rank loads pasts from tiers below HBM by itself, so a load counts as of an even rank. Pasts of a tier are
    computed again where that brings the first token of the mean prompt sooner. Returns one of each form; None where
    prompts of a pass count as alike [s].

    Eight ranks with a prompt each wait for the longest of the eight:

    >>> import disagg_sim as ds
    >>> at, wide = ds.setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), ds.Sharding(dp_attn=8, ep=8)
    >>> chat = ds.lengths("log_normal_4096_512", rank_imbalance="least_load")
    >>> even = ds.prefill_grid(at, wide, ds.lengths("log_normal_4096_512"), batch=[8])
    >>> (slowest,) = slowest_passes(PromptPasses(at, wide, 8.0, 0, ("naive",)), chat)
    >>> f"{slowest.busy / (8.0 / even.request_rate[0, 0]):.1f} times as long"
    '3.3 times as long'
    """
    if lengths.prompts_on_ranks() is None:
        return None
    reuse, system = None if lengths.cached is None else lengths.cached.reuse, timed.at.system
    below = {name: tier for name, _ in (reuse.tiers if reuse else ()) if (tier := system.tier(name)) is not None}
    slower = sorted(below, key=lambda name: below[name].bandwidth)
    means = lengths.mean_isl, lengths.mean_past
    again: Any = sum(timed.passes(*means, tier)[0].load == 0 for tier in below.values())  # of the slower
    found = _slowest(timed, lengths, ())
    for count in range(1, len(slower) + 1):
        if np.any(again >= count):
            others = _slowest(timed, lengths, tuple(slower[:count]))
            found = [taken.where(again >= count, other) for taken, other in zip(others, found, strict=True)]
    return found


def _slowest(timed: PromptPasses, lengths: Lengths, again: tuple[str, ...]) -> list[PrefillPass]:
    """Passes of the slowest ranks of each form, pasts in the tiers ``again`` computed again and the others loaded."""
    at, mapping, batch, chunk_tokens = timed.at, timed.mapping, timed.batch, timed.chunk_tokens
    ranks, dp = lengths.prompts_on_ranks(again), mapping.dp_attn
    assert ranks is not None
    past, load = 0.0, 0.0 * np.asarray(batch)
    for _, held, weight, name in lengths.prompt_nodes().each():
        if name not in again:
            past += weight * held
            load = load + weight * load_time(at, mapping, batch=batch, past=held, tier=at.system.tier(name))
    each: dict[str, Any] = {"batch": batch, "isl": lengths.mean_isl, "past": past}
    if np.any(np.asarray(chunk_tokens) > 0):
        each |= {"chunk_tokens": chunk_tokens, "slowest": ranks.chunked(batch, dp, chunk_tokens)}
        passes = [chunked_prefill_pass(at, mapping, mla_form=form, **each) for form in timed.forms]
    else:
        prompts = ranks.prefill(batch, dp)
        passes = [prefill_pass(at, mapping, mla_form=form, slowest=prompts, **each) for form in timed.forms]
    return [done._replace(load=load) for done in passes]
