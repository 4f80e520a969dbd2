"""Placement search of DistServe: parallel degrees and counts of prefill and decode instances for a workload.

Y. Zhong et al., "DistServe", OSDI 2024, algorithm 1: each phase is simulated alone, on one instance, for every
parallel configuration; its goodput is the largest rate at which the wanted share of requests meets that phase's
limit. Replicas multiply it. The paper divides by GPUs and replicates the winners until a wanted rate is
reached; here the GPUs are given and the counts are chosen with the configurations, so that none are left over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disagg_sim.domain import Mapping, Slo
from disagg_sim.errors import InfeasibleError, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.simulation.capacity import bracket
from disagg_sim.simulation.deployment import Replicas, ServedDeployment, degrees_of
from disagg_sim.simulation.kernel.fleet import Fleet, InstanceSpec
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_memory import kv_blocks
from disagg_sim.simulation.wishes import MAX_SEQUENCES
from disagg_sim.workload.trace import Trace

#: GPUs of the largest instance tried unless mappings are given: a server of the paper. [1]
SERVER_GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseGoodput:
    """One configuration of one phase."""

    mapping: Mapping
    requests_per_s: float  # largest rate of one instance with the wanted share inside its limit [request/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Shown):
    """The deployment found, and what was tried."""

    deployment: ServedDeployment
    requests_per_s: float  # of the slower phase [request/s]
    prefill: tuple[PhaseGoodput, ...]  # every configuration that fits in memory
    decode: tuple[PhaseGoodput, ...]


def distserve_placement(
    trace: Trace,
    *,
    setting: Setup,
    slo: Slo,
    gpus: int,
    mappings: Iterable[Mapping] | None = None,
    share: float = 0.9,
    token_budget: int = 2048,
) -> Placement:
    """Prefill and decode instances with the highest goodput on ``gpus``.

    Parameters
    ----------
    trace : Trace
        The workload; some hundred requests suffice. Its time stamps are stretched to try rates.
    setting : Setup
        Model, hardware, recipe and profile.
    slo : Slo
        TTFT is the limit of the prefill phase, TPOT that of the decode phase.
    gpus : int
        For both pools together. [1]
    mappings : iterable of Mapping, optional
        Configurations to try; all of up to 8 GPUs otherwise.
    share : float
        Of requests inside the limit of a phase. [1]
    token_budget : int
        Most tokens of a prefill pass, beyond its first prompt. [token]

    Raises
    ------
    InfeasibleError
        No pair of configurations fits the GPUs, or none meets the limits at any rate.
    """
    whole_number("gpus", gpus, 2)
    tried = list(mappings or enumerate_mappings(setting.model, setting.system, max_gpus=min(gpus, SERVER_GPUS)))
    prefill: list[PhaseGoodput] = []
    decode: list[PhaseGoodput] = []
    for mapping in tried:
        if mapping.gpus >= gpus:
            continue
        degrees = degrees_of(mapping)
        try:
            blocks = kv_blocks(setting, degrees, max_sequences=MAX_SEQUENCES, max_tokens=token_budget)
        except InfeasibleError:
            continue
        spec = InstanceSpec(
            table=StepTable.build(setting, degrees), blocks=blocks, mode=Mode.PREFILL_FIRST, token_budget=token_budget
        )
        for phase, found in (("prefill", prefill), ("decode", decode)):
            rate = phase_goodput(trace, spec, phase=phase, slo=slo, share=share)
            found.append(PhaseGoodput(mapping=mapping, requests_per_s=rate))
    best = max(
        (_filled(p, d, gpus) for p in prefill for d in decode if p.mapping.gpus + d.mapping.gpus <= gpus),
        key=lambda each: (each[0], -each[1] * each[3].mapping.gpus - each[2] * each[4].mapping.gpus),
        default=None,
    )
    if best is None or best[0] <= 0.0:
        raise InfeasibleError(
            f"no placement of {setting.model.name} on {gpus} x {setting.system.name} meets TTFT {slo.ttft:g} s and "
            f"TPOT {slo.tpot:g} s for {share:.0%} of the requests; {len(prefill)} of {len(tried)} configurations fit"
        )
    rate, n_p, n_d, p, d = best
    return Placement(
        deployment=ServedDeployment(
            name="distserve",
            gpus=gpus,
            prefill=(Replicas(mapping=p.mapping, instances=n_p),),
            decode=(Replicas(mapping=d.mapping, instances=n_d),),
        ),
        requests_per_s=rate,
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def phase_goodput(trace: Trace, spec: InstanceSpec, *, phase: str, slo: Slo, share: float) -> float:
    """Largest request rate at which one instance, alone with one phase, keeps ``share`` inside its limit. [request/s]

    Parameters
    ----------
    trace, slo, share
        As in ``distserve_placement``.
    spec : InstanceSpec
        The instance.
    phase : str
        "prefill": prompts alone, against the TTFT; "decode": caches that have just arrived, against the TPOT.
    """
    few = trace.output_tokens <= 1
    fits = trace.input_tokens + trace.output_tokens <= spec.blocks * BLOCK_TOKENS
    rows = np.flatnonzero(fits & ~few) if phase == "decode" else np.flatnonzero(fits)
    outputs = trace.output_tokens[rows]
    lost = len(trace) - rows.size - (int((few & fits).sum()) if phase == "decode" else 0)
    requests = list(zip(rows.tolist(), trace.input_tokens[rows].tolist(), outputs.tolist(), strict=True))

    def met(scale: float) -> bool:
        fleet = Fleet([spec], capacity=max(1, len(requests)))
        for (request, prompt, output), time in zip(requests, (trace.arrival[rows] / scale).tolist(), strict=True):
            fleet.run_until(time)
            if phase == "prefill":
                fleet.submit(0, request, 0, prompt, 1, time)
            else:
                fleet.submit(0, request, prompt, 0, output - 1, time)
        fleet.run_until(np.inf)
        spent = fleet.segments.finish_s - fleet.segments.submit_s
        late = spent > slo.ttft if phase == "prefill" else spent > slo.tpot * (outputs - 1)
        return bool(late.sum() + lost <= (1 - share) * len(trace))

    return bracket(met)[0] * trace.rate


def _filled(p: PhaseGoodput, d: PhaseGoodput, gpus: int) -> tuple[float, int, int, PhaseGoodput, PhaseGoodput]:
    """Counts of two configurations with the highest rate of the slower phase, the fewest GPUs among equals."""
    counts = [
        (min(n_p * p.requests_per_s, n_d * d.requests_per_s), n_p, n_d)
        for n_p in range(1, (gpus - d.mapping.gpus) // p.mapping.gpus + 1)
        for n_d in range(1, (gpus - n_p * p.mapping.gpus) // d.mapping.gpus + 1)
    ]
    rate, n_p, n_d = max(counts, key=lambda each: (each[0], -each[1] * p.mapping.gpus - each[2] * d.mapping.gpus))
    return rate, n_p, n_d, p, d
