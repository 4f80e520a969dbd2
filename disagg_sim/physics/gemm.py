"""Time a dense matrix multiply: tiles, waves, split-K and repeated reads.

The roofline of section 7 says what a GEMM needs; this form adds why kernels miss it (physics page, section 9): M and N
are padded to tiles, tiles run in waves over the multiprocessors, a tile walks along K no faster than its loop allows,
K is split where multiprocessors would idle, operands that outgrow L2 are read again, and quantised formats quantise A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg_sim.physics.roofline import Cost, Rate, Sums, operator_cost
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric, Work

#: Tiles that pad M and N: the smallest that the libraries' kernels fall back to (chosen once, over all fits). [1]
TILE_M, TILE_N = 64, 32
#: Rows of a tile where arithmetic on ``TILE_M`` of them would outlast the reading of their weights: the m16n8k16 of
#: mma.sync (PTX ISA), the smallest that every GPU since Ampere has. No system that was timed is such a one. [1]
FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class GemmRate(Rate):
    """What a dense GEMM reaches in one weight format. Without multiprocessors it is the plain roofline of ``Rate``."""

    multiprocessors: int = 0  # that tiles are dealt out to; 0 = no tiles [1]
    step: float = 0.0  # time of one element of K in the loop of a tile [s]
    split: float = 0.0  # time to add up one more part of a split K [s]
    reuse: float = np.inf  # elements for which one read of an operand beyond L2 serves [1]
    cache: float = np.inf  # capacity of L2 [B]
    quantise: float = np.inf  # bandwidth of quantising A [B/s]
    least_row: float = 0.0  # a row of A is quantised no faster than one of so many elements [1]
    write: float = np.inf  # bandwidth of writing C after the loop; inf = the loop hides it [B/s]
    element: float = ACTIVATION_BYTES  # of A and W [B]
    floor_is_all: bool = False  # whether t0 stands for the loop along K as well
    tile_rows: float = TILE_M  # that M is padded to [1]


def gemm_cost(m: Numeric, n: Numeric, k: Numeric, work: Work, rate: GemmRate) -> Cost:
    r"""Cost of ``C[m,n] = A[m,k] @ W[k,n]``.

    With :math:`T = \lceil m/r_m \rceil \lceil n/32 \rceil` tiles of :math:`r_m` rows (64, or ``FEW_ROWS``) on S
    multiprocessors, K is split into :math:`s = \sqrt{k \tau / \rho}` parts, which is where the loop :math:`k \tau / s`
    and the sum of the parts :math:`(s-1)\rho` together are shortest, but never into more than S/T or less than one, and

    .. math:: t = t_0 + t_{quantise} + t_{write} + (t_c^q + t_m^q + t_k^q)^{1/q}

    * :math:`t_c = 2 \cdot 32\, r_m\, k \lceil T/S \rceil S / (s\, e_c \Pi)`: the waves of padded tiles;
    * :math:`t_m = (B + B')/(e_m W)`: the three matrices once, and
      :math:`B' = m n k\, b / r \cdot x/(x + L2)`, the operands read again for every r rows or columns as the
      smaller one, x bytes, outgrows the cache;
    * :math:`t_k = k\tau/s + (s-1)\rho`: the loop along K of one tile;
    * :math:`t_{quantise} = m \max(k, k_0)(2 + b)/W_{quantise}`: A read in bf16 and written in the format;
    * :math:`t_{write} = 2 m n/W_{write}`: C, where its writing follows the loop; B is without it then.

    Parameters
    ----------
    m, n, k
        Sizes on one GPU; m may be a mean. [1]
    work
        Their FLOP and bytes (``work.gemm_work``).
    rate
        What the kernel reaches; without multiprocessors the plain roofline.

    Returns
    -------
    Cost
        Of one call; its arrays have the broadcast shape of the sizes. [s]

    Examples
    --------
    A weight of 8192 x 8192 at one byte crosses HBM at 4.8 TB/s in 14 us, as long as there are too few rows to keep
    1979 TFLOP/s busy:

    >>> from disagg_sim.physics.work import gemm_work
    >>> peak = GemmRate(1979e12, 4.8e12, 0.0, np.inf)
    >>> costs = [gemm_cost(m, 8192, 8192, gemm_work(m, 8192, 8192, weight_bytes=1), peak) for m in (1, 64, 4096)]
    >>> [f"{cost.time * 1e6:.0f} us" for cost in costs]
    ['14 us', '14 us', '278 us']
    """
    if not rate.multiprocessors:
        return operator_cost(work, rate)
    sms = rate.multiprocessors
    tiles = np.maximum(np.ceil(m / rate.tile_rows) * np.ceil(n / TILE_N), 1.0)
    parts = np.maximum(np.minimum(np.sqrt(k * (rate.step / rate.split)), sms / tiles), 1.0)
    waves = np.ceil(tiles / sms)
    compute = waves * (k / parts) * (2.0 * rate.tile_rows * TILE_N * sms / rate.flops)
    loop = 0.0 if rate.floor_is_all else k * rate.step / parts + (parts - 1.0) * rate.split
    smaller = np.minimum(m, n) * k * rate.element
    again = m * n * k * (rate.element / rate.reuse) * (smaller / (smaller + rate.cache))
    written = m * n * ACTIVATION_BYTES
    moved = work.hbm_bytes if rate.write == np.inf else work.hbm_bytes - written
    memory = (moved + again) / rate.bandwidth
    q = rate.blend
    quantise = m * np.maximum(k, rate.least_row) * ((ACTIVATION_BYTES + rate.element) / rate.quantise)
    write = written / rate.write
    time = rate.t0 + quantise + write + (compute**q + memory**q + loop**q) ** (1.0 / q)
    return Cost(time, Sums(compute, memory + quantise + write, 0.0, rate.t0 + loop))
