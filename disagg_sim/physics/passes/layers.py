"""Times of layers and stages, of which every pass is made.

Physics page, section 7. Degrees and batches are numbers or arrays that broadcast; grids hand in
degrees of shape (rows, 1) and batches of shape (1, batches).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import AttentionBlock, elementwise, layers_of
from disagg_sim.physics.blocks.base import OUTWARD
from disagg_sim.physics.context import shared_decode, shared_prefill
from disagg_sim.physics.cost import adjusted, all_reduce_cost, cheapest, kernel_cost, total_cost
from disagg_sim.physics.operators import Operator, Tokens, all_reduce, embedding, head
from disagg_sim.physics.roofline import NOTHING, AnySums, Cost, Sums, added
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.stages import stage_table
from disagg_sim.physics.tabulate import is_one
from disagg_sim.physics.work import Numeric


class LayerTimes(NamedTuple):
    """Times of one layer of each kind and of the model's ends, for one micro-batch; sums of the whole pass. [s]

    ``layers`` leaves scores and values of attention out, which are ``scores``.
    """

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: AnySums


class AttentionSide(NamedTuple):
    """The attention ranks' part of ``LayerTimes``: ``shared`` experts apart, as they may hide dispatch."""

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    shared: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: AnySums


def attention_cost(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Time scores and values of one layer, prompts and decodes one after the other (serial kernels).

    Where GPUs share the tokens of a sequence, with what they send each other for it (``physics.context``).

    Parameters
    ----------
    block
        Attention of the layer: what it multiplies and reads in each of its forms.
    at, tp
        Setup, and TP degree of attention. [1]
    tokens
        Prompts and decodes of one rank. [token]
    form
        ``auto``, which takes the fastest form at each point, or one that is forced.

    Returns
    -------
    Cost
        Of one layer; its arrays have the broadcast shape of ``tp`` and ``tokens``. [s]

    Examples
    --------
    64 sequences of 1000 tokens, one of 8 KV heads of 128 a GPU: 2 x 64 x 1000 x 128 B at 4.8 TB/s.

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> ((layer, count),) = layers_of(at.model)
    >>> cost = attention_cost(layer.attention, at, 8, Tokens(decodes=64.0, context=1000.0), "auto")
    >>> f"{count} layers, {1e6 * cost.time:.1f} us each"
    '80 layers, 3.4 us each'
    """
    total = NOTHING
    if np.any(np.asarray(tokens.prompts) > 0):
        if is_one(tokens.pcp) and is_one(tokens.dcp):
            total = total + cheapest(total_cost(ops, at) for ops in block.prefill(at.precision, tp, tokens, form))
        else:
            total = total + shared_prefill(block, at, tp, tokens, form)
    if np.any(np.asarray(tokens.decodes) > 0):
        if is_one(tokens.dcp):
            total = total + cheapest(total_cost(ops, at) for ops in block.decode(at.precision, tp, tokens, form))
        else:
            total = total + shared_decode(block, at, tp, tokens, form)
    return total


def attention_side(
    at: Setup, tp: Numeric, tokens: Tokens, form: str, phase: str, *, core: bool = True
) -> AttentionSide:
    """Time everything on the attention ranks; ``core = False`` leaves scores and values out (chunks add their own).

    The head is timed for ``tokens.emitted`` tokens; it enters the sums only where ``emitted`` is not a plain 0.

    Parameters
    ----------
    at, tp
        Setup, and TP degree of attention. [1]
    tokens
        Prompts and decodes of one rank. [token]
    form
        MLA form of scores and values.
    phase
        "prefill" or "decode": which share of the all-reduces the profile hides.
    core
        Whether scores and values are timed.

    Returns
    -------
    AttentionSide
        Times of one layer of each kind and sums of all layers, of the broadcast shape of ``tp`` and ``tokens``. [s]

    Examples
    --------
    DeepSeek-R1 has three dense layers and 58 of experts, and a shared expert in the latter alone:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    >>> side = attention_side(at, 1, Tokens(decodes=64.0, context=1000.0, emitted=64.0), "auto", "decode")
    >>> at.model.kind_counts, [bool(time > 0) for time in side.shared]
    ((3, 58), [False, True])
    """
    model, precision, linear = at.model, at.precision, tokens.linear
    hidden = at.profile.all_reduce_hidden_fraction if phase == "prefill" else 0.0
    absorbed = tokens.decodes * tokens.queries if form in ("auto", "absorbed") or not core else 0.0
    emits = not (np.ndim(tokens.emitted) == 0 and tokens.emitted == 0)
    start = total_cost([embedding(model, precision, linear)], at)
    end = total_cost([head(model, precision, tp, tokens.emitted)], at) if emits else NOTHING
    sums = start.sums.plus(end.sums)
    layers: list[Numeric] = []
    scores: list[Numeric] = []
    shared: list[Numeric] = []
    summed = all_reduce("attention all-reduce", linear, model, precision, tp)
    reduced = all_reduce_cost(summed.size, tp, at)  # that behind the FFN sums as many bytes

    def timed(operators: Iterable[Operator]) -> Cost:
        costs = (adjusted(op, reduced, at) if op.kind == "all_reduce" else kernel_cost(op, at) for op in operators)
        return sum(costs, NOTHING)

    @cache  # layers of several kinds may have the same attention
    def projected(block: AttentionBlock[Any]) -> Cost:
        return timed([*_projections(block, at, tp, tokens, absorbed), summed] if block.present else [])

    @cache
    def scored(block: AttentionBlock[Any]) -> Cost:
        return attention_cost(block, at, tp, tokens, form) if core else NOTHING

    for layer, count in layers_of(model):
        own = projected(layer.attention) + timed(layer.ffn.local(model, precision, tp, linear))
        apart = total_cost(layer.ffn.beside(model, precision, tp, linear), at)
        own = own + total_cost([elementwise(model, layer, tp, linear)], at)
        layers.append(own.time - hidden * own.sums.communication)
        mixing = scored(layer.attention)
        own = own + mixing
        scores.append(mixing.time)
        shared.append(apart.time)
        sums = sums.plus(own.sums, count).plus(apart.sums, count)
    return AttentionSide(tuple(layers), tuple(scores), tuple(shared), start.time, end.time, sums)


def _projections(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, absorbed: Numeric) -> list[Any]:
    """Projections of attention; under Helix those before the scores are as in TP of tp/dcp GPUs."""
    operators = block.served_projections(at.model, at.precision, tp, tokens.linear, absorbed)
    if is_one(tokens.dcp) or at.sharing.decode != "helix" or block.spec.shared_rows is None:
        return operators
    wide = block.served_projections(at.model, at.precision, tp / tokens.dcp, tokens.linear, absorbed)
    return [*(op for op in wide if op.name not in OUTWARD), *(op for op in operators if op.name in OUTWARD)]


def stretched(times: LayerTimes, stretch: Numeric) -> LayerTimes:
    """Stretch all times but scores and sums.

    Parameters
    ----------
    times
        Of layers and ends. [s]
    stretch
        Factor, ``prefill_stretch``. [1]

    Returns
    -------
    LayerTimes
        Of the broadcast shape. [s]

    Examples
    --------
    >>> times = LayerTimes(layers=(2.0,), scores=(1.0,), embedding=0.5, head=0.5, sums=Sums())
    >>> stretched(times, 1.5)[:4]
    ((3.0,), (1.0,), 0.75, 0.75)
    """
    layers = tuple(stretch * time for time in times.layers)
    return LayerTimes(layers, times.scores, stretch * times.embedding, stretch * times.head, times.sums)


def with_prefill(own: LayerTimes, same: LayerTimes, both: LayerTimes, stretch: Numeric) -> LayerTimes:
    """Find the times of a step of decodes and prefill: of its decodes alone, and what the prefill adds, stretched.

    ``t = t_own + s*max(t_both - t_same, 0)``; scores and values take no stretch.

    Parameters
    ----------
    own, same
        Its decodes alone, in the kernels of decode, and in those of ``both``. [s]
    both
        Decodes and prefill in one pass. [s]
    stretch
        Time of prefill over the sum of its kernels. [1]

    Returns
    -------
    LayerTimes
        Of the broadcast shape, with scores and sums of ``both``. [s]

    Examples
    --------
    Decodes alone take 3 ms in their own kernels and 2 ms in those of prefill; what the prefill adds to the latter is
    4 ms and takes 5 ms:

    >>> own, same, both = (LayerTimes((t,), (0.0,), 0.0, 0.0, Sums()) for t in (3e-3, 2e-3, 6e-3))
    >>> f"{1e3 * with_prefill(own, same, both, 1.25).layers[0]:.1f} ms"
    '8.0 ms'
    """

    def sum_of(alone: Numeric, without: Numeric, together: Numeric) -> Numeric:
        return alone + stretch * np.maximum(together - without, 0.0)

    return LayerTimes(
        tuple(map(sum_of, own.layers, same.layers, both.layers)),
        both.scores,
        sum_of(own.embedding, same.embedding, both.embedding),
        sum_of(own.head, same.head, both.head),
        both.sums,
    )


def slowest_stage(model: ModelSpec, pp: Numeric, times: LayerTimes) -> Numeric:
    """Find the time of the slowest stage for one micro-batch, without host. [s]

    Parameters
    ----------
    model, pp
        Layers of each kind, and pipeline stages. [1]
    times
        Of one layer of each kind, scores included apart, and of the ends. [s]

    Returns
    -------
    numeric
        Of the broadcast shape of ``pp`` and ``times``. [s]

    Examples
    --------
    80 layers of 1.5 ms and a head of 2 ms: the last of four stages has 20 layers and the head.

    >>> from disagg_sim.facts.load import load_model
    >>> times = LayerTimes(layers=(1e-3,), scores=(0.5e-3,), embedding=0.0, head=2e-3, sums=Sums())
    >>> f"{1e3 * float(slowest_stage(load_model('llama_3_1_70b'), 4, times)):.0f} ms"
    '32 ms'
    """
    table = stage_table(model, pp)
    of_kind = [one + scores for one, scores in zip(times.layers, times.scores, strict=True)]
    stages: list[Numeric] = []
    for counts, first, last in zip(table.layers, table.first, table.last, strict=True):
        time = added(added(0.0, times.embedding, first), times.head, last)
        for count, one in zip(counts, of_kind, strict=True):
            time = added(time, one, count)
        stages.append(time)
    return reduce(np.maximum, stages)


def all_stages(model: ModelSpec, times: LayerTimes) -> Numeric:
    """Find the time of one micro-batch through every stage in turn, without host and hops. [s]

    Parameters
    ----------
    model
        Layers of each kind. [1]
    times
        Of one layer of each kind, scores included apart, and of the ends. [s]

    Returns
    -------
    numeric
        Of the shape of ``times``. [s]

    Examples
    --------
    80 layers of 1.5 ms and a head of 2 ms:

    >>> from disagg_sim.facts.load import load_model
    >>> times = LayerTimes(layers=(1e-3,), scores=(0.5e-3,), embedding=0.0, head=2e-3, sums=Sums())
    >>> f"{1e3 * all_stages(load_model('llama_3_1_70b'), times):.0f} ms"
    '122 ms'
    """
    total = times.embedding + times.head
    for one, scores, count in zip(times.layers, times.scores, model.kind_counts, strict=True):
        total = total + (one + scores) * count
    return total


def followed(times: LayerTimes, model: ModelSpec, drafted: LayerTimes) -> LayerTimes:
    """Let a pass of a draft model follow on the last stage.

    Parameters
    ----------
    times
        Of the model that it drafts for. [s]
    model, drafted
        Draft model, and times of its pass. [s]

    Returns
    -------
    LayerTimes
        With a longer head, and the sums of both. [s]

    Examples
    --------
    A head of 1 ms, and 32 draft layers of 0.5 ms behind it:

    >>> from disagg_sim.facts.load import load_model
    >>> times = LayerTimes(layers=(1e-3,), scores=(0.0,), embedding=0.0, head=1e-3, sums=Sums())
    >>> drafted = LayerTimes(layers=(0.5e-3,), scores=(0.0,), embedding=0.0, head=0.0, sums=Sums())
    >>> f"{1e3 * followed(times, load_model('llama_3_1_8b'), drafted).head:.0f} ms"
    '17 ms'
    """
    return times._replace(head=times.head + all_stages(model, drafted), sums=times.sums.plus(drafted.sums))


def with_ends(sums: AnySums, hop: Cost, host: Numeric) -> AnySums:
    """Add host [s] and hops of a pass to the sums of its layers."""
    return sums.plus(hop.sums).plus(Sums(latency=host))
