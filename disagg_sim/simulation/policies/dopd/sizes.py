r"""Sizes of DOPD's pools: concurrency of a decode instance, and prefill instances to match.

Equations (11) to (15) of the paper, for a decode instance of TP GPUs and requests of ISL input and OSL output
tokens, M_token bytes of cache each:

.. math:: V_{mem} = (M_{gpu} - M')\,TP - M_{model},\quad V_{BW} = t_{SLO}\,\alpha\,TP\,BW,\quad
          cc = \frac{\min(V_{mem}, V_{BW})}{(ISL + OSL/2)\,M_{token}},\quad \frac{n_p}{n_d} = \frac{cc\,t_p}{t_d\,OSL}

where t_p is one prefill and t_d one decode step at batch cc, itself no larger than the largest captured CUDA graph.
V_BW forgets that the weights are read too; ``reads_weights`` takes them off, which is the physical form.

``Profile`` has the same on the memory and step times of the instances that serve: for r requests at a time
n_d = ceil(r/cc_max), and at the concurrency cc = r/n_d of each, n_p = n_d * cc * t_p/(t_d * OSL).

The GPUs of an instance follow eq. (14) for decode, the TP at which the concurrency of an instance is about 0.9 of the
largest captured CUDA graph, and eq. (16) for prefill: a larger TP speeds a prompt up by less than its GPUs, so that the
smallest serves the most prompts; our choice is the smallest at which a prompt of mean length alone is inside the TTFT
limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Table
from collections.abc import Sequence
from dataclasses import dataclass

from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.simulation.instance_variants import require_one_system
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.pools import Sizes
from disagg_sim.simulation.site import Site, StepLimits
from disagg_sim.simulation.wishes import Limits, Role

#: Share of the bandwidth that a decode step reaches (alpha), and the largest captured CUDA graph, as in the paper. [1]
BANDWIDTH_SHARE, LARGEST_GRAPH = 0.6, 256
#: Rules of the sizes: eq. (15) without the faults of algorithm 2; as algorithm 2 prints them; as the authors' published
#: code has them (liao4s/DOPD, c1d793e); by Little's law, this project's own.
SIZINGS = ("mended", "printed", "published", "little")
#: Weight of the newest window in the correction of times, by rule: the published code keeps no average. [1]
NEWEST = {"mended": 0.3, "printed": 0.3, "published": 1.0, "little": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one instance of each pool can do."""

    prefill: StepTable
    decode: StepTable
    tokens: float  # that a decode instance holds: min(V_mem, V_BW)/M_token [token]
    graph: int  # largest captured CUDA graph of a decode instance [1]

    @classmethod
    def of(cls, site: Site, prefill: Sharding, decode: Sharding, limits: Limits) -> Profile:
        """Of two instances at a site; ``limits`` are those of decode instances."""
        table = site.table(decode, limits.max_sequences)
        step = site.slo.tpot * table.accepted_tokens
        bandwidth = step * BANDWIDTH_SHARE * decode.gpus * site.setup_of(decode).system.hbm_bandwidth
        held = site.blocks(decode, limits) * BLOCK_TOKENS
        return cls(
            prefill=site.table(prefill, limits.max_sequences),
            decode=table,
            tokens=min(held, bandwidth / site.handed_model.kv_bytes(1, site.setup.precision)),
            graph=limits.max_sequences,
        )

    def prefill_time(self, prompt: int) -> float:
        """t_p: what one prompt keeps a prefill instance busy. [s]"""
        return self.prefill.pass_time(prompt)[1]

    def token_time(self, sequences: float, context: float) -> float:
        """t_d: one token of so many sequences, rounded, at a mean context. [s]"""
        return self.decode.token_time(min(max(round(sequences), 1), self.graph), context)

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
        """Instances of both pools, at mean lengths [token].

        ``requests`` are those in service at a time [1], for ``published`` those that came in a window [1], for
        ``little`` those that come in a second [request/s].

        * ``printed`` takes t_d at all requests together and at the length (ISL + OSL)/2, and multiplies n_p by n_d.
        * ``published`` has n_d = ceil(r/cc), and n_p = ceil(cc * t_p/(OSL * t_d)) whatever n_d is, t_d at cc.
        * ``little``: a decode instance of cc requests ends cc/(OSL * t_d) of them in a second, and a prefill instance
          1/t_p. Requests in service, of which the other rules take n_d, are more the fewer instances there are, so that
          their sizes swing under a constant load; a rate does not depend on the sizes.
        """
        decode = max(1, math.ceil(requests / self.concurrency(inputs, outputs)))
        printed = rule == "printed"
        if rule in ("published", "little"):
            held, prompt = self.concurrency(inputs, outputs), max(round(inputs), 1)
            stays = outputs * correction[1] * self.token_time(held, inputs + outputs / 2)
            if rule == "little":
                first = correction[0] * self.prefill_time(prompt)
                return Sizes(max(1, math.ceil(requests * first)), max(1, math.ceil(requests * stays / held)))
            return Sizes(max(1, math.ceil(math.floor(held) * self.prefill_time(prompt) / stays)), decode)
        context = (inputs + outputs) / 2 if printed else inputs + outputs / 2
        step = correction[1] * self.token_time(requests if printed else requests / decode, context)
        first = correction[0] * self.prefill_time(max(round(inputs), 1))
        matched = matching_prefill(requests, decode, prefill_s=first, step_s=step, outputs=outputs, rule=rule)
        return Sizes(max(1, math.ceil(matched)), decode)


def matching_prefill(
    requests: float, decode: int, *, prefill_s: float, step_s: float, outputs: float, rule: str
) -> float:
    """Match prefill instances to decode instances, not rounded: n_p of eq. (15).

    As printed the ratio is taken at the requests of all instances and then multiplied by their number.

    Parameters
    ----------
    requests
        In decode at a time, on all decode instances. [request]
    decode
        Decode instances. [1]
    prefill_s, step_s
        t_p of one prompt and t_d of one decode step. [s]
    outputs
        Mean output length. [token]
    rule
        "mended" or "printed".

    Returns
    -------
    float
        Prefill instances. [1]

    Examples
    --------
    100 requests of 50 tokens in steps of 20 ms complete 100 in 1 s; prompts of 30 ms keep 3 instances busy:

    >>> [matching_prefill(100, 2, prefill_s=0.03, step_s=0.02, outputs=50, rule=rule) for rule in ("mended", "printed")]
    [3.0, 6.0]
    """
    ratio = requests / (outputs * step_s / prefill_s)
    return ratio * decode if rule == "printed" else ratio


#: Degrees that are tried: those of one server.
DEGREES = (1, 2, 4, 8)
#: Share of the largest graph that the concurrency should be, as in the paper. [1]
GRAPH_SHARE = 0.9


def decode_degree(concurrency: Table[int, float], graph: int) -> int:
    """Choose TP of decode instances, eq. (14): the concurrency nearest to 0.9 of the graph [request].

    Llama-70B in FP8 on H100 with 1,000/150 tokens holds 12, 231 and 667 requests; 0.9 * 256 is 230:

    >>> decode_degree({1: 12.0, 2: 231.0, 4: 667.0}, 256)
    2
    """
    return min(concurrency, key=lambda degree: (abs(concurrency[degree] - GRAPH_SHARE * graph), degree))


def prefill_degree(times: Table[int, float], limit: float) -> int:
    """Choose TP of prefill instances, eq. (16), by times and a limit [s].

    >>> prefill_degree({1: 2.5, 2: 1.4, 4: 0.8}, 2.0), prefill_degree({1: 2.5, 2: 1.4, 4: 0.8}, 0.5)
    (2, 4)
    """
    inside = [degree for degree, time in times.items() if time <= limit]
    return min(inside) if inside else min(times, key=lambda degree: times[degree])


def chosen(site: Site, steps: StepLimits, inputs: float, outputs: float) -> tuple[tuple[Sharding, Role], ...]:
    """Choose the first instances: as many of the chosen degrees as the GPUs of the parts hold."""
    given = tuple(each.mapping for part in ("prefill", "decode") for each in site.deployment.part(part))
    require_one_system(f"deployment {site.deployment.name!r}: the choice of TP", given)
    times: dict[int, float] = {}
    held: dict[int, float] = {}
    gpus = {
        name: sum(part.mapping.gpus * part.instances for part in site.deployment.part(name))
        for name in ("prefill", "decode")
    }
    graph = 1
    for degree in DEGREES:
        mapping = Sharding(tp_attn=degree, tp_ffn=degree)
        limits = steps.limits(mapping, Role.DECODE)
        try:
            profile = Profile.of(site, mapping, mapping, limits)
        except DisaggSimError:
            continue  # the model does not fit, or cannot be split so
        if profile.tokens < inputs + outputs:
            continue
        graph = profile.graph
        if degree <= gpus["prefill"]:
            times[degree] = profile.prefill_time(max(round(inputs), 1))
        if degree <= gpus["decode"]:
            held[degree] = profile.tokens / (inputs + outputs / 2)
    if not times or not held:
        degrees = ", ".join(map(str, DEGREES))
        raise InputError(f"deployment {site.deployment.name!r}: no TP of {degrees} fits into the GPUs of its parts")
    found = (prefill_degree(times, site.slo.ttft), Role.PREFILL), (decode_degree(held, graph), Role.DECODE)
    return tuple(
        (Sharding(tp_attn=degree, tp_ffn=degree), role)
        for (degree, role), part in zip(found, ("prefill", "decode"), strict=True)
        for _ in range(max(gpus[part] // degree, 1))
    )
