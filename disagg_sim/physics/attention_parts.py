r"""Time the kernels of linear and sparse attention that are neither scores nor values of all cached tokens.

:math:`t = t_0 + \max(F/e_c\Pi,\ B/e_m W,\ S w)` for S new tokens of each sequence: a chunked scan walks the chunks of
one sequence one after the other, w seconds a token, however few heads and sequences there are; the recurrent step of
decode reads and writes its states; an index reads its keys and scores them. Kernels of sparse attention add what
``part_cost`` says: tiles of heads and queries, small kernels around, and an index that runs for long contexts alone.

References: S. Yang et al., "Gated Delta Networks", :arxiv:`2412.06464`; Kimi Team, "Kimi Linear", :arxiv:`2510.26692`;
T. Dao, A. Gu, "Transformers are SSMs", :arxiv:`2405.21060`; DeepSeek-AI, "DeepSeek-V3.2", :arxiv:`2512.02556`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from disagg_sim.facts.efficiency import (
    ASSUMED,
    CHOSEN,
    CONVOLUTION,
    CONVOLUTION_STEP,
    INDEX,
    INDEX_STEP,
    SCAN,
    SMALL_STEP,
    STEP,
    AttentionPartFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.roofline import Cost, Sums
from disagg_sim.physics.work import AttentionShape, Numeric, Work


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
    CHOSEN: _assumed_part(CHOSEN, 40e-6, token=80e-9, e_compute=0.35, e_memory=0.6, head_tile=64.0),
    SMALL_STEP: _assumed_part(SMALL_STEP, 6e-6, token=50e-9),
}


@dataclass(frozen=True, slots=True)
class PartRate:
    """What such a kernel reaches; the defaults are the plain roofline."""

    flops: float  # [FLOP/s]
    bandwidth: float  # [B/s]
    t0: float = 0.0  # [s]
    walk: float = 0.0  # of a new token of one sequence [s]
    key_walk: float = 0.0  # of a key of one sequence, cached or new [s]
    token: float = 0.0  # of a new token of any sequence, in the small kernels around [s]
    choice: float | None = None  # start of what runs only where not all keys are chosen; None = it always runs [s]
    choice_until: float = 0.0  # longest context that pays this start; 0 = any [token]
    head_tile: float = 0.0  # query heads are padded to multiples of it; 0 = they are not [1]
    query_tile: float = 0.0  # so are new tokens of a sequence [token]
    few_heads: float = 0.0  # fewer query heads than that take ``few_token`` [1]
    few_token: float = 0.0  # of a new token of any sequence [s]


def part_cost(work: Work, shape: AttentionShape, rate: PartRate) -> Cost:
    r"""Time a kernel with the equation in the head of this file.

    For n sequences of S new tokens after C cached ones,

    .. math:: t = t_0 + n S\,\tau + [C + S > K]\,(t_K + \max(F/e_c\Pi,\ B/e_m W,\ S w + (C + S)\,w_k))

    * :math:`\tau` is what the small kernels around take for a token (norms, rotary embedding, quantising, scatter);
    * the bracket is 1 where the kernel runs at any length, which is where no start :math:`t_K` of a choice is given; an
      index has nothing to choose as long as all K keys are taken;
    * F counts query heads, or new tokens of a sequence, in whole tiles where a kernel pads them;
    * :math:`w_k` is the time that one sequence needs for a key whose blocks are walked one after the other.

    Parameters
    ----------
    work
        FLOP and bytes of the call.
    shape
        Its sequences, new and cached tokens, query heads, and the longest context whose keys are all chosen.
    rate
        What the kernel reaches.

    Returns
    -------
    Cost
        Of one layer; its arrays have the broadcast shape of the sizes. [s]

    Examples
    --------
    64 states of 4 MB, read and written at 4.2 TB/s; a prompt alone walks 8192 tokens at 41 ns each:

    >>> one, prompt = (AttentionShape(n, new, 0.0, 64.0, 1.0, 128.0) for n, new in ((64.0, 1.0), (1.0, 8192.0)))
    >>> step = part_cost(Work(0.47e9, 64 * 2 * 4.19e6), one, PartRate(500e12, 4.2e12, 3.7e-6))
    >>> scan = part_cost(Work(96e9, 0.3e9), prompt, PartRate(700e12, 4.2e12, 22e-6, walk=41e-9))
    >>> f"{1e6 * step.time:.0f} us, {1e6 * scan.time:.0f} us"
    '131 us, 358 us'
    """
    compute, memory = work.flops / rate.flops, work.hbm_bytes / rate.bandwidth
    if rate.head_tile:
        compute = compute * (np.ceil(shape.q_heads / rate.head_tile) * rate.head_tile / shape.q_heads)
    if rate.query_tile:
        new = np.maximum(shape.new, 1.0)
        compute = compute * (np.ceil(new / rate.query_tile) * rate.query_tile / new)
    walked = shape.new * rate.walk
    if rate.key_walk:
        walked = walked + (shape.past + shape.new) * rate.key_walk
    busy = np.maximum(np.maximum(compute, memory), walked)
    if rate.few_heads:
        each = shape.sequences * shape.new * rate.few_token
        busy = np.where(shape.q_heads < rate.few_heads, np.maximum(busy, each), busy)
    start: Numeric = rate.t0
    if rate.token:
        start = start + shape.sequences * shape.new * rate.token
    if rate.choice is not None:
        length = shape.past + shape.new
        chooses = np.where(length > shape.chosen, 1.0, 0.0)
        pays = np.where(length <= rate.choice_until, chooses, 0.0) if rate.choice_until else chooses
        start = start + pays * rate.choice
        compute, memory, walked, busy = chooses * compute, chooses * memory, chooses * walked, chooses * busy
    return Cost(start + busy, Sums(compute, memory, 0.0, start + walked))


def part_rate(fit: AttentionPartFit, system: SystemSpec, cache: str = "") -> PartRate:
    """Find what a fitted kernel of linear or sparse attention reaches on a system; a share of None does not bind."""
    same = {each.name: getattr(fit, each.name) for each in fields(PartRate)[2:]}
    return PartRate(
        np.inf if fit.e_compute is None else fit.e_compute * system.peak_flops["bf16"],
        np.inf if fit.e_memory is None else fit.e_memory * system.hbm_bandwidth,
        **same | {"few_heads": fit.few_heads if cache == "fp8" else 0.0},
    )
