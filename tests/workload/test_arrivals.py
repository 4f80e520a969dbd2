"""Synthetic traces: moments of the arrival processes, fits that return what they were drawn from, named streams."""

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim import synthetic_trace
from disagg_sim.errors import InputError
from disagg_sim.units import MB
from disagg_sim.workload.arrivals import Gamma, Mmpp, Poisson, arrivals, fit_mmpp, named_rng
from disagg_sim.workload.distributions import Pareto
from disagg_sim.workload.synthetic import LengthTable, log_normal

BURSTS = Mmpp(contrast=4.0, burst_share=0.25, burst_s=30.0)  # all requests come in bursts
SHORT_BURSTS = Mmpp(contrast=1.0, burst_share=0.5, burst_s=1e-12)
LONG_BURSTS = Mmpp(contrast=1.0, burst_share=0.5, burst_s=1e9)
PROCESSES = [Poisson(), Gamma(0.0), Gamma(0.3), Gamma(3.0), BURSTS]


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@pytest.mark.parametrize("rate", [0.05, 40.0])
def test_arrivals_ascend_and_a_count_and_a_duration_agree(process, rate):
    times = arrivals(process, named_rng(1, "a"), rate, requests=500)
    assert times.size == 500
    assert times[0] >= 0
    assert np.all(np.diff(times) >= 0)
    part = arrivals(process, named_rng(1, "a"), rate, duration=2 / rate)
    assert np.all(part < 2 / rate)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_the_mean_rate_holds_from_the_first_second(process):
    """A process that began with a whole gap, or always in a burst, would miss it."""
    runs = 3000
    counts = [arrivals(process, named_rng(seed, "a"), 0.1, duration=50.0).size for seed in range(runs)]
    assert abs(np.mean(counts) - 5.0) < 4 * max(np.std(counts), 0.1) / math.sqrt(runs)


@pytest.mark.parametrize(
    ("process", "cv"), [(Poisson(), 1.0), (Gamma(0.0), 0.0), (Gamma(0.5), 0.5), (Gamma(2.0), 2.0)], ids=repr
)
def test_gaps_have_their_coefficient_of_variation(process, cv):
    trace = synthetic_trace(rate=3.0, requests=200_000, lengths=(1, 1), arrivals_as=process)
    gaps = np.diff(trace.arrival)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)
    assert trace.rate == pytest.approx(3.0, rel=0.02)


def test_mmpp_by_hand():
    """p = 1/4, d = 4: rate 4 in a burst, 0 outside; windows much shorter than a burst see the rate's own variance 3."""
    assert BURSTS.window_cv(rate=1e9, length_cv=0.0, window_s=1e-3) == pytest.approx(math.sqrt(3.0), rel=1e-3)
    # sT = T/(30*0.75) = 2: g = 2(2 - 1 + e^-2)/4 = 0.567668; squared c_v = (1 + 4)/(10*45) + 3*g
    assert BURSTS.window_cv(rate=10.0, length_cv=2.0, window_s=45.0) ** 2 == pytest.approx(
        5 / 450 + 3 * 0.567668, rel=1e-5
    )


@given(st.floats(0.05, 0.9), st.floats(1, 1e4), st.floats(0, 3), st.floats(0, 1))
def test_the_mmpp_fit_inverts_its_equation(share, burst_s, length_cv, place):
    none = Mmpp(contrast=0.0, burst_share=share, burst_s=burst_s).window_cv(rate=2, length_cv=length_cv, window_s=60)
    full = Mmpp(contrast=1 / share, burst_share=share, burst_s=burst_s).window_cv(
        rate=2, length_cv=length_cv, window_s=60
    )
    cv = none + place * (full - none) * 0.999
    fit = fit_mmpp(cv, rate=2, length_cv=length_cv, burst_share=share, burst_s=burst_s)
    assert fit.window_cv(rate=2, length_cv=length_cv, window_s=60) == pytest.approx(cv, rel=1e-9)


def test_a_variation_that_no_mmpp_has_is_refused_with_the_range():
    for cv in (0.01, 9.0):
        with pytest.raises(InputError, match=r"out of range; allowed with these bursts: 0\.\d+ to 1\.\d+"):
            fit_mmpp(cv, rate=1.0, length_cv=1.0, burst_share=0.3, burst_s=100.0)


def test_other_lengths_move_no_arrival_and_another_seed_moves_all():
    kept = [
        synthetic_trace(rate=1.0, requests=50, lengths=lengths, seed=7) for lengths in ((9, 9), (log_normal(50, 1), 3))
    ]
    assert kept[0].arrival.tolist() == kept[1].arrival.tolist()
    other = synthetic_trace(rate=1.0, requests=50, lengths=(9, 9), seed=8)
    assert not np.any(np.isclose(other.arrival, kept[0].arrival))


def test_pairs_of_a_table_stay_together():
    table = LengthTable(np.arange(1, 100), np.arange(1, 100) * 2)
    trace = synthetic_trace(rate=1.0, requests=5000, lengths=table)
    assert np.all(trace.output_tokens == 2 * trace.input_tokens)
    assert trace.input_tokens.mean() == pytest.approx(50, rel=0.03)
    again = synthetic_trace(rate=1.0, requests=5000, lengths=trace)
    assert np.all(again.output_tokens == 2 * again.input_tokens)


def test_lengths_follow_their_laws():
    heavy = Pareto(minimum=10, maximum=10_000, alpha=1.2)
    trace = synthetic_trace(rate=1.0, requests=100_000, lengths=(log_normal(800, 0.5), heavy))
    assert trace.input_tokens.mean() == pytest.approx(800, rel=0.01)
    assert trace.input_tokens.std() / trace.input_tokens.mean() == pytest.approx(0.5, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(heavy.mean, rel=0.05)
    assert abs(np.corrcoef(trace.input_tokens, trace.output_tokens)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: synthetic_trace(rate=1.0, lengths=(1, 1), requests=10**12), "requests are too many"),
        (lambda: synthetic_trace(rate=1e-12, lengths=(1, 1), requests=3), "allowed: up to 1e\\+09 s"),
        (lambda: synthetic_trace(rate=1.0, lengths=(10**12, 1), requests=3), "input_tokens 1e\\+12 is out of range"),
        (lambda: synthetic_trace(rate=1.0, lengths=(1, 1), requests=9, arrivals_as=SHORT_BURSTS), "bursts in 26 s"),
        (lambda: synthetic_trace(rate=1.0, lengths=(1, 1), requests=9, arrivals_as=LONG_BURSTS), "8 bursts at 1 requ"),
        (lambda: LengthTable([1], [1, 2]), "1"),
        (lambda: Gamma(1e200), "allowed: 0 to 1000"),
    ],
)
def test_no_count_takes_all_memory_or_all_time(make, said):
    """Each in a second or so and a few MB; without its limit it would ask for TB, or never end."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        with pytest.raises(InputError, match=said):
            make()
        assert tracemalloc.get_traced_memory()[1] < 200 * MB
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 30
