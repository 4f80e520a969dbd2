"""Whether what an engine runs lies where its kernels were measured: every operator of a decode step and of a prefill.

An operator counts where it takes at least ``WORTH_TELLING`` of the step or of the pass; its share is the derivative
of the time by its own slowness, as in ``serving.operators``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.physics.layer import Operator
from disagg_sim.physics.work import Numeric
from disagg_sim.serving.calibrated import WORTH_TELLING, breaches
from disagg_sim.serving.closed_loop import Lengths, Pool, Served, decode_time, pieces_of, prefill_time
from disagg_sim.serving.operators import SLOWED, Use, fits_of, sizes_of
from disagg_sim.serving.rescore import Times

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def leaves_range(run: Served, pool: Pool, lengths: Lengths, sequences: Numeric) -> Mask:
    """Rows in which an operator that matters lies outside its fit, or rests on another system.

    Parameters
    ----------
    pool, lengths
        Of shape (rows,).
    sequences
        In decode on one instance. [request]
    """
    rows = np.size(sequences)
    _, size = pieces_of(run.engine, lengths.isl)

    def times(adjusted: Served) -> tuple[Floats, Floats]:
        step = decode_time(adjusted, pool.degrees, np.maximum(sequences, 1.0), lengths)
        fill = prefill_time(adjusted, pool.degrees, size, np.ones(rows), lengths)
        return np.broadcast_to(step, rows), np.broadcast_to(fill, rows)

    seen: dict[tuple[str, str, str], dict[str, tuple[Floats, Floats]]] = {}

    def record(op: Operator) -> float:
        mine = seen.setdefault((op.name, op.kind, op.format), {})
        for key, values in sizes_of(op, latent=run.at.model.is_mla).items():
            value = np.broadcast_to(np.asarray(values, dtype=float), rows)
            low, high = mine.get(key, (value, value))
            mine[key] = np.minimum(low, value), np.maximum(high, value)
        return 1.0

    plain = times(_adjusted(run, record))
    outside = np.zeros(rows, dtype=bool)
    zero = np.zeros(rows)
    for (name, kind, form), sizes in seen.items():
        use = Use(
            phase="decode", name=name, kind=kind, format=form, seconds=Times(*(zero for _ in Times._fields)),
            sizes=sizes, fits=tuple(fits_of(run.at.rates, name, kind, form)),
            architecture=run.at.system.architecture,
        )  # fmt: skip
        doubtful = np.full(rows, any(fit.inherited_from for fit in use.fits))
        for breach in breaches(use):
            doubtful = doubtful | breach.where
        if doubtful.any() and not outside.all():
            slow = times(_adjusted(run, _slows(name, kind)))
            shares = [(after - before) / SLOWED / before for after, before in zip(slow, plain, strict=True)]
            outside = outside | (doubtful & (np.maximum(*shares) >= WORTH_TELLING))
    return np.asarray(outside)


def _slows(name: str, kind: str) -> Callable[[Operator], float]:
    return lambda op: 1.0 + SLOWED if (op.name, op.kind) == (name, kind) else 1.0


def _adjusted(run: Served, adjust: Callable[[Operator], Any]) -> Served:
    return replace(run, at=replace(run.at, rates=replace(run.at.rates, adjust=adjust)))
