"""Compute error bars of predicted served runs, and name their operators outside the range of the fits.

A run consists of decode steps of the sequences in flight and of passes over one piece of a prompt; one pass of each
kind is evaluated. ``ServedSpread`` holds the spread of what an engine adds to its kernels, by kind of evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import Contribution, contributions_in
from disagg_sim.certainty.designs import Times
from disagg_sim.certainty.error_bars import kind_of, sigma_of
from disagg_sim.certainty.evidence import served_sigma
from disagg_sim.certainty.extrapolation import words_of
from disagg_sim.facts.load import load_uncertainty
from disagg_sim.facts.uncertainty import EIGHTY, EVIDENCE, UncertaintySpec
from disagg_sim.physics.setup import Setup
from lab.calibration.kernels.residuals import band
from lab.calibration.served.evaluate import engine_of, expert_kernel_of, pool_of
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.spreads import FEW, evidence_of, pass_doubt
from lab.calibration.served.steady_state import (
    RowLengths,
    ServedModel,
    WorkerPool,
    decode_time,
    pieces_of,
    prefill_time,
    served,
)

#: Columns that ``with_bands`` adds.
COLUMNS = ("predicted_p10", "predicted_p90", "kernel_sigma", "outside_calibration", "calibrated")


def kernel_doubt(
    run: ServedModel,
    prefill: WorkerPool,
    decode: WorkerPool,
    lengths: RowLengths,
    in_flight: Floats,
    spec: UncertaintySpec,
) -> Iterator[tuple[float, float, str]]:
    """How sure the passes of each run are, with so many requests ``in_flight``.

    S.d. of the logarithm of the time of a decode step and of a pass of prefill [1], and what the run rests on beside
    measurements, as ``certainty.extrapolation.outside_calibration`` says it.
    """
    batch = np.maximum(in_flight / decode.count, 1.0)
    _, size, _ = pieces_of(run.engine, lengths.isl)
    zero = np.zeros(np.shape(batch))

    def step(at: Setup) -> Times:
        return Times(decode_time(replace(run, at=at), decode.mapping, batch, lengths) + zero, zero, zero)

    def fill(at: Setup) -> Times:
        first = prefill_time(replace(run, at=at), prefill.mapping, size, 1.0, lengths) + zero
        return Times(zero, first, first)

    times = Times(step(run.at).step, *fill(run.at)[1:])
    steps, fills = contributions_in("decode", run.at, step), contributions_in("prefill", run.at, fill)
    outside = words_of([*steps, *fills], times)
    return zip(_deviation(steps, times, "step", spec), _deviation(fills, times, "fill", spec), outside, strict=True)


def _deviation(parts: list[Contribution], times: Times, name: str, spec: UncertaintySpec) -> Floats:
    """S.d. of the logarithm of a pass: operators of one kind share a part of their errors, the rest averages. [1]"""
    whole = getattr(times, name)
    common: dict[str, Floats] = {}
    variance = np.zeros(np.shape(whole))
    for operator in parts:
        own = getattr(operator.seconds, name) / whole * sigma_of(operator, spec)
        share = kind_of(operator, spec).shared
        common[operator.label] = common.get(operator.label, np.zeros(np.shape(whole))) + np.sqrt(share) * own
        variance = variance + (1.0 - share) * own**2
    return np.asarray(np.sqrt(variance + sum(part**2 for part in common.values())))


def with_bands(
    lines: pd.DataFrame, rows: Sequence[ServingRow], spreads: UncertaintySpec | str = "measured"
) -> pd.DataFrame:
    """Add bands to the evaluated lines of served rows.

    Returns the lines and ``COLUMNS``: ends of the 80 % band in the unit of the prediction, the part of the deviation
    that comes from kernels [1], and what the run rests on beside measurements, in words; ``calibrated`` where it rests
    on none.
    """
    spec = load_uncertainty(spreads) if isinstance(spreads, str) else spreads
    known = {(line.file, line.row): line.capacity for line in lines.itertuples() if line.evaluated}
    doubted: dict[tuple[str, str], tuple[float, float, str]] = {}
    usable = sorted((row for row in rows if (row.file, row.row) in known), key=_run)
    for _, found in groupby(usable, key=_run):
        members = list(found)
        first = members[0]
        engine = engine_of(first, {})
        run = served(first.model, first.system, first.recipe, engine, random_tokens=first.random_tokens)
        decode = pool_of(row.workers for row in members if row.workers)
        prefill = pool_of(row.prefill or row.workers for row in members if row.workers)
        lengths = RowLengths(np.array([row.isl for row in members]), np.array([row.osl for row in members]))
        room = np.array([known[row.file, row.row] for row in members])
        doubts = kernel_doubt(run, prefill, decode, lengths, _in_flight(members, room, decode, run), spec)
        doubted |= zip(((row.file, row.row) for row in members), doubts, strict=True)
    keys = list(zip(lines["file"], lines["row"], strict=True))
    words = [doubted[key][2] if key in doubted else "" for key in keys]
    kernels, beyond = np.full((2, len(lines)), np.nan)
    for place, line in enumerate(lines.itertuples()):
        if line.evaluated and keys[place] in doubted:
            step, fill, _ = doubted[keys[place]]
            kernels[place] = fill if line.quantity == "ttft" else step  # others are mostly steps of decode
    known_by = evidence_of(lines)
    for field, spread in spec.served.items():
        mine = (known_by["field"] == field).to_numpy() & np.isfinite(kernels)
        beyond[mine] = served_sigma(spread, {kind: known_by.loc[mine, kind].tolist() for kind in EVIDENCE})
    low, high = band(lines["predicted"].to_numpy(dtype=float), np.hypot(kernels, beyond))
    few = (known_by["field"] == FEW).to_numpy() & np.isfinite(kernels)
    passes, off = pass_doubt(
        lines[few].drop(columns=list(EVIDENCE), errors="ignore").join(known_by).assign(kernel_sigma=kernels[few]),
        spec.served["step"],
    )
    half = EIGHTY * np.hypot(passes * off, beyond[few])
    middle = lines.loc[few, "predicted"].to_numpy(dtype=float)
    low[few], high[few] = np.maximum(middle - half, passes / np.exp(EIGHTY * off)), middle + half
    inside = [key in doubted and not word for key, word in zip(keys, words, strict=True)]
    return lines.assign(
        predicted_p10=low, predicted_p90=high, kernel_sigma=kernels, outside_calibration=words, calibrated=inside
    )


def _run(row: ServingRow) -> tuple[Any, ...]:
    engine = row.engine, expert_kernel_of(row), row.chunk_tokens, row.random_tokens
    return row.model, row.system, row.recipe, *engine, row.prefill is not None


def _in_flight(rows: Sequence[ServingRow], room: Floats, pool: WorkerPool, run: ServedModel) -> Floats:
    """Sequences that decode: those stated, and no more than fit or than the engine runs. [request]"""
    stated = np.array([row.concurrency if row.concurrency > 0 else row.batch for row in rows])
    most = run.engine.max_running * pool.mapping.dp_attn * pool.count
    limit = np.minimum(np.where(room > 0, room, np.inf), most)
    return np.asarray(np.minimum(np.where(stated > 0, stated, limit), limit))
