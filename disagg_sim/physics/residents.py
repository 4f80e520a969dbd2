"""Count what a rank holds and works on while it serves: sequences, cached tokens, tokens of a pass.

Cached tokens of requests are independent, so a sum of them counts as its mean and some standard deviations more
(physics page, section 4); ``memory`` turns the counts into bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.mixed import chunk_share
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric

#: The MLA form that keeps up-projected keys and values beside the latent.
EXPANDED = "cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """What a rank holds and works on while it serves."""

    sequences: Numeric  # whose cache is resident [1]
    tokens: Numeric  # their cached tokens [token]
    live: Numeric  # tokens of one forward pass on this rank [token]
    live_total: Numeric  # the same over all DP ranks [token]
    emitted: Numeric  # sequences of this rank that emit a token in a pass [1]
    saved: Numeric = 0.0  # recurrent states that are saved along their prefixes, beside the running ones [1]
    expanded: Numeric = 0.0  # tokens whose up-projected MLA keys and values are kept [token]
    states: Numeric = 1.0  # that are kept of a sequence: with drafts one after each new token, for roll-back [1]


class RankLoad(NamedTuple):
    """What the ranks are given that a step waits for."""

    context: Numeric  # mean cache of requests, were all ranks as the slowest [token]
    batch: Numeric | None = None  # requests of the fullest rank; None = an even share, rounded up [request]

    def room(self, batch: Numeric, ranks: Numeric) -> Numeric:
        """Requests that an instance has room for, where all ranks have as much as the fullest needs. [request]"""
        return batch if self.batch is None else ranks * self.batch


class Live(NamedTuple):
    """What one forward pass works on, for which activations, logits and buffers are kept."""

    tokens: Numeric  # of the fullest DP rank [token]
    total: Numeric  # of all DP ranks [token]
    emitted: Numeric  # sequences of the fullest rank that emit a token [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Distribution of the cached tokens of one resident request; those of several are independent.

    Numbers, or columns of shape (rows, 1) of requests that differ by row.
    """

    mean: Any  # [token]
    deviation: Any  # standard deviation [token]
    most: Any  # [token]
    computed: CachedTokens | None = None  # of a prompt: the tokens that its prefill computes; None = all of them

    @property
    def new(self) -> CachedTokens:
        """Tokens of a prompt that pass through the layers. [token]"""
        return self if self.computed is None else self.computed

    def of(self, requests: Numeric, deviations: float) -> Numeric:
        """What ``requests`` hold: the mean of the sum plus ``deviations`` of its own, at most ``most`` each. [token]"""
        held = requests * self.mean + deviations * np.sqrt(requests) * self.deviation
        return np.minimum(held, requests * self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """Prompts that an instance prefills while it decodes."""

    prompts: Numeric  # over all DP ranks [1]
    prompt: CachedTokens  # length of each
    new: Numeric  # prefill tokens of the fullest rank that are live in one forward pass [token]
    mixed: bool  # whether in one pass together with the decodes, or in one of their own


def prefilling_in_passes(
    mapping: Sharding, prompts: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, deviations: float
) -> Prefilling:
    """Prompts that are prefilled in passes of their own, decode waiting, and their tokens.

    Each of two DP ranks takes two of four prompts of 1000 tokens, whole or 256 tokens of each at a time:

    >>> two = Sharding(dp_attn=2, ep=2)
    >>> [float(prefilling_in_passes(two, 4, prompt_residents(1000), chunk, 2.0).new) for chunk in (0, 256)]
    [2000.0, 512.0]
    """
    own = np.ceil(prompts / mapping.dp_attn)
    whole = prompt.new.of(np.ceil(own / np.minimum(mapping.pp, own)), deviations)
    new = np.where(np.asarray(chunk_tokens) > 0, own * chunk_tokens, whole)
    return Prefilling(prompts=prompts, prompt=prompt, new=new, mixed=False)


def prefilling_in_pieces(
    mapping: Sharding, prompts: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, batch: Numeric
) -> Prefilling:
    """Size prompts that are prefilled in pieces, in the steps of ``batch`` decodes. [token]

    >>> float(prefilling_in_pieces(Sharding(dp_attn=8, ep=8), 8, prompt_residents(1000), 2048, 64).new)
    256.0
    """
    new = chunk_share(chunk_tokens / np.minimum(mapping.pp, batch), mapping.dp_attn)
    return Prefilling(prompts=prompts, prompt=prompt, new=new, mixed=True)


def decode_residents(isl: float, osl: float) -> CachedTokens:
    """Cache of a sequence in steady decode, of uniform age: mean ISL + OSL/2, deviation OSL/sqrt(12). [token]"""
    return CachedTokens(mean=isl + osl / 2, deviation=osl / math.sqrt(12.0), most=isl + osl)


def prompt_residents(isl: float) -> CachedTokens:
    """Describe the cache of one prompt of ``isl`` tokens in prefill, counted whole from its start. [token]"""
    return CachedTokens(mean=isl, deviation=0.0, most=isl)


def decode_live(mapping: Sharding, batch: Numeric) -> Live:
    """Count the tokens of a micro-batch of a decode step: with pp stages, ``min(pp, batch)`` of them follow each other.

    Returns tokens of the fullest rank and of all ranks, of the broadcast shape [token].

    100 sequences in two micro-batches of 50, at most 7 of them on one of 8 ranks:

    >>> decode_live(Sharding(dp_attn=8, ep=8, pp=2), 100).tokens.item()
    7.0
    """
    own = np.ceil(np.ceil(batch / np.minimum(mapping.pp, batch)) / mapping.dp_attn)
    return Live(own, np.minimum(own * mapping.dp_attn, batch), own)


def prefill_live(
    mapping: Sharding, batch: Numeric, prompt: CachedTokens, chunk_tokens: Numeric, deviations: float
) -> Live:
    """Tokens of a micro-batch of whole prompts of a pass, or, with CPP, of a chunk of every prompt of a rank. [token]

    Four prompts of 1000 tokens on two stages go two at a time; with CPP 256 tokens of each do:

    >>> [prefill_live(Sharding(pp=2), 4, prompt_residents(1000), chunk, 2.0).tokens.item() for chunk in (0, 256)]
    [2000.0, 1024.0]
    """
    prompts = np.ceil(batch / mapping.dp_attn)
    microbatch = np.ceil(prompts / np.minimum(mapping.pp, prompts))
    new = prompt.new
    chunk = np.minimum(prompts * chunk_tokens, new.of(prompts, deviations))
    own = np.where(chunk_tokens > 0, chunk, new.of(microbatch, deviations))
    total = np.minimum(own * mapping.dp_attn, new.of(batch, deviations))
    return Live(own / mapping.pcp, total, np.where(chunk_tokens > 0, prompts, microbatch))


def decode_load(
    at: Setup, mapping: Sharding, batch: Numeric, *, cached: CachedTokens, mla_form: str = "auto"
) -> Residents:
    """Count what a rank of a decode instance holds at its steady batch.

    With k drafts a sequence takes k more places in the cache, 1 + k rows in every pass and 1 + k recurrent states. The
    result is of the fullest DP rank, of the broadcast shape of mapping and batch.
    """
    sequences = np.ceil(batch / mapping.dp_attn)
    drafts = at.drafts(mapping)
    tokens = cached.of(sequences, at.profile.resident_deviations) + sequences * drafts
    live, queries = decode_live(mapping, batch), 1.0 + drafts
    return Residents(
        sequences=sequences,
        tokens=tokens,
        live=live.tokens * queries,
        live_total=live.total * queries,
        emitted=live.emitted * queries,
        expanded=tokens if mla_form == EXPANDED else 0.0,
        states=queries,
    )


def prefill_load(
    at: Setup, mapping: Sharding, batch: Numeric, *, prompt: CachedTokens, chunk_tokens: Numeric, mla_form: str = "auto"
) -> Residents:
    """Count what the fullest DP rank of a prefill instance holds."""
    deviations = at.profile.resident_deviations
    prompts = np.ceil(batch / mapping.dp_attn)
    live = prefill_live(mapping, batch, prompt, chunk_tokens, deviations)
    resident = 2.0 * mapping.pp * prompts
    return Residents(
        sequences=resident,
        tokens=prompt.of(resident, deviations),
        live=live.tokens,
        live_total=live.total,
        emitted=live.emitted,
        expanded=prompt.of(prompts, deviations) if mla_form == EXPANDED else 0.0,
    )


def colocated_load(
    at: Setup,
    mapping: Sharding,
    batch: Numeric,
    *,
    cached: CachedTokens,
    prefilling: Prefilling,
    mla_form: str = "auto",
) -> Residents:
    """Count what the fullest DP rank of an instance that does both phases holds.

    64 sequences and 8 prompts on 8 ranks, 2048 tokens of which go along with each step:

    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=8, ep=8)
    >>> pieces = prefilling_in_pieces(wide, 8, prompt_residents(1000), 2048, 64)
    >>> load = colocated_load(at, wide, 64, cached=decode_residents(1000, 1000), prefilling=pieces)
    >>> float(load.sequences), float(load.live), float(load.live_total)
    (9.0, 264.0, 2112.0)
    """
    deviations = at.profile.resident_deviations
    prompt, prompts, new = prefilling.prompt, prefilling.prompts, prefilling.new
    sequences, own = np.ceil(batch / mapping.dp_attn), np.ceil(prompts / mapping.dp_attn)
    drafts = at.drafts(mapping)
    queries = 1.0 + drafts
    decodes, decodes_total = (each * queries for each in decode_live(mapping, batch)[:2])
    together = np.add if prefilling.mixed else np.maximum
    new_total = np.minimum(new * mapping.dp_attn, prompt.new.of(prompts, deviations))
    whole = prompt.of(own, deviations)
    return Residents(
        sequences=sequences + own,
        tokens=cached.of(sequences, deviations) + sequences * drafts + whole,
        live=together(decodes, new),
        live_total=together(decodes_total, new_total),
        emitted=together(decodes, own),
        expanded=whole if mla_form == EXPANDED else 0.0,
        states=queries,
    )
