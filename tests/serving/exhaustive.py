"""Pools by exhaustive search: the second method that the integer program is held against."""

from itertools import product

import numpy as np

CLOSE = 1e-9  # rates closer than this, relatively, are equal


def pool_rates(choices, budget):
    """Highest rate of a pool of at most 0, 1, ..., ``budget`` GPUs, from (gpus, rate) pairs, mixed at will."""
    best = np.zeros(budget + 1)
    for g in range(1, budget + 1):
        best[g] = max([best[g - 1], *(best[g - size] + rate for size, rate in choices if size <= g)])
    return best


def most_rate(pools, budget):
    """Highest matched rate of any number of pools within the budget, and the fewest GPUs that reach it; (0, 0) where
    nothing fits."""
    first, *others = (pool_rates(pool, budget) for pool in pools)
    rates = first
    for pool in others:
        rates = np.array([np.minimum(rates[: g + 1], pool[g::-1]).max() for g in range(budget + 1)])
    return rates[-1], int(np.argmax(rates >= rates[-1] * (1 - CLOSE)))


def fewest_gpus(choices, rate, most=400):
    """GPUs of the smallest pool that reaches a rate."""
    return int(np.argmax(pool_rates(choices, most) >= rate * (1 - CLOSE)))


def all_pools(choices, budget, kinds=None):
    """Every multiset of instances within a budget as (gpus, rate), with at most ``kinds`` distinct ones."""
    for counts in product(*(range(budget // size + 1) for size, _ in choices)):
        gpus = sum(n * size for n, (size, _) in zip(counts, choices, strict=True))
        if gpus <= budget and (kinds is None or sum(n > 0 for n in counts) <= kinds):
            yield gpus, sum(n * rate for n, (_, rate) in zip(counts, choices, strict=True))


def best_match(prefill, gd, r, cap, left=1.0, right=1.0):
    """Best requests/s per GPU, or per USD/h at these prices, and the fewest GPUs that reach it, over every count."""
    found = [
        (min(n_p * p, n_d * r) / (n_p * gp * left + n_d * gd * right), n_p * gp + n_d * gd)
        for gp, p in prefill
        for n_p in range(1, cap // gp + 1)
        for n_d in range(1, (cap - n_p * gp) // gd + 1)
    ]
    if not found:
        return None
    best = max(value for value, _ in found)
    return best, min(total for value, total in found if value >= best * (1 - 1e-12))
