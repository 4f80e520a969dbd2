"""Run what a study of serving policies compares, each run once, and keep the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pandas as pd

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.records import RunResult
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.scaling import TIME
from disagg_sim.workload.trace import Trace
from lab.studies.claims import Keeping, kept

#: Engines of the years in which the studied papers ran theirs.
SCHEDULER = "vllm_v0_2024"


class Place(NamedTuple):
    """Where a study runs."""

    system: str  # GPU system
    profile: str  # efficiency profile
    recipes: Mapping[str, str]  # precision by model
    engine: str | None = None  # None: as the profile has it


def replicas(tp: int, instances: int) -> tuple[Replicas, ...]:
    """Equal instances of ``tp`` GPUs."""
    return (Replicas(mapping=Sharding(tp_attn=tp, tp_ffn=tp), instances=instances),)


class StudyCase(NamedTuple):
    """A serving policy on a deployment of a model."""

    label: str
    deployment: ServedDeployment
    policy: Policy
    model: str
    flip_s: float = 0.0  # out of service for a change of role [s]
    transfer: str = "policy"  # how caches move; as the policy's own system unless a claim tests it


def read_cases(path: Path, model: str) -> dict[str, dict[str, StudyCase]]:
    """Read the groups of cases of a file, on deployments that it lists; of ``model`` where a case names none."""
    table = read_mapping(path)
    places: dict[str, ServedDeployment] = {}
    for key, row in table.pop("deployments").items():
        made: dict[str, Any] = {name: replicas(*of) if isinstance(of, list) else of for name, of in row.items()}
        places[key] = ServedDeployment(**made)

    def case(at: str, policy: str, label: str = "", options: Mapping[str, Any] | None = None, **more: Any) -> StudyCase:
        return StudyCase(label, places[at], policy_named(policy, **options or {}), **{"model": model, **more})

    return {group: {name: case(**row) for name, row in rows.items()} for group, rows in table.items()}


class Workload(NamedTuple):
    """A trace with its limits."""

    trace: Trace
    slo: Slo
    stand_in: str  # what stands in for the trace; "" = it is the published one
    start: float = 1.0  # rate scale at which searches begin [1]
    scale_by: str = TIME  # how its rate is changed: time stamps divided, or more requests in the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """What one run showed."""

    summary: Summary


AnyMeasures = TypeVar("AnyMeasures", bound=RunMeasures)


class Bench(Keeping):
    """Settings, runs and whatever else a study computes, each once."""

    def __init__(self, place: Place, *, quick: bool) -> None:
        super().__init__()
        self.place, self.quick = place, quick
        self.runs = 0  # done so far [1]

    @kept
    def setting(self, model: str) -> Setup:
        """Model, hardware, recipe and profile; one object a model."""
        system, profile, recipes, engine = self.place
        return setup(model, system, recipes[model], profile, engine=engine)

    def run(self, trace: Trace, case: StudyCase, *, slo: Slo, options: RunOptions) -> RunResult:
        """Run a trace under a case.

        The papers count TTFT to the token that the prefill emits. In Arrow (arXiv 2505.11916) the wait for memory and
        the transfer after it are part of TPOT; in DynaServe the instance that computed the prompt goes on itself.
        """
        self.runs += 1
        own = replace(options, first_token="prefill", scheduler=SCHEDULER, transfer=case.transfer)
        return run(trace, case.deployment, case.policy, at=self.setting(case.model), slo=slo, options=own)


class RatedBench(Bench, ABC, Generic[AnyMeasures]):
    """A bench whose workloads run under cases at many rates, in search of capacities."""

    def __init__(
        self, workloads: Mapping[str, Workload], cases: Mapping[str, StudyCase], place: Place, *, quick: bool
    ) -> None:
        super().__init__(place, quick=quick)
        self.workloads, self.cases = workloads, cases

    @abstractmethod
    def look(self, workload: str, case: str, scale: float) -> AnyMeasures:
        """Run a workload under a case at a rate scale, and extract the numbers that claims use. [1]"""

    @abstractmethod
    def rate(self, workload: str, case: str) -> float:
        """Serving capacity. [request/s]"""

    def seen(self, workload: str, case: str, scale: float) -> AnyMeasures:
        """What a run at a rate scale showed. [1]"""
        return self.once(("seen", workload, case, scale), lambda: self.look(workload, case, scale))

    def ratio(self, workload: str, case: str, over: str) -> float:
        """Capacity of a case over that of another; NaN where the other has none. [1]"""
        least = self.rate(workload, over)
        return self.rate(workload, case) / least if least else float("nan")

    def runs_seen(self) -> list[tuple[str, str, AnyMeasures]]:
        """Every run at a rate so far: workload, case, results."""
        return [(*key[1:3], seen) for key, seen in self._kept.items() if key[0] == "seen"]

    def table(self, more: Callable[[AnyMeasures], dict[str, float]]) -> pd.DataFrame:
        """Every run at a rate so far with some columns ``more``, then those of a simulation's summary."""
        rows = [
            {"workload": workload, "case": case} | more(seen) | asdict(seen.summary)
            for workload, case, seen in self.runs_seen()
        ]
        return pd.DataFrame(rows)

    def capacities(self, searches: Iterable[tuple[str, str]]) -> pd.DataFrame:
        """Serving capacity of each search."""
        rows = []
        for name, case in searches:
            how, told = self.cases[case], self.workloads[name].stand_in
            about = {"workload": name, "case": case, "policy": how.label, "model": how.model, "stand_in": told}
            rows.append(about | {"gpus": how.deployment.gpus, "requests_per_s": self.rate(name, case)})
        return pd.DataFrame(rows)

    def stand_ins(self, *names: str) -> str:
        """What a claim that uses these workloads has to say of its data; "" = they are the paper's."""
        said = [self.workloads[name].stand_in for name in names]
        return "".join(f"stand-in: {text}; " for text in dict.fromkeys(said) if text)
