"""Time prefill in two halves, of which one exchanges tokens with the experts while the other computes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.engine_time import host_time, launch_time, prefill_stretch
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def crosses_domains(at: Setup, mapping: Sharding) -> Numeric:
    """Tell whether expert ranks of attention DP span several NVLink domains: engines overlap halves only there.

    Parameters
    ----------
    at, mapping
        Setup, whose domain counts, and sharding. [1]

    Returns
    -------
    numeric
        Booleans of the shape of the mapping.

    Examples
    --------
    A domain of H200 has 8 GPUs:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    >>> crosses_domains(at, Sharding.stack([Sharding(dp_attn=8, ep=8), Sharding(dp_attn=32, ep=32)])).tolist()
    [False, True]
    """
    return (mapping.dp_attn > at.system.nvlink_domain) & (mapping.tp_attn == 1) & (mapping.pp == 1) & (mapping.pcp == 1)


def overlaps(at: Setup, mapping: Sharding) -> bool:
    """Tell whether the engine of ``at`` overlaps the halves of a prefill pass on any of the mappings.

    >>> from disagg_sim.physics.setup import setup
    >>> wide = Sharding(dp_attn=32, ep=32)
    >>> [overlaps(setup("deepseek_r1", "h200_sxm", "fp8", engine=name), wide) for name in ("sglang", "kernels")]
    [True, False]
    """
    engine = at.overheads
    if engine is None or not (engine.two_batch_overlap and at.model.is_moe):
        return False
    return bool(np.any(crosses_domains(at, mapping)))


def overlapped_prefill(
    at: Setup, mapping: Sharding, *, tokens: Numeric, ranks: Numeric, isl: Numeric, past: Numeric = 0.0
) -> Numeric:
    """A pass of ``tokens`` new tokens in two halves: twice the longer of work and exchange of one half. [s]

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance. [1]
    tokens
        New tokens over all DP ranks. [token]
    ranks
        DP ranks that share them. [1]
    isl, past
        Length of the prompts, and of it what was cached before. [token]

    Returns
    -------
    numeric
        FTL, which is also the time between passes, of the broadcast shape. [s]

    Notes
    -----
    ``t = 2*max(c, m)`` (physics page, section 7), without what does not shrink with the half.

    Examples
    --------
    The longer of work and exchange hides the other, so two halves take between half and all of the plain pass:

    >>> from disagg_sim.physics.passes.prefill import prefill_pass
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=32, ep=32)
    >>> halves = overlapped_prefill(at, wide, tokens=32 * 8192.0, ranks=32, isl=8192)
    >>> f"{halves / prefill_pass(at, wide, batch=32, isl=8192).ftl:.1f}"
    '0.6'
    """
    prompts = replace(mapping, draft_tokens=0)  # those of decode steps
    half = mixed_step(of_halves(at), prompts, batch=0.0, context=isl, chunk=Chunk(tokens / 2, isl, ranks, past))
    return in_halves(at, mapping, half.time, half.sums.communication)


@lru_cache(maxsize=64)
def of_halves(at: Setup) -> Setup:
    """Make the setup of one half: no time of the host, and the shared expert belongs to the work.

    Returns the setup with host times and launches of 0 s.

    >>> from disagg_sim.physics.setup import setup
    >>> half = of_halves(setup("deepseek_r1", "h200_sxm", "fp8", engine="sglang"))
    >>> half.overheads.step_host, half.overheads.kernel_launch, half.profile.shared_expert_overlaps_dispatch
    (0.0, 0.0, False)
    """
    engine = at.overheads
    if engine is not None:
        engine = replace(engine, step_host=0.0, sequence_host=0.0, rank_host=0.0, kernel_launch=0.0)
    profile = replace(at.profile, host=0.0, shared_expert_overlaps_dispatch=False)
    return replace(at, overheads=engine, profile=profile)


def in_halves(at: Setup, mapping: Sharding, half: Numeric, exchange: Numeric) -> Numeric:
    """Find twice the longer of work and exchange of one half, at least the launches, and the host once. [s]

    Parameters
    ----------
    at, mapping
        Setup of the whole pass, and sharding of the instance. [1]
    half
        One half, exchange included, as the engine stretches it. [s]
    exchange
        Its kernels of the exchange, not stretched. [s]

    Returns
    -------
    numeric
        Of the broadcast shape. [s]

    Examples
    --------
    Halves of 10 ms: an exchange of 4 ms hides behind 6 ms of work, one of 8 ms hides 2 ms of work.

    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=32, ep=32)
    >>> [f"{1e3 * in_halves(at, wide, 10e-3, exchange):.0f} ms" for exchange in (4e-3, 8e-3)]
    ['12 ms', '16 ms']
    """
    exchange = prefill_stretch(at) * exchange
    kernels = 2.0 * np.maximum(half - exchange, exchange)
    return np.maximum(kernels, launch_time(at, mapping)) + host_time(at, mapping, 0.0)
