r"""Power of a node at the wall and at the meter of the building, from what its GPUs draw.

.. math:: W = \frac{n\,w + h + f + c}{\eta} + s, \qquad
          f = f_{max}\,\Big(a + (b - a)\,\min\big(1, \tfrac{n\,w + h}{H}\big)\Big)

n GPUs of w watts, host h, fans f whose speed rises from a to b with the heat, converters c and supplies of efficiency
:math:`\eta` at their load, switches and optics s; PUE times that is the power of the building. Source: ``facts.node``.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.facts.node import NodePower
from disagg_sim.physics.work import Numeric


def wall_watts(node: NodePower, gpu_watts: Numeric, *, across: Numeric) -> Numeric:
    """Power of a node at the wall.

    The result is of the broadcast shape [W].
    """
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
    """Power of one GPU's share of a node at the meter of the building, cooling included.

    Parameters
    ----------
    node, gpu_watts, across
        As in ``wall_watts``.

    Returns
    -------
    ndarray
        Of the broadcast shape. [W]

    Examples
    --------
    Eight H100 that draw 520 W each; the building draws twice that for each of them:

    >>> from disagg_sim.facts.load import load_system
    >>> f"{facility_watts(load_system('h100_sxm').node_power, 520.0, across=False):.0f} W"
    '1077 W'
    """
    return wall_watts(node, gpu_watts, across=across) * node.pue / node.gpus
