"""Simulate a trace on a deployment under a policy; ask the result for summary, capacity and loss against the plan."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd

from disagg_sim.domain import Slo
from disagg_sim.errors import InputError, above_zero
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.search.deployment import Deployment
from disagg_sim.simulation.capacity import Capacity, attains, serving_capacity
from disagg_sim.simulation.deployment import ServedDeployment, served, shares_of
from disagg_sim.simulation.kernel.compiled import code_home
from disagg_sim.simulation.metrics import Summary, by_class, by_model, limits_of, summary, tier_use, with_class
from disagg_sim.simulation.physical_site import require_fit, require_possible
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy, require_policy
from disagg_sim.simulation.records import Outcome, RunResult
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.scaling import TIME, at_rate
from disagg_sim.workload.stream import TraceStream, in_memory
from disagg_sim.workload.trace import Trace

#: Generations of a closed loop: all, those before the rate is taken, and those after it. [1]
GENERATIONS, BEFORE, AFTER = 6, 2, 1
#: The closed loop keeps so many batches of every prefill instance beside the decodes. [1]
PREFILLS_AHEAD = 3


def _spread(trace: Trace) -> str:
    isl, osl = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    spread = float(trace.input_tokens.std()) / isl
    return f"mean lengths {isl:.0f}/{osl:.0f}, inputs with a coefficient of variation of {spread:.2f}"


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
        """A row a model of the cluster and one of all, see ``by_model``; ``InputError`` where it serves one model."""
        if self.records.models is None:
            raise InputError(f"deployment {self.deployment.name!r} serves one model; allowed: summary()")
        limits = limits_of(self.trace, self.slo, self.options.classes)
        return by_model(self.records.frame(), limits, self.records.gpus_by_model())

    def frame(self) -> pd.DataFrame:
        """A row a request; columns of ``records.Requests``, times in s; ``class`` where the trace has classes."""
        return with_class(self.records.frame(), self.trace)

    def samples(self) -> pd.DataFrame:
        """The state over time; columns of ``records.Samples``."""
        held = self.records.samples
        return pd.DataFrame({field.name: getattr(held, field.name) for field in fields(held)})

    def decisions(self) -> pd.DataFrame:
        """The decision log: time, kind, instance, wish, reason."""
        return pd.DataFrame(self.records.decisions, columns=["tick_s", "kind", "instance", "wish", "reason"])

    def tiers(self) -> pd.DataFrame:
        """Where prompts were found, HBM and the tiers below it, see ``tier_use``; ``InputError`` without tiers."""
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
        """Explain the loss from the plan to this run, removing one assumption of the plan at a time.

        1. planned: the slower pool's rate at constant lengths, no queue, no transfer;
        2. full queue, planned lengths: the same, simulated; what batches, transfers, rounding to whole passes cost;
        3. full queue, lengths of the trace: what their spread costs;
        4. arrivals of the trace: where it offers less than the plan can serve, the rest is no loss but spare capacity.
           From the first arrival to the last finish: start and drain of a short trace count;
        5. inside the SLO: of these, the tokens of requests that meet it.

        A full queue is a closed loop, which is simulated: as many requests as the pools hold and a few more are always
        there; its rate is taken after two and before the last generation of them.

        Returns ``step``, ``tokens_per_s_per_gpu``, ``share_of_plan``, ``change`` against the step before, ``because``.
        ``InputError`` where the deployment was not planned by ``plan_pools``, so that nothing was planned.
        """
        plan = self.deployment.planned
        if plan is None or plan.lengths is None:  # no grid scored its decode instances
            raise InputError("a deployment that plan_pools did not plan has no planned throughput to compare with")
        trace, row = in_memory(self.trace), self.summary(slo)
        lengths, rate = plan.lengths, min(pool.request_rate_per_s for pool in (plan.prefill, plan.decode))
        planned = rate * lengths.mean_osl / plan.gpus  # output tokens of the slower pool over ALL GPUs [token/s]
        at, decodes = plan.prefill.members[0][0].setup, sum(each.batch * count for each, count in plan.decode.members)
        prefills = PREFILLS_AHEAD * sum(each.batch * count for each, count in plan.prefill.members)
        held = decodes + prefills + math.ceil(rate * (at.request_host if at is not None else 0.0))  # that fill both
        constant = trace.with_lengths(round(lengths.mean_isl), max(round(lengths.mean_osl), 1))
        offered = trace.rate * float(trace.output_tokens.mean()) / plan.gpus
        limits = f"TTFT {row.slo_ttft_s:g} s and TPOT {row.slo_tpot_s:g} s"
        ideal = f"slower pool at {lengths.mean_isl:g}/{lengths.mean_osl:g} tokens, no queue, no transfer"
        arrivals = f"the trace offers {offered:.4g} tokens/s/GPU, {offered / planned:.0%} of the plan; start and drain"
        steps = (
            ("planned", planned, ideal),
            (
                "full queue, planned lengths",
                self._saturated(held, constant) / plan.gpus,
                "batches, transfers, whole passes",
            ),
            ("full queue, lengths of the trace", self._saturated(held, trace) / plan.gpus, _spread(trace)),
            ("arrivals of the trace", row.throughput_tokens_per_s / plan.gpus, f"{arrivals} are in"),
            (
                "inside the SLO",
                row.goodput_tokens_per_s / plan.gpus,
                f"{row.slo_attainment:.1%} of the requests meet {limits}",
            ),
        )
        frame = pd.DataFrame(steps, columns=["step", "tokens_per_s_per_gpu", "because"])
        values = frame["tokens_per_s_per_gpu"]
        frame.insert(2, "share_of_plan", values / planned)
        frame.insert(3, "change", values / values.shift(1) - 1)
        return frame

    def _saturated(self, held: int, lengths: Trace) -> float:
        """Output tokens per second of a closed loop of so many requests with the lengths of a trace in turn."""
        rows = np.arange(GENERATIONS * held) % len(lengths)
        loop = Trace(
            arrival=np.zeros(rows.size),
            input_tokens=lengths.input_tokens[rows],
            output_tokens=lengths.output_tokens[rows],
            name=lengths.name,
        )
        requests = self._replayed(loop, held).requests
        done = np.flatnonzero(requests.status == Outcome.COMPLETED)
        order = done[np.argsort(requests.finish_s[done], kind="stable")]
        part = order[BEFORE * held : (GENERATIONS - AFTER) * held]
        tokens = np.cumsum(requests.output_tokens[part])
        slope, _ = np.polyfit(requests.finish_s[part], tokens, 1)  # whole batches finish together
        return float(slope)

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
        options=options,
    )
