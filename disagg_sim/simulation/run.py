"""Run one trace through a deployment under a serving policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, check_kinds
from disagg_sim.facts.hardware import WRITES
from disagg_sim.facts.load import list_specs
from disagg_sim.facts.traffic import Reuse
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.admission import AdmissionKind
from disagg_sim.simulation.cells import Rows, cell_of, forget, in_whole, joined_cells
from disagg_sim.simulation.classes import ServiceClass, limits_of, slo_of
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.failures import Failures
from disagg_sim.simulation.kernel.layout import Scheduling
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.models import shares_of
from disagg_sim.simulation.options import (
    FULL,
    LEAST_PERIOD_S,
    LONGEST_S,
    MOST,
    MOST_SAMPLES,
    NONE,
    RECORDS,
    STREAM,
    check_options,
    option,
)
from disagg_sim.simulation.physical_site import physical_site
from disagg_sim.simulation.pieces import Pieces, Sink
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.records import Requests, RunResult
from disagg_sim.simulation.serve import Served, serve_models
from disagg_sim.simulation.site import SCHEDULER, Site
from disagg_sim.simulation.stated_pasts import check_reuse
from disagg_sim.simulation.transfers import FIRST_TOKENS, WAYS
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run other than deployment and policy."""

    concurrency: int = option(
        0,
        "closed loop: so many requests, or sessions, are always there; 0: the arrivals of the trace",
        unit="request",
        low=0,
        high=MOST,
    )
    start_up_s: float = option(
        30.0,
        "time from the wish for an instance until it serves; weights are cached",
        unit="s",
        low=0.0,
        high=LONGEST_S,
    )
    flip_s: float = option(
        0.0, "time out of service of a drained instance that changes its role", unit="s", low=0.0, high=LONGEST_S
    )
    link: LinkSpec = field(default_factory=LinkSpec)
    admission: AdmissionKind | None = None  # beside that of the policy; None = all are admitted
    classes: tuple[ServiceClass, ...] = ()  # of requests with limits of their own
    failures: Failures | None = None  # None = nothing fails
    transfer: str = option(
        "policy",
        "how a cache moves: pulled once the receiver has reserved blocks; pushed into blocks reserved from the start; "
        "into an unlimited buffer of the receiver; or as in the system of the policy",
        choices=("policy", *WAYS),
    )
    first_token: str = option(
        "decode",
        "who emits the first token of a request that goes on elsewhere: the instance of its prefill, or that of its "
        "decode in its first step",
        choices=FIRST_TOKENS,
    )
    prefix_cache: bool = option(
        False, "instances remember prompts in the free part of their KV memory, until requests take its blocks"
    )
    prefix_cache_tokens: int = option(
        0, "tokens of prompts that an instance remembers beside its requests; 0: none", unit="token", low=0, high=MOST
    )
    tiers: tuple[str, ...] = ()  # below HBM, of ``kv_tiers`` of the system, the fastest first; () = none
    reuse: Reuse | None = None  # pasts as stated, in place of what caches find; None = what they find
    tier_writes: str = option(
        "through",
        "what goes into the tiers below HBM: every block that is computed, or what the tier above forgets",
        choices=WRITES,
    )
    sample_s: float = option(
        10.0,
        "time between two samples of the state; a scenario without it takes a 200th of the trace",
        unit="s",
        low=LEAST_PERIOD_S,
        infinite=True,
    )
    until_s: float = option(math.inf, "time at which the run is cut", unit="s", low=0.0, above=True, infinite=True)
    scheduler: str = option(
        SCHEDULER,
        "what engines admit, keep and hold in a step by default (hw_specs/schedulers)",
        choices=list_specs("scheduler"),
    )
    scheduling: str = option(
        "fcfs",
        "order in which engines serve what waits: as it came, or classes of a higher priority first; where blocks "
        "lack, the newest request is preempted, or the newest of the lowest priority",
        choices=tuple(each.name.lower() for each in Scheduling),
    )
    cells: int = option(
        1,
        "equal groups of instances, each with a router and every so-many-th request, or session, of its own",
        low=1,
        high=MOST,
    )
    records: str = option(
        FULL,
        "what is kept of requests: all until the end (full); they leave in pieces, as the run goes, into their table "
        "(stream); or they leave and are dropped (none). Without full, TTFT and TPOT percentiles are 0.5 % off at most",
        choices=RECORDS,
    )
    step_by_step: bool = option(False, "compute every decode step by itself, for comparison with the closed form")

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_options(self)
        check_kinds(self)
        if self.prefix_cache and self.prefix_cache_tokens:
            raise InputError(
                f"prefix_cache true and prefix_cache_tokens {self.prefix_cache_tokens}; allowed: one of the two"
            )
        if self.tiers and self.records != FULL:
            raise InputError(f"records {self.records!r} with tiers {', '.join(self.tiers)}; allowed: {FULL!r}")
        if self.reuse is not None:
            if self.prefix_cache or self.prefix_cache_tokens:
                raise InputError("reuse states what caches find; allowed: without prefix_cache and prefix_cache_tokens")
            check_reuse(self.reuse, self.tiers)
        elif self.tiers and not (self.prefix_cache or self.prefix_cache_tokens):
            raise InputError(
                f"tiers {', '.join(self.tiers)} below instances that remember nothing; allowed: beside prefix_cache or "
                "prefix_cache_tokens"
            )

    def last_arrival(self, trace: Trace | TraceStream) -> float:
        """Time at which the last request comes, or the run is cut; 0 in a closed loop. [s]"""
        return 0.0 if self.concurrency else min(trace.last_s, self.until_s)

    def check_samples(self, trace: Trace | TraceStream) -> None:
        """``InputError`` where a trace lasts for more than ``MOST_SAMPLES`` samples."""
        end = self.last_arrival(trace)
        if end / self.sample_s > MOST_SAMPLES:
            raise InputError(
                f"sample_s {self.sample_s:g}: trace {trace.name} lasts {end:g} s, {end / self.sample_s:,.0f} samples; "
                f"allowed: up to {MOST_SAMPLES:,} samples, sample_s from {end / MOST_SAMPLES:.3g} s"
            )


def run(
    trace: Trace | TraceStream,
    deployment: ServedDeployment,
    policy: Policy | str,
    *,
    at: Setup,
    slo: Slo,
    seed: int = 0,
    options: RunOptions = RunOptions(),
    sink: Sink | None = None,
) -> RunResult:
    """Serve a trace.

    Parameters
    ----------
    trace : Trace or TraceStream
        Requests; in a closed loop (``options.concurrency``) of requests or sessions, no arrival counts. Of a stream a
        window is held at a time: not with all records, nor with what knows all requests.
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
        Takes the records of requests that are over, piece by piece, in the order of the trace, where
        ``options.records`` is ``stream``.

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
    require_windows(trace, options)
    options.check_samples(trace)
    if options.cells > 1:
        return _in_cells(trace, deployment, policy, at=at, slo=slo, seed=seed, options=options, sink=sink)
    if (pool := deployment.encode) is not None:
        if isinstance(trace, TraceStream):
            raise InputError(f"trace {trace.name} comes in windows, with an encode pool; allowed: one of the two")
        deployment.check_encode(trace, at, options.concurrency, options.records)
        met, rest = pool.before(trace), replace(deployment, encode=None)
        return pool.counted(run(met, rest, policy, at=at, slo=slo, seed=seed, options=options), trace)
    if options.records == (FULL if sink is not None else STREAM):
        raise InputError(
            f"records {options.records!r} {'with' if sink else 'without'} a sink; allowed: one with 'stream' or "
            "'none', and none with 'full'"
        )
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
    if len(shares) == 1:
        pieces = None
        if options.records != FULL:
            limits = limits_of(trace, slo, options.classes) if options.classes else None
            pieces = Pieces(slo, limits, sink)
        one = (Served("", (), trace, sites[0]),)
        return serve_models(trace, policy, one, sites[0].deployment, Engine(seed), options, pieces)
    if options.records != FULL:
        raise InputError(f"records {options.records!r} with {len(shares)} models; allowed: {FULL!r}")
    models = [
        Served(each.model, each.rows.tolist(), each.trace, site) for each, site in zip(shares, sites, strict=True)
    ]
    return serve_models(trace, policy, models, deployment, Engine(seed), options)


def require_windows(trace: Trace | TraceStream, options: RunOptions) -> None:
    """Raise where a run needs all requests at once, and its trace is a stream.

    >>> from disagg_sim.workload.stream import InMemoryStream
    >>> one = Trace(arrival=[0.0], input_tokens=[5], output_tokens=[1])
    >>> require_windows(TraceStream(name="one", window=1, source=InMemoryStream(one)), RunOptions())
    Traceback (most recent call last):
    disagg_sim.errors.InputError: trace one comes in windows, with records 'full'; allowed: records 'stream', 'none'
    """
    if isinstance(trace, Trace):
        return
    said = f"trace {trace.name} comes in windows, with"
    if options.records == FULL:
        raise InputError(f"{said} records {FULL!r}; allowed: records {STREAM!r}, {NONE!r}")
    whole = {
        "concurrency": options.concurrency,
        "failures": options.failures,
        "reuse": options.reuse,
        "prefix_cache": options.prefix_cache,
        "prefix_cache_tokens": options.prefix_cache_tokens,
        "classes": options.classes,
    }
    for name, there in whole.items():
        if there:
            raise InputError(f"{said} {name}; allowed: without {name}, or a trace that is held whole (window 0)")


def _in_cells(
    trace: Trace | TraceStream,
    deployment: ServedDeployment,
    policy: Policy | str,
    *,
    at: Setup,
    slo: Slo,
    seed: int,
    options: RunOptions,
    sink: Sink | None,
) -> RunResult:
    """One cell after the other."""
    found, cells = [], options.cells
    parts = [cell_of(trace, deployment, options, seed, cell) for cell in range(cells)]
    for cell, (rows, own, part, rest, stream) in enumerate(parts):
        into = None if sink is None else partial(_handed_on, sink, rows, cell, cells)
        found.append(run(own, part, policy, at=at, slo=slo, seed=stream, options=rest, sink=into))
        forget()
    return joined_cells(found, [each.rows for each in parts], seed)


def _handed_on(sink: Sink, rows: Rows, cell: int, cells: int, piece: Requests) -> None:
    sink(in_whole(piece, rows, cell, cells))


def serve(trace: Trace, policy: Policy | str, site: Site, engine: Engine, options: RunOptions) -> RunResult:
    """Serve a trace at a site that is there already; ``run`` makes one from the physics.

    Takes ``policy`` (a registered name, or ``policy_named(name, option=...)``). Returns times as ``run`` does [s].

    A step takes 10 ms and 1 ms a token of prefill: 100 tokens and 4 more outputs are done after 0.110 + 4 * 0.010 s:

    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> at, engine, table = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="kernels"), Engine(0), StepTable.affine
    >>> one = ServedDeployment(name="one", gpus=1, colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),))
    >>> times = {"start_up_s": 0.0, "flip_s": 0.0}
    >>> times["tables"] = lambda mapping, most: table(step=0.010, per_token=0.001, max_sequences=most)
    >>> link = {"link": LinkSpec(), "link_bandwidth": 1e11, "link_latency_s": 0.0, "slo": Slo(ttft=1.0, tpot=0.1)}
    >>> rest = {"prompt_tokens": 100, "output_tokens": 5, "blocks": lambda mapping, limits: 100, "rng": engine.rng}
    >>> site = Site(setup=at, deployment=one, **times, **link, **rest)
    >>> trace = Trace(arrival=[0.0], input_tokens=[100], output_tokens=[5])
    >>> found = serve(trace, "vllm", site, engine, RunOptions()).requests
    >>> f"{found.first_token_s[0]:.3f} {found.finish_s[0]:.3f}"
    '0.110 0.150'
    """
    return serve_models(trace, policy, (Served("", (), trace, site),), site.deployment, engine, options)
