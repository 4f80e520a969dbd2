"""Waiting times of an instance against queueing theory.

Pollaczek and Khinchine: W = rho/(1 - rho) * (1 + c_s^2)/2 * E[S] with Poisson arrivals. Kingman puts
(c_a^2 + c_s^2)/2 in its place for any arrivals.
"""

import numpy as np
import pytest

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable

MEAN_SERVICE = 0.1  # [s]
TOKENS = 10_000  # mean length of a prompt on the fleet, so that whole tokens do not show [token]
BATCHES = 40


def waits_on_fleet(gaps, services):
    """Prompts whose length is their service time, one a pass."""
    table = StepTable.affine(per_token=MEAN_SERVICE / TOKENS)
    fleet = Fleet([InstanceSpec(table=table, blocks=2**40, mode=Mode.ONE_PROMPT, token_budget=2**40)])
    prompts = np.maximum(np.round(services / MEAN_SERVICE * TOKENS), 1).astype(int).tolist()
    arrivals = np.cumsum(gaps).tolist()
    for k, (time, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
        while fleet.run_until(time)[0] != -1:
            pass
        fleet.submit(0, k, (0, prompt, 1), time)
    fleet.run_until(1e12)
    return fleet.segments.start_s - fleet.segments.submit_s


def gamma(rng, mean, squared_variation, n):
    """Gamma variates of a mean and a squared coefficient of variation; the mean alone where that is 0."""
    if squared_variation == 0:
        return np.full(n, mean)
    return rng.gamma(1 / squared_variation, mean * squared_variation, n)


def mean_and_error(waits):
    """Mean of the second half on, and its standard error by batch means (waits of neighbours go together)."""
    batches = waits[waits.size % BATCHES :].reshape(BATCHES, -1).mean(axis=1)[2:]
    return batches.mean(), batches.std(ddof=1) / np.sqrt(batches.size)


@pytest.mark.parametrize("squared_variation", [1.0, 0.0, 2.5], ids=["M/M/1", "M/D/1", "M/G/1"])
def test_poisson_arrivals_wait_as_pollaczek_and_khinchine_say(squared_variation):
    rho, n = 0.7, 100_000
    rng = np.random.default_rng(11)
    gaps = rng.exponential(MEAN_SERVICE / rho, n)
    mean, error = mean_and_error(waits_on_fleet(gaps, gamma(rng, MEAN_SERVICE, squared_variation, n)))
    expected = rho / (1 - rho) * (1 + squared_variation) / 2 * MEAN_SERVICE
    assert error < 0.1 * expected
    assert abs(mean - expected) < 3.5 * error
