r"""Say what the GPUs of a plan draw at its rate, which is below what its pools could do.

.. math:: W = \sum_{pools} n\,G\,P_0 + n\,G\,(1 - e^{-m})\,(P_d - P_0)\,(1 - f) + X\,(J_p - t_p\,G\,P_0)

An instance of n, of G GPUs each, holds m sequences on average; :math:`P_d` is the power of a GPU in decode steps of so
many, and at least one is there in :math:`1 - e^{-m}` of the time. A prompt costs :math:`J_p` joules in a pass that
takes :math:`t_p` of an instance's time, f of the time at the rate X. :math:`P_0` is the power of a GPU that waits.
Source: ``certainty.pass_energy``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from disagg_sim.certainty.designs import Designs
from disagg_sim.certainty.energy import Spent, step_and_pass
from disagg_sim.certainty.rows import design_of
from disagg_sim.physics.node import facility_watts
from disagg_sim.physics.power import power_at
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.workload.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a design draws at its rate."""

    watts: float  # of all GPUs [W]
    band: tuple[float, float]  # 80 % of the cases lie between [W]
    facility: float  # with hosts, network, fans, supplies and PUE; NaN = not known [W]
    inherited: bool  # whether the power of any kernel was measured on another system


def drawn(design: Design) -> Drawn:
    """Compute what the GPUs of a design draw at its rate.

    Parameters
    ----------
    design
        Of a plan.

    Returns
    -------
    Drawn
        Watts.

    Raises
    ------
    InputError
        A system whose power is not known.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> best = ds.plan("llama_3_1_8b", "h200_sxm", ds.lengths(2048, 256), rate=40).best
    >>> found = drawn(best)
    >>> best.gpus * 134 < found.watts < best.gpus * 700, found.watts < found.facility, found.inherited
    (True, True, False)
    """
    watts, facility, inherited, least, most = 0.0, 0.0, False, 0.0, 0.0
    for pool in design.pools:
        own = _watts(pool, design.work.lengths)
        node = pool.setup.system.node_power
        watts += own
        power = power_at(pool.setup)
        above = own - pool.gpus * power.idle
        least += own - above * (1.0 - 1.0 / power.factor)
        most += min(own + above * (power.factor - 1.0), pool.gpus * power.limit)
        inherited |= power.spec.inherited
        if node is None:
            facility = math.nan
        else:
            facility += pool.gpus * float(facility_watts(node, own / pool.gpus, across=design.gpus > node.gpus))
    return Drawn(watts=watts, band=(least, most), facility=facility, inherited=inherited)


def _watts(pool: PlannedPool, lengths: Lengths) -> float:
    """Watts of the GPUs of a pool. [W]"""
    idle, each = power_at(pool.setup).idle, float(pool.mapping.gpus)
    watts, left = pool.gpus * idle, 1.0
    if pool.role != "decode":
        design = prefill_design(pool, lengths)
        prompts = float(design.prefill_batch[0])
        joules, seconds = _of_one(step_and_pass(design)[1])
        watts += pool.rate * each / prompts * (joules - idle * seconds)
        left = max(1.0 - pool.rate * seconds / prompts / pool.instances, 0.0)
    if pool.role != "prefill":
        joules, seconds = _of_one(step_and_pass(decode_design(pool, lengths))[0])
        watts += pool.gpus * (joules / seconds - idle) * -math.expm1(-pool.sequences) * left
    return watts


def prefill_design(pool: PlannedPool, lengths: Lengths) -> Designs:
    """A pass of prefill of an instance: as large as a prefill pool takes them, of one prompt beside decodes."""
    plain, chunk = replace(pool.mapping, chunk_tokens=0), int(pool.mapping.chunk_tokens)
    batch, chunks = (pool.batch, [chunk]) if pool.role == "prefill" else (1, [0])
    grid = prefill_grid(pool.setup, plain, lengths, batch=[batch], chunk_tokens=chunks)
    return design_of(grid, int((grid.mappings.chunk_tokens == chunks[0]).argmax()), 0)


def decode_design(pool: PlannedPool, lengths: Lengths) -> Designs:
    """A decode step of an instance with as many sequences as there are on average, of one at least."""
    plain, batch = replace(pool.mapping, chunk_tokens=0), max(1, round(pool.sequences))
    return design_of(decode_grid(pool.setup, plain, lengths, batch=[batch]), 0, 0)


def _of_one(found: Spent) -> tuple[float, float]:
    """Energy and time of one design. [J], [s]"""
    return float(np.squeeze(found.joules)), float(np.squeeze(found.seconds))
