"""Measured kernel tables are met on shapes that no fit has seen."""

import numpy as np
import pytest
from shared_data import shared_file

from disagg_sim.facts.load import load_system
from lab.calibration.kernels.registry import OPERATORS
from lab.calibration.kernels.tables import read_exclusions, read_tables

ATTENTION = "system in ['h200_sxm', 'b200_sxm'] and batch in [1, 8, 32, 128]"
H100, H200 = "system == 'h100_sxm'", "system == 'h200_sxm' and framework == 'vllm'"
#: Table, rows of it, bar of the median, most numbers that a library may have on a system.
BARS = [
    pytest.param("context_attention", ATTENTION, 0.08, 12, marks=pytest.mark.long),
    pytest.param("generation_attention", ATTENTION, 0.08, 14, marks=pytest.mark.long),
    pytest.param("mla_context", ATTENTION, 0.12, 6, marks=pytest.mark.long),
    pytest.param("mla_generation", ATTENTION, 0.12, 7, marks=pytest.mark.long),
    ("collectives", H100, 0.12, 40),
    ("moe_alltoall", H100, 0.20, 60),
    ("gemm", H200, 0.07, 20),
    pytest.param("moe", H200, 0.15, 15, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "which", "bar", "numbers"), BARS)
def test_shapes_that_no_fit_has_seen_are_met(name, which, bar, numbers):
    """Median below the bar and 90 % quantile below 3.5 times it, each library apart."""
    (table,) = read_tables(
        shared_file(f"kernels/{name}.csv"), exclusions=read_exclusions(shared_file("kernels/exclude.csv"))
    )
    errors: dict[str, list[np.ndarray]] = {}
    for system, mine in table.rows.query(f"masked == '' and {which}").groupby("system"):
        spec, operator, unseen = load_system(system), OPERATORS[name], mine[mine["held_out"]]
        fits = operator.fit_rows(mine[~mine["held_out"]], spec)
        error = np.abs(operator.predict(unseen, spec, fits) / unseen["latency"] - 1.0)
        for library, rows in error.groupby(unseen["framework"]):
            assert sum(fit.parameters for fit in fits if fit.engine == library) <= numbers
            errors.setdefault(library, []).append(rows)
    for library, parts in errors.items():
        pooled = np.concatenate(parts)
        assert len(pooled) > 10
        assert np.median(pooled) < bar, library
        assert np.quantile(pooled, 0.9) < 3.5 * bar, library
