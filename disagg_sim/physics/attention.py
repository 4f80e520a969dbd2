r"""Time attention kernels: prefill in tiles of query rows, decode with split KV, absorbed MLA.

With the neutral defaults of ``AttentionRate`` both are the plain roofline of physics page, section 7:
:math:`t_0 + \max(F/e_c\Pi\cdot(1 + S_{1/2}/S), B/e_m W)`. The fitted forms see more of a kernel.

**Prefill** (T query rows of one head in a thread block, m multiprocessors):
:math:`t = t_0 + \max(c + x + \theta s, s)` with

* c, all blocks together, tiles on the diagonal multiplied whole: :math:`F/e_c\Pi\cdot(1 + T/S)` without a past; reading
  the cached past overlaps with it;
* x, queries, outputs and the new keys and values, which pass through rotary embedding, quantisation and the cache
  before and after the kernel proper: :math:`B_x/e_x W`;
* s, the longest block alone, T rows against all keys of a prompt: :math:`4Th(C+S)/(e_c\Pi/m)`; a share
  :math:`\theta` of its new keys stays visible at the end of a grid of many blocks, none under a persistent kernel that
  balances them. The cached past C is alike for all blocks, which pass it in whole rounds: c counts
  :math:`\lceil N/m\rceil C` keys of it for N blocks, where their rows alone would need NC/m.

At heads of 128, which the fits saw, a share z of c and s is softmax: one exponential a score, whatever the size h of a
head. So both take :math:`1+z\,(128/h-1)` times as long as their multiplies tell.

Most kernels *walk*: a block takes a tile of T rows of one query head against all of its keys, so few new tokens on a
long past take as long as a whole tile, and blocks run in whole rounds. FlashAttention-3 *splits*: the rows of all query
heads of a KV head share tiles, N of them; where these fill less than 0.8 of the multiprocessors, the n blocks of 128
keys of each are shared among :math:`p=\lceil n/\lceil 1.1\,Nn/m\rceil\rceil` thread blocks. Then 1/p of the keys
count, in :math:`\lceil Np/m\rceil` rounds, and x has the p partial outputs, in 32 bits, written and read.

**Decode**: :math:`t = t_0 + r\frac{B}{B+B_{1/2}} + \sqrt{\max(c, m)^2 + b^2 + s^2}` with

* m, cache, queries and outputs at the memory's rate; what the L2 cache still holds from the call before comes faster;
* c, multiply-adds of heads filled up to a tile of 16;
* b, thread blocks, one per sequence, KV head and 64 query rows, at a fixed cost each;
* s, the keys of one sequence, which the blocks that split it still walk through: grows with a power of the length;
* r, what streaming from HBM costs to get going.

References: T. Dao, "FlashAttention-2", :arxiv:`2307.08691`; J. Shah et al., "FlashAttention-3", :arxiv:`2407.08608`
(persistent kernels); T. Dao et al., "Flash-Decoding for long-context inference", 2023 (split KV); the parts of a tile
in FlashAttention-3: ``flash_prepare_scheduler.cu`` and ``heuristics.h`` in github.com/vllm-project/flash-attention,
folder ``hopper``. The constants below are either sizes of these kernels or were fitted once over the kernel tables of
aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), all systems and engines together; they are the same for every system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.physics.roofline import Cost, Rate, Sums, operator_cost
from disagg_sim.physics.tabulate import of_column
from disagg_sim.physics.work import ACTIVATION_BYTES, AttentionShape, Numeric, Work

#: Share of a tile of query rows that is moved at least (fitted). [1]
LEAST_ROWS = 0.4
#: Share of the longest block that stays visible when a grid of blocks is handed out in order (fitted). [1]
GRID_TAIL = 0.4
#: Tiles over multiprocessors from which a kernel that splits keys leaves them whole. [1]
FULL_GRID = 0.8
#: Head dimension of the rows that attention was fitted to. [1]
FITTED_HEAD = 128
#: Keys of a tile that a kernel splits are multiples of this. [token]
KEY_BLOCK = 128.0
#: Blocks of keys up to which they stay whole. [1]
LEAST_KEY_BLOCKS = 4
#: Tenths of the work that a scheduler shares out: it adds a margin of one. [1]
SPLIT_TENTHS = 11.0
#: Bytes of a partial output, written and read. [B]
PARTIAL_BYTES = 8.0
#: Query rows that one thread block of a decode kernel takes. [1]
BLOCK_ROWS = 64.0
#: Query rows to which a matrix instruction of a decode kernel is filled up. [1]
ROW_TILE = 16.0
#: Key length to which the serial time of decode is referred. [token]
SERIAL_KEYS = 1024.0
#: Growth of the serial time with the key length under split KV (fitted; 1 = not split). [1]
SPLIT_POWER = 0.45
#: Cache bytes at which half of the ramp is paid (fitted). [B]
RAMP_BYTES = 40e6
#: Share of L2 in which a repeated call finds its cache again (fitted). [1]
RESIDENT_SHARE = 0.7
#: Rate of L2 over that of HBM (fitted). [1]
L2_SPEED = 4.0
#: Steepness of the passage from a cache inside L2 to one outside (fitted). [1]
L2_STEEPNESS = 8


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Rates of an attention kernel; what has a default is off in the plain roofline."""

    flops: float  # [FLOP/s]
    bandwidth: float  # [B/s]
    t0: float  # [s]
    s_half: float = 0.0  # key length at which half of the plateau is reached; T in the tiled form [token]
    multiprocessors: float = 0.0  # 0 = plain roofline
    io_bandwidth: float = np.inf  # prefill: of queries, outputs and new keys and values [B/s]
    tail: float = 0.0  # prefill: share of the longest block that stays visible [1]
    splits_keys: bool = False  # prefill: whether blocks share the keys of a tile
    softmax: float = 0.0  # prefill: share of the arithmetic that is softmax, at heads of ``FITTED_HEAD`` [1]
    block_time: float = 0.0  # decode: of a thread block on its multiprocessor [s]
    serial_time: float = 0.0  # decode: of ``SERIAL_KEYS`` keys of one sequence [s]
    serial_power: float = SPLIT_POWER  # decode: growth of it with the length [1]
    ramp: float = 0.0  # decode: cost of streaming a large cache, beside its bytes [s]
    resident: float = 0.0  # decode: bytes that L2 holds from the call before; 0 = between other layers [B]


def prefill_attention_cost(work: Work, shape: AttentionShape, keys: Numeric, rate: AttentionRate) -> Cost:
    """Time scores and values of many new tokens, with the equation of *Prefill* in the head of this file.

    ``keys`` is twice the mean key length of a query [token]: C + S of a prompt without a past. ``multiprocessors = 0``
    of the rate is the plain roofline.

    One prompt of 8192 tokens, 8 heads of 128 on one KV head: 4*8*128*8192*8193/2 = 137 GFLOP at 989 TFLOP/s.
    """
    softmax = 1.0 + rate.softmax * (FITTED_HEAD / shape.head_dim - 1.0)  # over that of fitted heads, by FLOP
    compute = work.flops / rate.flops * softmax * (1.0 + rate.s_half / keys)
    if not rate.multiprocessors:
        memory = work.hbm_bytes / rate.bandwidth
        return Cost(rate.t0 + np.maximum(compute, memory), Sums(compute, memory, 0.0, rate.t0))
    rows = shape.q_heads * np.maximum(shape.new, LEAST_ROWS * rate.s_half) + shape.kv_heads * shape.new
    past = shape.past_bytes / rate.bandwidth
    exchange = shape.sequences * rows * (2 * ACTIVATION_BYTES * shape.head_dim) / rate.io_bandwidth
    grid = _grid(shape, rate)
    outputs = shape.sequences * shape.q_heads * shape.new * shape.head_dim
    exchange = exchange + np.where(grid.parts > 1, grid.parts, 0.0) * (outputs * (PARTIAL_BYTES / rate.io_bandwidth))
    whole_tile = 4.0 * shape.head_dim * rate.s_half * rate.multiprocessors / rate.flops * softmax
    one_key = np.where(work.flops > 0, whole_tile / grid.parts, 0.0)
    computed = compute + one_key * grid.idle * shape.shortest
    longest = one_key * shape.longest
    streamed = np.maximum(computed, past) + exchange
    time = rate.t0 + np.maximum(streamed + rate.tail * (longest - one_key * shape.shortest), longest)
    return Cost(time, Sums(computed, past + exchange, 0.0, rate.t0 + longest))


class _Grid(NamedTuple):
    """How the thread blocks of a prefill kernel share its work."""

    parts: Numeric  # blocks that share the keys of a tile [1]
    idle: Numeric  # tiles that the fullest multiprocessor could take beyond its share of the rows [1]


def _grid(shape: AttentionShape, rate: AttentionRate) -> _Grid:
    """Tiles of query rows on the multiprocessors, their keys walked by one block or split."""
    tile, grid = rate.s_half, rate.multiprocessors
    rows = shape.sequences * shape.q_heads * shape.new
    parts: Numeric = np.ones(())
    if rate.splits_keys:
        group = shape.q_heads / shape.kv_heads
        tiles = shape.sequences * shape.kv_heads * np.ceil(shape.new * group / tile)
        blocks = np.ceil(shape.longest / KEY_BLOCK)
        share = np.maximum(np.ceil(tiles * blocks * SPLIT_TENTHS / (10.0 * grid)), 1.0)
        few = (tiles < FULL_GRID * grid) & (blocks > LEAST_KEY_BLOCKS)
        parts = np.where(few, np.ceil(blocks / share), 1.0)
    else:
        tiles = shape.sequences * shape.q_heads * np.ceil(shape.new / tile)
    rounds = np.ceil(tiles * parts / grid)
    return _Grid(parts, rounds - parts * rows / (tile * grid))


def decode_attention_cost(work: Work, shape: AttentionShape, rate: AttentionRate) -> Cost:
    """Time scores and values of few new tokens against a cache, with the equation of *Decode* in the head of this file.

    ``multiprocessors = 0`` of the rate is the plain roofline.

    64 sequences of 8192 tokens, one KV head of 128 at one byte: 134 MB from HBM at 4.8 TB/s, at 16 FLOP a byte.
    """
    if not rate.multiprocessors:
        return operator_cost(work, Rate(rate.flops, rate.bandwidth, rate.t0, np.inf))
    cache, group = work.hbm_bytes, shape.q_heads * shape.new / shape.kv_heads
    rows = shape.sequences * shape.q_heads * shape.new * (2 * ACTIVATION_BYTES * shape.head_dim)
    memory = (_from_hbm(cache, rate.resident) + rows) / rate.bandwidth
    compute = work.flops * (np.ceil(group / ROW_TILE) * ROW_TILE / group) / rate.flops
    blocks = shape.sequences * shape.kv_heads * np.ceil(group / BLOCK_ROWS) * (rate.block_time / rate.multiprocessors)
    floor = rate.t0 + rate.ramp * (cache / (cache + RAMP_BYTES))
    # squares of the time that the blocks which split the keys of one sequence walk through them
    waiting = blocks**2 + of_column(
        lambda keys: (rate.serial_time * (keys / SERIAL_KEYS) ** rate.serial_power) ** 2, shape.longest
    )
    time = floor + np.sqrt(np.maximum(compute, memory) ** 2 + waiting)
    return Cost(time, Sums(compute, memory, 0.0, floor + np.sqrt(waiting)))


def _from_hbm(cache: Numeric, resident: float) -> Numeric:
    """Bytes of a cache as HBM would have to deliver them: those that L2 still holds count less. [B]"""
    if not resident:
        return cache
    far = 1.0 / (1.0 + (resident / cache) ** L2_STEEPNESS)
    return cache * (far + (1.0 - far) / L2_SPEED)
