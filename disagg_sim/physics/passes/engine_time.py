r"""Add to the kernels of a pass what the engine that runs them adds.

With an engine (``Setup.overheads``) every micro-batch costs host time on the stage that runs it,

.. math:: t_{host} = h_0 + h_G \log_2 G + h_B\,\frac{B}{dp}

for G GPUs of the instance and B sequences in decode; prefill takes s times the sum of its kernels, without scores and
values of attention, which are one long kernel a layer; and steps that run outside CUDA graphs cannot be faster than
the host launches their kernels, on the ranks of all stages in parallel.
Without one, the host time is that of the profile, once a pass. Source: physics page, section 7 (engines).
"""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def host_time(at: Setup, mapping: Mapping, sequences: Numeric) -> Numeric:
    """Host time of one micro-batch with ``sequences`` decodes over all DP ranks that the GPU waits for. [s]"""
    engine = at.overheads
    if engine is None:
        return at.profile.host
    ranks = np.log2(mapping.gpus)
    return engine.step_host + engine.rank_host * ranks + engine.sequence_host * sequences / mapping.dp_attn


def launch_time(at: Setup, mapping: Mapping) -> Numeric:
    """Host time to launch the kernels of one stage one by one; 0 without an engine. [s]"""
    if at.overheads is None:
        return 0.0
    kernels = 0
    for layer, count in layers_of(at.model):
        kernels += count * (layer.attention.launches + layer.ffn.launches)
    return at.overheads.kernel_launch * kernels / mapping.pp


def prefill_host(at: Setup, mapping: Mapping, parts: Numeric) -> Numeric:
    """Host time of a prefill pass: of each of its micro-batches or chunks with an engine, else once. [s]"""
    return host_time(at, mapping, 0.0) * (1.0 if at.overheads is None else parts)


def prefill_stretch(at: Setup) -> float:
    """Time of prefill over the sum of its kernels, scores and values left out: gaps, clocks under lasting load. [1]"""
    return 1.0 if at.overheads is None else at.overheads.prefill_stretch


def step_time(
    at: Setup,
    mapping: Mapping,
    microbatches: Numeric,
    stage: Numeric,
    whole: Numeric,
    *,
    decodes: Numeric,
    graphs: bool,
) -> Numeric:
    """Time of a step of m micro-batches: the slowest stage is always busy, or a token walks through all stages. [s]

    With an engine ``max(m*(t_stage + host), sum_s t_s + host)``: each micro-batch is scheduled and launched on its
    own. Without, ``max(m*t_stage, sum_s t_s) + host``.

    Parameters
    ----------
    stage, whole
        Kernels of one micro-batch on the slowest stage, and on all stages. [s]
    decodes
        Sequences in decode of one micro-batch, over all DP ranks, the mean. [1]
    graphs
        Whether the step may run as a CUDA graph, where the engine makes them.
    """
    host = host_time(at, mapping, decodes)
    if at.overheads is None:
        return np.maximum(microbatches * stage, whole) + host
    if not (graphs and at.overheads.decode_graphs):
        launch = launch_time(at, mapping)
        stage, whole = np.maximum(stage, launch), np.maximum(whole, launch * mapping.pp)
    return np.maximum(microbatches * (stage + host), whole + host)
