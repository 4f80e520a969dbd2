"""Simulate a trace on a deployment under a policy; ask the result for summary, capacity and loss against the plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace

import pandas as pd

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, above_zero
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.search.deployment import Deployment
from disagg_sim.simulation.capacity import Capacity, attains, serving_capacity
from disagg_sim.simulation.classes import by_class, by_model, limits_of, with_class
from disagg_sim.simulation.deployment import ServedDeployment, served
from disagg_sim.simulation.feasibility import require_fit, require_possible
from disagg_sim.simulation.kernel.compiled import code_home
from disagg_sim.simulation.loss import MatchedDeployment, loss
from disagg_sim.simulation.metrics import Summary, summary, tier_use
from disagg_sim.simulation.models import shares_of
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy, require_policy
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.workload.scaling import TIME, at_rate
from disagg_sim.workload.stream import TraceStream, in_memory
from disagg_sim.workload.trace import Trace

#: Limits where none are given: TTFT as ``plan_pools`` allows by default, ten tokens per second to every reader. [s]
DEFAULT_SLO = Slo(ttft=10.0, tpot=0.1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult(Shown):
    """One run with its inputs."""

    records: RunResult
    slo: Slo
    rate_scale: float  # of the trace's own request rate [1]
    scale_by: str  # how it was scaled: of ``scaling.SCALE_BY``
    source: Trace | TraceStream  # at its own rate
    trace: Trace | TraceStream  # at that rate
    deployment: ServedDeployment
    setup: Setup
    policy: Policy
    plan: MatchedDeployment | None  # None of a deployment that was not matched
    options: RunOptions

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def summary(self, slo: Slo | None = None) -> Summary:
        """All numbers of the run, against the SLO and classes of the run, or against another SLO for all requests."""
        return self._summarised(self.records, self.trace, slo, self.rate_scale)

    def classes(self) -> pd.DataFrame:
        """A row a class of the trace: attainment of its own limits, goodput, percentiles; see ``classes.by_class``."""
        return by_class(self.records.frame(), in_memory(self.trace), self.slo, self.options.classes)

    def models(self) -> pd.DataFrame:
        """A row a model of the cluster and one of all: attainment, percentiles, tokens a GPU; see ``by_model``.

        Raises
        ------
        InputError
            Where the deployment serves one model.
        """
        if self.records.models is None:
            raise InputError(f"deployment {self.deployment.name!r} serves one model; allowed: summary()")
        limits = limits_of(self.trace, self.slo, self.options.classes)
        return by_model(self.records.frame(), limits, self.records.gpus_by_model())

    def frame(self) -> pd.DataFrame:
        """A row a request; columns of ``records.Requests``, times in s; ``class`` where the trace has classes."""
        return self.records.frame() if self.trace.classes is None else with_class(self.records.frame(), self.trace)

    def samples(self) -> pd.DataFrame:
        """The state over time; columns of ``records.Samples``."""
        held = self.records.samples
        return pd.DataFrame({field.name: getattr(held, field.name) for field in fields(held)})

    def decisions(self) -> pd.DataFrame:
        """The decision log: time, kind, instance, wish, reason."""
        return pd.DataFrame(self.records.decisions, columns=["tick_s", "kind", "instance", "wish", "reason"])

    def tiers(self) -> pd.DataFrame:
        """Where prompts were found, HBM and the tiers below it; see ``metrics.tier_use``.

        Raises
        ------
        InputError
            A run without tiers.
        """
        if not self.options.tiers:
            raise InputError("no tiers below HBM in this run; allowed: one with tiers among its options")
        return tier_use(self.records.frame(), self.options.tiers)

    def capacity(self, share: float = 0.9, slo: Slo | None = None) -> Capacity:
        """The largest request rate at which ``share`` [1] of the requests are inside the SLO, by bisection.

        Rate scales are relative to this run's, and made as its own was; every rate that was tried is among its
        ``runs``, and ``met_again`` says where the share was reached above a rate that missed it.
        """

        def at(scale: float) -> Summary:
            trace = at_rate(self.source, self.rate_scale * scale, self.scale_by, seed=self.records.seed)
            return self._summarised(self._replayed(trace), trace, slo, scale)

        return serving_capacity(at, attains(share), rate=self.trace.rate)

    def loss(self, slo: Slo | None = None) -> pd.DataFrame:
        """Tabulate the steps from planned to simulated throughput; simulates two closed loops, see ``loss.loss``.

        Parameters
        ----------
        slo : Slo, optional
            In place of the run's own, for the last step.

        Raises
        ------
        InputError
            When the deployment was not planned by ``plan_pools``, so that nothing was planned.
        """
        if self.plan is None:
            raise InputError("a deployment that plan_pools did not plan has no planned throughput to compare with")
        return loss(self.plan, in_memory(self.trace), self.summary(slo), self._replayed)

    def _summarised(
        self, records: RunResult, trace: Trace | TraceStream, slo: Slo | None, rate_scale: float
    ) -> Summary:
        limits = limits_of(trace, self.slo, self.options.classes) if slo is None and self.options.classes else None
        return summary(records, slo or self.slo, rate_scale=rate_scale, limits=limits)

    def _replayed(self, trace: Trace | TraceStream, concurrency: int | None = None) -> RunResult:
        """Records of another trace, or a closed loop, where all else is as in this run."""
        options = self.options if concurrency is None else replace(self.options, concurrency=concurrency)
        records = run(
            trace, self.deployment, self.policy, at=self.setup, slo=self.slo, seed=self.records.seed, options=options
        )
        return replace(records, policy=self.records.policy)


def simulate(
    deployment: Deployment | ServedDeployment,
    trace: Trace | TraceStream,
    policy: str | Policy = "disaggregated",
    *,
    slo: Slo | None = None,
    rate_scale: float = 1.0,
    scale_by: str = TIME,
    seed: int = 0,
    options: RunOptions | None = None,
) -> SimulationResult:
    """Replay a trace through a deployment under a serving policy.

    Parameters
    ----------
    deployment : Deployment or ServedDeployment
        A matched one, such as ``plan_pools(...).deployment``, which is served on the specs that it was planned for;
        or parts written by hand, with a ``setup`` of their own. ``Replicas`` on unlike GPUs each have one.
    trace : Trace or TraceStream
        Of ``load_trace``, ``synthetic_trace``, or made from arrays; or of ``synthetic_stream``, which holds a window of
        its requests at a time, for options with ``records="none"``.
    policy : str or Policy
        ``"vllm"``, ``"disaggregated"``, ``"arrow"``, ...; or a policy with options of its own. A matched
        deployment under ``"disaggregated"`` batches as it was planned. Other policies prefill by their own rules, and
        decode no more sequences together than planned.
    slo : Slo, optional
        What SLO-aware policies steer by and the summary measures; by default TTFT 10 s and TPOT 0.1 s. [s]
    rate_scale : float
        By what the request rate of the trace is multiplied. [1]
    scale_by : str
        ``"time"``: time stamps are divided by it; ``"requests"``: fewer or more requests at unchanged time, see
        ``workload.scaling``.
    seed : int
        Of all random streams.
    options : RunOptions, optional
        Start-up and flip times, network, period of samples (``disagg_sim.simulation.run_options.RunOptions``).

    Returns
    -------
    SimulationResult
        With ``summary()``, ``frame()``, ``samples()``, ``decisions()``, ``capacity()`` and, of a matched
        deployment, ``loss()``.

    Raises
    ------
    InputError
        A deployment that lacks a part that the policy needs, has too few GPUs, or does not say what it serves.
    InfeasibleError
        A model that does not fit; an SLO that not even the shortest request alone can meet.
    PolicyError
        The policy wished the impossible; ``so_far`` holds the records until then.
    UnknownNameError
        No such policy.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> parts = ds.ServedDeployment(
    ...     name="one",
    ...     gpus=1,
    ...     colocated=(ds.Replicas(mapping=ds.Sharding(), instances=1),),
    ...     setup=ds.setup("llama_3_1_8b", "h100_sxm", "fp8"),
    ... )
    >>> trace = ds.Trace(arrival=[0.0, 1.0], input_tokens=[100, 200], output_tokens=[5, 1])
    >>> ds.simulate(parts, trace, "vllm").summary().completed
    2
    """
    if note := code_home().note:
        warnings.warn(note, stacklevel=2)  # Python shows it once
    parts = served(deployment) if isinstance(deployment, Deployment) else deployment
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    name = policy if isinstance(policy, str) else type(policy).__name__
    limits = slo or DEFAULT_SLO
    require_policy(name, chosen)
    parts.require(name, chosen.needs)
    at = shares_of(trace, parts, chosen.needs)[0].setup
    require_fit(at, parts)
    options = options or RunOptions()
    require_possible(at, parts, chosen.needs, trace, limits, options.classes)
    replayed = at_rate(trace, above_zero("rate_scale", rate_scale), scale_by, seed=seed)
    records = run(replayed, parts, chosen, at=at, slo=limits, seed=seed, options=options)
    plan = None
    if (planned := parts.planned) is not None and planned.lengths is not None:  # a grid scored its decode instances
        plan = MatchedDeployment(lengths=planned.lengths, deployment=planned)
    return SimulationResult(
        records=replace(records, policy=policy) if isinstance(policy, str) else records,
        slo=limits,
        rate_scale=rate_scale,
        scale_by=scale_by,
        source=trace,
        trace=replayed,
        deployment=parts,
        setup=at,
        policy=chosen,
        plan=plan,
        options=options,
    )
