"""Read a scenario's YAML into a frozen ``Scenario``: policies x deployments x traces x rates; report all faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator

from disagg_sim.choices import MOST_DRAFTS, MOST_SEED
from disagg_sim.domain import Slo
from disagg_sim.errors import DisaggSimError, SpecError, quoted, unknown_word
from disagg_sim.facts import load
from disagg_sim.facts.faults import SeveralFaultsError, expected, faults_of_call, require_few
from disagg_sim.facts.schema import (
    Named,
    OneOf,
    PlainName,
    Range,
    Several,
    Strict,
    Title,
    Written,
    checked_or_faults,
    distinct_by,
    plain_name,
)
from disagg_sim.facts.yaml_files import find_document, read_mapping, spec_error
from disagg_sim.memory import require_memory
from disagg_sim.physics.setup import Setup, engine_names
from disagg_sim.scenario.deployments import (
    DeploymentKeys,
    Profile,
    served_by_name,
    setup_named,
    speculation_named,
    techniques_of,
)
from disagg_sim.scenario.options import KnownPolicies, read_failures, read_options
from disagg_sim.scenario.traces import TraceKeys, TraceSource, replacing
from disagg_sim.simulation.admission import ADMISSIONS, AdmissionKind
from disagg_sim.simulation.deployment import PARTS, ServedDeployment, shares_of
from disagg_sim.simulation.metrics import MODEL, ServiceClass, limits_of
from disagg_sim.simulation.options import FULL, options_of
from disagg_sim.simulation.physical_site import require_fit
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.facts_keys import with_techniques
from disagg_sim.techniques.prefix.play_tiers import below
from disagg_sim.techniques.registry import asked_techniques
from disagg_sim.units import GB
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Criteria of serving capacity: a share of the requests meets the SLO, or their 99th percentiles do.
CRITERIA = ("attainment", "p99")
#: Memory of a process with its libraries and tables [B];
PROCESS = 0.4 * GB
#: for each request in the trace and the run, in the table at the end, and for each block of a prompt. [B]
REQUEST, RECORD, BLOCK = 260.0, 250.0, 24.0
#: Memory from which on ``specs check`` prints a note. [B]
NOTED_MEMORY = 2.0 * GB


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A serving policy with its options."""

    kind: str  # name in the registry
    label: str  # its name in results
    options: tuple[tuple[str, Any], ...] = ()
    admission: AdmissionKind | None = None  # in place of the scenario's; None = the scenario's

    @property
    def policy(self) -> Policy:
        """Make the policy."""
        return policy_named(self.kind, **dict(self.options))

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a deployment that the policy needs."""
        return self.policy.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityAim:
    """Criterion of the search for the serving capacity."""

    criterion: str = "attainment"  # of ``CRITERIA``
    share: float = 0.9  # of requests inside the SLO, for "attainment" [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario as a person wrote it: every combination of its tuples is a run."""

    source: str  # file that it was read from
    name: str
    model: str
    system: str
    precision: str
    profile: str
    engine: str  # "" = the system's own
    traces: tuple[TraceSource, ...]
    slo: Slo
    deployments: tuple[ServedDeployment, ...]
    policies: tuple[PolicyChoice, ...]
    seed: int = 0
    capacity: CapacityAim | None = None  # None = no search
    run: RunOptions = field(default_factory=RunOptions)
    policy_files: tuple[str, ...] = ()  # Python files that register policies of the user
    speculation: str = ""  # drafter and its acceptance; "" = none
    draft_tokens: int = 0  # default of a decode step, for parts without the key [token]
    techniques: str = ""  # of the registry, with their values; "" = none
    sampled: bool = False  # whether the file sets ``sample_s``; else a run has 200 samples

    @property
    def setup(self) -> Setup:
        """Setup of model, system, recipe and profile; the same object each time."""
        names = self.model, self.system, self.precision, self.profile, self.engine, self.speculation
        return setup_named(*names, self.techniques)


def load_scenario(name: str, *, trace: str = "", seed: int | None = None, run: bool = True) -> Scenario:
    """Read a scenario from a file, or a shipped one by its name; import, and so run, its policy files."""
    scenario, _ = _loaded(name, trace, run=run)
    return scenario if seed is None else replace(scenario, seed=seed)


def check_scenario(name: str) -> tuple[str, ...]:
    """Find the faults of a scenario without running its policy files."""
    scenario, known = _loaded(name, "", run=False)
    notes = [*known.notes()]
    for source in scenario.traces:
        trace = source.load(scenario.seed)
        if (needed := run_memory(trace, scenario.run.records)) > NOTED_MEMORY:
            notes.append(f"{name}: each process of a run on {trace.name} needs about {needed / GB:.1f} GB of memory")
    return tuple(notes)


def run_memory(trace: Trace | TraceStream, records: str) -> float:
    """Estimate the memory of a process that runs a trace. [B]"""
    if isinstance(trace, TraceStream):
        return PROCESS + REQUEST * trace.window
    blocks = 0 if trace.prefix is None else trace.prefix.ids.size
    return PROCESS + (REQUEST + RECORD * (records == FULL)) * len(trace) + BLOCK * blocks


@dataclass(frozen=True, slots=True)
class _Reading:
    """Context of the checks of a file."""

    folder: Path  # base of relative paths
    instead: str  # a trace in place of the file's; "" = none
    known: KnownPolicies


def _admission(value: object) -> AdmissionKind:
    """Read an admission: a name, or ``{kind: predicted_ttft, share: 0.8}`` with options of the kind."""
    given = {"kind": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise ValueError(f"{quoted(value)} is neither a name nor {{kind: NAME, ...}}; allowed: {', '.join(ADMISSIONS)}")
    name = given["kind"]
    if name not in ADMISSIONS:
        raise ValueError(unknown_word(name, tuple(ADMISSIONS)))
    options = read_options(options_of(ADMISSIONS[name]), {key: each for key, each in given.items() if key != "kind"})
    return expected(lambda: ADMISSIONS[name](**options))


def _run_options(value: object) -> RunOptions:
    if not isinstance(value, Mapping):
        raise ValueError(f"{quoted(value)} is not a mapping of keys such as sample_s, start_up_s")
    options = {key: each for key, each in value.items() if key not in ("failures", "tiers")}
    failures = read_failures(value["failures"]) if "failures" in value else None
    tiers = _tiers(value.get("tiers", ()))
    return expected(lambda: RunOptions(**read_options(options_of(RunOptions), options), failures=failures, tiers=tiers))


def _tiers(value: object) -> tuple[str, ...]:
    """Read tiers below HBM: ``dram``, or ``[dram, ssd]``."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SeveralFaultsError([(("tiers",), f"{quoted(value)} is no list of tiers, such as [dram, ssd]")])
    return tuple(names)


def _registered(paths: tuple[str, ...], info: Any) -> tuple[str, ...]:
    """Register the policies of some files, whose paths are relative to the scenario; return the paths."""
    files, faults = [], []
    for number, path in enumerate(paths):
        if not path.isprintable() or not path.strip():
            faults.append(((number,), f"{quoted(path)} is not the path of a file"))
            continue
        files.append(str(info.context.folder / path))
        try:
            info.context.known.take(files[-1])
        except DisaggSimError as error:
            faults.append(((number,), str(error)))
    if faults:
        raise SeveralFaultsError(faults)
    return tuple(files)


#: Keys of a policy in a scenario other than its options.
OF_CHOICE = ("kind", "label", "admission")


def _choice(value: object, info: Any) -> PolicyChoice:
    """Read a policy: a name, or ``{kind: dopd, label: dopd_slow, ...}`` with options of the policy."""
    given = {"kind": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise ValueError(f"{quoted(value)} is neither a name nor {{kind: NAME, ...}}")
    kind, known = given["kind"], info.context.known
    if kind.endswith(".py"):
        raise ValueError(f"{quoted(kind)} is a file, not the name of a policy; name files under policy_file")
    label, options = given.get("label", kind), {}
    if not isinstance(label, str):
        raise SeveralFaultsError([(("label",), f"{quoted(label)} is no plain name")])
    if (there := expected(known.options, kind)) is not None:
        options = read_options(there, {key: each for key, each in given.items() if key not in OF_CHOICE})
        if known.run:
            expected(lambda: policy_named(kind, **options))
    try:
        admission = _admission(given["admission"]) if "admission" in given else None
    except SeveralFaultsError as error:
        raise SeveralFaultsError((("admission", *place), reason) for place, reason in error.found) from None
    except ValueError as error:
        raise SeveralFaultsError([(("admission",), str(error))]) from None
    try:
        return PolicyChoice(kind=kind, label=plain_name(label), options=tuple(options.items()), admission=admission)
    except ValueError as error:
        raise SeveralFaultsError([(("label",), str(error))]) from None


class _Limits(Strict):
    """Keys of an SLO."""

    ttft_s: Annotated[float, Range(1e-6, 1e6, "s")]
    tpot_s: Annotated[float, Range(1e-6, 1e6, "s")]


class _ClassLimits(_Limits):
    """Keys of the SLO of one class."""

    priority: Annotated[int, Range(-1000, 1000)] = 0


class _Slo(_Limits):
    """Keys of ``slo``: limits of all requests, with other limits for some classes and models."""

    classes: dict[PlainName, _ClassLimits] = {}  # noqa: RUF012 - pydantic copies it
    models: dict[Annotated[str, load.spec_name("model")], _Limits] = {}  # noqa: RUF012


#: SLO of all requests, and of classes and models that have their own.
_Slos = tuple[Slo, tuple[ServiceClass, ...]]


def _slos_of(keys: _Slo) -> _Slos:
    classes = tuple(
        ServiceClass(name=name, slo=Slo(ttft=each.ttft_s, tpot=each.tpot_s), priority=each.priority)
        for name, each in keys.classes.items()
    )
    models = tuple(
        ServiceClass(name=name, slo=Slo(ttft=each.ttft_s, tpot=each.tpot_s), of=MODEL)
        for name, each in keys.models.items()
    )
    return Slo(ttft=keys.ttft_s, tpot=keys.tpot_s), classes + models


class _Capacity(Strict):
    """Keys of ``capacity``."""

    criterion: Annotated[str, OneOf(CRITERIA)] = CRITERIA[0]
    share: Annotated[float, Range(0.01, 1.0)] = CapacityAim().share


class _File(Strict):
    """Keys of a scenario's file."""

    name: Title
    model: Annotated[str, load.spec_name("model")]
    system: Annotated[str, load.spec_name("hardware")]
    precision: Annotated[str, load.spec_name("precision")]
    profile: Profile = "measured"
    engine: Annotated[str, OneOf(engine_names)] = ""
    speculation: Annotated[str, AfterValidator(speculation_named)] = ""
    draft_tokens: Annotated[int, Range(0, MOST_DRAFTS)] = 0
    trace: Annotated[tuple[TraceSource, ...], Written(Several[TraceKeys], distinct_by(attrgetter("name")))]
    slo: Annotated[_Slos, Written(_Slo, _slos_of)]
    deployments: Annotated[Named[PlainName, DeploymentKeys], AfterValidator(served_by_name)]  # after ``model``
    policy_file: Annotated[Several[str], AfterValidator(_registered)] = ()  # before ``policies``, which may name them
    policies: Annotated[
        Several[Annotated[PolicyChoice, PlainValidator(_choice)]], AfterValidator(distinct_by(attrgetter("label")))
    ]
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    capacity: Annotated[CapacityAim | None, Written(_Capacity, lambda aim: CapacityAim(**dict(aim)))] = None
    run: Annotated[RunOptions, PlainValidator(_run_options)] = RunOptions()
    admission: Annotated[AdmissionKind | None, PlainValidator(_admission)] = None


def _loaded(name: str, trace: str, *, run: bool) -> tuple[Scenario, KnownPolicies]:
    path, known = find_document("scenario", name), KnownPolicies(run)
    document = read_mapping(path)
    faults: list[str] = []
    checked = checked_or_faults(with_techniques(_File, axes=False), document, _Reading(path.parent, trace, known))
    of_option = list(faults_of_call("--trace", replacing, trace, ())) if trace else []
    if isinstance(checked, list):
        faults += checked
    elif not (faults or of_option):
        apart = {"trace", "policy_file", "admission", "slo", *(each.name for each in asked_techniques())}
        unchanged = {key: value for key, value in checked if key not in apart}
        unchanged["techniques"] = techniques_of(dict(checked))
        slo, classes = checked.slo
        unchanged["run"] = replace(checked.run, admission=checked.admission, classes=classes)
        traces = replacing(trace, checked.trace) if trace else checked.trace
        if unchanged["run"].whole or any(each.encode is not None for each in checked.deployments):
            traces = tuple(replace(each, window=0) for each in traces)
        scenario = Scenario(
            source=str(path),
            slo=slo,
            traces=traces,
            policy_files=checked.policy_file,
            sampled=isinstance(document.get("run"), Mapping) and "sample_s" in document["run"],
            **unchanged,
        )
        faults = list(dict.fromkeys(_conflicts(scenario, known)))
        if not faults:
            return scenario, known
    raise SpecError("\n".join([*of_option, *([str(spec_error(path, faults))] if faults else [])]))


def _conflicts(scenario: Scenario, known: KnownPolicies) -> Iterator[str]:
    """Find faults of combined keys: recipe on system, parts of policies, memory."""
    try:
        at = scenario.setup
    except DisaggSimError as error:
        return (yield str(error))
    sizes = (len(scenario.deployments), sum(len(each.rate_scales) for each in scenario.traces), len(scenario.policies))
    if many := list(faults_of_call("", require_few, "deployments x rates x policies", *sizes)):
        return (yield from many)
    for source in scenario.traces:
        if scenario.run.classes:
            yield from faults_of_call(
                "slo.classes", limits_of, source.load(scenario.seed), scenario.slo, scenario.run.classes
            )
    if scenario.run.classes and scenario.capacity is not None and scenario.capacity.criterion == "p99":
        yield "capacity.criterion: p99 judges by one SLO; with slo.classes allowed: attainment"
    if drafts := list(_draft_conflicts(scenario, at)):
        return (yield from drafts)
    for deployment in scenario.deployments:
        for choice in scenario.policies:
            yield from faults_of_call("deployments", deployment.require, choice.label, known.needs(choice.kind))
        yield from faults_of_call("deployments", require_fit, at, deployment)
        yield from faults_of_call("run.tiers", below, at.system, scenario.run.tiers)
        for source in scenario.traces:
            yield from faults_of_call("trace", shares_of, source.load(scenario.seed), deployment, PARTS, at)
            needed = run_memory(source.load(scenario.seed), scenario.run.records)
            yield from faults_of_call("trace", require_memory, "a run of it", needed)
            limits = scenario.run.concurrency, scenario.run.records
            yield from faults_of_call("deployments", deployment.check_encode, source.load(scenario.seed), at, *limits)


def _draft_conflicts(scenario: Scenario, usual: Setup) -> Iterator[str]:
    """Find curves of other models, drafters without draft tokens and draft tokens without a drafter."""
    if scenario.draft_tokens and usual.speculation is None:
        yield "draft_tokens: acts with 'speculation' only"
    every = [(part, each) for deployment in scenario.deployments for part in PARTS for each in deployment.part(part)]
    for at in {id(at): at for _, each in every if (at := each.setup or usual).speculation is not None}.values():
        assert at.speculation is not None
        yield from faults_of_call("speculation", at.speculation.check_model, at.model)
        drafts = [int(each.mapping.draft_tokens) for _, each in every if (each.setup or usual) is at]
        yield from faults_of_call("draft_tokens", at.speculation.trying, tuple(drafts))
        if not any(drafts):
            most = len(at.speculation.acceptance)
            yield f"draft_tokens: missing, the number that a decode step verifies; allowed: 1 to {most}"
    for part, each in every:
        if each.mapping.draft_tokens and (each.setup or usual).speculation is None and not scenario.draft_tokens:
            yield f"deployments: {part} has draft_tokens {each.mapping.draft_tokens} and no 'speculation'"
