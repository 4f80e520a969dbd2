"""From plan to proof: a deployment and a trace to records, metrics, and the loss against what was planned.

The loss has steps, each one assumption of the plan less:

1. planned: the slower pool's rate at constant lengths, no queue, no transfer;
2. full queue, planned lengths: the same lengths, simulated; what batches, transfers and rounding to whole passes cost;
3. full queue, lengths of the trace: what their spread costs;
4. arrivals of the trace: requests come when they come; where the trace offers less than the plan can serve, the rest
   is no loss but spare capacity. Taken from the first arrival to the last finish: start and drain of a short
   trace count;
5. inside the SLO: of these, the tokens of requests that meet it.

A full queue is a closed loop: as many requests as the pools hold and a few more are always there; its rate is taken
after two and before the last generation of them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd

from disagg_sim.domain import Conditions, Deployment, Slo
from disagg_sim.errors import InputError, above_zero
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.simulation.capacity import Capacity, attains, serving_capacity
from disagg_sim.simulation.deployment import ServedDeployment, served
from disagg_sim.simulation.feasibility import require_fit, require_possible
from disagg_sim.simulation.kernel.compiled import code_home
from disagg_sim.simulation.metrics import Summary, summary
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy, require_policy
from disagg_sim.simulation.records import Outcome, RunResult
from disagg_sim.simulation.run import RunOptions, run
from disagg_sim.workload.trace import Trace

#: Limits where none are given: TTFT as ``match_rates`` allows by default, ten tokens per second to every reader. [s]
DEFAULT_SLO = Slo(ttft=10.0, tpot=0.1)
#: Generations of a closed loop: all, those before the rate is taken, and those after it. [1]
GENERATIONS, BEFORE, AFTER = 6, 2, 1
#: The closed loop keeps so many batches of every prefill instance beside the decodes. [1]
PREFILLS_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a matched deployment promises."""

    conditions: Conditions
    deployment: Deployment

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens of the slower pool over ALL GPUs. [token/s]"""
        pools = (self.deployment.prefill, self.deployment.decode)
        rate = min(pool.request_rate_per_s for pool in pools)
        return rate * self.conditions.osl / sum(pool.gpus for pool in pools)

    @property
    def in_flight(self) -> int:
        """Requests that keep both pools full. [request]"""
        decode = sum(each.batch * count for each, count in self.deployment.decode.members)
        return decode + PREFILLS_AHEAD * sum(each.batch * count for each, count in self.deployment.prefill.members)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult(Shown):
    """One run with what it was asked for."""

    records: RunResult
    slo: Slo
    rate_scale: float  # of the trace's own request rate [1]
    trace: Trace  # at that rate
    deployment: ServedDeployment
    setting: Setup
    policy: Policy
    plan: Plan | None  # None of a deployment that was not matched
    options: RunOptions

    def summary(self, slo: Slo | None = None) -> Summary:
        """All numbers of the run, against the SLO that it was simulated for, or another."""
        return summary(self.records, slo or self.slo, rate_scale=self.rate_scale)

    def frame(self) -> pd.DataFrame:
        """A row a request; columns of ``records.Requests``, times in s."""
        return self.records.frame()

    def samples(self) -> pd.DataFrame:
        """The state over time; columns of ``records.Samples``."""
        held = self.records.samples
        return pd.DataFrame({field.name: getattr(held, field.name) for field in fields(held)})

    def decisions(self) -> pd.DataFrame:
        """The decision log: time, kind, instance, wish, reason."""
        return pd.DataFrame(self.records.decisions, columns=["tick_s", "kind", "instance", "wish", "reason"])

    def capacity(self, share: float = 0.9, slo: Slo | None = None) -> Capacity:
        """The largest request rate at which ``share`` [1] of the requests are inside the SLO, by bisection.

        Rate scales are relative to this run's; every rate that was tried is among its ``runs``, and ``met_again``
        says where the share was reached above a rate that missed it.
        """

        def at(scale: float) -> Summary:
            records = run(
                self.trace.scaled(scale),
                self.deployment,
                self.policy,
                setting=self.setting,
                slo=self.slo,
                seed=self.records.seed,
                options=self.options,
            )
            return summary(replace(records, policy=self.records.policy), slo or self.slo, rate_scale=scale)

        return serving_capacity(at, attains(share), rate=self.trace.rate)

    def loss(self, slo: Slo | None = None) -> pd.DataFrame:
        """From planned to simulated throughput, step by step; simulates two closed loops.

        Parameters
        ----------
        slo : Slo, optional
            In place of the run's own, for the last step.

        Returns
        -------
        DataFrame
            ``step``, ``tokens_per_s_per_gpu``, ``share_of_plan``, ``change`` against the step before, ``because``.

        Raises
        ------
        InputError
            When the deployment was not matched by ``match_rates``, so that nothing was planned.
        """
        if self.plan is None:
            raise InputError("a deployment that match_rates did not plan has no planned throughput to lose against")
        row, gpus = self.summary(slo), self.deployment.gpus
        planned, lengths = self.plan.tokens_per_s_per_gpu, self.plan.conditions
        constant = self.trace.with_lengths(round(lengths.isl), max(round(lengths.osl), 1))
        offered = self.trace.rate * float(self.trace.output_tokens.mean()) / gpus
        limits = slo or self.slo
        steps = (
            ("planned", planned, f"slower pool at {lengths.isl:g}/{lengths.osl:g} tokens, no queue, no transfer"),
            ("full queue, planned lengths", self._saturated(constant), "batches, transfers, whole passes"),
            ("full queue, lengths of the trace", self._saturated(self.trace), self._lengths_text()),
            (
                "arrivals of the trace",
                row.throughput_tokens_per_s / gpus,
                f"the trace offers {offered:.4g} tokens/s/GPU, {offered / planned:.0%} of the plan; "
                "start and drain are in",
            ),
            (
                "inside the SLO",
                row.goodput_tokens_per_s / gpus,
                f"{row.slo_attainment:.1%} of the requests meet TTFT {limits.ttft:g} s and TPOT {limits.tpot:g} s",
            ),
        )
        frame = pd.DataFrame(steps, columns=["step", "tokens_per_s_per_gpu", "because"])
        values = frame["tokens_per_s_per_gpu"]
        frame.insert(2, "share_of_plan", values / planned)
        frame.insert(3, "change", values / values.shift(1) - 1)
        return frame

    def _lengths_text(self) -> str:
        trace = self.trace
        isl, osl = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
        spread = float(trace.input_tokens.std()) / isl
        return f"mean lengths {isl:.0f}/{osl:.0f}, inputs with a coefficient of variation of {spread:.2f}"

    def _saturated(self, lengths: Trace) -> float:
        """Output tokens per second and GPU of a closed loop with the lengths of a trace, taken in turn. [token/s]"""
        assert self.plan is not None, "asked of a planned deployment only"
        held = self.plan.in_flight
        rows = np.arange(GENERATIONS * held) % len(lengths)
        loop = Trace(
            arrival=np.zeros(rows.size),
            input_tokens=lengths.input_tokens[rows],
            output_tokens=lengths.output_tokens[rows],
            name=lengths.name,
        )
        result = run(
            loop,
            self.deployment,
            self.policy,
            setting=self.setting,
            slo=self.slo,
            seed=self.records.seed,
            options=replace(self.options, concurrency=held),
        )
        done = np.flatnonzero(result.requests.status == Outcome.COMPLETED)
        order = done[np.argsort(result.requests.finish_s[done], kind="stable")]
        part = order[BEFORE * held : (GENERATIONS - AFTER) * held]
        tokens = np.cumsum(result.requests.output_tokens[part])
        slope, _ = np.polyfit(result.requests.finish_s[part], tokens, 1)  # whole batches finish together
        return float(slope) / self.deployment.gpus


def simulate(
    deployment: Deployment | ServedDeployment,
    trace: Trace,
    policy: str | Policy = "disaggregated",
    *,
    slo: Slo | None = None,
    model: ModelSpec | str | None = None,
    system: SystemSpec | str | None = None,
    precision: str | None = None,
    profile: str | None = None,
    engine: str | None = None,
    rate_scale: float = 1.0,
    seed: int = 0,
    options: RunOptions | None = None,
) -> SimulationResult:
    """Replay a trace through a deployment under a serving policy.

    Parameters
    ----------
    deployment : Deployment or ServedDeployment
        A matched one, such as ``match_rates(...).deployment``, or parts written by hand.
    trace : Trace
        Of ``load_trace``, ``synthetic_trace``, or made from arrays.
    policy : str or Policy
        ``"vllm"``, ``"disaggregated"``, ``"arrow"``, ...; or a policy with options of its own. A matched
        deployment under ``"disaggregated"`` batches as it was planned. Other policies prefill by their own rules, and
        decode no more sequences together than planned.
    slo : Slo, optional
        What SLO-aware policies steer by and the summary measures; by default TTFT 10 s and TPOT 0.1 s. [s]
    model, system : spec or str, optional
        A matched deployment knows its own; needed for parts written by hand.
    precision, profile, engine : str, optional
        The same; profile ``"measured"`` and the profile's own engine where nothing says otherwise.
    rate_scale : float
        By what the request rate of the trace is multiplied. [1]
    seed : int
        Of all random streams.
    options : RunOptions, optional
        Start-up and flip times, network, period of samples (``disagg_sim.simulation.run.RunOptions``).

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
        No such policy, system, model, precision or profile.
    """
    if note := code_home().note:
        warnings.warn(note, stacklevel=2)  # Python shows it once
    plan = _plan_of(deployment) if isinstance(deployment, Deployment) else None
    parts = served(deployment) if isinstance(deployment, Deployment) else deployment
    said = plan.conditions if plan is not None else None
    where = _system_of(deployment) if isinstance(deployment, Deployment) else None
    served_model: ModelSpec | str | None = model or (said.model if said else None)
    served_on: SystemSpec | str | None = system or where
    recipe = precision or (said.precision if said else None)
    if served_model is None or served_on is None or recipe is None:
        lacking = {"model": served_model, "system": served_on, "precision": recipe}
        names = [f"{key}=..." for key, value in lacking.items() if value is None]
        raise InputError(f"the deployment does not say what it serves: give {', '.join(names)}")
    what = setup(
        served_model,
        served_on,
        recipe,
        profile or (said.profile if said else "measured"),
        engine or (said.engine if said else None) or None,
    )
    serving = policy_named(policy) if isinstance(policy, str) else policy
    name = policy if isinstance(policy, str) else None
    limits = slo or DEFAULT_SLO
    require_policy(name or type(serving).__name__, serving)
    parts.require(name or type(serving).__name__, serving.needs)
    require_fit(what, parts)
    require_possible(what, parts, serving.needs, trace, limits)
    at_rate = trace.scaled(above_zero("rate_scale", rate_scale))
    chosen = options or RunOptions()
    records = run(at_rate, parts, serving, setting=what, slo=limits, seed=seed, options=chosen)
    return SimulationResult(
        records=replace(records, policy=name or records.policy),
        slo=limits,
        rate_scale=rate_scale,
        trace=at_rate,
        deployment=parts,
        setting=what,
        policy=serving,
        plan=plan,
        options=chosen,
    )


def _plan_of(deployment: Deployment) -> Plan | None:
    """What a deployment was matched for; None when no grid scored its decode instances."""
    known = dict.fromkeys(instance.conditions for instance, _ in deployment.decode.members)
    conditions = next(iter(known), None)
    return Plan(conditions=conditions, deployment=deployment) if conditions is not None else None


def _system_of(deployment: Deployment) -> str | None:
    pools = (deployment.prefill, deployment.decode)
    names = tuple(dict.fromkeys(instance.system for pool in pools for instance, _ in pool.members))
    if len(names) > 1:
        raise InputError(f"pools on {' and '.join(names)}: simulation serves both on one system")
    return next(iter(names), None) or None
