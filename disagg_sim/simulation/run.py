"""Run one trace through a deployment under a serving policy."""

from __future__ import annotations

from dataclasses import replace

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.classes import limits_of, slo_of
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.models import shares_of
from disagg_sim.simulation.options import FULL, NONE, STREAM
from disagg_sim.simulation.physical_site import physical_site
from disagg_sim.simulation.pieces import Pieces, Sink
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.simulation.serve import Served, serve_models
from disagg_sim.simulation.site import Site
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


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

    >>> from disagg_sim.workload.synthetic import synthetic_stream
    >>> require_windows(synthetic_stream(rate=2.0, lengths=(512, 64), requests=3, name="one"), RunOptions())
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


def serve(trace: Trace, policy: Policy | str, site: Site, engine: Engine, options: RunOptions) -> RunResult:
    """Serve a trace at a site that is there already; ``run`` makes one from the physics.

    A step takes 10 ms and 1 ms a token of prefill: 100 tokens and 4 more outputs are done after 0.110 + 4 * 0.010 s:

    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> from disagg_sim.simulation.kv_link import LinkSpec
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
