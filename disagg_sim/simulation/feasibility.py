"""Check what no schedule can change: whether a model fits an instance, and the least latencies of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.simulation.classes import ServiceClass, slo_of
from disagg_sim.simulation.deployment import PARTS, ModelShare, Replicas, ServedDeployment, shares_of
from disagg_sim.simulation.instance_variants import FfnPool, ffn_of, split_of
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


def least_step(at: Setup, mapping: Sharding, context: int) -> float:
    """Time of a step of one sequence at a context [token]. [s]"""
    if (ffn := ffn_of(mapping)) is None:
        return float(np.min(decode_step(at, mapping, batch=1, context=context).time))
    alone = split_of(mapping, ffn)._replace(microbatches=1)
    return float(np.min(split_step(at, ffn.setup or at, alone, sequences=1.0, context=float(context)).ttl))


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
    steps = [least_step(own, mapping, prompt) / (1 + mapping.draft_tokens) for own, mapping in pairs]
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
        _require_possible(share, parts, slo_of(share.model, slo, classes))


def _require_possible(share: ModelShare, parts: tuple[str, ...], slo: Slo) -> None:
    """See ``require_possible``; of one model."""
    trace, deployment = share.trace, share.deployment
    least = least_latencies(share.setup, [each for part in parts for each in deployment.part(part)], trace)
    beside = f"on deployment {deployment.name!r} with no other request"
    if least.ttft > slo.ttft:
        raise InfeasibleError(
            f"slo: no request of {trace.name} can meet ttft_s {slo.ttft:g}; the least TTFT {beside} is "
            f"{least.ttft:.4g} s, of a prompt of {least.prompt} tokens"
        )
    if least.tpot > slo.tpot:
        raise InfeasibleError(
            f"slo: no request of {trace.name} can meet tpot_s {slo.tpot:g}; the least TPOT {beside} is "
            f"{least.tpot:.4g} s, behind a prompt of {least.prompt} tokens"
        )
