r"""Concurrency of a decode instance and the prefill:decode ratio after DOPD.

Equations (11) to (15) of the paper, for a decode instance of TP GPUs and requests of ISL input and OSL output
tokens, M_token bytes of cache each:

.. math:: V_{mem} = (M_{gpu} - M')\,TP - M_{model},\quad V_{BW} = t_{SLO}\,\alpha\,TP\,BW,\quad
          cc = \frac{\min(V_{mem}, V_{BW})}{(ISL + OSL/2)\,M_{token}},\quad \frac{n_p}{n_d} = \frac{cc\,t_p}{t_d\,OSL}

where t_p is one prefill and t_d one decode step at batch cc, itself no larger than the largest captured CUDA graph.
V_BW forgets that the weights are read too; ``reads_weights`` takes them off, which is the physical form.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.errors import above_zero
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.memory import weight_bytes

#: Share of the bandwidth that a decode step reaches, and the largest captured CUDA graph, as the paper has them.
BANDWIDTH_SHARE, LARGEST_GRAPH = 0.6, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests a decode instance holds, and what limits them."""

    requests: float  # cc, eq. (13), not rounded [request]
    memory_bytes: float  # V_mem [B]
    bandwidth_bytes: float  # V_BW [B]

    @property
    def memory_bound(self) -> bool:
        """Whether memory, not bandwidth, limits the concurrency."""
        return self.memory_bytes < self.bandwidth_bytes


def decode_concurrency(
    model: ModelSpec,
    system: SystemSpec,
    precision: Precision,
    *,
    tp: int,
    isl: float,
    osl: float,
    tpot_limit: float,
    utilisation: float = 0.9,
    bandwidth_share: float = BANDWIDTH_SHARE,
    reads_weights: bool = False,
) -> Concurrency:
    """Eq. (11)-(13).

    Parameters
    ----------
    tp
        GPUs of the decode instance. [1]
    isl, osl
        Input and output length of every request. [token]
    tpot_limit
        SLO of a token, t_SLO. [s]
    utilisation
        Share of a GPU that the engine may fill: M' is the rest. [1]
    bandwidth_share
        alpha. [1]
    reads_weights
        Whether V_BW leaves room for reading the weights.
    """
    above_zero("isl", isl)
    above_zero("osl", osl)
    weights = weight_bytes(model, precision)
    memory = utilisation * system.hbm_reported * tp - weights
    bandwidth = tpot_limit * bandwidth_share * tp * system.hbm_bandwidth - (weights if reads_weights else 0.0)
    held = (isl + osl / 2) * model.kv_bytes_per_token(precision)
    return Concurrency(requests=min(memory, bandwidth) / held, memory_bytes=memory, bandwidth_bytes=bandwidth)


def prefill_decode_ratio(
    concurrency: float, *, prefill_time: float, step_time: float, osl: float, largest_graph: int = LARGEST_GRAPH
) -> float:
    """Eq. (14) and (15): prefill instances for each decode instance. [1]

    Parameters
    ----------
    concurrency
        cc of eq. (13), cut at ``largest_graph``. [request]
    prefill_time, step_time
        t_p of one prompt and t_d of one decode step at that concurrency. [s]
    osl
        Output length. [token]
    """
    return min(concurrency, largest_graph) * prefill_time / (step_time * osl)
