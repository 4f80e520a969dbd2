"""What match_rates promises is what the simulation serves."""

import pytest
from plans import CASES, plans, simulated


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_plan_holds_at_four_fifths_of_its_rate(case):
    found = list(plans([case]))
    assert len(found) >= 10
    for planned in found:
        row = simulated(planned, 0.8, poisson=False, most=5000)
        assert row.completed == row.requests, planned.name
        assert row.slo_attainment >= 0.99, (planned.name, row.ttft_p99_s, row.tpot_p99_s)
