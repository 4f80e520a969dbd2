"""Count the KV blocks of an instance, from the same memory sum as the grids of ``search``.

A grid asks how many bytes a batch needs; an engine fills what weights, activations and buffers leave. Both add up
``physics.memory.instance_bytes`` with the same live tokens, so a batch that a grid calls feasible has its blocks here.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.drafting import drafts_of
from disagg_sim.physics.memory import instance_bytes
from disagg_sim.physics.residents import Live, Residents, decode_live, prefill_live, prompt_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.units import GIB

#: Most tokens that the cache of one DP rank is taken to hold: 10,000 prompts of 100,000. [token]
LARGEST_CACHE = 2**30


def kv_blocks(
    at: Setup,
    mapping: Sharding,
    *,
    max_sequences: int = 256,
    max_tokens: int = 2048,
    prompts: int = 0,
    saved_states: float = 0.0,
) -> int:
    """Count the KV blocks of an instance: what its GPUs hold beside weights and the activations of a full step. [block]

    The blocks of all DP ranks form one pool, as if requests were spread evenly over them. A layer with a sliding window
    keeps at most a window of each of ``max_sequences``. Takes ``max_sequences`` and ``max_tokens`` (sequences that the
    instance holds, and tokens of its largest step, over all DP ranks; a step of no more tokens than sequences has
    decodes alone, which a pipeline works off in micro-batches; drafts count among the tokens of a sequence [1],
    [token]), ``prompts`` (0 = steps of chunks) and ``saved_states`` [1/token] (0 = none).

    A token of 2 * 8 heads * 128 numbers * 32 layers takes 65,536 B in FP8; 8 GB of weights leave room for a million:

    >>> from disagg_sim.physics.setup import setup
    >>> tokens = kv_blocks(setup("llama_3_1_8b", "h100_sxm", "fp8"), Sharding()) * BLOCK_TOKENS
    >>> f"{tokens / 1e6:.1f} million tokens"
    '1.0 million tokens'
    """
    ranks = float(np.max(mapping.dp_attn))
    queries = 1.0 + float(np.max(drafts_of(at, mapping)))
    live, imbalance = _live(at, mapping, max_sequences, max_tokens, prompts, queries)

    def fullest_bytes(blocks: int) -> float:
        tokens = float(blocks * BLOCK_TOKENS)
        residents = Residents(
            sequences=min(np.ceil(max_sequences / ranks), tokens),
            tokens=tokens,
            live=live.tokens,
            live_total=live.total,
            emitted=live.emitted,
            saved=tokens * saved_states,
            states=1.0 if prompts else queries,
        )
        return float(np.max(instance_bytes(at, mapping, residents, imbalance)))

    largest = LARGEST_CACHE // BLOCK_TOKENS
    falling = range(largest, 0, -1)
    low = largest - bisect_left(falling, True, key=lambda blocks: fullest_bytes(blocks) <= at.memory_limit)
    if low < 1:
        lacking = max(fullest_bytes(1) - at.memory_limit, 0.0)
        raise InfeasibleError(
            f"{at.model.name} on {at.system.name} leaves no memory for a KV cache: an instance of "
            f"{mapping.gpus:g} GPUs lacks {lacking / GIB:.1f} GiB per GPU with steps of {max_tokens} tokens; "
            "allowed: more GPUs an instance, or smaller steps"
        )
    if low == largest:  # windows alone: the cache of a sequence stops growing
        low = math.ceil(max_sequences / ranks * at.model.max_context / BLOCK_TOKENS)
    return int(ranks) * low


def _live(
    at: Setup, mapping: Sharding, max_sequences: int, max_tokens: int, prompts: int, queries: float
) -> tuple[Live, float]:
    """What the largest pass works on, and the imbalance of its experts."""
    profile, ranks = at.profile, mapping.dp_attn
    if prompts:
        law = prompt_residents(math.ceil(max_tokens / prompts))
        live = prefill_live(mapping, prompts, law, float(mapping.chunk_tokens), profile.resident_deviations)
        return live, profile.prefill_imbalance
    sampled = np.ceil(max_sequences / ranks) * queries
    if max_tokens <= max_sequences * queries:
        live = decode_live(mapping, float(max_sequences))
        every = Live(live.tokens * queries, live.total * queries, live.emitted * queries)
        return every, profile.decode_imbalance
    return Live(max_tokens / ranks, float(max_tokens), sampled), profile.prefill_imbalance
