"""Time the steps of co-located instances, decodes and pieces of prompts, at a few sizes for all their batches.

And size what they hold under each budget of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.memory import colocated_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.residents import prefilling_in_pieces
from disagg_sim.planning.limits import Demand
from disagg_sim.search.phase_grid import PhaseGrid

#: Tokens of one rank, decodes and prefill, at which steps with prefill are timed. [token]
SIZES = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Budgets of a step of one attention rank that are tried: what engines are started with. [token]
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def mixed_tables(grid: PhaseGrid, work: Demand, rows: Ints, mapping: Sharding, last: int) -> Floats:
    """Times of steps with prefill on every rank, on one, and where prompts end, (3, rows, sizes, batches). [s]"""
    at, lengths = grid.setup, work.lengths
    nodes = lengths.prompt_nodes()
    new, weights = nodes.new, nodes.weight
    prompt = float(weights @ new**2) / lengths.mean_new  # that a token of prefill is of, on average
    past = float(weights @ (new * nodes.past)) / lengths.mean_new  # before it
    batch = grid.batch[:last].astype(float)
    sizes = np.array(SIZES[1:], dtype=float)
    shape = (rows.size, sizes.size, batch.size)
    decodes = np.broadcast_to(batch, (sizes.size, batch.size)).reshape(1, -1)
    verified = decodes * (1.0 + mapping.draft_tokens)
    tokens = np.maximum(np.repeat(sizes, batch.size)[None, :] - verified / mapping.dp_attn, 1.0)
    held = lengths.on_ranks(decodes, mapping.dp_attn)
    alone = grid.latency[rows, :last]
    if at.speculation is not None:  # an instance has one number of drafts, whatever its batch is
        load = lengths.on_ranks(batch[None, :], mapping.dp_attn)
        alone = decode_step(at, mapping, batch=batch[None, :], context=load.context, rank_batch=load.batch).time

    def step(ranks: Any, prompt: float) -> Floats:
        chunk = Chunk(tokens * ranks, prompt + past, ranks, past)
        time = mixed_step(at, mapping, batch=decodes, context=held.context, chunk=chunk, rank_batch=held.batch).time
        table = np.broadcast_to(time, (shape[0], tokens.shape[1])).reshape(shape)
        return np.concatenate([alone[:, None], table], axis=1)

    every = step(mapping.dp_attn, prompt)
    if np.all(mapping.dp_attn == 1):
        return np.stack([every, every, every])
    later = step(mapping.dp_attn, 2.0 * prompt) - every  # half a prompt further
    before = np.maximum(1.0 - tokens / prompt, 0.0).reshape(shape)  # share of a prompt that is before its last piece
    before = np.concatenate([np.zeros((shape[0], 1, shape[2])), before], axis=1)
    return np.stack([every, step(np.ones_like(mapping.dp_attn), prompt), every + later * before])


def mixed_bytes(
    grid: PhaseGrid, work: Demand, mapping: Sharding, last: int, budgets: Sequence[float] = BUDGETS
) -> Floats:
    """Memory on the fullest GPU under each budget of a rank [token], (rows, budgets, batches). [B]"""
    ranks, lengths, batch = mapping.dp_attn, work.lengths, grid.batch[:last].astype(float)
    decodes = np.tile(batch, len(budgets))[None, :]
    budget = ranks * np.repeat(np.array(budgets, dtype=float), last)
    prompts = ranks * np.maximum(np.ceil(budget / (ranks * lengths.mean_new)), 1.0)
    prefilling = prefilling_in_pieces(mapping, prompts, lengths.prompt, budget, decodes)
    memory = colocated_bytes(grid.setup, mapping, decodes, cached=lengths.resident, prefilling=prefilling)
    return np.broadcast_to(memory, budget.shape).reshape(-1, len(budgets), last)
