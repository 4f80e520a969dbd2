"""Prefill and decode grids under a joint law of input and output lengths.

They return the same ``PhaseGrid`` as constant lengths, so matching, fronts and the integer program
work on them as they are; ``isl`` and ``osl`` of the grid are the means. Lengths take the same forms as
in ``workload.joint``; the P50 approximation beside them is ``workload.lengths.representative_shape``.

* **Prefill.** The request rate is b/E[t], t the busy time of a pass, integrated over the law of ISL.
  Attention is convex in the length, so E[t] is at least t(E[ISL]). The prompts of one pass share a
  length, as where a scheduler groups prompts by length. That is exact for one prompt a pass, and has
  the mean of independent lengths wherever a pass is affine in its tokens and in its attention pairs
  (within 0.7 % for 2-16 prompts of a TP instance). With DP attention it means that no rank waits for
  longer prompts elsewhere: unsorted prompts, one a rank, would wait for the longest of them, which
  for the log-normal law is 3.1 mean lengths over 8 ranks.
* **FTL** is the mean over requests, as TTL is a mean, or a quantile; limits act on the one chosen.
  With a shared length the quantile is that of one prompt's law, hence on the safe side: the 0.9
  quantile lies 10-20 % above that of 2-4 independent prompts a pass.
* **Prefill memory** holds prompts of independent lengths: the mean of their sum and as many standard
  deviations of it as the profile says (2), in the cache and in the live activations alike.
* **Decode** runs at the length-biased mean context, holds residents of the length-biased law and
  completes B/(TTL*(E[OSL] - 1)) requests/s; derivation in ``workload.joint``.

The mean request must lie within the model's context limit; the tail of a law beyond it keeps its
weight, as if the limit were not there.

Source: physics page, sections 4 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.chunked import chunked_prefill_pass
from disagg_sim.physics.kv_transfer import kv_bytes_per_request
from disagg_sim.physics.layer import check_form
from disagg_sim.physics.memory import CachedTokens, decode_bytes, prefill_bytes
from disagg_sim.physics.phases import Degrees, PrefillPass, decode_step, prefill_pass
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.grid import (
    CHUNK_TOKENS,
    Floats,
    Ints,
    PhaseGrid,
    batch_axis_of,
    best_form,
    bound_codes,
    degree_columns,
    given_sizes,
    phase_grid,
    row_blocks,
    with_chunks,
)
from disagg_sim.search.mappings import MappingTable, mappings_for
from disagg_sim.workload.joint import JointLengths, joint_lengths


def decode_grid_under(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    lengths: JointLengths | str,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
    batch: Any = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every decode configuration where requests have ``lengths``; costs no more than ``decode_grid``.

    Parameters
    ----------
    lengths
        A law of input and output length [token], or the name of a shipped traffic of one case.
    model, system, mappings, precision, profile, engine, batch, mla_form, allow_long_context
        As in ``decode_grid``.

    Returns
    -------
    PhaseGrid
        Latency is the mean TTL [s]; arrays of shape (mappings, batches). Source: physics page, section 8.

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, mappings that the model cannot take, unknown names.
    """
    at, law = setup(model, system, precision, profile, engine), _law(lengths)
    table = mappings_for(at.model, at.system, mappings)
    at.model.check_context(law.mean_isl, law.mean_osl, allow_long=allow_long_context)
    check_form(mla_form)
    cached = _cached(law, "decode")
    sizes = batch_axis_of(at, table, cached, phase="decode") if batch is None else given_sizes("batch", batch)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ttl, memory = np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    for rows in row_blocks(*shape):
        degrees = degree_columns(table[rows])
        step = decode_step(at, degrees, batch=axis, context=law.context, mla_form=mla_form)
        ttl[rows], micro[rows], bound[rows] = step.ttl, step.microbatches, bound_codes(step.sums)
        memory[rows] = decode_bytes(at, degrees, axis, cached=cached, mla_form=mla_form)
    rate = axis / (ttl * (law.mean_osl - 1))
    grid = phase_grid(at, "decode", table, law.mean_isl, law.mean_osl, sizes, ttl, rate, memory, micro, bound)
    return replace(grid, kv_bytes_per_request=_kv_bytes(at, law))


def prefill_grid_under(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    lengths: JointLengths | str,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
    batch: Any = None,
    chunk_tokens: Any = None,
    mla_form: str = "auto",
    ftl_quantile: float | None = None,
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every prefill configuration where requests have ``lengths``; about 10 times the work of ``prefill_grid``.

    Parameters
    ----------
    lengths
        A law of input and output length [token], or the name of a shipped traffic of one case.
    ftl_quantile
        Make the FTL that of the prompt which a share of this size, above 0 and below 1, does not exceed;
        by default the mean over requests. [1]
    model, system, mappings, precision, profile, engine, batch, chunk_tokens, mla_form, allow_long_context
        As in ``prefill_grid``.

    Returns
    -------
    PhaseGrid
        Latency is the FTL [s]; arrays of shape (rows, batches). Source: physics page, sections 4 and 8.

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, mappings that the model cannot take, unknown names.
    """
    at, law = setup(model, system, precision, profile, engine), _law(lengths)
    table = mappings_for(at.model, at.system, mappings)
    at.model.check_context(law.mean_isl, law.mean_osl, allow_long=allow_long_context)
    check_form(mla_form)
    prompt = _cached(law, "prefill")
    sizes = batch_axis_of(at, table, prompt, phase="prefill") if batch is None else given_sizes("batch", batch)
    table, chunks = with_chunks(table, longest_timed(law), CHUNK_TOKENS if chunk_tokens is None else chunk_tokens)
    ftl_isl = 0.0 if ftl_quantile is None else law.isl_quantile(ftl_quantile)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ftl, busy, memory = np.empty(shape), np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    for size in np.unique(chunks).tolist():
        timed = _Timed(*(law.stair_nodes(size) if size else law.isl_nodes()), ftl_isl, size)
        alike = np.flatnonzero(chunks == size)
        for block in row_blocks(alike.size, sizes.size):
            rows = alike[block]
            degrees = degree_columns(table[rows])
            (ftl[rows], busy[rows], sums), memory[rows] = _score(at, timed, prompt, degrees, axis, mla_form)
            bound[rows] = bound_codes(sums)
            prompts = np.minimum(degrees.pp, np.ceil(axis / degrees.dp_attn))
            micro[rows] = np.ceil(law.mean_isl / size) if size else prompts
    grid = phase_grid(
        at, "prefill", table, law.mean_isl, law.mean_osl, sizes, ftl, axis / busy, memory, micro, bound, chunks
    )
    return replace(grid, kv_bytes_per_request=_kv_bytes(at, law))


def batch_axis_under(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable,
    *,
    phase: str,
    lengths: JointLengths | str,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
) -> Ints:
    """As ``search.grid.batch_axis``, where requests have ``lengths``. [request]"""
    at = setup(model, system, precision, profile, engine)
    return batch_axis_of(at, mappings, _cached(_law(lengths), phase), phase=phase)


def longest_timed(lengths: JointLengths | str) -> float:
    """Longest prompt whose passes are timed: chunks below it are tried. [token]"""
    return float(_law(lengths).isl_nodes()[0][-1])


def _cached(law: JointLengths, phase: str) -> CachedTokens:
    """Cache of a request in decode, or of a prompt in prefill. [token]"""
    if phase == "decode":
        return CachedTokens(mean=law.context, deviation=law.context_deviation, most=law.longest)
    return CachedTokens(mean=law.mean_isl, deviation=law.isl_deviation, most=float(law.isl[-1]))


class _Timed(NamedTuple):
    """Prompts whose passes are timed."""

    isl: Floats  # ascending [token]
    weight: Floats  # [1]
    ftl_isl: float  # prompt whose FTL counts; 0 = the mean over ``isl`` [token]
    chunk_tokens: int  # 0 = unchunked [token]


def _score(
    at: Setup, timed: _Timed, prompt: CachedTokens, degrees: Degrees, axis: Any, form: str
) -> tuple[PrefillPass, Any]:
    """Expected pass and bytes of one block of rows."""
    # a column, as CPP is tabulated over distinct degrees and chunk sizes
    chunk = np.full_like(degrees.pp, timed.chunk_tokens)

    def score(each: str) -> tuple[PrefillPass, Any]:
        def one(isl: float) -> PrefillPass:
            if not timed.chunk_tokens:
                return prefill_pass(at, degrees, batch=axis, isl=isl, mla_form=each)
            return chunked_prefill_pass(at, degrees, batch=axis, isl=isl, chunk_tokens=chunk, mla_form=each)

        held = prefill_bytes(at, degrees, axis, prompt=prompt, chunk_tokens=chunk, mla_form=each)
        return _expected(timed, one), held

    return best_form(at, form, score) if timed.chunk_tokens else score(form)


def _expected(timed: _Timed, one: Callable[[float], PrefillPass]) -> PrefillPass:
    """Mean pass over the law of lengths; its FTL is that of ``ftl_isl`` where one is set."""
    ftl, busy, sums = 0.0, 0.0, Sums()
    for isl, weight in zip(timed.isl.tolist(), timed.weight.tolist(), strict=True):
        each = one(isl)
        ftl, busy, sums = ftl + weight * each.ftl, busy + weight * each.busy, sums.plus(each.sums, weight)
    return PrefillPass(one(timed.ftl_isl).ftl if timed.ftl_isl else ftl, busy, sums)


def _law(lengths: JointLengths | str) -> JointLengths:
    return joint_lengths(lengths) if isinstance(lengths, str) else lengths


def _kv_bytes(at: Setup, law: JointLengths) -> float:
    """Expected cache of a prompt; sliding windows saturate prompt by prompt. [B]"""
    each = [kv_bytes_per_request(at.model, at.precision, isl) for isl in law.isl.tolist()]
    return float(law.isl_weight @ np.array(each))
