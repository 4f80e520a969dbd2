"""Time designs again, also under other rates.

``times_of`` times the passes that a design is made of (arrays of shape (rows,), the physics of the grids without their
axes) and ``scores_of`` puts these together as its mode does. What a search chose stays as chosen: nothing is made
feasible or infeasible. ``certainty.rows`` reads designs from tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mapping, Mode
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, Interference, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.setup import Setup
from disagg_sim.search.grid import PHASES
from disagg_sim.workload.lengths import Lengths

MODES = tuple(mode.value for mode in Mode)


class Times(NamedTuple):
    """What the passes of designs take, arrays whose last axis is (rows,). [s]"""

    step: Any  # a decode step
    fill: Any  # a pass of prefill (its FTL); in piggyback a mixed step
    busy: Any  # an instance starts a pass of prefill this often; ``fill`` where it does both phases


class Scores(NamedTuple):
    """What users and operators see of designs; arrays of the shape of the times."""

    ftl: Any  # [s]
    ttl: Any  # as the row means it: mean or largest gap [s]
    throughput: Any  # output tokens per second over all GPUs; of prefill alone prompt tokens [token/s]


@dataclass(frozen=True, eq=False, kw_only=True)
class Designs:
    """Rows of a table that share mode, settings, lengths and kind of prefill; arrays have shape (rows,)."""

    mode: str  # of ``MODES``, or of ``PHASES`` where an instance of one phase stands for itself
    lengths: Lengths  # a point each: constant, or the means of a law
    at: Setup  # of decode, and of instances that do both phases
    prefill_at: Setup
    interference: Interference
    rows: Ints  # places in the table
    mapping: Mapping  # of decode
    prefill_mapping: Mapping
    batch: Floats  # of a decode instance [request]
    prefill_batch: Floats  # prompts of a pass [request]
    chunk_tokens: Floats  # CPP, in all rows or in none; 0 = whole prompts [token]
    instances: Floats  # of decode [1]
    prefill_instances: Floats  # [1]
    total_gpus: Floats  # [1]
    mixed_chunk: Floats  # prefill tokens of a mixed step, over all DP ranks [token]
    mixed_share: Floats  # [1]
    rounding: Floats  # matched rate over that of real-valued counts, 1 where one instance does both phases [1]
    by_gap: NDArray[np.bool_]  # whether the row's TTL is the largest gap, else the mean
    form: str  # of MLA in prefill

    @property
    def shared(self) -> bool:
        """Whether one instance does both phases."""
        return self.mode in MODES[1:]

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that the designs do."""
        return (self.mode,) if self.mode in PHASES else ("prefill", "decode")

    def under(self, *, decode: Setup | None = None, prefill: Setup | None = None) -> Designs:
        """The same designs with other settings."""
        return replace(self, at=decode or self.at, prefill_at=prefill or self.prefill_at)


def times_of(designs: Designs, *, step: bool = True, fill: bool = True) -> Times:
    """Time every pass of the designs under their settings; without ``step`` or ``fill`` those stay zero."""
    zero = np.zeros(designs.rows.size)
    decode, first, busy = zero, zero, zero
    if step:
        decode = decode_step(designs.at, designs.mapping, batch=designs.batch, context=designs.lengths.context).ttl
    if fill:
        first, busy = _fill(designs)
    return Times(decode, first, busy)


def _fill(designs: Designs) -> tuple[Any, Any]:
    """Time of a pass of prefill, or of a mixed step, and how often an instance starts one. [s]"""
    at, isl, form = designs.prefill_at, designs.lengths.mean_isl, designs.form
    if designs.mode == "piggyback":
        step = mixed_step(
            at,
            designs.mapping,
            batch=designs.batch,
            context=designs.lengths.context,
            chunk=Chunk(designs.mixed_chunk, isl),
            mla_form=form,
            interference=designs.interference,
        )
        return step.time, step.time
    mapping, batch = designs.prefill_mapping, designs.prefill_batch
    if designs.chunk_tokens[0]:
        done = chunked_prefill_pass(at, mapping, batch=batch, isl=isl, chunk_tokens=designs.chunk_tokens, mla_form=form)
    else:
        done = prefill_pass(at, mapping, batch=batch, isl=isl, mla_form=form)
    return done.ftl, done.busy


def scores_of(designs: Designs, times: Times, *, rematch: bool = False) -> Scores:
    """Latencies and throughput from the times of the passes, as each mode puts them together.

    Parameters
    ----------
    rematch
        Whether the counts of prefill and decode instances follow the times, losing as much by rounding as before; else
        they stay, and the slower pool counts.

    Notes
    -----
    Source: physics page, section 8; ``serving.disaggregated``, ``serving.colocated``, ``serving.piggyback``.
    """
    lengths, rate_of = designs.lengths, designs.lengths.request_rate
    isl, osl = lengths.mean_isl, lengths.mean_osl
    with np.errstate(divide="ignore", invalid="ignore"):  # times that were left out
        if designs.mode == "decode":
            rate = rate_of(designs.batch, times.step)
            return Scores(0.0 * times.step, times.step, rate * osl / designs.total_gpus)
        if designs.mode == "prefill":
            prompts = designs.prefill_batch / times.busy
            return Scores(times.fill, 0.0 * times.fill, prompts * isl / designs.total_gpus)
        if not designs.shared:
            prefill, decode = designs.prefill_batch / times.busy, rate_of(designs.batch, times.step)
            if rematch:
                needed = designs.prefill_mapping.gpus / prefill + designs.mapping.gpus / decode
                return Scores(times.fill, times.step, designs.rounding * osl / needed)
            rate = np.minimum(designs.prefill_instances * prefill, designs.instances * decode)
            return Scores(times.fill, times.step, rate * osl / designs.total_gpus)
        if designs.mode == "colocated":
            passes = designs.batch / (designs.prefill_batch * lengths.gaps)
            mean, gap = times.step + passes * times.fill, times.step + np.ceil(passes) * times.fill
            ftl = times.fill
        else:
            share = designs.mixed_share
            mean, gap = share * times.fill + (1.0 - share) * times.step, times.fill
            ftl = np.maximum(designs.mapping.dp_attn * isl / designs.mixed_chunk, 1.0) * times.fill
        rate = rate_of(designs.batch, mean)
        return Scores(ftl, np.where(designs.by_gap, gap, mean), rate * osl / designs.total_gpus)
