"""Plan the runs of a scenario, each with a digest of everything that its result depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from disagg_sim.facts import load
from disagg_sim.physics.setup import Setup
from disagg_sim.scenario.spec import PolicyChoice, Scenario
from disagg_sim.scenario.traces import TraceSource
from disagg_sim.simulation.deployment import PARTS, ServedDeployment, shares_of
from disagg_sim.simulation.instance_variants import bare
from disagg_sim.simulation.options import NONE
from disagg_sim.simulation.physical_site import require_possible
from disagg_sim.sweep.digests import code_digest, digest_of
from disagg_sim.sweep.store import Key
from disagg_sim.workload import scaling
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Tables of a store: one block a run in each; a run is done when its row of ``runs`` is there, written last.
REQUESTS, SAMPLES, DECISIONS, RUNS = "requests", "samples", "decisions", "runs"
#: One block a search for a capacity.
CAPACITY = "capacity"
TABLES = (REQUESTS, SAMPLES, DECISIONS, RUNS, CAPACITY)
ROOMS = ("facts", "physics", "techniques", "workload", "search", "simulation", "sweep")  # whose code decides a result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One policy on one deployment under one trace at one rate; or, without a rate, the search for its capacity."""

    scenario: Scenario
    deployment: ServedDeployment
    choice: PolicyChoice
    source: TraceSource
    rate_scale: float | None  # None = the search for the capacity [1]
    requests: int  # of the trace [request]
    digest: str

    @property
    def name(self) -> str:
        """``eight/arrow-conv-x1.5``: where its blocks lie in every table."""
        return f"{self.deployment.name}/{self._name}"

    @property
    def _name(self) -> str:
        rate = "" if self.rate_scale is None else f"-x{self.rate_scale:g}"
        return f"{self.choice.label}-{self.source.name}{rate}"

    @property
    def table(self) -> str:
        """The table whose block marks the run as done."""
        return CAPACITY if self.rate_scale is None else RUNS

    def key(self, table: str) -> Key:
        """Its block of a table."""
        return Key(table, self.deployment.name, self._name, self.digest)

    @property
    def blocks(self) -> tuple[Key, ...]:
        """Its blocks of all tables."""
        kept = (REQUESTS,) if self.scenario.run.records != NONE else ()
        tables = (CAPACITY,) if self.rate_scale is None else (*kept, SAMPLES, DECISIONS, RUNS)
        return tuple(self.key(table) for table in tables)

    def anywhere(self) -> Run:
        """Make paths absolute, for a process in another directory."""
        files = tuple(str(Path(path).absolute()) for path in self.scenario.policy_files)
        source = replace(self.source, path=str(Path(self.source.path).absolute())) if self.source.path else self.source
        return replace(self, scenario=replace(self.scenario, policy_files=files), source=source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScenarioPlan:
    """All runs of a scenario: deployments, in each the traces, in each the rates, in each the policies."""

    scenario: Scenario
    runs: tuple[Run, ...]
    searches: tuple[Run, ...]  # for capacities
    notes: tuple[str, ...]  # what the readers of the traces dropped, sorted or assumed

    @property
    def tasks(self) -> tuple[Run, ...]:
        """Runs, then searches."""
        return self.runs + self.searches


def plan_scenario(scenario: Scenario) -> ScenarioPlan:
    """Plan every combination of the scenario; refuse an SLO that no request can meet."""
    what, specs = scenario.setup, digest_of(_specs(scenario))
    notes = []
    for source in scenario.traces:
        trace = source.load(scenario.seed)
        if scenario.sampled:
            scenario.run.check_samples(source.at_rate(scenario.seed, min(source.rate_scales)))
        notes += [f"{source.name}: {note}" for note in trace.notes]
        if source.scale_by == scaling.REQUESTS:
            notes.append(f"{source.name}: rates by fewer or more requests at unchanged time, seed {scenario.seed}")
        for deployment in scenario.deployments:
            for choice in scenario.policies:
                require_possible(what, deployment, choice.parts, trace, scenario.slo, scenario.run.classes)
            notes += [f"{source.name}: {note}" for note in _beyond(trace, deployment, what)]
    return ScenarioPlan(
        scenario=scenario,
        runs=tuple(_runs(scenario, specs, search=False)),
        searches=tuple(_runs(scenario, specs, search=True)) if scenario.capacity is not None else (),
        notes=tuple(dict.fromkeys(notes)),
    )


def _beyond(trace: Trace | TraceStream, deployment: ServedDeployment, usual: Setup) -> Iterator[str]:
    """Yield a line for each model with requests beyond its context."""
    for share in shares_of(trace, deployment, PARTS, usual):
        own, model = share.trace.windows(), share.setup.model
        if beyond := sum(int((each.input_tokens + each.output_tokens > model.max_context).sum()) for each in own):
            yield (
                f"{beyond} of {len(share.trace)} requests exceed the context of {model.name} "
                f"({model.max_context} tokens) and are rejected"
            )


def _runs(scenario: Scenario, specs: str, *, search: bool) -> Iterator[Run]:
    """The runs at every rate, or the searches for capacities."""
    aim = scenario.capacity if search else None
    for deployment, source in product(scenario.deployments, scenario.traces):
        trace = (replace(source, path="", rate_scales=()), source.content())
        scales: tuple[float | None, ...] = (None,) if search else source.rate_scales
        for scale, choice in product(scales, scenario.policies):
            served = _instances(deployment)
            values = (served, choice, trace, scale, aim, scenario.slo, scenario.seed, scenario.run, specs)
            yield Run(
                scenario=scenario,
                deployment=deployment,
                choice=choice,
                source=source,
                rate_scale=scale,
                requests=_requests(source, scenario.seed, scale),
                digest=digest_of(values),
            )


def _instances(deployment: ServedDeployment) -> tuple[Any, ...]:
    """List the values of a deployment, its setups by their specs."""
    parts = [
        (part, bare(each.mapping), each.instances, each.limits, _specs_of(each.setup), own)
        for part in PARTS
        for each in deployment.part(part)
        for own in [each.ffn and (each.ffn.mapping, each.ffn.microbatches, _specs_of(each.ffn.setup))]
    ]
    encode, pool = tuple[Any, ...](), deployment.encode
    if pool is not None:
        step = pool.step
        encode = pool.instances, step.images, step.height, step.width, step.cached, _specs_of(step.setup)
    return deployment.name, deployment.gpus, parts, _specs_of(deployment.setup), encode


def _specs_of(at: Setup | None) -> tuple[Any, ...]:
    """List the specs that determine how instances of a setup behave; empty without a setup of their own."""
    if at is None:
        return ()
    own = at.model, at.system, at.precision, at.profile, at.engine, at.overheads, at.speculation, at.techniques
    return (*own, load.load_efficiency(at.system.name))


def _requests(source: TraceSource, seed: int, scale: float | None) -> int:
    """Requests of a run; of a search, those of the trace at its own rate. [request]"""
    grown = scale if scale is not None and source.scale_by == scaling.REQUESTS else 1.0
    return round(len(source.load(seed)) * grown)


def _specs(scenario: Scenario) -> tuple[Any, ...]:
    what = scenario.setup
    lengths = [source.synthetic.lengths for source in scenario.traces if source.synthetic is not None]
    traffic = [load.load_traffic(name) for name in lengths if isinstance(name, str)]
    own = [Path(path).read_text(encoding="utf-8") for path in scenario.policy_files]
    return (
        *_specs_of(what),
        load.load_scheduler(scenario.run.scheduler),
        traffic,
        own,
        version("disagg-sim"),
        code_digest(ROOMS),
    )
