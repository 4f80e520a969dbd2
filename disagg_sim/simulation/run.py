"""Run one trace through a deployment under a serving policy: clusters, one a model, that serve side by side.

A sampler looks at them at times a fixed period apart. Past 400 lines: a run from its arguments to its result.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, PolicyError
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.admission import Both
from disagg_sim.simulation.clients import Clients, RequestWindow
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.deployment import ServedDeployment, shares_of
from disagg_sim.simulation.engine import OBSERVE, Engine
from disagg_sim.simulation.faults import own_faults
from disagg_sim.simulation.instance_variants import ffn_of
from disagg_sim.simulation.instances import GpuBudget, Roster, spec_of
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.layout import Scheduling
from disagg_sim.simulation.metrics import limits_of, slo_of
from disagg_sim.simulation.options import FULL, MOST_SAMPLES, STREAM
from disagg_sim.simulation.physical_site import peak_flops, physical_site
from disagg_sim.simulation.pieces import Pieces, Sink, instance_records, joined, joined_requests, last_moment
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.policy import Policy, require_parts
from disagg_sim.simulation.records import Instances, Models, RunResult, Samples, added
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site, placed_slo
from disagg_sim.simulation.view import ClusterState
from disagg_sim.simulation.wishes import Role
from disagg_sim.techniques.availability.play_outages import Outages
from disagg_sim.techniques.prefix.play import FreeMemory, PrefixMemory
from disagg_sim.techniques.prefix.play_stated import StatedPasts
from disagg_sim.techniques.prefix.play_tiers import tiered
from disagg_sim.workload.stream import TraceStream, in_memory
from disagg_sim.workload.trace import Trace

#: Segments for which there is room at first where requests leave the run. [1]
FEW = 4096


def run(
    trace: Trace | TraceStream,
    deployment: ServedDeployment,
    policy: Policy | str,
    *,
    at: Setup,
    slo: Slo,
    seed: int = 0,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen, no state
    sink: Sink | None = None,
) -> RunResult:
    """Serve a trace.

    Parameters
    ----------
    trace : Trace or TraceStream
        Requests; in a closed loop (``options.concurrency``) of requests or sessions, no arrival counts. Of a stream a
        window is held at a time, or all of it where the run needs that (``RunOptions.whole``).
    deployment : ServedDeployment
        The policy takes the parts that it needs.
    policy : Policy or str
        A registered name, or ``policy_named(name, option=...)``.
    at : Setup
        Model, hardware, recipe and profile of the instances that have none of their own.
    slo : Slo
        What SLO-aware policies steer by.
    seed : int
        Of all random streams.
    options : RunOptions
        Start-up, network, samples.
    sink : callable, optional
        Takes the records of requests that are over, in the order of the trace: piece by piece as the run goes, or all
        at its end where ``options.records`` is ``full``.

    Returns
    -------
    RunResult
        Records, a row a request in order of the trace, a sample each ``options.sample_s``, an instance, a decision. [s]

    Raises
    ------
    PolicyError
        The policy wished the impossible, or a user's own raised an error, which is its cause; ``so_far`` is the result
        until then.
    InputError, UnknownNameError
        The deployment lacks a part that the policy needs, or has too few GPUs for it; more samples than a run holds; of
        several models: requests that do not say which they ask for, or ask for one that nothing serves.

    Examples
    --------
    Two prompts of 100 tokens; the second request has a single output token, so it ends with its first:

    >>> import disagg_sim as ds
    >>> part, at = ds.Replicas(mapping=ds.Sharding(), instances=1), ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> parts = ServedDeployment(name="one", gpus=1, colocated=(part,))
    >>> trace = Trace(arrival=[0.0, 5.0], input_tokens=[100, 100], output_tokens=[8, 1])
    >>> found = run(trace, parts, "vllm", at=at, slo=Slo(ttft=1.0, tpot=0.1))
    >>> found.requests.first_token_s < found.requests.finish_s, int(found.instances.decode_tokens.sum())
    (array([ True, False]), 7)
    """
    if options.whole or deployment.encode is not None:
        trace = in_memory(trace)
    options.check_samples(trace)
    if (pool := deployment.encode) is not None and isinstance(trace, Trace):
        deployment.check_encode(trace, at, options.concurrency, options.records)
        met, rest = pool.before(trace), replace(deployment, encode=None)
        counted = pool.counted(run(met, rest, policy, at=at, slo=slo, seed=seed, options=options), trace)
        if sink is not None:
            sink(counted.requests)
        return counted
    policy = policy_named(policy) if isinstance(policy, str) else policy
    shares = shares_of(trace, deployment, policy.needs, at)
    sites = [
        physical_site(
            each.trace,
            each.deployment,
            at=each.setup,
            slo=slo_of(each.model, slo, options.classes),
            seed=seed,
            options=options,
        )
        for each in shares
    ]
    several = len(shares) > 1
    if options.records == STREAM and several:
        raise InputError(f"records {STREAM!r} with {len(shares)} models; allowed: 'full', 'none'")
    models = [
        Served(each.model if several else "", each.rows.tolist(), each.trace, site)
        for each, site in zip(shares, sites, strict=True)
    ]
    whole = deployment if several else sites[0].deployment
    return serve_models(trace, policy, models, whole, Engine(seed), options, slo, sink)


def serve(trace: Trace, policy: Policy | str, site: Site, engine: Engine, options: RunOptions) -> RunResult:
    """Serve a trace at a site that is there already; ``run`` makes one from the physics."""
    return serve_models(trace, policy, (Served("", (), trace, site),), site.deployment, engine, options)


class Served(NamedTuple):
    """What one model of a run serves, and where."""

    model: str  # its name; "" = the only one
    rows: Sequence[int]  # of the trace of the run, which has requests for others; none = all
    trace: Trace | TraceStream  # of these rows
    site: Site


def serve_models(
    trace: Trace | TraceStream,
    policy: Policy | str,
    models: Sequence[Served],
    deployment: ServedDeployment,
    engine: Engine,
    options: RunOptions,
    slo: Slo | None = None,
    sink: Sink | None = None,
) -> RunResult:
    """Serve a trace in a cluster of several models, each at a site and with a policy of its own, on one clock.

    Records go to the sink; totals of requests that leave are judged by the SLO, by default that of the first site.
    """
    if isinstance(policy, str):
        policy = policy_named(policy)
    name = next((name for name, kind in policies().items() if kind is type(policy)), type(policy).__name__)
    deployment.require(name, policy.needs)
    if options.concurrency and len(models) > 1:
        raise InputError(
            f"concurrency {options.concurrency} with {len(models)} models; allowed: 0, the arrivals of the trace"
        )
    faults = partial(own_faults, f"policy {name!r}", type(policy).__module__, lambda: engine.now)
    budget, clusters, keeps = GpuBudget(deployment), [], options.records == FULL
    with faults():
        for each in models:
            clusters.append(_opened(name, policy, each, budget, engine, options))
    outages = Outages(options.failures, clusters, deployment, budget) if options.failures is not None else None
    slo = slo or models[0].site.slo
    judged = [limits_of(each.trace, slo, options.classes) if options.classes else slo for each in models]
    pieces = [Pieces(each, limits, sink, keeps=keeps) for each, limits in zip(clusters, judged, strict=True)]
    sampler = Sampler(clusters, options.sample_s, pieces)
    wall, cpu = time.perf_counter(), time.process_time()
    failure: PolicyError | None = None
    try:
        with faults(), rare_collections():
            engine.run(options.until_s)
    except PolicyError as error:
        failure = error
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    numbers, rows = [np.array(cluster.roster.number) for cluster in clusters], [each.rows for each in models]
    end = engine.now  # of a run cut short
    if not any(cluster.at_work for cluster in clusters):
        end = max(map(last_moment, clusters))
    end = max(end, *(each.last_s for each in pieces))
    found = [each.close() for each in pieces]
    instances = joined([instance_records(each, end) for each in clusters], numbers)
    result = RunResult(
        policy=name,
        deployment=deployment.name,
        trace=trace.name,
        seed=engine.seed,
        requests=joined_requests(found, rows, numbers) if keeps else found[0],
        itl_edges=clusters[0].fleet.itl_edges,
        itl_counts=np.sum([cluster.fleet.itl_counts for cluster in clusters], axis=0),
        samples=sampler.samples(),
        instances=instances,
        decisions=tuple(merge(*(each.roster.decisions for each in clusters), key=attrgetter("time_s"))),
        failures=tuple(outages.happened) if outages is not None else (),
        duration_s=end,
        peak_flops=_peak_flops(budget, instances),
        wall_s=wall,
        cpu_s=cpu,
        models=_models(models, numbers, len(trace)) if len(models) > 1 else None,
        totals=None if keeps else reduce(added, [each.totals for each in pieces]),
        judged_by=None if keeps else slo,
    )
    if failure is not None:
        raise PolicyError(str(failure), result) from failure.__cause__ or failure
    return result


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage in circles a hundred times less often: a run leaves next to none, and looking takes a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _opened(
    name: str, policy: Policy, served: Served, budget: GpuBudget, engine: Engine, options: RunOptions
) -> Cluster:
    """Everything that takes part in serving a model, wired up."""
    site, trace = served.site, served.trace
    name = f"{name} ({served.model})" if served.model else name
    parts = require_parts(name, policy.build(site))
    trace = in_memory(trace) if parts.keeps_segments else trace
    coming = RequestWindow(trace, site.request_host_s) if isinstance(trace, TraceStream) else None
    classes = [replace(each, slo=placed_slo(each.slo, site.setup)) for each in options.classes]
    limits = limits_of(trace, site.slo, classes)
    if options.admission is not None:
        own, of_run = parts.admission, options.admission.build(site, limits)
        parts = replace(parts, admission=of_run if own is None else Both(own, of_run))
    spec = cache(partial(spec_of, name, site, parts.steps))
    priority = limits.priority if site.scheduling == Scheduling.PRIORITY and coming is None else None
    fleet = Fleet(
        [spec(*each) for each in parts.start],
        step_by_step=options.step_by_step,
        capacity=max(2 * len(trace) if options.records == FULL else 0, FEW),
        priority=priority,
        stream=int(site.rng("accepted drafts").integers(2**32)),
        gap_limit_s=options.gap_limit_s,
        spine=options.link.spine(site.setup, site.deployment.link_gpus),
    )
    roster = Roster(name, site, parts.steps, engine=engine, fleet=fleet, budget=budget)
    roster.rows = served.rows
    roster.open(parts.start)
    for part in (parts.roles, parts.scaling):
        if part is not None:
            roster.check_looks(part.period_s, options.last_arrival(trace))
    clients = Clients(len(trace), options.concurrency, trace.sessions)
    arrival, *lengths = _columns(trace, clients, coming)
    saved, stated = checkpoint_tokens(site.setup.model, site.setup.precision), None
    memory: FreeMemory | StatedPasts | None = None
    size = trace.prefix.block_tokens if trace.prefix is not None else 0
    if options.prefix_cache:
        if trace.prefix is None:
            raise InputError(f"prefix_cache true: trace {trace.name} has no block ids")
        memory = FreeMemory(trace.prefix, fleet, saved)
    elif options.reuse is not None and isinstance(trace, Trace):
        rng = site.rng("stated pasts")
        memory = stated = StatedPasts(trace, options.reuse, options.tiers, fleet=fleet, step=saved, rng=rng)
        size = stated.block_tokens
    if options.tiers and parts.forming is not None:
        raise InputError(
            f"tiers {', '.join(options.tiers)}: policy {name!r} forms batches of prompts, whose pasts are not loaded; "
            "allowed: policies whose engines take prompts as they come"
        )
    prefix: PrefixMemory | None = memory
    if options.tiers and memory is not None and size:
        prefix = tiered(
            memory, size, names=options.tiers, site=site, roster=roster, tables=lambda at: spec(at, Role.PREFILL).table
        )
    state = ClusterState(
        engine,
        fleet,
        roster,
        arrival_s=arrival,
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        prefix=prefix,
        stated=stated,
        coming=coming,
    )
    way = parts.transfer if options.transfer == "policy" else options.transfer
    return Cluster(
        parts, state=state, clients=clients, transfer=way, first_token=options.first_token, failures=options.failures
    )


def _columns(trace: Trace | TraceStream, clients: Clients, coming: RequestWindow | None) -> tuple[Floats, Ints, Ints]:
    """Arrivals, NaN where they are not known yet, and lengths of all requests. [s], [token]"""
    if isinstance(trace, TraceStream):
        assert coming is not None
        return coming.arrival_s, coming.input_tokens, coming.output_tokens
    arrival = trace.arrival.copy()
    if clients.timed != range(len(trace)):  # the others come when another has ended
        arrival[~np.isin(np.arange(len(trace)), clients.timed)] = np.nan
    return arrival, trace.input_tokens, trace.output_tokens


def _models(models: Sequence[Served], numbers: Sequence[Ints], requests: int) -> Models:
    """Which model each request asked for, and each instance served."""
    asked, serves = np.zeros(requests, np.int64), np.zeros(sum(map(len, numbers)), np.int64)
    for place, (each, own) in enumerate(zip(models, numbers, strict=True)):
        asked[np.asarray(each.rows)], serves[own] = place, place
    return Models(names=tuple(each.model for each in models), request=asked, instance=serves)


def _peak_flops(budget: GpuBudget, instances: Instances) -> float:
    """Dense peak of a GPU, on average over the time for which instances of unlike GPUs were there. [FLOP/s]"""
    peaks, held = [], instances.gpu_s
    for roster, each in budget.instances:
        mapping = roster.mapping[each]
        peak, ffn = peak_flops(roster.site.setup_of(mapping)), ffn_of(mapping)
        if ffn is not None and ffn.setup is not None:  # the mean over both pools of an instance
            share = float(ffn.mapping.gpus / mapping.gpus)
            peak = (1.0 - share) * peak + share * peak_flops(ffn.setup)
        peaks.append(peak)
    return peaks[0] if len(set(peaks)) == 1 or not held.any() else float(np.average(peaks, weights=held))


class Sampler:
    """Looks at the clusters of a run, one a model, every ``period`` [s], after all that happens at that time.

    Of more than ``MOST_SAMPLES`` samples, which a run gets that goes on long after its last arrival, every second
    one is kept, and the period doubles.
    """

    def __init__(self, clusters: Sequence[Cluster], period: float, pieces: Sequence[Pieces]) -> None:
        self._clusters, self._period, self._engine, self._pieces = clusters, period, clusters[0].engine, pieces
        self._rows: list[tuple[float, ...]] = []
        self._engine.at(0.0, OBSERVE, self._look)

    def _look(self) -> None:
        arrived, queued, running, free, blocks, *rest = map(sum, zip(*map(_sample, self._clusters), strict=True))
        self._rows.append((self._engine.now, arrived, queued, running, 1.0 - free / max(blocks, 1), *rest))
        halved = len(self._rows) > MOST_SAMPLES
        for each in self._pieces:
            each.looked(now=halved)
        if halved:  # an odd number: the last stays
            del self._rows[1::2]
            self._period *= 2
            for each in self._pieces:
                each.halve()
        if any(cluster.at_work for cluster in self._clusters):
            self._engine.at(self._engine.now + self._period, OBSERVE, self._look)

    def samples(self) -> Samples:
        """All samples, of a run whose requests have left."""
        table = np.array(self._rows, dtype=float).reshape(-1, 9).T
        whole = table.astype(np.int64)
        return Samples(
            time_s=table[0],
            arrivals=whole[1],
            finished=np.sum([each.finished() for each in self._pieces], axis=0),
            queued=whole[2],
            running=whole[3],
            kv_use=table[4],
            gpus=whole[5],
            prefill_gpus=whole[6],
            decode_gpus=whole[7],
            transfers=whole[8],
        )


def _sample(cluster: Cluster) -> tuple[int, ...]:
    """Requests that came, wait and decode, free blocks and all, GPUs held, by role, and transfers in flight."""
    view, roster = cluster.view, cluster.roster
    view.refresh()
    return (
        view.arrived,
        view.queued_requests.sum() + cluster.batches.waiting + len(cluster.recovery.parked),
        view.running_requests.sum(),
        view.free_blocks[roster.there].sum(),
        view.total_blocks[roster.there].sum(),
        *roster.held_gpus,
        cluster.fleet.wires.in_flight,
    )
