r"""Sum the layers of a pass to stages and stages to a step, and add the overheads of the engine.

With an engine (``Setup.overheads``) every micro-batch costs host time on the stage that runs it,

.. math:: t_{host} = h_0 + h_G \log_2 G + h_B\,\frac{B}{dp}

for G GPUs of the instance and B sequences in decode; kernels of prefill take s times as long, except scores and values
of attention (one long kernel a layer); and steps outside CUDA graphs take at least the time to launch their kernels,
on the ranks of all stages in parallel.
Without one, the host time is that of the profile, once a pass. Source: physics page, sections 3 (PP) and 7 (engines).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.roofline import AnySums, added
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


class Stage(NamedTuple):
    """Layers and ends of one pipeline stage."""

    layers: tuple[int, ...]  # of each kind of ``ModelSpec.kinds`` [1]
    first: int  # 1 if it holds the embedding
    last: int  # 1 if it holds the head

    def covers(self, other: Stage) -> bool:
        """Whether this stage holds at least everything that ``other`` does."""
        mine, theirs = (*self.layers, self.first, self.last), (*other.layers, other.first, other.last)
        return all(a >= b for a, b in zip(mine, theirs, strict=True))


@lru_cache(maxsize=512)
def stages_of(layers: tuple[int, ...], kinds: int, pp: int, longer: str = "first") -> tuple[Stage, ...]:
    """List the distinct stages of an even split of ``layers`` (the kind of each layer), in pipeline order.

    ``L mod p`` stages hold ceil(L/p) layers, the others floor(L/p): the first ones, the last ones, or those before the
    last (``EngineSpec.longer_stages``). Stages that another one covers cannot be the slowest or
    the fullest and are left out. Source: physics page, section 3 (PP).
    """
    base, extra = divmod(len(layers), pp)
    long = {"first": range(extra), "last": range(pp - extra, pp), "before_last": range(pp - 1 - extra, pp - 1)}[longer]
    found: list[Stage] = []
    start = 0
    for index in range(pp):
        end = start + base + (index in long)
        counts = tuple(layers[start:end].count(kind) for kind in range(kinds))
        found.append(Stage(counts, int(index == 0), int(index == pp - 1)))
        start = end
    distinct = tuple(dict.fromkeys(found))
    return tuple(s for s in distinct if not any(o.covers(s) for o in distinct if o is not s))


class StageTable(NamedTuple):
    """Candidate slowest stages of every row, repeated where a row has fewer; a number is the same in all rows."""

    layers: tuple[tuple[Numeric, ...], ...]  # (candidates, kinds), each of the shape of the degrees [1]
    first: tuple[Numeric, ...]  # (candidates,), each of the same shape [1]
    last: tuple[Numeric, ...]  # (candidates,) [1]


def stage_table(at: Setup, pp: Numeric) -> StageTable:
    """Candidate stages for pipeline degrees ``pp`` of any shape."""
    degrees, model = np.asarray(pp), at.model
    longer = "first" if at.overheads is None else at.overheads.longer_stages
    return _stage_table(model.pattern, len(model.kinds), tuple(degrees.ravel().tolist()), degrees.shape, longer)


@lru_cache(maxsize=256)
def _stage_table(
    layers: tuple[int, ...], kinds: int, pp: tuple[float, ...], shape: tuple[int, ...], longer: str
) -> StageTable:
    """Build the table of ``stage_table``; cached, as passes and memory of a grid need the same one."""
    values, inverse = np.unique(np.array(pp), return_inverse=True)
    plans = [stages_of(layers, kinds, int(value), longer) for value in values]
    depth = max(len(plan) for plan in plans)
    padded = [plan + (plan[-1],) * (depth - len(plan)) for plan in plans]
    where = inverse.reshape(shape)

    def of_rows(numbers: list[int]) -> Numeric:
        if len(set(numbers)) == 1:
            return float(numbers[0])
        column: Numeric = np.array(numbers, dtype=float)[where]
        column.setflags(write=False)
        return column

    candidates = [[plan[place] for plan in padded] for place in range(depth)]
    return StageTable(
        layers=tuple(tuple(of_rows([s.layers[kind] for s in some]) for kind in range(kinds)) for some in candidates),
        first=tuple(of_rows([s.first for s in some]) for some in candidates),
        last=tuple(of_rows([s.last for s in some]) for some in candidates),
    )


class LayerTimes(NamedTuple):
    """Times of one layer of each kind and of the model's ends, for one micro-batch; sums of the whole pass. [s]

    ``layers`` excludes scores and values of attention, which are in ``scores``.
    """

    layers: tuple[Numeric, ...]
    scores: tuple[Numeric, ...]
    embedding: Numeric
    head: Numeric
    sums: AnySums


def slowest_stage(at: Setup, pp: Numeric, times: LayerTimes) -> Numeric:
    """Find the time of the slowest stage for one micro-batch, without host. [s]

    80 layers of 1.5 ms and a head of 2 ms: the last of four stages has 20 layers and the head.
    """
    table = stage_table(at, pp)
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

    80 layers of 1.5 ms and a head of 2 ms:

    >>> from disagg_sim.facts.load import load_model
    >>> from disagg_sim.physics.roofline import Sums
    >>> times = LayerTimes(layers=(1e-3,), scores=(0.5e-3,), embedding=0.0, head=2e-3, sums=Sums())
    >>> f"{1e3 * all_stages(load_model('llama_3_1_70b'), times):.0f} ms"
    '122 ms'
    """
    total = times.embedding + times.head
    for one, scores, count in zip(times.layers, times.scores, model.kind_counts, strict=True):
        total = total + (one + scores) * count
    return total


def without_host(at: Setup) -> Setup:
    """Make the setup without host time; kernels and the stretch of prefill stay."""
    engine = at.overheads
    if engine is not None:
        engine = replace(engine, step_host=0.0, sequence_host=0.0, rank_host=0.0, kernel_launch=0.0, captured=0)
    return replace(at, profile=replace(at.profile, host=0.0), overheads=engine)


def host_time(at: Setup, mapping: Sharding, sequences: Numeric) -> Numeric:
    """Find the host time of one micro-batch that the GPU waits for; without an engine, of the profile. [s]"""
    engine = at.overheads
    if engine is None:
        return at.profile.host
    ranks = np.log2(mapping.gpus)
    return engine.step_host + engine.rank_host * ranks + engine.sequence_host * sequences / mapping.dp_attn


def launch_time(at: Setup, mapping: Sharding, *, captured: bool = True) -> Numeric:
    """Find the host time to launch the kernels of one stage, and of a draft model; 0 without an engine. [s]

    ``captured=False`` is for decode steps above the largest CUDA graph.

    80 layers of 9 kernels of attention and 7 of a dense FFN, at 5 us each, on two stages:

    >>> from dataclasses import replace
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8")
    >>> at = replace(at, overheads=replace(at.overheads, kernel_launch=5e-6))
    >>> f"{1e3 * launch_time(at, Sharding(tp_attn=4, tp_ffn=4, pp=2)):.1f} ms"
    '3.2 ms'
    """
    if at.overheads is None:
        return 0.0
    launch = at.overheads.kernel_launch
    if not captured and at.overheads.uncaptured_launch is not None:
        launch = at.overheads.uncaptured_launch
    own = at.draft_model
    return launch * _kernels(at.model) / mapping.pp + (0.0 if own is None else launch * _kernels(own.model))


def _kernels(model: ModelSpec) -> int:
    """Kernels of all layers. [1]"""
    return sum(count * (layer.attention.launches + layer.ffn.launches) for layer, count in layers_of(model))


def prefill_host(at: Setup, mapping: Sharding, parts: Numeric) -> Numeric:
    """Find the host time of a prefill pass: with an engine once a micro-batch or chunk, else once. [s]"""
    return host_time(at, mapping, 0.0) * (1.0 if at.overheads is None else parts)


def prefill_stretch(at: Setup) -> float:
    """Find the ratio of the time of prefill to the sum of its kernels, both without scores and values. [1]

    It covers gaps between kernels and lower clocks under lasting load. It is fitted for each engine, 1 without one.
    """
    return 1.0 if at.overheads is None else at.overheads.prefill_stretch


def step_time(
    at: Setup,
    mapping: Sharding,
    microbatches: Numeric,
    stage: Numeric,
    whole: Numeric,
    *,
    decodes: Numeric,
    graphs: bool,
) -> Numeric:
    """Time a step of m micro-batches: the slowest stage is always busy, or a token walks through all stages. [s]

    With an engine ``max(m*(t_stage + host), sum_s t_s + host)``: each micro-batch is scheduled and launched on its own.
    Without, ``max(m*t_stage, sum_s t_s) + host``. ``decodes`` are the mean sequences of a micro-batch over all DP
    ranks, 0 in prefill; ``graphs`` is whether the step may run as a CUDA graph. Steps above the largest captured graph
    are launched kernel by kernel.
    """
    host = host_time(at, mapping, decodes)
    if at.overheads is None:
        return np.maximum(microbatches * stage, whole) + host
    if not (graphs and at.overheads.decode_graphs):
        launch = launch_time(at, mapping)
        stage, whole = np.maximum(stage, launch), np.maximum(whole, launch * mapping.pp)
    time = np.maximum(microbatches * (stage + host), whole + host)
    if not (graphs and at.overheads.captured):  # steps with prefill are fitted without graphs
        return time
    larger = decodes / mapping.dp_attn * (1 + mapping.draft_tokens) > at.overheads.captured
    launch = launch_time(at, mapping, captured=False) * np.maximum(microbatches, mapping.pp)  # as fitted, with the host
    return np.maximum(time, np.where(larger, launch, 0.0))
