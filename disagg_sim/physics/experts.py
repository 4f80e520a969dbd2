"""Time the grouped GEMMs of routed experts on one rank.

The roofline says what the experts need: the picks' FLOP and the weights of the experts that are picked at all. The
form here adds what grouped kernels pay beside it (physics page, section 9): an expert with few rows is padded to a
tile, every expert of the rank costs set-up time whether picked or not, and rows are gathered, activated and summed one
by one, which the instructions of the multiprocessors bind and not HBM: an H200 takes as long as an H100.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg_sim.physics.roofline import Cost, Rate, Sums, blend, operator_cost
from disagg_sim.physics.work import ACTIVATION_BYTES, ExpertRows, Numeric, Work


@dataclass(frozen=True, slots=True)
class MoeRate(Rate):
    """What a grouped GEMM of experts reaches in one weight format; the defaults are the plain roofline of ``Rate``."""

    least_rows: Numeric = 0.0  # rows that an expert with fewer is padded to [1]
    per_expert: Numeric = 0.0  # set-up of one expert of the rank [s]
    handling: Numeric = np.inf  # rate at which multiprocessors gather, activate and sum the rows [B/s]
    passing: Numeric = np.inf  # rate at which rows pass HBM where that is what binds their handling [B/s]
    element: float = ACTIVATION_BYTES  # of a weight, and of a quantised activation [B]
    block_rows: Numeric = 0.0  # rows of the blocks in which every expert of the rank runs, picked or not; 0 = none [1]
    input_multiple: Numeric = 1.0  # to which the hidden size that the first matrices read is rounded up [1]
    multiple: Numeric = 1.0  # to which all other sizes of a matrix are [1]

    @property
    def plain(self) -> bool:
        """Whether nothing is added to the roofline."""
        added = np.any(self.least_rows) or np.any(self.per_expert) or np.any(self.block_rows)
        return not added and bool(np.all(np.isinf(self.handling)) and np.all(np.isinf(self.passing)))


def moe_cost(rows: ExpertRows, work: Work, rate: MoeRate) -> Cost:
    r"""Cost of the routed experts of one rank.

    .. math:: t = t_0 + E \epsilon + \frac{P\,(d\,(2b + 4) + d_e (2b + 8))}{W_h}
        + \left(\left(\frac{F}{e_c\Pi} \max(1, r_0 D/P)\right)^q + \left(\frac{B}{e_m W}\right)^q\right)^{1/q}

    with P picks, D distinct experts among the E of the rank, :math:`r_0` the rows that an expert is padded to. A row is
    written and read in the format (b bytes) at both GEMMs, and in bf16 before the activation (two halves) and where it
    is summed. An expert of two matrices has one half: :math:`d_e (2b + 4)`. :math:`W_h` is what the multiprocessors
    handle, in proportion to their number and clock (FP32 peak), so that the term is time of compute; where they are
    faster than rows can pass HBM, ``rate.passing`` takes its place, and the term is time of memory.

    A kernel whose tiles want multiples of a size multiplies the padding, too (F grows), which it does not read.

    A kernel with blocks gives each expert of the rank whole blocks of r rows, also without a pick, and takes as long
    for each as for its weights: :math:`B = (E + P/r) \cdot 3 d d_e b`, which holds the arithmetic, too.

    Parameters
    ----------
    rows
        What the rank multiplies.
    work
        Its FLOP, and the bytes of the weights that are read (``work.expert_work``).
    rate
        What the kernel reaches; without padding, set-up and handling the plain roofline.

    Returns
    -------
    Cost
        Of one layer, of the broadcast shape of ``rows``. [s]

    Examples
    --------
    One token of DeepSeek-R1 on one GPU reads 8 of 256 experts, 44 MB each at 4.8 TB/s. A kernel that spends 0.1 us on
    every expert of the rank takes 26 us longer:

    >>> from disagg_sim.physics.work import expert_work
    >>> rows = ExpertRows(picks=8, distinct=8, experts=256, hidden=7168, width=2048)
    >>> rates = [MoeRate(1979e12, 4.8e12, 0.0, np.inf, per_expert=setup, element=1) for setup in (0.0, 1e-7)]
    >>> [f"{1e6 * moe_cost(rows, expert_work(rows, weight_bytes=1), rate).time:.0f} us" for rate in rates]
    ['73 us', '99 us']

    In blocks of 128 rows it takes as long as for all 256 experts:

    >>> blocks = MoeRate(np.inf, 4.8e12, 0.0, 1.0, handling=np.inf, element=1, block_rows=128)
    >>> f"{1e6 * moe_cost(rows, expert_work(rows, weight_bytes=1), blocks).time:.0f} us"
    '2349 us'
    """
    if rate.plain:
        return operator_cost(work, rate)
    padding = np.maximum(1.0, rate.least_rows * rows.distinct / np.maximum(rows.picks, 1e-9)) * _padded(rows, rate)
    compute = work.flops / rate.flops * padding
    blocks = np.where(rate.block_rows, rows.experts + rows.picks / np.maximum(rate.block_rows, 1.0), 0.0)
    moved = np.maximum(work.hbm_bytes, blocks * (rows.matrices * rows.hidden * rows.width * rate.element))
    memory = moved / rate.bandwidth
    format_bytes, plain_bytes = 2.0 * rate.element, 2.0 * ACTIVATION_BYTES
    halves = rows.matrices - 1.0
    row = rows.hidden * (format_bytes + plain_bytes) + rows.width * (format_bytes + halves * plain_bytes)
    handled = rows.picks * row / rate.handling
    passed = rows.picks * row / rate.passing
    floor = rate.t0 + rows.experts * rate.per_expert
    time = floor + handled + passed + blend(compute, memory, rate.blend)
    return Cost(time, Sums(compute + handled, memory + passed, 0.0, floor))


def _padded(rows: ExpertRows, rate: MoeRate) -> Numeric:
    """Elements of the matrices of an expert, padded to the multiples of a kernel, over those that the model has. [1]"""
    if np.all(np.maximum(rate.multiple, rate.input_multiple) == 1.0):
        return 1.0
    width, output = (np.ceil(size / rate.multiple) * rate.multiple for size in (rows.width, rows.hidden))
    read = np.ceil(rows.hidden / rate.input_multiple) * rate.input_multiple
    return width * ((rows.matrices - 1) * read + output) / (rows.matrices * rows.hidden * rows.width)
