"""What simulations of a plan play: its requests, the network, tiers that pasts lie in, and what serves."""

from __future__ import annotations

import math
from dataclasses import replace

from disagg_sim.choices import EVEN_RANKS, LEAST_LOAD
from disagg_sim.domain import ServingMode, Slo
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.design import Design
from disagg_sim.planning.kv_links import wire_of
from disagg_sim.planning.limits import Demand
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.synthetic import synthetic_trace
from disagg_sim.workload.trace import Trace

#: Requests that are judged at least, by percentile, and simulated at most. [request]
LEAST_JUDGED = {0.5: 1_000, 0.9: 2_000, 0.99: 5_000}
MOST_SIMULATED = 300_000
#: Mean times of a request in the system that pass before requests are judged, and in which they are, at least. [1]
FILLING, JUDGED = 2.0, 3.0


def slo_of(design: Design) -> Slo:
    """The limits that the design was sized for."""
    work = design.work
    return Slo(ttft=work.ttft.seconds, tpot=work.tpot.seconds)


def run_options(design: Design, max_nic: float | None) -> RunOptions:
    """The network of a design, of which so much bandwidth may be used [B/s], and its sessions with their tiers."""
    if design.work.lengths.rank_imbalance not in ("", LEAST_LOAD):
        raise InputError(
            f"rank_imbalance {design.work.lengths.rank_imbalance}: plan --simulate sends each request to the DP rank "
            f"with the least load; allowed with it: {EVEN_RANKS}, {LEAST_LOAD}; without --simulate any"
        )
    link, sender = LinkSpec(), design.first.setup
    if max_nic is not None:  # the wire that the design was sized for
        wire = wire_of(design.pools[-1].setup, sender, design.gpus, max_nic)
        link = LinkSpec(bandwidth=wire.bandwidth, latency_s=wire.latency_s, descriptor_s=wire.descriptor_s)
    options, cached = RunOptions(link=link), design.work.lengths.cached
    if cached is None:
        return options
    tiers = sorted(cached.reuse.below, key=lambda name: -sender.system.kv_tiers[name].bandwidth)
    return replace(options, reuse=cached.reuse, tiers=tuple(tiers))


def policy_of(design: Design) -> Policy:
    """What serves the design; chunks of one prompt follow each other through a pipeline in a pass of their own."""
    if design.mode == ServingMode.DISAGGREGATED:
        return policy_named("disaggregated")
    return policy_named("vllm", chunked=not any(pool.mapping.chunk_tokens for pool in design.pools))


def requests_of(plan: Plan, design: Design, seed: int) -> tuple[Trace, float]:
    """Requests to replay, and from when on they are judged. [s]"""
    if plan.options.trace is not None:
        return plan.options.trace.scaled(design.rate / plan.options.trace.rate), 0.0
    if plan.source is None:
        raise InputError("requests cannot be drawn from these lengths; give a traffic's case, constants or a trace")
    return drawn_requests(design.work, plan.source, design.rate, seed)


def drawn_requests(work: Demand, source: TrafficCase | tuple[int, int], rate: float, seed: int) -> tuple[Trace, float]:
    """Poisson arrivals with lengths of a case or constants, as many as the rate says; when judging begins. [s]"""
    alone = time_alone(work)
    judged = max(LEAST_JUDGED[max(work.ttft.share, work.tpot.share)], math.ceil(JUDGED * alone * rate))
    filling = math.ceil(FILLING * alone * rate)
    requests = min(filling + judged, MOST_SIMULATED)
    trace = synthetic_trace(rate=rate, requests=requests, lengths=source, seed=seed)
    first = min(filling, requests // 2)
    came = (requests - 1 - first) / float(trace.arrival[-1] - trace.arrival[first])
    trace = trace.scaled(rate / came)
    return trace, float(trace.arrival[first])


def time_alone(work: Demand) -> float:
    """Time of a mean request in the system at its limits. [s]"""
    return work.ttft.seconds + work.lengths.gaps * work.tpot.seconds
