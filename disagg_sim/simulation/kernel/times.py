"""Compiled look-ups in step tables; ``step_table`` builds the tables and says what the axes mean.

``head`` is one row of the integer header of a table, ``values`` all tables end to end.
"""

from __future__ import annotations

import math
from typing import Any

from disagg_sim.simulation.kernel.compiled import inner

# --- columns of a header ----------------------------------------------------------------------------------------
SEQUENCES = 0  # largest number of decodes
KNOTS = 1  # contexts of the decode axis, and where they start
KNOTS_AT = 2
DECODE_AT = 3  # (SEQUENCES + 1, KNOTS) whole decode steps [s]
SCORES_AT = 4  # (SEQUENCES + 1, KNOTS) their scores and values alone [s]
ROW_AT = 5  # (SEQUENCES + 1) position of a number of decodes among the rows of the linear part
TOKENS = 6  # points of the token axis
LINEAR_AT = 7  # (2, rows, TOKENS) everything but scores and values, in the kernels of prefill and of decode [s]
ROWS = 8
PASTS = 9  # past tokens of prefill attention, and where they start
PASTS_AT = 10
PROMPTS = 11  # prompts of a step: half powers of two from 1
LENGTHS = 12  # tokens of each, OCTAVE of them a doubling from 1, and where they start
LENGTHS_AT = 13
OCTAVE = 14
ATTENTION_AT = 15  # (stages + 1, PROMPTS, LENGTHS, PASTS) scores and values of a token of prefill [s/token]
STAGE_AT = 16  # (TOKENS) slowest pipeline stage of a prompt, without scores and values [s]
PIPELINE = 17  # stages
RANKS = 18  # DP ranks of attention
CHUNK = 19  # tokens of a chunk of CPP, 0 = whole prompts
HOST_AT = 20  # host time of a pass [s]
HEADER = 21

# --- the token axis: every number up to EXACT, both ends of every tile, and a far point -------------------------
EXACT = 512
FINE_TILE = 64
FINE_END = 8192
COARSE_TILE = 512
FAR = 8  # the last point lies so many times beyond the last tile
HALF_POWER = 2.0**0.5 - 1.0  # step of an axis of half powers of two, over its left end
FINE_POINTS = EXACT + 2 * (FINE_END - EXACT) // FINE_TILE


@inner
def token_place(tokens: int, points: int) -> tuple[int, float]:
    """Left point of the token axis and the share of the way to the next one."""
    if tokens <= EXACT:
        return max(tokens, 1) - 1, 0.0
    if tokens <= FINE_END:
        tile = (tokens - EXACT - 1) // FINE_TILE
        return EXACT + 2 * tile, (tokens - EXACT - 1 - tile * FINE_TILE) / (FINE_TILE - 1.0)
    tile = (tokens - FINE_END - 1) // COARSE_TILE
    left = FINE_POINTS + 2 * tile
    if left + 2 < points:
        return left, (tokens - FINE_END - 1 - tile * COARSE_TILE) / (COARSE_TILE - 1.0)
    last = FINE_END + (points - FINE_POINTS) // 2 * COARSE_TILE  # the end of the last tile, then one far point
    return points - 2, (tokens - last) / (last * (FAR - 1.0))


@inner
def knot_of(head: Any, values: Any, context: float) -> int:
    """Cell of the decode axis that holds a mean context."""
    first = head[KNOTS_AT]
    low, high = 0, head[KNOTS] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if values[first + middle] <= context:
            low = middle
        else:
            high = middle
    return low


@inner
def decode_line(head: Any, values: Any, base: int, decodes: int, cell: int) -> tuple[float, float, float]:
    """Knot, value there and slope of one cell for one number of decodes: [token], [s], [s/token]."""
    at = head[KNOTS_AT] + cell
    row = base + decodes * head[KNOTS] + cell
    left = values[at]
    return left, values[row], (values[row + 1] - values[row]) / (values[at + 1] - left)


@inner
def decode_time(head: Any, values: Any, decodes: int, context: float) -> float:
    """A decode step of so many sequences at a mean context. [s]"""
    left, value, slope = decode_line(head, values, head[DECODE_AT], decodes, knot_of(head, values, context))
    return value + (context - left) * slope


@inner
def attention_time(head: Any, values: Any, row: int, prompts: float, length: float, past: float) -> float:
    """Scores and values of ``prompts`` equal pieces of ``length`` tokens after ``past`` cached ones. [s]"""
    k_count, p_count, q_count = head[PROMPTS], head[LENGTHS], head[PASTS]
    i = min(int(head[OCTAVE] * math.log2(max(length, 1.0))), p_count - 2)
    lengths = head[LENGTHS_AT] + i
    u = (length - values[lengths]) / (values[lengths + 1] - values[lengths])
    low, high = 0, q_count - 1
    pasts = head[PASTS_AT]
    while high - low > 1:
        middle = (low + high) // 2
        if values[pasts + middle] <= past:
            low = middle
        else:
            high = middle
    v = (past - values[pasts + low]) / (values[pasts + low + 1] - values[pasts + low])
    k = min(int(2.0 * math.log2(max(prompts, 1.0))), k_count - 2)
    left = 2.0 ** (0.5 * k)
    w = min((prompts - left) / (left * HALF_POWER), 1.0)
    at = head[ATTENTION_AT] + ((row * k_count + k) * p_count + i) * q_count + low
    total = 0.0
    for one in range(2):
        a = values[at] + (values[at + 1] - values[at]) * v
        b = values[at + q_count] + (values[at + q_count + 1] - values[at + q_count]) * v
        total += (a + (b - a) * u) * (w if one else 1.0 - w)
        at += p_count * q_count
    return total * prompts * length


@inner
def linear_time(head: Any, values: Any, decodes: int, tokens: int, prefill: int) -> float:
    """Everything but scores and values of a step of ``decodes`` and, together, ``tokens`` of the fullest rank. [s]"""
    points = head[TOKENS]
    i, u = token_place(tokens, points)
    at = values[head[ROW_AT] + decodes]
    row = int(at)
    v = at - row
    sheet = 0 if prefill > decodes else 1
    first = head[LINEAR_AT] + (sheet * head[ROWS] + row) * points + i
    time: float = values[first] + (values[first + 1] - values[first]) * u if u != 0.0 else values[first]
    if v != 0.0:
        first += points
        after = values[first] + (values[first + 1] - values[first]) * u if u != 0.0 else values[first]
        time += (after - time) * v
    return time


@inner
def step_time(
    head: Any, values: Any, decodes: int, context: float, pieces: int, prefill: int, longest: int, pairs: float
) -> float:
    """A step of decodes at a mean context and of pieces of prefill. [s]

    ``prefill`` tokens in all, the longest piece of ``longest``, ``pairs`` the query-key pairs of all. The pieces
    count as equal ones with the same sums. Over DP ranks they are spread as evenly as whole pieces allow; the
    fullest rank counts.
    """
    if prefill == 0:
        return decode_time(head, values, decodes, context)
    ranks = head[RANKS]
    fullest = prefill
    prompts = float(pieces)
    if ranks > 1:
        fullest = max(longest, -(-prefill // ranks))
        prompts = max(prompts / ranks, 1.0)
    stages = head[PIPELINE]
    micro = min(stages, max(decodes, 1))
    length = fullest / prompts
    past = max(pairs / prefill - 0.5 * length, 0.0)
    own = -(-decodes // micro)  # decodes of a micro-batch
    time = linear_time(head, values, decodes, own * micro + fullest * ranks, prefill)
    split = min(prompts, float(micro))  # micro-batches take whole prompts, or parts of one
    part = max(length * split / micro, 1.0)
    time += attention_time(head, values, micro - 1, prompts / split, part, past + 0.5 * (length - part))
    if decodes > 0:
        left, value, slope = decode_line(head, values, head[SCORES_AT], decodes, knot_of(head, values, context))
        time += value + (context - left) * slope
    return time


@inner
def pass_part(head: Any, values: Any, prompts: float, length: int, past: int) -> tuple[float, float]:
    """One micro-batch of a pipeline, ``prompts`` a rank: time of the slowest stage, and of all others. [s]

    Chunks of CPP follow each other through the stages; the others are walked through by one chunk.
    """
    size = head[CHUNK] if head[CHUNK] > 0 else length
    slowest = 0.0
    others = 0.0
    done = 0
    while done < length:
        new = min(size, length - done)
        tokens = int(prompts * new) * head[RANKS]
        i, u = token_place(tokens, head[TOKENS])
        at = head[STAGE_AT] + i
        stage = values[at] + (values[at + 1] - values[at]) * u if u != 0.0 else values[at]
        stage += attention_time(head, values, head[PIPELINE], prompts, float(new), float(past + done))
        through = linear_time(head, values, 0, tokens, tokens) - values[head[HOST_AT]]
        through += attention_time(head, values, 0, prompts, float(new), float(past + done))
        slowest += stage
        others = max(others, through - stage)
        done += new
    return slowest, others


@inner
def largest_prefill(head: Any, values: Any, decodes: int, context: float, past: int, limit: float, most: int) -> int:
    """Most tokens of one piece that keep a step within ``limit`` [s], by bisection; at least one. [token]"""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        pairs = middle * (past + 0.5 * middle)
        if step_time(head, values, decodes, context, 1, middle, middle, pairs) <= limit:
            low = middle
        else:
            high = middle
    return low
