"""What Arrow's scheduler measures at the start, and what it knows of one instance (compiled)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, InstanceRecord, dtype_of
from disagg_sim.simulation.kernel.step_table import StepTable

#: Shortest and longest prompt to which the predictor is fitted. [token]
SHORTEST, LONGEST = 32, 131_072
#: Longest context that the profile of decode steps tries. [token]
LONGEST_CONTEXT = 131_072


class Predictor(NamedTuple):
    """Time of one prompt alone, quadratic in its length. [s]"""

    constant: float  # [s]
    linear: float  # [s/token]
    quadratic: float  # [s/token^2]

    @classmethod
    def fit(cls, table: StepTable, token_budget: int) -> Predictor:
        """Least squares of relative errors over two lengths a doubling, each prompt in chunks of the budget."""
        halves = range(math.floor(2 * math.log2(LONGEST / SHORTEST)) + 1)
        lengths = np.array([round(SHORTEST * 2.0 ** (half / 2)) for half in halves], dtype=float)
        times = np.array([prompt_time(table, int(length), token_budget) for length in lengths])
        terms = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / times[:, None]
        found, *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
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


class Account:
    """What the scheduler knows of one instance; the first three are of its ``Predictor``."""

    constant: float  # [s]
    linear: float  # [s/token]
    quadratic: float  # [s/token^2]
    free_s: float  # when the prompts in its queue will be done, on its own clock [s]
    ahead_s: float  # of that clock to the real one: what its last prompt took longer than predicted, in all [s]
    interval_s: float  # mean time between its decode steps over the window; 0 without one [s]
    held: float  # MaxRunningTokens; -1 where others decode in time and it never does [token]
    seats: float  # sequences that it can run [1]
    room: float  # tokens that its memory holds [token]
    weight: float  # its MaxRunningTokens over the largest; 1 where nobody decodes in time [1]
    waiting: int  # 1 = requests that wait for memory are load of decode
    corrects: int  # 1 = ``ahead_s`` is that of its last prompt; 0 = predictions add up


ACCOUNT = dtype_of(Account)


@inner
def prompt_of(account: Account, tokens: int) -> float:
    """Predicted time of a prompt alone on an instance. [s]"""
    return account.constant + tokens * (account.linear + tokens * account.quadratic)


@inner
def delay_of(account: Account, queued: int, now: float) -> float:
    """Predicted wait of a prompt that comes now: what is left of the queue. [s]"""
    return max(account.free_s + account.ahead_s - now, 0.0) if queued > 0 else 0.0


@inner
def queue_of(inst: InstanceRecord) -> int:
    """Prompt tokens that wait for prefill, those whose past is being loaded from tiers included. [token]"""
    return inst.queued_prompt_tokens + inst.loading_prompt_tokens


@inner
def decode_of(inst: InstanceRecord, account: Account, steps: int) -> int:
    """Tokens of all requests that an instance decodes, is being sent, or, where they count, keeps waiting. [token]

    ``steps`` of its decodes are not in its columns yet.
    """
    running = inst.running_tokens + steps * inst.running_requests
    return running + inst.coming_tokens + account.waiting * inst.queued_context_tokens


@inner
def decodes(inst: InstanceRecord, account: Account) -> bool:
    """Whether an instance has anything to decode."""
    return inst.running_requests > 0 or inst.coming_tokens > 0 or account.waiting * inst.queued_context_tokens > 0


@inner
def share(account: Account, tokens: int) -> float:
    """Of what an instance decodes in time. [1]"""
    return tokens / max(account.held, 1.0) if account.held >= 0.0 else np.inf


@inner
def booked(account: Account, tokens: int, queued: int, now: float) -> float:
    """Book a prompt behind ``queued`` tokens: its predicted end, on the clock of the instance. [s]"""
    start = now - account.ahead_s
    if queued > 0:
        start = max(start, account.free_s)
    account.free_s = start + prompt_of(account, tokens)
    return account.free_s
