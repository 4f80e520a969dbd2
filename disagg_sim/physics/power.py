r"""Power that a GPU draws while it runs a kernel, and the laws of all kernels of a setup.

.. math:: P = P_0 + \frac{y}{(1 + (y/(1-P_0))^q)^{1/q}}, \qquad
          y = (b + c\,u^\alpha + m\,v^\beta)\,\frac{t}{t + g}

P and all of its parts are shares of the power limit. :math:`P_0` is what a GPU draws that waits; u and v are the shares
of the peak of the kernel's arithmetic and of the bandwidth of HBM that it reaches; t is its time. So P rises with u, v
and t, from :math:`P_0` to the limit, where the clock is throttled. Short kernels draw less: between them are gaps of
about g. Fitted class by class (``lab.calibration.power``), ``hw_specs/power/``.

Power of a node at the wall, and at the meter of the building, follows from what its GPUs draw:

.. math:: W = \frac{n\,w + h + f + c}{\eta} + s, \qquad
          f = f_{max}\,\Big(a + (b - a)\,\min\big(1, \tfrac{n\,w + h}{H}\big)\Big)

n GPUs of w watts, host h, fans f whose speed rises from a to b with the heat, converters c and supplies of efficiency
:math:`\eta` at their load, switches and optics s; PUE times that is the power of the building. Source:
``facts.hardware.NodePower``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disagg_sim.errors import InputError
from disagg_sim.facts.hardware import NodePower, SystemSpec
from disagg_sim.facts.load import load_power
from disagg_sim.facts.power import WINDOWED, PowerLaw, PowerSpec
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.uncertainty import EIGHTY, HALF
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric, Operator

#: q, how sharply power bends at the limit; 3, 4 and 6 do alike on rows held out. [1]
BEND = 4.0
#: Median error of the power of single kernels where the laws of another system are taken by share of the limit: mean
#: over the six pairs of measured systems, on rows held out. [1]
TRANSFER = 0.26
#: Operator kinds of transfers: they read and write HBM at the pace of the link, as an elementwise kernel does.
TRANSFERS = ("all_reduce", "gather", "all_to_all", "hop")


def kernel_power(law: PowerLaw, *, compute: Numeric, memory: Numeric, time: Numeric, idle: float) -> Numeric:
    """Power of a kernel, as a share of the power limit.

    ``compute`` and ``memory`` are the shares that it reaches of the peak of its arithmetic and of the bandwidth of HBM,
    ``idle`` the power of a GPU that waits.
    """
    drawn = law.base + law.compute * compute**law.compute_power + law.memory * memory**law.memory_power
    drawn = drawn * (time / (time + law.gap)) / (1.0 - idle)
    with np.errstate(divide="ignore"):
        return idle + (1.0 - idle) * drawn / (1.0 + drawn**BEND) ** (1.0 / BEND)


@dataclass(frozen=True, slots=True)
class Power:
    """What the GPUs of a setup draw."""

    spec: PowerSpec
    limit: float  # TDP of the system [W]

    @property
    def idle(self) -> float:
        """Of a GPU that waits. [W]"""
        return self.spec.idle * self.limit

    @property
    def factor(self) -> float:
        """Power above waiting lies within this factor of the forecast with a probability of 80 %. [1]

        As if all kernels of a pass erred together, by the median error of single ones.
        """
        rows = sum(law.held_out_points for law in self.spec.laws)
        if self.spec.inherited or not rows:
            median = TRANSFER
        else:
            median = sum(law.held_out_median_error * law.held_out_points for law in self.spec.laws) / rows
        return math.exp(EIGHTY * median / HALF)


def power_at(at: Setup) -> Power:
    """Find what the GPUs of a setup draw."""
    return power_of(at.system)


def power_of(system: SystemSpec) -> Power:
    """Find what the GPUs of a system draw, whatever they serve."""
    name = system.name
    spec = load_power(name)
    if spec is None:
        raise InputError(
            f"the power of {name!r} is not known: hw_specs/power/ has no file of it; "
            "'disagg-sim calibrate power' fits one, or let it inherit another system's"
        )
    return Power(spec, system.tdp)


def watts_of(at: Setup) -> Callable[[Operator, Cost], Numeric]:
    """Make the function from an operator and its cost [s] to the power of one GPU [W] under a setup."""
    power, system = power_at(at), at.system
    library = at.kernels

    def watts(op: Operator, cost: Cost) -> Numeric:
        time = cost.time
        kind, form = class_of(op)
        law = power.spec.law_of(kind, form, library)
        with np.errstate(divide="ignore", invalid="ignore"):
            if op.kind in TRANSFERS:
                compute: Numeric = 0.0
                memory = 2.0 * system.nvlink_bandwidth * cost.sums.communication / time / system.hbm_bandwidth
            else:
                compute = op.work.flops / time / peak_flops(op, system)
                memory = op.work.hbm_bytes / time / system.hbm_bandwidth
            share = kernel_power(law, compute=compute, memory=memory, time=time, idle=power.spec.idle)
        return np.where(time > 0.0, power.limit * share, power.idle)

    return watts


def clock_under(cap: Numeric, *, drawn: Numeric, idle: Numeric) -> Numeric:
    r"""Clock that a power cap leaves, as a share of the clock without it, of powers in W. [1]

    .. math:: f = \left(\frac{P_{cap} - P_0}{P - P_0}\right)^{1/3}

    Above the idle :math:`P_0` the power is in proportion to the clock and to the square of the voltage, which falls
    with the clock. Where the voltage can fall no further (below some 0.7 of the limit) clocks fall faster than this.
    """
    return ((cap - idle) / np.maximum(drawn - idle, cap - idle)) ** (1.0 / 3.0)


def slowed(op: Operator, cost: Cost, at: Setup) -> Cost:
    r"""Slow an operator that draws more than the power cap of its system.

    .. math:: t' = t + \max(0, c/f - \max(c, m))

    Multiplying (c) takes 1/f times as long (``clock_under``), the traffic of HBM (m) as long as before: what waits for
    HBM is not slowed. An assumption beside the fits.

    Parameters
    ----------
    op, cost, at
        Kernel, its cost at full clock, and the setup, whose system has a ``power_cap``.

    Returns
    -------
    Cost
        As before where the power is below the cap, and for transfers. [s]

    Raises
    ------
    InputError
        As ``power_at``.

    Examples
    --------
    A prompt of 8192 tokens takes 5 % longer at 500 W than at 700 W, a step of decode as long as before:

    >>> import disagg_sim as ds
    >>> def times(system):
    ...     at, mapping = ds.setup("llama_3_1_70b", system, "fp8", engine="vllm"), ds.Sharding(tp_attn=8, tp_ffn=8)
    ...     lengths = ds.lengths(8192, 512)
    ...     grids = (grid(at, mapping, lengths, batch=[1]) for grid in (ds.prefill_grid, ds.decode_grid))
    ...     return [float(grid.latency[0, 0]) for grid in grids]
    >>> [round(capped / free, 2) for capped, free in zip(times("h200_sxm_500w"), times("h200_sxm"))]
    [1.05, 1.0]
    """
    cap = at.system.power_cap
    if cap is None or op.kind in TRANSFERS:
        return cost
    clock = clock_under(cap, drawn=watts_of(at)(op, cost), idle=power_at(at).idle)
    compute, memory = cost.sums.compute / clock, cost.sums.memory
    longer = np.maximum(compute - np.maximum(cost.sums.compute, memory), 0.0)
    return Cost(cost.time + longer, cost.sums._replace(compute=compute))


def class_of(op: Operator) -> tuple[str, str]:
    """Kind and form of the law of an operator (``PowerSpec.law_of``)."""
    if op.kind in TRANSFERS or op.kind == "copy":
        return "elementwise", ""
    if op.kind == "attention_part":
        return op.kind, op.table.rpartition(" ")[2]
    if op.table == "gqa" and op.attention.window:
        return op.kind, WINDOWED
    return op.kind, op.format or op.table


def peak_flops(op: Operator, system: SystemSpec) -> float:
    """Peak of the arithmetic of an operator: of its format, of BF16 for an attention. [FLOP/s]"""
    arithmetic = FORMATS[op.format].arithmetic if op.format else "bf16"
    return system.peak_flops.get(arithmetic, system.peak_flops["bf16"])


def wall_watts(node: NodePower, gpu_watts: Numeric, *, across: Numeric) -> Numeric:
    """Power of a node at the wall. [W]"""
    host = np.where(across, node.host_across, node.host)
    network = np.where(across, node.network_across, node.network)
    load = node.gpus * np.asarray(gpu_watts, dtype=float) + host
    if node.fans is not None:
        fans = node.fans
        speed = fans.slowest + (fans.fastest - fans.slowest) * np.minimum(load / fans.heat, 1.0)
        load = load + fans.rated * speed
    if node.converters is not None:
        each = node.converters
        load = load + each.count * np.interp(load / (each.count * each.capacity), each.loads, each.losses)
    return load / np.interp(load / node.supply_capacity, node.supply_loads, node.supply_efficiency) + network


def facility_watts(node: NodePower, gpu_watts: Numeric, *, across: Numeric) -> Numeric:
    """Power of one GPU's share of a node at the meter of the building, cooling included. [W]"""
    return wall_watts(node, gpu_watts, across=across) * node.pue / node.gpus
