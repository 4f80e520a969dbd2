"""Length distributions against closed forms and against their own samples."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.facts.load import list_specs, load_traffic
from disagg_sim.facts.traffic import ConstantLength, LogNormalLength, TrafficCase
from disagg_sim.workload.distributions import Constant, Empirical, LogNormal, Pareto, length_distribution
from disagg_sim.workload.lengths import lengths, nearest_power_of_two

medians = st.floats(1.0, 1e5)
constants = st.builds(Constant, tokens=st.integers(1, 10**6))
log_normals = st.builds(LogNormal, median=medians, sigma=st.floats(0.0, 1.5))
paretos = st.builds(
    lambda low, spread, alpha: Pareto(minimum=low, maximum=low * spread, alpha=alpha),
    st.floats(1.0, 1e4),
    st.floats(1.5, 1e3),
    st.floats(0.1, 6.0),
)


@st.composite
def empiricals(draw):
    inner = sorted(set(draw(st.lists(st.floats(0.01, 0.99), max_size=6))))
    tokens = sorted(draw(st.lists(st.floats(1.0, 1e5), min_size=len(inner) + 2, max_size=len(inner) + 2)))
    return Empirical(probabilities=(0.0, *inner, 1.0), tokens=tuple(tokens))


distributions = st.one_of(constants, log_normals, paretos, empiricals())


@given(distributions)
def test_the_mean_is_the_integral_of_the_quantile_function(length):
    """E[X] is the integral of quantile(p) over p; with p = 1 - u^4 a midpoint rule of 400 strips sees the tail.

    A quantile that jumps inside a strip is missed by at most the strip's weight times the jump: half to each side.
    """
    u = (np.arange(400) + 0.5) / 400
    weight = 4 * u**3 / 400
    lengths = np.array([length.quantile(1 - each**4) for each in u])
    jump = np.max(np.maximum(weight[1:], weight[:-1]) * np.abs(np.diff(lengths)))
    assert np.sum(weight * lengths) == pytest.approx(length.mean, rel=0.01, abs=0.01 * length.mean + jump)


@given(distributions, st.integers(0, 2**32 - 1))
def test_samples_are_whole_positive_and_reproducible(length, seed):
    first, second = (length.sample(np.random.default_rng(seed), 50) for _ in range(2))
    assert first.dtype == np.int64
    assert first.shape == (50,)
    assert first.min() >= 1
    assert (first == second).all()


@pytest.mark.parametrize("name", list_specs("traffic"))
def test_samples_of_shipped_traffic_meet_their_mean(name):
    """20,000 samples; four standard errors, and half a token for rounding."""
    for case in load_traffic(name).cases:
        for spec in (case.isl, case.osl):
            length = length_distribution(spec)
            sample = length.sample(np.random.default_rng(1), 20_000)
            error = sample.std() / math.sqrt(sample.size)
            assert abs(sample.mean() - length.mean) <= 4 * error + 0.5


@given(medians, st.floats(0.0, 2.0))
def test_a_log_normal_has_its_closed_form(median, sigma):
    length, mu = LogNormal(median=median, sigma=sigma), math.log(median)
    assert length.mean == pytest.approx(math.exp(mu + sigma**2 / 2), rel=1e-9)
    assert length.quantile(0.5) == pytest.approx(median, rel=1e-9)


def test_log_normal_quantile_by_hand():
    # the 97.5 % quantile of the normal distribution is 1.959964
    assert LogNormal(median=100.0, sigma=0.5).quantile(0.975) == pytest.approx(100 * math.exp(0.5 * 1.959964), rel=1e-6)
    assert LogNormal(median=100.0, sigma=0.5).quantile(1.0) == math.inf
    assert LogNormal(median=100.0, sigma=0.0).quantile(1.0) == 100.0


@pytest.mark.parametrize(
    ("alpha", "mean"),
    [
        (1.0, 2 * math.log(2)),  # density 2/x^2 on [1, 2]: integral of 2/x
        (2.0, 4 / 3),  # density (8/3)/x^3
        (3.0, 9 / 7),  # density (24/7)/x^4: (24/7)*(1/2)*(3/4)
    ],
)
def test_pareto_means_by_hand(alpha, mean):
    length = Pareto(minimum=1.0, maximum=2.0, alpha=alpha)
    assert length.mean == pytest.approx(mean, rel=1e-12)
    assert (length.quantile(0.0), length.quantile(1.0)) == pytest.approx((1.0, 2.0))


def test_a_far_bound_gives_the_open_pareto_tail():
    # alpha 3: mean 3/2, median 2^(1/3)
    length = Pareto(minimum=1.0, maximum=1e9, alpha=3.0)
    assert length.mean == pytest.approx(1.5, rel=1e-8)
    assert length.quantile(0.5) == pytest.approx(2 ** (1 / 3), rel=1e-8)


def test_an_empirical_mean_by_hand():
    # half uniform on [0, 10], half uniform on [10, 30]: 0.5*5 + 0.5*20
    length = Empirical(probabilities=(0.0, 0.5, 1.0), tokens=(0.0, 10.0, 30.0))
    assert length.mean == pytest.approx(12.5)
    assert length.quantile(0.75) == pytest.approx(20.0)


def test_the_paper_stands_for_a_case_by_powers_of_two_nearest_the_medians():
    case = TrafficCase(isl=LogNormalLength(median=1469, sigma=1.36), osl=ConstantLength(tokens=13))
    assert lengths(case).at_medians() == lengths(2048, 16)  # log2 of 1469 and 13: 10.52 and 3.70
    assert nearest_power_of_two(1) == 1
