r"""Time the kernels of linear and sparse attention that are neither scores nor values of all cached tokens.

:math:`t = t_0 + \max(F/e_c\Pi,\ B/e_m W,\ S w)` for S new tokens of each sequence: a chunked scan walks the chunks of
one sequence one after the other, w seconds a token, however few heads and sequences there are; the recurrent step of
decode reads and writes its states; an index reads its keys and scores them.

References: S. Yang et al., "Gated Delta Networks", :arxiv:`2412.06464`; Kimi Team, "Kimi Linear", :arxiv:`2510.26692`;
T. Dao, A. Gu, "Transformers are SSMs", :arxiv:`2405.21060`; DeepSeek-AI, "DeepSeek-V3.2", :arxiv:`2512.02556`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg_sim.facts.efficiency import (
    ASSUMED,
    CONVOLUTION,
    CONVOLUTION_STEP,
    INDEX,
    INDEX_STEP,
    SCAN,
    STEP,
    AttentionPartFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.roofline import Cost, Sums
from disagg_sim.physics.work import Numeric, Work


def _assumed_part(part: str, t0: float, **numbers: Any) -> AttentionPartFit:
    """What a kernel is taken to reach where nobody has timed it: a middle of the fits of like kernels."""
    return AttentionPartFit(
        engine=ASSUMED, version="", points=0, median_error=0.0, p90_error=0.0, kind="gdn", part=part, t0=t0, **numbers
    )


#: Part -> what it is taken to reach where no table has it, such as the scan of Mamba-2.
ASSUMED_PARTS = {
    SCAN: _assumed_part(SCAN, 25e-6, e_compute=0.1, e_memory=0.3, walk=45e-9),
    STEP: _assumed_part(STEP, 4e-6, e_memory=0.87),
    CONVOLUTION: _assumed_part(CONVOLUTION, 3e-6, e_memory=0.5),
    CONVOLUTION_STEP: _assumed_part(CONVOLUTION_STEP, 2e-6, e_memory=0.45),
    INDEX: _assumed_part(INDEX, 30e-6, e_compute=0.5, e_memory=0.5),
    INDEX_STEP: _assumed_part(INDEX_STEP, 30e-6, e_compute=0.5, e_memory=0.7),
}


@dataclass(frozen=True, slots=True)
class PartRate:
    """What such a kernel reaches; the defaults are the plain roofline."""

    flops: float  # [FLOP/s]
    bandwidth: float  # [B/s]
    t0: float = 0.0  # [s]
    walk: float = 0.0  # of a token of one sequence [s]


def part_cost(work: Work, new: Numeric, rate: PartRate) -> Cost:
    """Time a kernel with the equation in the head of this file.

    Parameters
    ----------
    work
        FLOP and bytes of the call.
    new
        New tokens of each sequence. [token]
    rate
        What the kernel reaches.

    Returns
    -------
    Cost
        Of one layer; its arrays have the broadcast shape of the sizes. [s]

    Examples
    --------
    64 states of 4 MB, read and written at 4.2 TB/s; a prompt alone walks 8192 tokens at 41 ns each:

    >>> step = part_cost(Work(0.47e9, 64 * 2 * 4.19e6), 1.0, PartRate(500e12, 4.2e12, 3.7e-6))
    >>> scan = part_cost(Work(96e9, 0.3e9), 8192.0, PartRate(700e12, 4.2e12, 22e-6, walk=41e-9))
    >>> f"{1e6 * step.time:.0f} us, {1e6 * scan.time:.0f} us"
    '131 us, 358 us'
    """
    compute, memory = work.flops / rate.flops, work.hbm_bytes / rate.bandwidth
    walked = new * rate.walk
    return Cost(rate.t0 + np.maximum(np.maximum(compute, memory), walked), Sums(compute, memory, 0.0, rate.t0 + walked))


def part_rate(fit: AttentionPartFit, system: SystemSpec) -> PartRate:
    """Find what a fitted kernel of linear or sparse attention reaches on a system; a share of None does not bind.

    Parameters
    ----------
    fit
        Shares of the peaks [1], times [s].
    system
        Whose peaks they are shares of.

    Returns
    -------
    PartRate
        [FLOP/s], [B/s] and [s].

    Examples
    --------
    States move at nine tenths of 4.8 TB/s:

    >>> from disagg_sim.facts.load import load_system
    >>> row = {"engine": "vllm", "version": "", "points": 0, "median_error": 0.0, "p90_error": 0.0, "t0": 4e-6}
    >>> rate = part_rate(AttentionPartFit(**row, kind="gdn", part="step", e_memory=0.9), load_system("h200_sxm"))
    >>> f"{rate.bandwidth / 1e12:.2f} TB/s, {rate.flops}"
    '4.32 TB/s, inf'
    """
    flops = np.inf if fit.e_compute is None else fit.e_compute * system.peak_flops["bf16"]
    bandwidth = np.inf if fit.e_memory is None else fit.e_memory * system.hbm_bandwidth
    return PartRate(flops, bandwidth, fit.t0, fit.walk)
