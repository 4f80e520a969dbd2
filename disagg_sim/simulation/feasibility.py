"""Check what no schedule can change: whether a model fits an instance, and the least latencies of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.domain import Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.simulation.deployment import PARTS, Replicas, ServedDeployment, shares_of
from disagg_sim.simulation.instance_variants import FfnPool, ffn_of, split_of
from disagg_sim.simulation.metrics import ServiceClass, slo_of
from disagg_sim.simulation.site import request_host
from disagg_sim.techniques.split.physics import split_bytes, split_step
from disagg_sim.techniques.split.search import check_split
from disagg_sim.units import GB
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLatency:
    """Latencies of the shortest request of a trace, served alone."""

    ttft: float  # [s]
    tpot: float  # 0 where a request has a single token [s]
    prompt: int  # of the shortest prompt [token]


def require_fit(at: Setup, deployment: ServedDeployment) -> None:
    """Raise when a mapping of the deployment is impossible, or the model with one token does not fit."""
    for part in PARTS:
        for replicas in getattr(deployment, part):
            own = replicas.setup or at
            if replicas.ffn is not None:
                _require_split(own, replicas, replicas.ffn, f"{deployment.name}.{part}")
                continue
            mappings_for(own, replicas.mapping if part == "prefill" else without_pcp(replicas.mapping))
            need = float(np.max(decode_bytes(own, replicas.mapping, 1, cached=decode_residents(1, 0))))
            if need > own.memory_limit:
                raise InfeasibleError(
                    f"{deployment.name}.{part}: {own.model.name} in {own.precision.name} does not fit on "
                    f"{replicas.mapping.gpus} x {own.system.name}: with a single cached token it needs "
                    f"{need / GB:.1f} GB a GPU and may use {own.memory_limit / GB:.1f} GB, "
                    f"{(need - own.memory_limit) / GB:.1f} GB too few"
                )


def _require_split(at: Setup, replicas: Replicas, ffn: FfnPool, where: str) -> None:
    """See ``require_fit``; of instances with a feed-forward pool."""
    theirs, split = ffn.setup or at, split_of(replicas.mapping, ffn)
    check_split(at, split)
    held = split_bytes(at, theirs, split, sequences=1, cached=decode_residents(1, 0))
    for name, need, own in zip(("attention", "feed-forward"), held, (at, theirs), strict=True):
        if (most := float(np.max(need))) > own.memory_limit:
            raise InfeasibleError(
                f"{where}: the {name} part of {at.model.name} in {own.precision.name} does not fit: with a sequence a "
                f"micro-batch of a single cached token each it needs {most / GB:.1f} GB a GPU of {own.system.name} and "
                f"may use {own.memory_limit / GB:.1f} GB, {(most - own.memory_limit) / GB:.1f} GB too few"
            )


def least_latencies(at: Setup, replicas: Iterable[Replicas], trace: Trace | TraceStream) -> LeastLatency:
    """What the fastest instance needs for the trace's shortest prompt, host included, and first decode step, alone.

    Of a step that verifies drafts all may be accepted.
    """
    prompt, output = trace.least
    computed = 1 if trace.prefix is not None else prompt
    pairs = [(each.setup or at, each.mapping) for each in replicas]
    first = [
        prompt_pass(own, cut, batch=1, isl=computed, past=0, chunk_tokens=cut.chunk_tokens).ftl
        for own, cut in pairs
        if ffn_of(cut) is None
    ]
    steps = []
    for own, mapping in pairs:
        if (ffn := ffn_of(mapping)) is None:
            time = decode_step(own, mapping, batch=1, context=prompt).time
        else:
            alone = split_of(mapping, ffn)._replace(microbatches=1)
            time = split_step(own, ffn.setup or own, alone, sequences=1.0, context=float(prompt)).ttl
        steps.append(float(np.min(time)) / (1 + mapping.draft_tokens))
    single = output == 1
    ttft, tpot = request_host(at) + float(np.min(first)), 0.0 if single else float(np.min(steps))
    return LeastLatency(ttft=ttft, tpot=tpot, prompt=prompt)


def require_possible(
    at: Setup,
    deployment: ServedDeployment,
    parts: tuple[str, ...],
    trace: Trace | TraceStream,
    slo: Slo,
    classes: Sequence[ServiceClass] = (),
) -> None:
    """Raise when not even the shortest request of a trace, or of one of its models, meets the SLO alone."""
    for share in shares_of(trace, deployment, parts, at):
        own, limits = share.deployment, slo_of(share.model, slo, classes)
        least = least_latencies(share.setup, [each for part in parts for each in own.part(part)], share.trace)
        for name, found, most, where in (
            ("TTFT", least.ttft, limits.ttft, "of"),
            ("TPOT", least.tpot, limits.tpot, "behind"),
        ):
            if found > most:
                raise InfeasibleError(
                    f"slo: no request of {share.trace.name} can meet {name.lower()}_s {most:g}; the least {name} on "
                    f"deployment {own.name!r} with no other request is {found:.4g} s, {where} a prompt of "
                    f"{least.prompt} tokens"
                )
