"""Compiled look-ups in step tables; ``step_table`` builds the tables and says what the axes mean.

``head`` has the sizes and places of a table, ``values`` all tables end to end.
"""

from __future__ import annotations

import math

from disagg_sim.arrays import Floats
from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import InstanceRecord, TableRecord

# --- the token axis: every number up to EXACT, both ends of every tile, and a far point -------------------------
EXACT = 512
FINE_TILE = 64
FINE_END = 8192
COARSE_TILE = 512
STAIR = 16  # new tokens of a tile of prefill attention, or a part of them
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
def cell_of(values: Floats, first: int, points: int, value: float) -> int:
    """Cell of a rising axis of so many points from ``first`` on that holds a value; the outer ones go on."""
    low, high = 0, points - 1
    while high - low > 1:
        middle = (low + high) // 2
        if values[first + middle] <= value:
            low = middle
        else:
            high = middle
    return low


@inner
def knot_of(head: TableRecord, values: Floats, context: float) -> int:
    """Cell of the decode axis that holds a mean context."""
    return cell_of(values, head.knots_at, head.knots, context)


@inner
def decode_line(head: TableRecord, values: Floats, base: int, decodes: int, cell: int) -> tuple[float, float, float]:
    """Knot, value there and slope of one cell for one number of decodes: [token], [s], [s/token]."""
    at = head.knots_at + cell
    row = base + decodes * head.knots + cell
    left = values[at]
    return left, values[row], (values[row + 1] - values[row]) / (values[at + 1] - left)


@inner
def decode_time(head: TableRecord, values: Floats, decodes: int, context: float) -> float:
    """A decode step of so many sequences at a mean context. [s]"""
    left, value, slope = decode_line(head, values, head.decode_at, decodes, knot_of(head, values, context))
    stretch: float = values[head.stretch_at + decodes]
    return stretch * (value + (context - left) * slope)


@inner
def attention_time(head: TableRecord, values: Floats, row: int, prompts: float, length: float, past: float) -> float:
    """Scores and values of ``prompts`` equal pieces of ``length`` tokens after ``past`` cached ones. [s]"""
    k_count, p_count, q_count = head.prompts, head.lengths, head.pasts
    lengths = head.lengths_at
    i = cell_of(values, lengths, p_count, length)
    u = (length - values[lengths + i]) / (values[lengths + i + 1] - values[lengths + i])
    pasts = head.pasts_at
    low = cell_of(values, pasts, q_count, past)
    v = (past - values[pasts + low]) / (values[pasts + low + 1] - values[pasts + low])
    k = min(int(2.0 * math.log2(max(prompts, 1.0))), k_count - 2)
    left = 2.0 ** (0.5 * k)
    w = min((prompts - left) / (left * HALF_POWER), 1.0)
    at = head.attention_at + ((row * k_count + k) * p_count + i) * q_count + low
    total = 0.0
    for one in range(2):
        a = values[at] + (values[at + 1] - values[at]) * v
        b = values[at + q_count] + (values[at + q_count + 1] - values[at + q_count]) * v
        total += (a + (b - a) * u) * (w if one else 1.0 - w)
        at += p_count * q_count
    return total * prompts * length


@inner
def linear_time(head: TableRecord, values: Floats, sheet: int, decodes: int, tokens: int) -> float:
    """Everything but scores and values of a step of ``decodes`` and, together, ``tokens``, on even ranks. [s]

    ``sheet``: 0 = in the kernels of prefill, 1 = in those of decode, see ``sheet_of``.
    """
    points = head.tokens
    i, u = token_place(tokens, points)
    at = values[head.row_at + decodes]
    row = int(at)
    v = at - row
    first = head.linear_at + (sheet * head.rows + row) * points + i
    time: float = values[first] + (values[first + 1] - values[first]) * u if u != 0.0 else values[first]
    if v != 0.0:
        first += points
        after = values[first] + (values[first + 1] - values[first]) * u if u != 0.0 else values[first]
        time += (after - time) * v
    return time


@inner
def sheet_of(decode: int, prefill: int) -> int:
    """Whose kernels a step runs in: 0 = those of prefill, which has more tokens, 1 = those of decode."""
    return 0 if prefill > decode else 1


@inner
def expert_time(head: TableRecord, values: Floats, sheet: int, tokens: int) -> float:
    """Routed experts on the tokens of several ranks, but for a constant: only differences mean something. [s]"""
    if head.ranks == 1:
        return 0.0
    i, u = token_place(tokens, head.tokens)
    at = head.experts_at + sheet * head.tokens + i
    time: float = values[at] + (values[at + 1] - values[at]) * u if u != 0.0 else values[at]
    return time


@inner
def piece_time(head: TableRecord, values: Floats, micro: int, alike: float, length: float, past: float) -> float:
    """Scores and values of one piece of prefill, as its share of a batch of ``alike`` equal ones. [s]

    Micro-batches of a pipeline take whole pieces, or parts of one.
    """
    split = min(alike, float(micro))
    part = max(length * split / micro, 1.0)
    return attention_time(head, values, micro - 1, alike / split, part, past + 0.5 * (length - part)) / alike


@inner
def mixed_time(
    head: TableRecord, values: Floats, decodes: int, context: float, prefill: int, fullest: int, attention: float
) -> float:
    """A step of decodes and of ``prefill`` tokens, of which the fullest DP rank has ``fullest``. [s]

    ``attention`` is what the scores and values of the prefill take. [s]
    """
    micro, queries = min(head.pipeline, max(decodes, 1)), 1 + head.drafts
    own = -(-decodes // micro) * queries  # decode tokens of a micro-batch
    sheet = sheet_of(decodes * queries, prefill)
    time = linear_time(head, values, sheet, decodes, own * micro + fullest * head.ranks)
    time += attention
    if decodes > 0:
        left, value, slope = decode_line(head, values, head.scores_at, decodes, knot_of(head, values, context))
        time += value + (context - left) * slope
    least: float = values[head.floor_at + decodes]
    stretch: float = values[head.stretch_at + decodes]
    return stretch * max(time, least)


@inner
def fullest_rank(head: TableRecord, prefill: int, longest: int) -> int:
    """Tokens of the fullest DP rank, where pieces are spread as evenly as whole ones allow. [token]"""
    return prefill if head.ranks == 1 else max(longest, -(-prefill // head.ranks))


@inner
def step_time(
    head: TableRecord,
    values: Floats,
    decodes: int,
    context: float,
    pieces: int,
    prefill: int,
    longest: int,
    pairs: float,
) -> float:
    """A step of decodes at a mean context and of equal pieces of prefill. [s]

    ``prefill`` tokens in all, the longest piece of ``longest``, ``pairs`` the query-key pairs of all: unequal pieces
    count as equal ones with the same sums. The fullest DP rank counts.
    """
    if prefill == 0:
        return decode_time(head, values, decodes, context)
    fullest = fullest_rank(head, prefill, longest)
    prompts = float(pieces) if head.ranks == 1 else max(float(pieces) / head.ranks, 1.0)
    length = fullest / prompts
    past = max(pairs / prefill - 0.5 * length, 0.0)
    micro = min(head.pipeline, max(decodes, 1))
    attention = prompts * piece_time(head, values, micro, prompts, length, past)
    return mixed_time(head, values, decodes, context, prefill, fullest, attention)


@inner
def passed_time(head: TableRecord, values: Floats, whole: int, tokens: int, filled: float) -> float:
    """What experts take less in a part of a pass whose ranks hold ``filled`` of ``tokens``; see ``passed_at``. [s]"""
    if head.ranks == 1 or filled == 1.0:
        return 0.0
    at = head.passed_at + whole * head.tokens
    i, u = token_place(tokens, head.tokens)
    full: float = values[at + i] + (values[at + i + 1] - values[at + i]) * u
    i, u = token_place(max(int(tokens * filled), 1), head.tokens)
    held: float = values[at + i] + (values[at + i + 1] - values[at + i]) * u
    return full - held


@inner
def equal_prompts(tokens: int, pairs: float, past: int) -> tuple[float, int, int]:
    """How many equal prompts have the tokens, query-key pairs and pasts of some, and tokens and past of each."""
    length = max(math.floor(pairs / (past + 0.5 * tokens) + 0.5), 1)
    return tokens / length, length, max(math.floor(pairs / tokens - 0.5 * length + 0.5), 0)


@inner
def pass_part(
    head: TableRecord, values: Floats, chunk: int, prompts: float, length: int, past: int, filled: float
) -> tuple[float, float]:
    """One micro-batch of a pipeline, ``prompts`` on a rank: time of the slowest stage, and of all others. [s]

    Chunks of CPP (``chunk`` tokens, 0 = none) follow each other through the stages; the others are walked through by
    one chunk. ``filled``: tokens of all ranks, over those if every rank had as many as this one.
    """
    size = chunk if chunk > 0 else length
    each = values[head.host_at + 1]  # host time of each micro-batch or chunk, where an engine adds it
    launch = values[head.host_at + 2]
    slowest = 0.0
    others = 0.0
    done = 0
    while done < length:
        new = min(size, length - done)
        tokens = math.floor(prompts * new + 0.5) * head.ranks
        i, u = token_place(tokens, head.tokens)
        at = head.stage_at + i
        stage = values[at] + (values[at + 1] - values[at]) * u if u != 0.0 else values[at]
        stage += attention_time(head, values, head.pipeline, prompts, float(new), float(past + done))
        stage -= passed_time(head, values, 0, tokens, filled)
        stage = max(stage, launch)
        through = linear_time(head, values, 0, 0, tokens) - values[head.host_at] - each
        through += attention_time(head, values, 0, prompts, float(new), float(past + done))
        through -= passed_time(head, values, 1, tokens, filled)
        through = max(through, launch * head.pipeline)
        slowest += stage + each
        others = max(others, through - stage)
        done += new
    return slowest, others


@inner
def aware_prefill(
    head: TableRecord, values: Floats, inst: InstanceRecord, decodes: int, context: float, past: int, most: int
) -> int:
    """Tokens of prefill that a step of a SLO_AWARE instance takes beside its decodes, ``most`` at most. [token]

    As many as keep the limit, an equal piece on each rank. After a past so long that even without decodes no piece of
    ``least_prefill`` tokens keeps it, as many as that: a single token costs nearly as much, and waiting helps nothing.
    """
    found = largest_prefill(head, values, decodes, context, past, inst.step_limit_s, most)
    least = min(inst.least_prefill, most)
    if found < least:
        each = -(-least // head.ranks)
        alone = step_time(head, values, 0, 0.0, head.ranks, each * head.ranks, each, pairs_of(head, each, past))
        if alone > inst.step_limit_s:
            return least
    return found


@inner
def largest_prefill(
    head: TableRecord, values: Floats, decodes: int, context: float, past: int, limit: float, most: int
) -> int:
    """Most tokens, one equal piece a rank, that keep a step within ``limit`` [s], by bisection; one each at least."""
    ranks = head.ranks
    low, high = 1, most // ranks + 1
    while high - low > 1:
        middle = (low + high) // 2
        pairs = pairs_of(head, middle, past)
        if step_time(head, values, decodes, context, ranks, middle * ranks, middle, pairs) <= limit:
            low = middle
        else:
            high = middle
    return low * ranks


@inner
def pairs_of(head: TableRecord, piece: int, past: int) -> float:
    """Query-key pairs of a piece of so many tokens on every rank. [1]"""
    return head.ranks * (piece * (past + 0.5 * piece))
