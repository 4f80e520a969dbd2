"""A fixed ratio of prefill to decode GPUs: exact, and never above the best ratio."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_grid, match

from disagg_sim.errors import InputError
from disagg_sim.serving.disaggregated import disaggregated

ratios = st.sampled_from([Fraction(1, 2), Fraction(7, 2), Fraction(1, 3), Fraction(1), Fraction(2, 5)])
sizes = st.sampled_from([1, 2, 3, 4, 8])
rates = st.floats(0.1, 50.0)
rows = st.lists(st.tuples(sizes, rates), min_size=1, max_size=4, unique_by=lambda row: row[1])
caps = st.integers(2, 40)


def grids(prefill: list[tuple[int, float]], decode: list[tuple[int, float]]):
    sides = (("prefill", prefill), ("decode", decode))
    return [make_grid(phase, [g for g, _ in side], [r for _, r in side]) for phase, side in sides]


@settings(max_examples=60)
@given(rows, rows, ratios, caps)
def test_the_fixed_ratio_is_held_exactly_and_best_among_all_counts(prefill, decode, ratio, cap):
    side = grids(prefill, decode)
    table = disaggregated(*side, ftl_limit=1e9, gpu_cap=cap, matching=ratio)
    found = dict(zip(table["decode_request_rate_per_s"], table.to_dict("records"), strict=True))
    for gpus_d, r in decode:
        best = 0.0
        for (gpus_p, p), n_d in product(prefill, range(1, cap // gpus_d + 1)):
            n_p, rest = divmod(ratio.numerator * n_d * gpus_d, ratio.denominator * gpus_p)
            total = n_p * gpus_p + n_d * gpus_d
            if not rest and n_p and total <= cap:
                best = max(best, min(n_p * p, n_d * r) * side[1].lengths.mean_osl / total)
        if not best:
            continue
        row = found[r]
        assert row["prefill_instances"] * row["prefill_gpus"] * ratio.denominator == (
            ratio.numerator * row["decode_instances"] * row["decode_gpus"]
        )
        assert row["tokens_per_s_per_gpu"] >= best * (1 - 1e-9)
        assert row["total_gpus"] <= cap


def test_a_match_by_hand():
    """q = 1/2 with instances of 2 and 3 GPUs: 3 prefill (6 GPUs) to 4 decode (12 GPUs); 3*10 < 4*8 requests/s."""
    (row,) = disaggregated(*grids([(2, 10.0)], [(3, 8.0)]), ftl_limit=1e9, gpu_cap=18, matching=0.5).to_dict("records")
    assert (row["prefill_instances"], row["decode_instances"], row["total_gpus"]) == (3, 4, 18)
    assert row["request_rate_per_s"] == pytest.approx(30.0, rel=1e-12)
    assert row["ctx_gen_gpu_ratio"] == 0.5
    small = match(*grids([(2, 10.0)], [(3, 8.0)]), ftl_limit=1e9, gpu_cap=17, matching=0.5)
    assert small.empty


def test_a_ratio_out_of_range_is_refused():
    side = grids([(2, 10.0)], [(3, 8.0)])
    for ratio in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(InputError, match="matching must be above 0"):
            disaggregated(*side, matching=ratio)
