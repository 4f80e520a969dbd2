"""Compute the capacity of an instance: prompts per second, and sequences that it decodes in time.

Policies weigh the loads of unequal instances by these, so that none of them is late while another idles. Both are
taken from the step table at the mean lengths of the expected traffic, as an operator measures them before a start.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.wishes import Limits

#: Modes whose steps mix pieces of prompts with decodes.
MIXED = (Mode.CHUNKED, Mode.SLO_AWARE)


class ExpectedTraffic(NamedTuple):
    """Mean lengths of the traffic that is expected, and the limit that its tokens should keep."""

    prompt: float  # [token]
    output: float  # [token]
    tpot: float  # [s]

    @property
    def context(self) -> float:
        """Mean cache of a sequence in steady decode: ages are uniform. [token]"""
        return self.prompt + self.output / 2


def prefill_rate(table: StepTable, limits: Limits, traffic: ExpectedTraffic) -> float:
    """Compute the prompts of mean length that an instance prefills when its queue is full. [request/s]

    Whole prompts: those of a full pass over the time after which the next pass may start. Chunks: the token budget
    over a step without decodes, at the mean past of a chunk, ``(prompt - chunk)/2``.
    """
    prompt = max(round(traffic.prompt), 1)
    if limits.mode in MIXED:
        chunk = min(limits.token_budget, prompt)
        ranks = min(table.ranks, limits.token_budget)  # a prompt lives on one DP rank
        pieces = max(limits.token_budget // prompt, ranks)
        pieces = min(pieces, limits.max_prompts)
        tokens = min(limits.token_budget, pieces * chunk)
        return tokens / table.step_time(0, 0.0, tokens, (prompt - chunk) / 2, pieces) / prompt
    most = 1 if limits.mode == Mode.ONE_PROMPT else limits.max_prompts
    prompts = max(min(most, limits.token_budget // prompt), 1)
    return prompts / table.pass_time(prompt, prompts=prompts)[1]


def decode_slots(table: StepTable, limits: Limits, blocks: int, traffic: ExpectedTraffic, *, shared: bool) -> int:
    """Count the sequences that an instance decodes at once within TPOT limit, memory and batch; at least 1. [1]"""
    beside = 1.0 / (prefill_rate(table, limits, traffic) * max(traffic.output, 1.0)) if shared else 0.0
    held = int(blocks * BLOCK_TOKENS / traffic.context)
    most = max(1, min(limits.max_sequences, table.max_sequences, held))

    def in_time(sequences: int) -> bool:
        return table.token_time(sequences, traffic.context) + sequences * beside <= traffic.tpot

    return most - bisect_left(range(most, 1, -1), True, key=in_time)
