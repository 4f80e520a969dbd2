"""How sure a predicted served run is: what its kernels may be off, and which of them nobody measured as they are used.

The passes looked at are a decode step of the sequences in flight and a pass over one piece of a prompt: what a run of the
engine is made of. What an engine adds beyond its kernels is in ``EngineSpread``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.facts.uncertainty import UncertaintySpec
from disagg_sim.search.setting import Setting
from disagg_sim.serving.calibrated import words_of
from disagg_sim.serving.closed_loop import Lengths, Pool, Served, decode_time, pieces_of, prefill_time
from disagg_sim.serving.operators import Use, uses_in
from disagg_sim.serving.rescore import Times
from disagg_sim.serving.uncertainty import kind_of, sigma_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KernelDoubt:
    """What the kernels of served runs leave open; arrays of shape (rows,)."""

    decode: Floats  # s.d. of the logarithm of the time of a decode step [1]
    prefill: Floats  # the same of a pass of prefill [1]
    outside: tuple[str, ...]  # as ``serving.calibrated.outside_calibration``


def kernel_doubt(
    run: Served, prefill: Pool, decode: Pool, lengths: Lengths, in_flight: Floats, spec: UncertaintySpec
) -> KernelDoubt:
    """How sure the passes of served runs are.

    Parameters
    ----------
    prefill, decode
        The workers; the same where one instance does both phases.
    in_flight
        Sequences of the deployment that decode. [request]
    """
    batch = np.maximum(in_flight / decode.count, 1.0)
    size = pieces_of(run.engine, lengths.isl)[1]
    zero = np.zeros(np.shape(batch))

    def step(at: Setting) -> Times:
        return Times(decode_time(replace(run, at=at), decode.degrees, batch, lengths) + zero, zero, zero)

    def fill(at: Setting) -> Times:
        first = prefill_time(replace(run, at=at), prefill.degrees, size, 1.0, lengths) + zero
        return Times(zero, first, first)

    times = Times(step(run.at).step, *fill(run.at)[1:])
    steps, fills = uses_in("decode", run.at, step, times), uses_in("prefill", run.at, fill, times)
    return KernelDoubt(
        decode=_deviation(steps, times, "step", spec),
        prefill=_deviation(fills, times, "fill", spec),
        outside=tuple(words_of([*steps, *fills], times)),
    )


def _deviation(uses: list[Use], times: Times, name: str, spec: UncertaintySpec) -> Floats:
    """S.d. of the logarithm of a pass: operators of one kind share a part of their errors, the rest averages. [1]"""
    whole = getattr(times, name)
    common: dict[str, Floats] = {}
    variance = np.zeros(np.shape(whole))
    for use in uses:
        own = getattr(use.seconds, name) / whole * sigma_of(use, spec)
        share = kind_of(use, spec).shared
        common[use.label] = common.get(use.label, np.zeros(np.shape(whole))) + np.sqrt(share) * own
        variance = variance + (1.0 - share) * own**2
    return np.asarray(np.sqrt(variance + sum(part**2 for part in common.values())))
