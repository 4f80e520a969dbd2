"""Spreads of calibrated times, estimated from residuals and stored apart from the fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.choices import MOST_SKEW
from disagg_sim.facts.efficiency import ASSUMED, SECTIONS, Fit
from disagg_sim.facts.schema import NOT_IN_FILE, Line, OneOf, Range, Span, spec_of
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown

#: Quantiles of the absolute value of a normal variable: 50 %, 80 % and 90 % lie within so many deviations. [1]
HALF, EIGHTY, NINETY = 0.67449, 1.28155, 1.64485


_Share = Annotated[float, Range(0.0, 1.0)]
_Spread = Annotated[float, Range(0.0, 3.0)]
_Factor = Annotated[float, Range(0.01, 100.0)]
_Rows = Annotated[int, Range(0, 10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpread:
    """Errors of the fits of one operator kind (a section of the efficiency files)."""

    shared: _Share  # share of the variance of a fit's errors that whole groups of shapes have in common [1]
    transfer: _Spread  # s.d. of the logarithm on top where the fit is of another system of the same architecture [1]
    transfer_across: _Spread  # the same where the architecture is another one, too [1]
    rows: _Rows  # measurements behind them [1]


#: What served runs have spreads of: a step or an output token, what an engine spends on a request beside its pass
#: before the first token, passes and queues before it where an instance has more than a few requests, throughput.
SERVED = ("step", "first_token", "first_token_loaded", "throughput")
#: By what kinds of evidence are told apart: ``certainty.evidence`` has the words of family, layout and mode.
EVIDENCE = ("engine", "load", "family", "layout", "mode", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpread:
    """What served runs show beyond their kernels, by kind of evidence.

    The s.d. of log(measured/predicted), of ``first_token`` that of the error over the engine's ``request_host``, is
    ``base`` times one factor for each of ``EVIDENCE``: of its level where runs of that level were fitted, ``unseen``
    where there were none, 1 where nothing is said.
    """

    base: _Spread  # [1]
    rows: _Rows  # operating points behind it [1]
    levels: Mapping[Annotated[str, OneOf(EVIDENCE)], Mapping[str, _Factor]]
    unseen: Mapping[Annotated[str, OneOf(EVIDENCE)], _Factor]

    def factor(self, kind: str, level: str) -> float:
        """Factor of one level of one kind of evidence. [1]"""
        return self.levels.get(kind, {}).get(level, self.unseen.get(kind, 1.0)) if level else 1.0


@dataclass(frozen=True, kw_only=True)
class UncertaintySpec(Shown):
    """Spreads that error bars are made from. Source: ``lab.calibration.kernels.spreads`` over the data named."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    data: str
    date: str
    assumed: _Spread  # s.d. of log time of an operator that no fit speaks of [1]
    per_doubling: _Spread  # s.d. added for each doubling by which a size lies outside the range of its fit [1]
    kv_transfer: _Spread  # s.d. of log time in which a cache moves from prefill to decode [1]
    text_skew: Annotated[tuple[float, float], Span(0.0, MOST_SKEW)]  # 80 % band of the ``rank_skew`` of text [1]
    kinds: Mapping[Annotated[str, OneOf(SECTIONS)], KindSpread]  # by section of the efficiency files
    composed: Mapping[str, _Spread]  # kernel table predicted from the fits of other operators -> s.d. of log time [1]
    shared: _Share  # of the variance of served runs, the part that all configurations of a case have in common [1]
    served: Mapping[Annotated[str, OneOf(SERVED)], ServedSpread]
    sources: Mapping[str, str]  # key -> where its value comes from


def uncertainty_of(path: Path, data: Mapping[str, Any], name: str) -> UncertaintySpec:
    """Read spreads, deviations of logarithms, from their file; every operator kind needs one. [1]"""
    spec = spec_of(UncertaintySpec, path, data, name)
    faults = [f"kinds: missing key {kind!r}" for kind in SECTIONS if kind not in spec.kinds]
    faults += [f"served: missing key {name!r}" for name in SERVED if name not in spec.served]
    if faults:
        raise spec_error(path, faults)
    return spec


def spread_of(fit: Fit, spec: UncertaintySpec) -> float:
    """Estimate the s.d. of log(measured/fitted) of a kernel that the fit did not see, of the system measured. [1]

    From the median m and the 90 % quantile p of the relative errors on the rows FITTED, which leaves the rows held out
    to check it: errors grow with the quantile z of a normal law as :math:`m (z/z_{50})^b`, b from m and p, so that 80 %
    of them lie within 1.28 of these deviations, whatever the tails. A fit of p numbers to n rows is worse on others by
    sqrt((n+p)/(n-p)). Where nobody measured, ``assumed``.

    References: H. Akaike, "Fitting autoregressive models for prediction", Ann. Inst. Stat. Math. 21, 1969 (final
    prediction error), :doi:`10.1007/BF02532251`.
    """
    if fit.engine == ASSUMED or not fit.p90_error > 0.0:
        return spec.assumed
    median = max(fit.median_error, 1e-3 * fit.p90_error)
    power = math.log(fit.p90_error / median) / math.log(NINETY / HALF)
    unseen = math.sqrt((fit.points + fit.parameters) / max(fit.points - fit.parameters, 1))
    return float(median * (EIGHTY / HALF) ** power / EIGHTY) * unseen
