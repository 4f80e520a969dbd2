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

The time to a first token T is a sum of causes, whose errors add up in seconds:

.. math:: \sigma_T^2\,T^2 = (\sigma_h h)^2 + (2p)^2/12 + (\sigma_s (p + s))^2 + (\sigma_q q)^2

* h, what the engine spends on a request beside its pass (HTTP, tokenising, scheduling, hand-over), is off by a share of
  itself (``first_token``), told apart by engine and mode alone;
* p, the mean wait for the next look at requests every so many steps: all of a closed loop may come just before a look
  or just after it, so the wait is uniform on 0 to 2 p, and nothing of it is fitted;
* s, half of the decode step under way, is off as steps are (``step``);
* q is the rest: the own pass, and where an instance has more than a few requests the passes of others that it queues
  for. No data tell both apart, as queues grow with passes: one spread counts for both, ``step`` where there is no
  queue, ``first_token_loaded`` elsewhere.

Points of configurations that are held out are used in no fit here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import Contribution, contributions_in
from disagg_sim.certainty.designs import Times
from disagg_sim.certainty.error_bars import kind_of, sigma_of
from disagg_sim.certainty.evidence import served_sigma
from disagg_sim.certainty.extrapolation import words_of
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_uncertainty
from disagg_sim.facts.uncertainty import EVIDENCE, SERVED, ServedSpread, UncertaintySpec
from disagg_sim.physics.setup import Setup
from lab.calibration.kernels.residuals import CLIP, band, deviation
from lab.calibration.served.evaluate import pool_of, served_model, setup_key
from lab.calibration.served.groups import TTFT_CONCURRENCY, per_instance, points
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.steady_state import (
    RowLengths,
    ServedModel,
    WorkerPool,
    decode_time,
    looked_late,
    pieces_of,
    prefill_time,
)


class FirstTokenCauses(NamedTuple):
    """Parts of the time to a first token under load that are neither its pass nor a queue."""

    engine: float = 0.0  # what the engine spends on a request [s]
    poll: float = 0.0  # mean wait for the next look at requests [s]
    step: float = 0.0  # half of the decode step under way, and those formed ahead [s]


#: Loads in which requests come one by one, through the engine's front.
ONE_BY_ONE = ("closed_loop", "server")


def kernel_doubt(
    run: ServedModel,
    prefill: WorkerPool,
    decode: WorkerPool,
    lengths: RowLengths,
    in_flight: Floats,
    spec: UncertaintySpec,
) -> Iterator[tuple[float, float, str, FirstTokenCauses]]:
    """Of each run with so many requests ``in_flight``: s.d. of the logarithm of a decode step and of a pass of prefill
    [1], what it rests on beside measurements, in words, and causes of the time to a first token.
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
    poll, under_way = looked_late(run, times.step), (0.5 + run.engine.steps_ahead) * times.step
    causes = [FirstTokenCauses(run.engine.request_host, *each) for each in zip(poll, under_way, strict=True)]
    doubts = _deviation(steps, times, "step", spec), _deviation(fills, times, "fill", spec)
    return zip(*doubts, outside, causes, strict=True)


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
    """Add to the evaluated lines of served rows the ends of the 80 % band, the s.d. that comes from kernels [1], what
    the run rests on beside measurements, in words, and of first tokens the parts of ``FirstTokenCauses`` [s].
    """
    spec = load_uncertainty(spreads) if isinstance(spreads, str) else spreads
    known = {(line.file, line.row): line.capacity for line in lines.itertuples() if line.evaluated}
    doubted: dict[tuple[str, str], tuple[float, float, str, FirstTokenCauses]] = {}

    def run_of(row: ServingRow) -> tuple[Any, ...]:
        return (*setup_key(row), row.poll_steps, row.gather_steps, row.prefill is not None)

    usable = sorted((row for row in rows if (row.file, row.row) in known), key=run_of)
    for _, found in groupby(usable, key=run_of):
        members = list(found)
        first = members[0]
        run = replace(served_model(first), poll_steps=first.poll_steps, gather_steps=first.gather_steps)
        decode = pool_of(row.workers for row in members if row.workers)
        prefill = pool_of(row.prefill or row.workers for row in members if row.workers)
        lengths = RowLengths(np.array([row.isl for row in members]), np.array([row.osl for row in members]))
        room = np.array([known[row.file, row.row] for row in members])
        doubts = kernel_doubt(run, prefill, decode, lengths, _in_flight(members, room, decode, run), spec)
        doubted |= zip(((row.file, row.row) for row in members), doubts, strict=True)
    keys = list(zip(lines["file"], lines["row"], strict=True))
    words = [doubted[key][2] if key in doubted else "" for key in keys]
    kernels, causes = np.full(len(lines), np.nan), np.zeros((len(lines), len(FirstTokenCauses._fields)))
    for place, line in enumerate(lines.itertuples()):
        if line.evaluated and keys[place] in doubted:
            step, fill, _, apart = doubted[keys[place]]
            kernels[place] = fill if line.quantity == "ttft" else step  # others are mostly steps of decode
            if line.quantity == "ttft" and line.load in ONE_BY_ONE:
                causes[place] = apart
    told = lines.assign(kernel_sigma=kernels, **{f"ttft_{each}_s": causes[:, n] for n, each in enumerate(CAUSES)})
    seen = _with_evidence(told)
    sigma = np.full(len(lines), np.nan)
    for field in SERVED:
        mine = (seen["field"] == field).to_numpy() & np.isfinite(kernels)
        other, share = doubt(seen[mine], field, spec.served)
        sigma[mine] = np.hypot(other, share * _beyond(spec.served[field], seen[mine]))
    low, high = band(lines["predicted"].to_numpy(dtype=float), sigma)
    inside = [key in doubted and not word for key, word in zip(keys, words, strict=True)]
    return told.assign(predicted_p10=low, predicted_p90=high, outside_calibration=words, calibrated=inside)


def _in_flight(rows: Sequence[ServingRow], room: Floats, pool: WorkerPool, run: ServedModel) -> Floats:
    """Sequences that decode: those stated, and no more than fit or than the engine runs. [request]"""
    stated = np.array([row.concurrency if row.concurrency > 0 else row.batch for row in rows])
    most = run.engine.max_running * pool.mapping.dp_attn * pool.count
    limit = np.minimum(np.where(room > 0, room, np.inf), most)
    return np.asarray(np.minimum(np.where(stated > 0, stated, limit), limit))


CAUSES = FirstTokenCauses._fields
#: Fields of first tokens: what the engine spends beside a pass, seen where an instance has few requests; with more.
FEW, LOADED = SERVED[1:3]
#: Configurations' worth of doubt that pulls a factor towards 1, and those from which a level has a factor. [1]
PRIOR, LEAST = 10, 3
#: Rounds of raking, and the share of a step that each takes. [1]
ROUNDS, STEP = 30, 0.7
#: Quantiles by which a level stands for itself among others. [1]
EACH = 50
#: Folds in which the base is checked. [1]
FOLDS = 5
#: Least time of passes before a first token. [s]
LEAST_PASS = 1e-3
#: Least base: nothing is surer than this beyond its kernels. [1]
LEAST_BASE = 0.01
#: Kinds of evidence by which the time beside the pass is told apart: factors of more would multiply on 100 points.
BESIDE_PASS = ("engine", "mode")
#: Columns of served lines that make a case: its configurations share what the engine does to all of them.
CASE = ("system", "model", "engine", "recipe")


def evidence_of(lines: pd.DataFrame) -> pd.DataFrame:
    """Columns ``EVIDENCE`` and ``field`` (one of ``SERVED``) of evaluated lines: a first token is the work of the
    layout that prefills, all else of the one that decodes.
    """
    first = lines["quantity"] == "ttft"
    loaded = first & ~(per_instance(lines) <= TTFT_CONCURRENCY)
    field = np.select([loaded, first, lines["quantity"] == "throughput"], [SERVED[2], FEW, SERVED[3]], SERVED[0])
    version = (lines["engine"] + " " + lines["version"]).where(lines["version"] != "", "")
    layout = lines["layout"].where(~first, lines["prefill_layout"])
    return lines[["engine", "load", "family", "mode"]].assign(layout=layout, version=version, field=field)


def _with_evidence(lines: pd.DataFrame) -> pd.DataFrame:
    found = evidence_of(lines)
    return lines.assign(**{str(name): found[name] for name in found})


def served_spreads(lines: pd.DataFrame) -> tuple[float, dict[str, ServedSpread]]:
    """Estimate what served runs show beyond their kernels: the share of the variance of the errors of TPOT that the
    configurations of a case have in common [1], and the spread of each field.
    """
    usable = lines[lines["evaluated"] & ~lines["saturated"] & ~lines["held_out"]]
    once = points(usable)
    known = _with_evidence(once)
    known = known.assign(error=-np.log1p(known["relative_error"].astype(float)))
    spreads: dict[str, ServedSpread] = {}
    for field in SERVED:
        mine = known[(known["field"] == field) & np.isfinite(known["kernel_sigma"].astype(float))]
        if mine["configuration"].nunique() < FOLDS:
            raise InputError(f"spread of {field}: fewer than {FOLDS} configurations of served runs are not held out")
        other, share = doubt(mine, field, spreads)  # in units of what this spread is of
        some = share > 0.0
        apart = mine[some].assign(error=(mine["error"] / share)[some], kernel_sigma=(other / share)[some])
        spreads[field] = _spread(apart, BESIDE_PASS if field == FEW else EVIDENCE)
    return _shared_by_case(known), spreads


def doubt(rows: pd.DataFrame, field: str, spreads: Mapping[str, ServedSpread]) -> tuple[Floats, Floats]:
    """The s.d. of the logarithm by all causes but the spread of a field [1], and the share of a prediction that this
    spread is of [1]; takes the spreads of the fields before.
    """
    kernels = rows["kernel_sigma"].to_numpy(dtype=float)
    if field not in (FEW, LOADED):
        return kernels, np.ones(len(rows))
    whole = rows["predicted"].to_numpy(dtype=float)
    engine, poll, step = (rows[f"ttft_{name}_s"].to_numpy(dtype=float) for name in CAUSES)
    passes = np.maximum(whole - engine - poll - step, LEAST_PASS)
    steps = _beyond(spreads["step"], rows)
    if field == FEW:
        mine, others = engine, passes * np.hypot(kernels, steps)
    else:
        mine, others = passes, np.hypot(passes * kernels, engine * _beyond(spreads[FEW], rows))
    return np.sqrt(others**2 + poll**2 / 3 + (steps * (poll + step)) ** 2) / whole, mine / whole


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
    """S.d. beyond the kernels of each row. [1]"""
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
