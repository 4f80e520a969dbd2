"""Time prefill in two halves, of which one exchanges tokens with the experts while the other computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.physics.passes.engine_time import host_time, launch_time, prefill_stretch
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def crosses_domains(at: Setup, mapping: Mapping) -> Numeric:
    """Whether expert ranks of attention DP span several NVLink domains: engines overlap halves only there."""
    return (mapping.dp_attn > at.system.nvlink_domain) & (mapping.tp_attn == 1) & (mapping.pp == 1)


def overlaps(at: Setup, mapping: Mapping) -> bool:
    """Whether the engine of ``at`` overlaps the halves of a prefill pass on any of the mappings."""
    engine = at.overheads
    if engine is None or not (engine.two_batch_overlap and at.model.is_moe):
        return False
    return bool(np.any(crosses_domains(at, mapping)))


def overlapped_prefill(at: Setup, mapping: Mapping, *, tokens: Numeric, ranks: Numeric, isl: Numeric) -> Numeric:
    """A pass of ``tokens`` new tokens in two halves: twice the longer of work and exchange of one half. [s]

    Parameters
    ----------
    tokens
        New tokens over all DP ranks. [token]
    ranks
        DP ranks that share them. [1]
    isl
        Length of the prompts. [token]

    Notes
    -----
    ``t = 2*max(c, m)``: serving facts page, section 6.1, without what does not shrink with the half.
    """
    half = mixed_step(of_halves(at), mapping, batch=0.0, context=isl, chunk=Chunk(tokens / 2, isl, ranks))
    return in_halves(at, mapping, half.time, half.sums.communication)


def of_halves(at: Setup) -> Setup:
    """The setup of one half: no time of the host, and the shared expert belongs to the work."""
    engine = at.overheads
    if engine is not None:
        engine = replace(engine, step_host=0.0, sequence_host=0.0, rank_host=0.0, kernel_launch=0.0)
    profile = replace(at.profile, host=0.0, shared_expert_overlaps_dispatch=False)
    return replace(at, overheads=engine, profile=profile)


def in_halves(at: Setup, mapping: Mapping, half: Numeric, exchange: Numeric) -> Numeric:
    """Twice the longer of work and exchange of one half, at least the launches, and the host once. [s]

    Parameters
    ----------
    half
        One half, exchange included, as the engine stretches it. [s]
    exchange
        Its kernels of the exchange, not stretched. [s]
    """
    exchange = prefill_stretch(at) * exchange
    kernels = 2.0 * np.maximum(half - exchange, exchange)
    return np.maximum(kernels, launch_time(at, mapping)) + host_time(at, mapping, 0.0)
