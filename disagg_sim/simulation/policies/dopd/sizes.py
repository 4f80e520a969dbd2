"""Sizes of DOPD's pools: concurrency of a decode instance, and prefill instances to match.

Equations (13) to (15), as in ``ratio`` beside this file, on the memory and step times of the instances that serve:
cc_max = min(V_mem, V_BW)/((ISL + OSL/2) M_token), no more than the largest CUDA graph. For r requests at a time
n_d = ceil(r/cc_max), and at the concurrency cc = r/n_d of each, n_p = n_d * cc * t_p/(t_d * OSL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disagg_sim.domain import Mapping
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.dopd.ratio import BANDWIDTH_SHARE
from disagg_sim.simulation.policies.pools import Sizes
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.wishes import Limits

#: The rule of eq. (15) and the one that algorithm 2 prints.
SIZINGS = ("mended", "printed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one instance of each pool can do."""

    prefill: StepTable
    decode: StepTable
    tokens: float  # that a decode instance holds: min(V_mem, V_BW)/M_token [token]
    graph: int  # largest captured CUDA graph of a decode instance [1]

    @classmethod
    def of(cls, site: Site, prefill: Mapping, decode: Mapping, limits: Limits) -> Profile:
        """Of two instances at a site; ``limits`` are those of decode instances."""
        bandwidth = site.slo.tpot * BANDWIDTH_SHARE * decode.gpus * site.setting.system.hbm_bandwidth
        held = site.blocks(decode, limits) * BLOCK_TOKENS
        return cls(
            prefill=site.table(prefill, limits.max_sequences),
            decode=site.table(decode, limits.max_sequences),
            tokens=min(held, bandwidth / site.kv_bytes(1)),
            graph=limits.max_sequences,
        )

    def prefill_time(self, prompt: int) -> float:
        """t_p: what one prompt keeps a prefill instance busy. [s]"""
        return self.prefill.pass_time(prompt)[1]

    def step_time(self, sequences: float, context: float) -> float:
        """t_d: one decode step of so many sequences, rounded, at a mean context. [s]"""
        return self.decode.step_time(min(max(round(sequences), 1), self.graph), context)

    def concurrency(self, inputs: float, outputs: float) -> float:
        """cc_max of requests of these mean lengths. [request]"""
        return max(1.0, min(self.tokens / (inputs + outputs / 2), self.graph))

    def sizes(
        self,
        requests: float,
        inputs: float,
        outputs: float,
        *,
        rule: str = "mended",
        correction: Sequence[float] = (1.0, 1.0),
    ) -> Sizes:
        """Instances of both pools.

        Parameters
        ----------
        requests, inputs, outputs
            Load: requests at a time [1], mean lengths [token].
        rule
            Of ``SIZINGS``; "printed" takes t_d at all requests together and at the length (ISL + OSL)/2, too.
        correction
            Factors on the prefill and the decode times of the profile. [1]
        """
        decode = max(1, math.ceil(requests / self.concurrency(inputs, outputs)))
        printed = rule == "printed"
        context = (inputs + outputs) / 2 if printed else inputs + outputs / 2
        step = correction[1] * self.step_time(requests if printed else requests / decode, context)
        first = correction[0] * self.prefill_time(max(round(inputs), 1))
        matched = matching_prefill(requests, decode, prefill_s=first, step_s=step, outputs=outputs, rule=rule)
        return Sizes(max(1, math.ceil(matched)), decode)


def matching_prefill(
    requests: float, decode: int, *, prefill_s: float, step_s: float, outputs: float, rule: str
) -> float:
    """n_p, not rounded: prefill instances that keep ``decode`` instances at so many requests in all. [1]

    As printed the ratio is taken at the requests of all instances and then multiplied by their number.
    """
    ratio = requests / (outputs * step_s / prefill_s)
    return ratio * decode if rule == "printed" else ratio
