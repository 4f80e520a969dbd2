"""Time the mixed step of piggybacking: decodes and a chunk of prefill in one pass.

Physics page, sections 7 (Mixed) and 8 (piggyback). A step of B decodes and c prefill tokens makes
ONE linear pass at T = B + c; the scores and values of both run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, check_kinds
from disagg_sim.physics.cost import hop_cost
from disagg_sim.physics.passes.engine_time import host_time, prefill_stretch, step_time
from disagg_sim.physics.passes.layers import LayerTimes, all_stages, slowest_stage, stretched, with_ends, with_prefill
from disagg_sim.physics.passes.mixed_layers import Chunk, Load, mixed_layers
from disagg_sim.physics.rank_load import RankLoad
from disagg_sim.physics.roofline import AnySums, at_columns, chosen_sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What prefill and decode cost each other in one step, beyond the sum of their work. Neutral by default.

    Both are assumptions of a study: no measurement of them is shipped. They act on steps that hold
    both phases and can only slow them down.

    Parameters
    ----------
    minority_efficiency : float
        Efficiency e of the phase that would take less time alone: what it adds to the other phase's
        own step takes 1/e as long, ``T = T_major + (T_mix - T_major)/e``. In (0, 1]. [1]
    overlap_loss : float
        Imperfect overlap k of the step's compute time c and memory time m: the roofline's
        ``max(c, m)`` becomes ``max(c, m) + k*min(c, m)``. In [0, 1]. [1]
    """

    minority_efficiency: float = 1.0
    overlap_loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_kinds(self)
        if not 0 < self.minority_efficiency <= 1:
            raise InputError(f"minority_efficiency {self.minority_efficiency:g} is out of range; allowed: (0, 1]")
        if not 0 <= self.overlap_loss <= 1:
            raise InputError(f"overlap_loss {self.overlap_loss:g} is out of range; allowed: [0, 1]")


NO_INTERFERENCE = Interference()


class MixedStep(NamedTuple):
    """One step of B decodes and a chunk of prefill."""

    time: Numeric  # [s]
    sums: AnySums  # of the whole pass; the largest names its bound [s]

    def columns(self, first: int, count: int) -> MixedStep:
        """Those of some columns of a grid."""
        place = np.arange(first, first + count)
        return MixedStep(np.take(self.time, place, axis=1), at_columns(self.sums, place))


def mixed_step(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    mla_form: str = "auto",
    interference: Interference = NO_INTERFERENCE,
    rank_batch: Numeric | None = None,
) -> MixedStep:
    """Time one step of ``batch`` decodes at mean length ``context`` and a chunk of prefill.

    Both counts are over all DP ranks, and each is zero everywhere or positive everywhere; no chunk is the decode
    step, no decodes a chunk. The micro-batches of a pipeline take successive pieces of a rank's share. Kernels and
    expert imbalance are those of the phase with more tokens. With draft tokens a sequence brings 1 + k tokens; the
    chunk passes the draft layers together with them, and the further draft passes follow.

    The time is the mean over the chunks of a prompt: it is taken at their mean past, ``C + (ISL-C-S)/2``
    for pieces of S tokens of a prompt that has C cached. Scores, cache traffic and re-projection are affine in the
    past, so this is exact but for the larger of compute and memory time, and for the choice between kernels, which
    is made once a prompt. ``mla_form`` is the form of the chunk (``naive`` re-projects the past,
    ``absorbed`` works in latent space, ``cached`` kept the up-projected past); decodes are absorbed.
    Source: physics page, sections 7 (Mixed) and 8 (piggyback).

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance; its degrees are numbers or of shape (rows, 1). [1]
    batch
        Sequences in decode over all DP ranks, a number or of shape (1, batches). [request]
    context
        Cached tokens of each, the mean. [token]
    chunk
        Prefill tokens of the step, and the prompts that they are cut from. [token]
    mla_form
        Of the chunk; ``auto`` is the faster of ``naive`` and ``absorbed``.
    interference
        What the phases cost each other beyond the sum of their work.
    rank_batch
        As in ``decode_step``, whose context on the rank with the most this one takes, too. [request]

    Returns
    -------
    MixedStep
        Arrays of shape (rows, batches), or numbers. [s]

    Examples
    --------
    A chunk of 2048 tokens makes a step of 64 decodes 14 times as long:

    >>> from disagg_sim.physics.setup import setup
    >>> at, eight = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal"), Sharding(tp_attn=8, tp_ffn=8)
    >>> chunks = [Chunk(tokens, isl=8192) for tokens in (0.0, 2048.0)]
    >>> steps = [mixed_step(at, eight, batch=64.0, context=1000.0, chunk=chunk) for chunk in chunks]
    >>> [f"{1e3 * step.time:.1f} ms" for step in steps]
    ['2.8 ms', '39.5 ms']
    """
    (step,) = mixed_step_by_form(
        at,
        mapping,
        batch=batch,
        context=context,
        chunk=chunk,
        forms=(mla_form,),
        interference=interference,
        rank_batch=rank_batch,
    )
    return step


def mixed_step_by_form(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    context: Numeric,
    chunk: Chunk,
    forms: tuple[str, ...] = ("auto",),
    interference: Interference = NO_INTERFERENCE,
    rank_batch: Numeric | None = None,
) -> list[MixedStep]:
    """Time the same step as ``mixed_step`` under several forms of MLA.

    Returns one of each form [s].

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    >>> wide, chunk = Sharding(dp_attn=8, ep=8), Chunk(512.0, isl=8192)
    >>> forms = "naive", "absorbed", "cached"
    >>> steps = mixed_step_by_form(at, wide, batch=64.0, context=1e3, chunk=chunk, forms=forms)
    >>> [f"{1e3 * step.time:.1f} ms" for step in steps]
    ['28.5 ms', '24.4 ms', '24.3 ms']
    """
    both = Load.of(at, mapping, batch, chunk, RankLoad(context, rank_batch))
    steps = _steps(at, mapping, both, context, chunk, forms)
    if interference == NO_INTERFERENCE or not (both.joins and both.prefills):
        return steps
    alone: list[Numeric] = []
    if interference.minority_efficiency < 1:
        parts = both.without_chunk, replace(both, decodes=0.0, most=None)
        decodes, prefills = (_steps(at, mapping, load, context, chunk, forms) for load in parts)
        alone = [np.maximum(one.time, other.time) for one, other in zip(decodes, prefills, strict=True)]
    found = []
    for index, step in enumerate(steps):
        time = step.time + interference.overlap_loss * np.minimum(step.sums.compute, step.sums.memory)
        if alone:
            added = np.maximum(step.time - alone[index], 0.0)
            time = time + added * (1.0 / interference.minority_efficiency - 1.0)
        found.append(MixedStep(time, step.sums))
    return found


class _Kernels(NamedTuple):
    """Kernels of a step, of one micro-batch: on the slowest stage and on all stages, and their sums."""

    stage: Numeric  # [s]
    whole: Numeric  # [s]
    sums: AnySums  # of the pass, without host and hops [s]

    @classmethod
    def of(cls, at: Setup, mapping: Sharding, times: LayerTimes) -> _Kernels:
        """Those of layers."""
        return cls(slowest_stage(at.model, mapping.pp, times), all_stages(at.model, times), times.sums)


def _steps(
    at: Setup, mapping: Sharding, load: Load, context: Numeric, prompts: Chunk, forms: tuple[str, ...]
) -> list[MixedStep]:
    """The step without interference, under each form.

    With an engine, what the prefill adds to the decodes alone is stretched, and a step with prefill runs outside CUDA
    graphs.
    """
    fullest = load.fullest
    kernels = _kernels(at, mapping, fullest, context, prompts, forms)
    pp, mean, microbatches = mapping.pp, load.over_rows(load.decodes), load.over_rows(load.microbatches)
    hops = np.where(np.asarray(pp) > 1, pp, 0.0) if load.joins else pp - 1  # decodes return to the first stage
    hop = hop_cost(load.over_rows(fullest.tokens), mapping.gpus, at) * hops
    host = host_time(at, mapping, mean)
    found = []
    for stage, whole, sums in kernels:
        time = step_time(at, mapping, microbatches, stage, whole, decodes=mean, graphs=not load.prefills)
        found.append(MixedStep(time + hop.time, with_ends(sums, hop, host)))
    return found


def _kernels(
    at: Setup, mapping: Sharding, load: Load, context: Numeric, prompts: Chunk, forms: tuple[str, ...]
) -> list[_Kernels]:
    """Kernels of a step, those of the phase with more tokens at each point.

    With an engine they are those of its decodes alone, and what prefill adds, stretched. So no step with prefill is
    faster than its decodes alone, whose exchange of experts lasts longer.
    """
    prefill_leads = np.asarray(load.chunk > load.decodes * load.queries)
    same_kernels = not at.model.is_moe and at.profile.all_reduce_hidden_fraction == 0.0
    if np.all(prefill_leads):
        needed = {"prefill": _ALL}
    elif same_kernels or not np.any(prefill_leads):
        needed = {"decode": _ALL}
    else:
        needed = {"decode": _Columns.of(~prefill_leads), "prefill": _Columns.of(prefill_leads)}
    stretches = at.overheads is not None and load.prefills
    found = [
        mixed_layers((phase,), at, mapping, load.at_columns(own.wanted), context, prompts.at_columns(own.wanted), forms)
        for phase, own in needed.items()
    ]
    alone = tuple(dict.fromkeys(("decode", *needed))) if stretches and load.joins else ()
    decodes: dict[str, LayerTimes] = {}
    if alone:
        parts = mixed_layers(
            alone, at, mapping, load.distinct_decodes, context, Chunk(0.0, 1.0), ("auto",), scored=False
        )
        decodes = dict(zip(alone, (one for (one,) in parts), strict=True))
    by_phase = []
    for (phase, columns), (of_forms,) in zip(needed.items(), found, strict=True):
        own_and_same = [load.over_columns(decodes[name], columns.wanted) for name in ("decode", phase) if alone]
        times = _stretched(at, of_forms, own_and_same) if stretches else of_forms
        by_phase.append([_Kernels.of(at, mapping, one) for one in times])
    if len(by_phase) == 1:
        return by_phase[0]
    leads, where = load.over_rows(prefill_leads), needed.values()
    kernels = []
    for of_form in zip(*by_phase, strict=True):
        decode, prefill = (columns.spread(each) for columns, each in zip(where, of_form, strict=True))
        sums = chosen_sums(leads, prefill.sums, decode.sums)
        stage, whole = (np.where(leads, p, d) for p, d in zip(prefill[:2], decode[:2], strict=True))
        kernels.append(_Kernels(stage, whole, sums))
    return kernels


class _Columns(NamedTuple):
    """The columns of a grid in which the kernels of a phase are needed."""

    wanted: Ints | None  # None = all
    place: Ints | None  # of every column of the grid in these, 0 where it is none of them

    @classmethod
    def of(cls, leads: Any) -> _Columns:
        """Those in which some row is led by the phase."""
        some = leads.any(axis=0) if np.ndim(leads) == 2 else np.ones(1, dtype=bool)
        if some.all():
            return cls(None, None)
        wanted = np.flatnonzero(some)
        place = np.zeros(some.size, dtype=np.intp)
        place[wanted] = np.arange(wanted.size)
        return cls(wanted, place)

    def spread(self, kernels: _Kernels) -> _Kernels:
        """Kernels of these columns, laid out over the grid."""
        if self.place is None:
            return kernels
        stage, whole = (np.take(each, self.place, axis=1) for each in kernels[:2])
        return _Kernels(stage, whole, at_columns(kernels.sums, self.place))


_ALL = _Columns(None, None)


def _stretched(at: Setup, times: list[LayerTimes], own_and_same: list[LayerTimes]) -> list[LayerTimes]:
    """Times of each form, what prefill adds stretched; of the decodes alone in their own and in the same kernels."""
    longer: list[LayerTimes] = []
    for one in times:
        if longer and at.speculation is None:  # forms differ in scores and sums alone
            longer.append(longer[0]._replace(scores=one.scores, sums=one.sums))
        elif own_and_same:
            own, same = own_and_same
            longer.append(with_prefill(own, same, one, prefill_stretch(at)))
        else:
            longer.append(stretched(one, prefill_stretch(at)))
    return longer
