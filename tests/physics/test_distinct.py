"""Distinct values: sorted, marked or hashed, they are those of ``numpy.unique``."""

import numpy as np
import pytest

from disagg_sim.physics.tabulate import MANY, SMALL, distinct, distinct_rows

RANDOM = np.random.default_rng(7)
KINDS = {
    "few": RANDOM.choice([0.5, 3.0, 7.25], (3, 5)),
    "many whole": RANDOM.integers(0, 40, (8, MANY)).astype(float),
    "many whole, counted": RANDOM.integers(0, 40, (2, MANY)),
    "many broken": RANDOM.choice(RANDOM.random(90) * 1e4, (8, MANY)),
    "many large": RANDOM.choice([1.0, 2.0 * SMALL, 3.0], (8, MANY)),
    "none": np.zeros((0, 4)),
}


@pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)
def test_values_rise_and_places_find_them(numbers):
    values, place = distinct(numbers)
    expected, inverse = np.unique(numbers, return_inverse=True)
    assert values.dtype == numbers.dtype
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(place, inverse.reshape(numbers.shape))


def test_rows_are_numbered_as_they_come():
    first, place = distinct_rows([np.array([4, 1, 4, 4]), np.array([2, 2, 2, 3])])
    assert first.tolist() == [0, 1, 3]
    assert place.tolist() == [0, 1, 0, 2]
