"""Arrow's start-up measurements: the time of prompts, and how much an instance can decode within the limit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable

#: Shortest and longest prompt to which the predictor is fitted, unless options say. [token]
SHORTEST, LONGEST = 32, 131_072
#: Longest context that the profile of decode steps tries. [token]
LONGEST_CONTEXT = 131_072


class Predictor(NamedTuple):
    """Time of one prompt alone, quadratic in its length. [s]"""

    constant: float  # [s]
    linear: float  # [s/token]
    quadratic: float  # [s/token^2]

    @classmethod
    def fit(
        cls,
        table: StepTable,
        token_budget: int,
        *,
        shortest: int = SHORTEST,
        longest: int = LONGEST,
        relative: bool = True,
    ) -> Predictor:
        """Least squares over two lengths a doubling, each prompt in chunks of the budget; of seconds or relative."""
        halves = range(math.floor(2 * math.log2(longest / shortest)) + 1)
        lengths = np.array([round(shortest * 2.0 ** (half / 2)) for half in halves], dtype=float)
        times = np.array([prompt_time(table, int(length), token_budget) for length in lengths])
        unit = times if relative else np.ones_like(times)
        terms = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / unit[:, None]
        found, *_ = np.linalg.lstsq(terms, times / unit, rcond=None)
        return cls(*found.tolist())

    def __call__(self, tokens: int) -> float:
        """Of a prompt of ``tokens``. [s]"""
        return self.constant + tokens * (self.linear + tokens * self.quadratic)


def prompt_time(table: StepTable, tokens: int, token_budget: int) -> float:
    """Time a prompt alone on an instance, in chunks of the token budget. [s]"""
    most = max(token_budget // table.ranks, 1)
    return sum(table.step_time(0, 0.0, min(most, tokens - past), float(past)) for past in range(0, tokens, most))


def max_running_tokens(table: StepTable, blocks: int, max_sequences: int, tpot: float) -> int:
    """MaxRunningTokens: what memory holds, and the most that a decode step reads within ``tpot`` [s]. [token]"""
    most = 0
    for doubling in range(max_sequences.bit_length()):
        sequences = 2**doubling
        low, high = 0, LONGEST_CONTEXT
        while low < high:
            middle = (low + high + 1) // 2
            if table.token_time(sequences, float(middle)) <= tpot:
                low = middle
            else:
                high = middle - 1
        most = max(most, sequences * low)
    return min(blocks * BLOCK_TOKENS, most)
