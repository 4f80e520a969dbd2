r"""Fit the spread of served runs by kind of evidence, and compute error bars of predicted ones.

A run consists of decode steps of the sequences in flight and of passes over one piece of a prompt; one pass of each
kind is evaluated, and its operators outside the range of the fits are named.

The s.d. of the logarithm of an error is :math:`\sqrt{\sigma_k^2 + (b \prod_d f_d)^2}`: that of the kernels, and a
base times one factor for each kind of evidence (``facts.uncertainty.EVIDENCE``). Factors are raked: each in turn is
moved until 80 % of the operating points of its level lie within their band, pulled towards 1 by ``PRIOR``
configurations' worth of doubt. Then two things that a fit to its own data cannot say:

* ``unseen``: each level is left out in turn and judged as one that nobody has seen; the factor holds 80 % of the
  points, all levels with equal weight, and is no less than that of any level that was fitted;
* the base is what holds 80 % of the points of configurations that a fit of four fifths of the others did not see.

What a request spends beside its pass (HTTP, tokenising, scheduling, hand-over) does not grow with the pass: the error
of a first token is measured - predicted [s], its kernels are those of the pass with the spread of ``step``, and it is
told apart by engine and mode alone.

Points of configurations that are held out are used in no fit here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_engine, load_uncertainty
from disagg_sim.facts.uncertainty import EIGHTY, EVIDENCE, SERVED, ServedSpread, UncertaintySpec
from disagg_sim.physics.setup import Setup
from lab.calibration.kernels.residuals import CLIP, band, deviation
from lab.calibration.served.evaluate import engine_of, expert_kernel_of, pool_of
from lab.calibration.served.groups import TTFT_CONCURRENCY, per_instance, points
from lab.calibration.served.rows import ServingRow
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


#: Field whose spread is in seconds.
FEW = SERVED[1]
#: Configurations' worth of doubt that pulls a factor towards 1, and those from which a level has a factor. [1]
PRIOR, LEAST = 10, 3
#: Rounds of raking, and the share of a step that each takes. [1]
ROUNDS, STEP = 30, 0.7
#: Quantiles by which a level stands for itself among others. [1]
EACH = 50
#: Folds in which the base is checked. [1]
FOLDS = 5
#: Least base: nothing is surer than this beyond its kernels. [1]
LEAST_BASE = 0.01
#: Kinds of evidence by which the time beside the pass is told apart: factors of more would multiply on 100 points.
BESIDE_PASS = ("engine", "mode")
#: Columns of served lines that make a case: its configurations share what the engine does to all of them.
CASE = ("system", "model", "engine", "recipe")


def evidence_of(lines: pd.DataFrame) -> pd.DataFrame:
    """Columns ``EVIDENCE`` and ``field`` (one of ``SERVED``) of evaluated lines, index as theirs.

    A first token is the work of the layout that prefills, all else of the one that decodes.
    """
    first = lines["quantity"] == "ttft"
    loaded = first & ~(per_instance(lines) <= TTFT_CONCURRENCY)
    field = np.select([loaded, first, lines["quantity"] == "throughput"], [SERVED[2], FEW, SERVED[3]], SERVED[0])
    version = (lines["engine"] + " " + lines["version"]).where(lines["version"] != "", "")
    layout = lines["layout"].where(~first, lines["prefill_layout"])
    return lines[["engine", "load", "family", "mode"]].assign(layout=layout, version=version, field=field)


def served_spreads(lines: pd.DataFrame) -> tuple[float, dict[str, ServedSpread]]:
    """Estimate what served runs show beyond their kernels.

    Returns ``shared`` (share of the variance of the errors of TPOT that the configurations of a case have in common.
    [1]).
    """
    usable = lines[lines["evaluated"] & ~lines["saturated"] & ~lines["held_out"]]
    once = points(usable)
    known = once.drop(columns=[name for name in EVIDENCE if name in once]).join(evidence_of(once))
    known = known.assign(error=-np.log1p(known["relative_error"].astype(float)))
    spreads: dict[str, ServedSpread] = {}
    for field in SERVED:
        mine = known[(known["field"] == field) & np.isfinite(known["kernel_sigma"].astype(float))]
        if mine["configuration"].nunique() < FOLDS:
            raise InputError(f"spread of {field}: fewer than {FOLDS} configurations of served runs are not held out")
        if field != FEW:
            spreads[field] = _spread(mine)
            continue
        passes, sigma = pass_doubt(mine, spreads["step"])  # errors in seconds, and what their pass explains of them
        late = mine["measured"].astype(float) - mine["predicted"]
        spreads[field] = _spread(mine.assign(error=late, kernel_sigma=passes * sigma), BESIDE_PASS)
    return _shared_by_case(known), spreads


def pass_doubt(rows: pd.DataFrame, step: ServedSpread) -> tuple[Floats, Floats]:
    """Pass behind the predicted first token of each row [s], and the s.d. of its logarithm [1].

    Takes lines with ``EVIDENCE`` of their first token and ``kernel_sigma``, and the spread of ``step``.
    """
    host = np.array([load_engine(name).request_host for name in rows["engine"]])
    kernels = rows["kernel_sigma"].to_numpy(dtype=float)
    return rows["predicted"].to_numpy(dtype=float) - host, np.hypot(kernels, _beyond(step, rows))


def _spread(rows: pd.DataFrame, kinds: Sequence[str] = EVIDENCE) -> ServedSpread:
    """Spread of one field: raked, then ``unseen`` and the base as of configurations that were not seen."""
    first = _raked(rows, kinds)
    unseen = {kind: max(_unseen(rows, kind, kinds), *levels.values(), 1.0) for kind, levels in first.levels.items()}
    first = replace(first, unseen=unseen)
    fold = rows["configuration"].map(lambda name: hashlib.sha256(f"fold {name}".encode()).digest()[0] % FOLDS)
    parts = [(rows[fold != number], rows[fold == number]) for number in range(FOLDS)]
    apart = [
        (replace(_raked(fitted, kinds), unseen=unseen), other) for fitted, other in parts if len(fitted) and len(other)
    ]
    left = np.concatenate([np.abs(other["error"]) for _, other in apart])
    kernels = np.concatenate([other["kernel_sigma"].astype(float) for _, other in apart])
    beyond = np.concatenate([_beyond(spread, other) for spread, other in apart])
    return replace(first, base=max(first.base * _holding(left, kernels, beyond), LEAST_BASE))


def _raked(rows: pd.DataFrame, kinds: Sequence[str]) -> ServedSpread:
    """Base and factors under which 80 % of the rows of every level lie within their bands."""
    error, kernels = np.abs(rows["error"].to_numpy(dtype=float)), rows["kernel_sigma"].to_numpy(dtype=float)
    configurations = rows["configuration"].to_numpy(dtype=object)
    members: dict[tuple[str, str], np.ndarray] = {}
    for kind in kinds:
        for level in sorted(set(rows[kind]) - {""}):
            mine = rows[kind].to_numpy(dtype=object) == level
            if len(set(configurations[mine])) >= LEAST:
                members[kind, level] = mine
    trust = {key: (n := len(set(configurations[mine]))) / (n + PRIOR) for key, mine in members.items()}
    factors = dict.fromkeys(members, 1.0)
    base = max(deviation(error), LEAST_BASE)
    for _ in range(ROUNDS):
        for kind in kinds:
            mine = {key: where for key, where in members.items() if key[0] == kind}
            sigma = np.hypot(kernels, base * _product(factors, members, len(error)))
            for key, where in mine.items():
                ratio = float(np.clip(deviation(error[where] / sigma[where]), 0.3, 3.0))
                factors[key] = float(np.clip((factors[key] * ratio**STEP) ** trust[key], 0.05, 20.0))
            weight = sum(where.sum() for where in mine.values())
            mean = np.exp(sum(np.log(factors[key]) * where.sum() for key, where in mine.items()) / max(weight, 1))
            factors |= {key: factors[key] / float(mean) for key in mine}
        sigma = np.hypot(kernels, base * _product(factors, members, len(error)))
        base = max(base * float(np.clip(deviation(error / sigma), 0.5, 2.0)), LEAST_BASE)
    levels: dict[str, dict[str, float]] = {}
    for (kind, level), factor in factors.items():
        levels.setdefault(kind, {})[level] = factor
    return ServedSpread(base=base, rows=len(rows), levels=levels, unseen={})


def _product(factors: Mapping[tuple[str, str], float], members: Mapping[tuple[str, str], np.ndarray], n: int) -> Floats:
    """Product of the factors of each row. [1]"""
    found = np.ones(n)
    for key, where in members.items():
        found[where] *= factors[key]
    return found


def _unseen(rows: pd.DataFrame, kind: str, kinds: Sequence[str]) -> float:
    """Factor on rows of a level that was never fitted: what holds 80 % of those of each level, fitted without it."""
    parts: list[tuple[Floats, Floats, Floats]] = []
    for level in sorted(set(rows[kind]) - {""}):
        other = rows[rows[kind] == level]
        rest = rows[rows[kind] != level]
        if rest["configuration"].nunique() < LEAST:
            continue
        beyond = _beyond(_raked(rest, kinds), other)
        error, kernels = (other[name].to_numpy(dtype=float) for name in ("error", "kernel_sigma"))
        take = np.linspace(0, len(other) - 1, EACH).round().astype(int)  # each level counts alike
        order = np.argsort(np.abs(error) / np.hypot(kernels, beyond))[take]
        parts.append((np.abs(error)[order], kernels[order], beyond[order]))
    return _holding(*(np.concatenate(column) for column in zip(*parts, strict=True))) if parts else 1.0


def _beyond(spread: ServedSpread, rows: pd.DataFrame) -> Floats:
    """S.d. beyond the kernels of each row: [1], of the time beside a pass [s]."""
    return served_sigma(spread, {kind: rows[kind].tolist() for kind in EVIDENCE})


def _holding(error: Floats, kernels: Floats, beyond: Floats) -> float:
    """Factor on what lies beyond the kernels under which 80 % of the errors lie within their band. [1]"""
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        if deviation(error / np.hypot(kernels, middle * beyond)) > 1.0:
            low = middle
        else:
            high = middle
    return high


def _shared_by_case(rows: pd.DataFrame) -> float:
    """Share of the variance of the errors of TPOT that the configurations of a case have in common. [1]"""
    tpot = rows[(rows["quantity"] == "tpot") & (rows["load"] == "closed_loop")]
    if not len(tpot):
        return 0.5
    errors = tpot["error"].to_numpy(dtype=float)
    limit = CLIP * deviation(errors)
    clipped = np.clip(errors, -limit, limit)
    groups = tpot.assign(error=clipped).groupby(list(CASE))["error"]
    return float(np.clip(np.average(groups.mean() ** 2, weights=groups.count()) / np.mean(clipped**2), 0.0, 1.0))
