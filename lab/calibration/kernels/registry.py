"""Register the kernel tables: which operator each measures, how its rows are fitted and predicted, what is shipped.

Fits of attention parts and of experts are shipped by the rows that they saw; held-out rows stay a judgement. What is
left out gives way to the fit of another engine, to fits that the file of assumptions names in its place
(``expert_kernels``), or to what ``physics.attention_parts`` assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import INDEX, PROMPT_LENGTH, AttentionPartFit, EfficiencySpec, Fit, MoeFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.precision import BF16
from lab.calibration.kernels import alltoall, attention, collectives, elementwise, gemm, linear, modules, moe
from lab.calibration.kernels.gemm import FORMAT_OF
from lab.calibration.kernels.robust import Array

#: Median and 90 % quantile of the relative error on fitted rows, above which a fit is left out. [1]
MOST_MEDIAN, MOST_P90 = 0.2, 0.6
#: Context that an index of prompts must have seen: what grows with its square cannot be told from shorter ones. [token]
LEAST_CONTEXT = 30_000.0
#: Share of the bf16 peak that an index may reach, where its keys are in bf16: more means that its rows hide it. [1]
PEAK_OF_INDEX = {"msa": 1.0}
#: Part of its time that a kernel of experts may lose as tokens are added, the median over its shapes: noise. [1]
MOST_FALL = 0.05
_SHAPE = ["hidden", "inter", "topk", "num_experts", "tp", "ep", "distribution"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A fit that is not shipped, and why."""

    fit: AttentionPartFit | MoeFit
    reason: str

    def __str__(self) -> str:
        """One line."""
        fit = self.fit
        what = f"{fit.kind} {fit.part}" if isinstance(fit, AttentionPartFit) else f"experts in {fit.format}"
        return f"left out: {what} of {fit.engine} {fit.version}: {self.reason}"


def sound_experts(fits: Sequence[MoeFit], rows: pd.DataFrame) -> tuple[list[MoeFit], list[LeftOut]]:
    """Split fits of experts into those that are shipped and those whose kernel was timed with a tactic nobody runs.

    Such a kernel loses to 16-bit weights of the same engine at the same shapes (the median over them), although it
    reads fewer bytes and multiplies faster; or it takes less time for more tokens.
    """
    left = [LeftOut(fit, reason) for fit in fits if (reason := _fault_of_experts(fit, rows))]
    return [fit for fit in fits if not any(fit is each.fit for each in left)], left


def _fault_of_experts(fit: MoeFit, rows: pd.DataFrame) -> str:
    """Why a fit of experts cannot be shipped, "" if it can."""
    library = rows[(rows["framework"] == fit.engine) & (rows["version"] == fit.version)]
    form = library["dtype"].map(FORMAT_OF)
    mine = library[(form == fit.format) & (library["kernel_source"] == fit.kernel)].sort_values("num_tokens")
    times = mine.groupby(_SHAPE)["latency"]
    falls = (1.0 - mine["latency"] / times.cummax()).groupby([mine[each] for each in _SHAPE]).max()[times.size() > 1]
    if len(falls) and (fall := float(np.median(falls))) > MOST_FALL:
        return f"its time falls by {100 * fall:.2g} % as tokens are added, at most {100 * MOST_FALL:g} %"
    if fit.format == BF16.name:
        return ""
    sizes = [*_SHAPE, "num_tokens"]
    plain = library[form == BF16.name].groupby(sizes)["latency"].min()
    ratios = (mine.groupby(sizes)["latency"].min() / plain).dropna()
    if len(ratios) and (ratio := float(np.median(ratios))) > 1.0:
        return f"it takes {ratio:.3g} times as long as bf16 at the same shapes"
    return ""


def sound_parts(
    fits: Sequence[AttentionPartFit], _rows: pd.DataFrame | None = None
) -> tuple[list[AttentionPartFit], list[LeftOut]]:
    """Split fits into those that are shipped and others; of several versions that with most points counts."""
    left: list[LeftOut] = []
    best: dict[tuple[str, str, str], AttentionPartFit] = {}
    for fit in fits:
        if reason := _fault(fit):
            left.append(LeftOut(fit, reason))
            continue
        key = (fit.engine, fit.kind, fit.part)
        other = best.get(key)
        if other is None or fit.points >= other.points:
            best[key] = fit
        worse = fit if best[key] is not fit else other
        if worse is not None:
            left.append(LeftOut(worse, f"version {best[key].version} has {best[key].points} points, it {worse.points}"))
    return [fit for fit in fits if any(fit is kept for kept in best.values())], left


def _fault(fit: AttentionPartFit) -> str:
    """Why a fit cannot be shipped, "" if it can."""
    if fit.median_error > MOST_MEDIAN:
        return f"median error {100 * fit.median_error:.3g} %, at most {100 * MOST_MEDIAN:g} %"
    if fit.p90_error > MOST_P90:
        return f"p90 error {100 * fit.p90_error:.3g} %, at most {100 * MOST_P90:g} %"
    longest = next((high for size, _, high in fit.valid if size == PROMPT_LENGTH), 0.0)
    if fit.part == INDEX and longest < LEAST_CONTEXT:
        return f"its longest context is {longest:,.0f} tokens, at least {LEAST_CONTEXT:,.0f}"
    most = PEAK_OF_INDEX.get(fit.kind, math.inf)
    if fit.part == INDEX and fit.e_compute is not None and fit.e_compute > most:
        return f"it multiplies at {fit.e_compute:.2f} of the bf16 peak, at most {most:g}: other kernels hide it"
    return ""


Fitter = Callable[["pd.DataFrame", SystemSpec], Sequence[Any]]
Selector = Callable[[Sequence[Any], "pd.DataFrame"], tuple[Sequence[Any], Sequence[LeftOut]]]
Predictor = Callable[["pd.DataFrame", SystemSpec, Any], Array]


@dataclass(frozen=True, slots=True)
class FittedOperator:
    """A form of table and the fits that predict it."""

    form: str
    sections: tuple[str, ...]  # of the efficiency file; the predictor gets the fits of all of them
    predict: Predictor  # [s], NaN where there is no fit
    fit: Fitter | None = None  # None: predicted from the fits of other operators; else fits of the first section
    by_library: bool = True  # whether the fitter takes the rows of one (framework, version) at a time
    unit: Callable[[Any], Hashable] = id  # fits of one unit predict together
    #: Fits that are shipped, by the rows that they saw, and those that are not.
    select: Selector = lambda fits, _rows: (fits, ())

    def fits_of(self, spec: EfficiencySpec) -> list[Fit]:
        """The fits of a system that this operator's predictor may use."""
        return [fit for section in self.sections for fit in getattr(spec, section)]

    def units(self, fits: Sequence[Fit]) -> list[list[Fit]]:
        """Fits that predict together, in order of first appearance."""
        units: dict[Hashable, list[Fit]] = {}
        for fit in fits:
            units.setdefault(self.unit(fit), []).append(fit)
        return list(units.values())

    def assign(
        self, rows: pd.DataFrame, system: SystemSpec, fits: Sequence[Fit], predicted: Array
    ) -> NDArray[np.int64]:
        """Return the index in ``units`` of what predicts each row, -1 if nothing does.

        A row needs a unit when it has a prediction with all fits and none without that unit; of several such units the
        one that fewest rows need counts.
        """
        chosen = np.full(len(rows), -1)
        fewest = np.full(len(rows), len(rows) + 1)
        for number, members in enumerate(self.units(fits)):
            mine = {id(fit) for fit in members}
            others = [fit for fit in fits if id(fit) not in mine]
            needs = np.isfinite(predicted) & ~np.isfinite(self.predict(rows, system, others))
            better = needs & (needs.sum() < fewest)
            chosen[better], fewest[better] = number, needs.sum()
        return chosen

    def fit_rows(self, rows: pd.DataFrame, system: SystemSpec) -> list[Fit]:
        """Fits of ``rows``, library by library where the fitter wants it so."""
        if self.fit is None or not len(rows):
            return []
        if not self.by_library:
            return list(self.fit(rows, system))
        groups = rows.groupby(["framework", "version"], sort=True)
        return [fit for _, group in groups for fit in self.fit(group, system)]


_ALL = (
    FittedOperator("gemm", ("gemm",), gemm.predict_gemm, gemm.fit_gemm),
    FittedOperator("context_attention", ("prefill_attention",), attention.CONTEXT.predict, attention.CONTEXT.fit),
    FittedOperator(
        "generation_attention", ("decode_attention",), attention.GENERATION.predict, attention.GENERATION.fit
    ),
    FittedOperator("mla_context", ("prefill_attention",), attention.MLA_CONTEXT.predict, attention.MLA_CONTEXT.fit),
    FittedOperator(
        "mla_generation", ("decode_attention",), attention.MLA_GENERATION.predict, attention.MLA_GENERATION.fit
    ),
    FittedOperator("mla_module", ("gemm", "prefill_attention", "decode_attention"), modules.predict_mla_module),
    FittedOperator("mla_bmm", ("gemm",), modules.predict_mla_bmm),
    FittedOperator(
        "linear_attention",
        ("attention_parts",),
        linear.predict_linear_attention,
        linear.fit_linear_attention,
        select=sound_parts,
    ),
    FittedOperator(
        "sparse_attention",
        ("attention_parts",),
        modules.predict_sparse_attention,
        modules.fit_sparse_attention,
        unit=modules.unit_of,
        select=sound_parts,
    ),
    FittedOperator("moe", ("moe",), moe.predict_moe, moe.fit_moe, select=sound_experts),
    FittedOperator("moe_ep_compute", ("moe",), moe.predict_moe),
    FittedOperator(
        "collectives",
        ("collectives",),
        collectives.predict_collectives,
        collectives.fit_collectives,
        by_library=False,
        unit=collectives.unit_of,
    ),
    FittedOperator("moe_alltoall", ("alltoall",), alltoall.predict_alltoall, alltoall.fit_alltoall, by_library=False),
    FittedOperator("quantize_ops", ("elementwise",), elementwise.predict_elementwise, elementwise.fit_elementwise),
)
#: Form -> operator, in the order in which a system is fitted.
OPERATORS = {operator.form: operator for operator in _ALL}
