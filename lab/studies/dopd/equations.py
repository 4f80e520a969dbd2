"""DOPD's concurrency of a decode instance and its ratio of pools, eq. (11) to (15), of figures on a data sheet.

The policy has the same of the instances that serve (``simulation.policies.dopd.sizes``).
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.errors import above_zero
from disagg_sim.physics.memory import weight_bytes
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.policies.dopd.sizes import BANDWIDTH_SHARE, LARGEST_GRAPH


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
    at: Setup,
    *,
    tp: int,
    isl: float,
    osl: float,
    tpot_limit: float,
    utilisation: float = 0.9,
    reads_weights: bool = False,
) -> Concurrency:
    """Compute the concurrency of a decode instance of ``tp`` GPUs by eq. (11) to (13), not rounded.

    ``tpot_limit`` is t_SLO [s], ``utilisation`` what the engine may fill of a GPU, M' being the rest [1]; with
    ``reads_weights`` V_BW leaves room for reading the weights. Lengths are in tokens.

    In 50 ms two H200 of 4.8 TB/s read 0.05 * 0.6 * 2 * 4.8e12 B at the paper's share of 0.6:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    >>> f"{decode_concurrency(at, tp=2, isl=1000, osl=100, tpot_limit=0.05).bandwidth_bytes:.4g}"
    '2.88e+11'
    """
    above_zero("isl", isl)
    above_zero("osl", osl)
    weights = weight_bytes(at.model, at.precision)
    memory = utilisation * at.system.hbm_reported * tp - weights
    bandwidth = tpot_limit * BANDWIDTH_SHARE * tp * at.system.hbm_bandwidth - (weights if reads_weights else 0.0)
    held = decode_residents(isl, osl).mean * at.model.kv_bytes_per_token(at.precision)
    return Concurrency(requests=min(memory, bandwidth) / held, memory_bytes=memory, bandwidth_bytes=bandwidth)


def prefill_decode_ratio(concurrency: float, *, prefill_time: float, step_time: float, osl: float) -> float:
    """Compute the prefill instances for each decode instance by eq. (14) and (15), not rounded. [1]

    ``prefill_time`` is t_p of a prompt and ``step_time`` t_d of a decode step [s] at ``concurrency``, cc of eq. (13),
    cut at ``LARGEST_GRAPH``.

    100 requests decode 50 tokens in 50 * 20 ms = 1 s; a prefill of 30 ms serves 33.3 of them in that time:

    >>> prefill_decode_ratio(100, prefill_time=0.03, step_time=0.02, osl=50)
    3.0
    """
    return min(concurrency, LARGEST_GRAPH) * prefill_time / (step_time * osl)
