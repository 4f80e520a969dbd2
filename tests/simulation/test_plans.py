"""What plan_pools promises is what the simulation serves."""

import pytest
from plans import CASES, SHAPES, plans, simulated


@pytest.mark.long
@pytest.mark.parametrize(("place", "case"), list(enumerate(CASES)), ids=str)
def test_every_plan_holds_at_four_fifths_of_its_rate(place, case):
    """Each case takes half of the shapes, every other one, so that each shape meets each kind of model."""
    found = list(plans([case], SHAPES[place % 2 :: 2]))
    assert len(found) >= 5
    for planned in found:
        row = simulated(planned, 0.8, poisson=False, most=2500)
        assert row.completed == row.requests, planned.name
        assert row.slo_attainment >= 0.99, (planned.name, row.ttft_p99_s, row.tpot_p99_s)
