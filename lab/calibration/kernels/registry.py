"""Register the kernel tables: which operator each measures, and how its rows are fitted and predicted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.facts.efficiency import EfficiencySpec, Fit
from disagg_sim.facts.hardware import SystemSpec
from lab.calibration.kernels import alltoall, attention, collectives, elementwise, gemm, linear, mla_module, moe, sparse
from lab.calibration.kernels.robust import Array
from lab.calibration.kernels.selection import LeftOut, sound_experts, sound_parts

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
        one that fewest rows need counts. Takes ``predicted`` [s] of shape (rows,).
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
    FittedOperator("mla_module", ("gemm", "prefill_attention", "decode_attention"), mla_module.predict_mla_module),
    FittedOperator("mla_bmm", ("gemm",), mla_module.predict_mla_bmm),
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
        sparse.predict_sparse_attention,
        sparse.fit_sparse_attention,
        unit=sparse.unit_of,
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
