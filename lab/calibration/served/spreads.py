r"""Fit the spread of served runs by kind of evidence: what their measurements show beyond the kernels.

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

Points of configurations that are held out are used nowhere here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.evidence import served_sigma
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_engine
from disagg_sim.facts.uncertainty import EVIDENCE, SERVED, ServedSpread
from lab.calibration.kernels.residuals import CLIP, deviation
from lab.calibration.served.groups import TTFT_CONCURRENCY, per_instance, points

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
