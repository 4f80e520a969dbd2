"""Choose the GPUs of an instance: eq. (14) of DOPD for decode, eq. (16) for prefill.

Decode: TP at which the concurrency of an instance is about 0.9 of the largest captured CUDA graph. Prefill: a larger TP
speeds a prompt up by less than its GPUs, so that the smallest serves the most prompts; our choice is the smallest at
which a prompt of mean length alone is inside the TTFT limit.
"""

from __future__ import annotations

from collections.abc import Mapping as Table

from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError, InputError
from disagg_sim.simulation.instance_variants import require_one_system
from disagg_sim.simulation.policies.dopd.sizes import Profile
from disagg_sim.simulation.site import Site, StepLimits
from disagg_sim.simulation.wishes import Role

#: Degrees that are tried: those of one server.
DEGREES = (1, 2, 4, 8)
#: Share of the largest graph that the concurrency should be, as in the paper. [1]
GRAPH_SHARE = 0.9


def decode_degree(concurrency: Table[int, float], graph: int) -> int:
    """Choose TP of decode instances, eq. (14).

    Takes ``graph`` [request]. Returns TP with the concurrency nearest to 0.9 of the graph.

    Llama-70B in FP8 on H100 with 1,000/150 tokens holds 12, 231 and 667 requests; 0.9 * 256 is 230:

    >>> decode_degree({1: 12.0, 2: 231.0, 4: 667.0}, 256)
    2
    """
    return min(concurrency, key=lambda degree: (abs(concurrency[degree] - GRAPH_SHARE * graph), degree))


def prefill_degree(times: Table[int, float], limit: float) -> int:
    """Choose TP of prefill instances, eq. (16).

    Takes ``times`` [s] and ``limit`` [s].

    >>> prefill_degree({1: 2.5, 2: 1.4, 4: 0.8}, 2.0), prefill_degree({1: 2.5, 2: 1.4, 4: 0.8}, 0.5)
    (2, 4)
    """
    inside = [degree for degree, time in times.items() if time <= limit]
    return min(inside) if inside else min(times, key=lambda degree: times[degree])


def chosen(site: Site, steps: StepLimits, inputs: float, outputs: float) -> tuple[tuple[Sharding, Role], ...]:
    """Choose the first instances: as many of the chosen degrees as the GPUs of the parts hold.

    Takes ``inputs`` and ``outputs`` [token].
    """
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
