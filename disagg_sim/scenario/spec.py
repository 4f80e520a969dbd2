"""A scenario's YAML to a frozen ``Scenario``: systems x deployments x traces x rates; all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from disagg_sim import domain
from disagg_sim.domain import MOST_SEED, Slo
from disagg_sim.errors import DisaggSimError, SpecError, nearest, quoted
from disagg_sim.facts import load
from disagg_sim.facts.yaml_files import read_mapping, spec_error, spec_files
from disagg_sim.physics.rates import ENGINES
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.scenario.policy_files import KnownPolicies
from disagg_sim.scenario.policy_text import Form
from disagg_sim.scenario.traces import TraceSource, read_traces
from disagg_sim.simulation.deployment import LIMITS, PARTS, Replicas, ServedDeployment
from disagg_sim.simulation.feasibility import require_fit
from disagg_sim.simulation.options import MOST_TOKENS, options_of
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run import RunOptions
from disagg_sim.sweep.reader import Reader, plain_number

KEYS = (
    "name",
    "model",
    "system",
    "precision",
    "profile",
    "engine",
    "trace",
    "slo",
    "deployments",
    "systems",
    "seed",
    "capacity",
    "run",
    "policies",
)
REQUIRED = ("name", "model", "system", "precision", "trace", "slo", "deployments", "systems")
DEGREES = ("tp", "dp", "ep", "pp")
#: Limits of the instances of a part -> their largest value [1], [token], [token].
PART_LIMITS = {**LIMITS, "chunk_tokens": MOST_TOKENS}
#: Parts whose passes of whole prompts a pipeline may cut into chunks.
CHUNKING = ("prefill", "colocated")
#: What a capacity is the largest rate of: a share of the requests inside the SLO, or their 99th percentiles.
CRITERIA = ("attainment", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemChoice:
    """A serving system with its options."""

    kind: str  # name in the registry
    label: str  # what results call it
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def policy(self) -> Policy:
        """The policy itself."""
        return policy_named(self.kind, **dict(self.options))

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a deployment that it takes."""
        return self.policy.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityAim:
    """What the search for the serving capacity asks of a rate."""

    criterion: str = "attainment"  # of ``CRITERIA``
    share: float = 0.9  # of requests inside the SLO, for "attainment" [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario as written by a person; every combination of its tuples is a run."""

    source: str  # file that it was read from
    name: str
    model: str
    system: str
    precision: str
    profile: str
    engine: str  # "" = the profile's own choice
    traces: tuple[TraceSource, ...]
    slo: Slo
    deployments: tuple[ServedDeployment, ...]
    systems: tuple[SystemChoice, ...]
    seed: int = 0
    capacity: CapacityAim | None = None  # None = not searched for
    run: RunOptions = field(default_factory=RunOptions)
    policies: tuple[str, ...] = ()  # Python files that register systems of the user
    sampled: bool = False  # whether the file says how often to sample; else a run has 200 samples

    @property
    def setting(self) -> Setup:
        """Model, system, recipe and profile with their rates; the same object each time."""
        return _setting(self.model, self.system, self.precision, self.profile, self.engine)


@lru_cache(maxsize=8)
def _setting(model: str, system: str, precision: str, profile: str, engine: str) -> Setup:
    return setup(model, system, precision, profile, engine or None)


def load_scenario(name: str, *, trace: str = "", seed: int | None = None) -> Scenario:
    """Read a scenario from a file, or a shipped one by its name; its policy files are imported, which runs them.

    Parameters
    ----------
    name : str
        Path of a YAML file, or the name of a shipped scenario such as ``azure_conv_on_h100``.
    trace : str
        Trace file, relative to the working directory, in place of the file's traces; their rates are kept.
    seed : int, optional
        In place of the file's own.

    Raises
    ------
    SpecError
        With every fault of the file: key, value, what is allowed, the nearest valid name.
    """
    scenario, _ = _loaded(name, trace, run=True)
    return scenario if seed is None else replace(scenario, seed=seed)


def check_scenario(name: str) -> tuple[str, ...]:
    """Find the faults of a scenario without running its policy files; lines on what was not checked therefore.

    Raises
    ------
    SpecError
        As ``load_scenario``.
    """
    return _loaded(name, "", run=False)[1].notes()


def _loaded(name: str, trace: str, *, run: bool) -> tuple[Scenario, KnownPolicies]:
    path = _find(name)
    reader, known = Reader(), KnownPolicies(run)
    scenario = _read(reader, read_mapping(path), path, trace, known)
    if not reader.faults:
        _cross_check(reader, scenario, known)
    if reader.faults:
        given = [fault for fault in reader.faults if fault.startswith("--")]  # of an option, not of the file
        own = [fault for fault in reader.faults if fault not in given]
        raise SpecError("\n".join([*given, *([str(spec_error(path, own))] if own else [])]))
    return scenario, known


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    shipped = spec_files("scenario")
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise SpecError(f"{name}: is a directory, not a scenario file")
    raise SpecError(f"{name}: no such file or shipped scenario ({', '.join(shipped)}){nearest(path.stem, shipped)}")


def _read(reader: Reader, document: Mapping[Any, Any], path: Path, trace: str, known: KnownPolicies) -> Scenario:
    reader.keys("", document, KEYS)
    reader.faults += [f"missing key {key!r}" for key in REQUIRED if key not in document]
    policies = _policies(reader, document.get("policies", []), path.parent)
    for file in policies:  # they are looked up after these
        reader.attempt("policies", known.take, file)
    return Scenario(
        source=str(path),
        name=reader.title("name", document.get("name", "-")),
        model=_one(reader, document, "model", load.load_model),
        system=_one(reader, document, "system", load.load_system),
        precision=_one(reader, document, "precision", load.load_precision),
        profile=reader.choice("profile", document.get("profile", "measured"), load.list_specs("profile")),
        engine=reader.choice("engine", document["engine"], ENGINES) if "engine" in document else "",
        traces=read_traces(reader, document["trace"], path.parent, trace) if "trace" in document else (),
        slo=_slo(reader, document.get("slo")) if "slo" in document else Slo(ttft=1.0, tpot=1.0),
        deployments=_deployments(reader, document["deployments"]) if "deployments" in document else (),
        systems=_systems(reader, document["systems"], known) if "systems" in document else (),
        seed=reader.whole("seed", document.get("seed", 0), low=0, high=MOST_SEED),
        capacity=_capacity(reader, document["capacity"]) if "capacity" in document else None,
        run=_run_options(reader, document.get("run", {})),
        policies=policies,
        sampled=isinstance(document.get("run"), Mapping) and "sample_s" in document["run"],
    )


def _one(reader: Reader, document: Mapping[Any, Any], key: str, loader: Any) -> str:
    """The canonical spelling of one spec's name."""
    if key not in document:
        return ""
    if not isinstance(document[key], str):
        reader.faults.append(f"{key}: {quoted(document[key])} is not one name")
        return ""
    return next(iter(reader.names(key, document[key], loader)), "")


def _slo(reader: Reader, value: object) -> Slo:
    given = reader.mapping("slo", value, ("ttft_s", "tpot_s"))
    limits = {}
    for key in ("ttft_s", "tpot_s"):
        if key not in given and isinstance(value, Mapping):
            reader.faults.append(f"slo: missing key {key!r}")
        limits[key] = reader.number(f"slo.{key}", given.get(key, 1.0), low=1e-6, high=1e6, unit="s")
    return Slo(ttft=limits["ttft_s"], tpot=limits["tpot_s"])


def _deployments(reader: Reader, value: object) -> tuple[ServedDeployment, ...]:
    if not isinstance(value, Mapping) or not value:
        reader.faults.append(f"deployments: {quoted(value)} is not a mapping of a name to its instances")
        return ()
    found = []
    for name, entry in value.items():
        where = f"deployments.{reader.plain_name('deployments', name)}"
        given = reader.mapping(where, entry, ("gpus", *PARTS))
        parts = {part: _part(reader, f"{where}.{part}", part, given[part]) for part in PARTS if part in given}
        if isinstance(entry, Mapping) and not parts:
            reader.faults.append(f"{where}: has no instances; allowed: {', '.join(PARTS)}")
        most = max((_gpus(parts, *names) for names in (("prefill", "decode"), ("colocated",), ("pairs",))), default=1)
        gpus = reader.whole(f"{where}.gpus", given.get("gpus", max(most, 1)), low=1, high=10**6)
        found.append(reader.attempt("deployments", partial(ServedDeployment, name=str(name), gpus=gpus, **parts)))
    return tuple(deployment for deployment in found if deployment is not None)


def _gpus(parts: Mapping[str, tuple[Replicas, ...]], *names: str) -> int:
    return sum(replicas.gpus for name in names for replicas in parts.get(name, ()))


def _part(reader: Reader, where: str, name: str, value: object) -> tuple[Replicas, ...]:
    """``{tp: 2, instances: 2}``, or a list of these."""
    entries = value if isinstance(value, list) else [value]
    if not entries:
        reader.faults.append(f"{where}: the list is empty")
    return tuple(
        _replicas(reader, f"{where}[{number}]" if isinstance(value, list) else where, name, entry)
        for number, entry in enumerate(entries)
    )


def _replicas(reader: Reader, where: str, part: str, value: object) -> Replicas:
    """Degrees, count and limits of equal instances; what is not given of the limits is left to the policy."""
    given = reader.mapping(where, value, ("instances", *DEGREES, *PART_LIMITS))
    known = len(reader.faults)
    tp, dp, ep, pp = (reader.whole(f"{where}.{key}", given.get(key, 1), low=1, high=1024) for key in DEGREES)
    instances = reader.whole(f"{where}.instances", given.get("instances", 1), low=1, high=10**5)
    batch, budget, chunk = (
        reader.whole(f"{where}.{key}", given[key], low=1, high=most) if key in given else None
        for key, most in PART_LIMITS.items()
    )
    if tp * dp % ep:
        reader.faults.append(f"{where}: ep {ep} does not divide the {tp * dp} GPUs of a stage (tp x dp)")
    if chunk is not None and (pp == 1 or part not in CHUNKING):
        reader.faults.append(
            f"{where}.chunk_tokens: {chunk} cuts the prompts of a pass for the stages of a pipeline; allowed: with pp "
            f"above 1, in {' and '.join(CHUNKING)}"
        )
    nothing = Replicas(mapping=domain.Mapping(), instances=1)
    if len(reader.faults) > known:
        return nothing
    mapping = domain.Mapping(tp_attn=tp, dp_attn=dp, tp_ffn=tp * dp // ep, ep=ep, pp=pp, chunk_tokens=chunk or 0)
    found = reader.attempt(
        where, lambda: Replicas(mapping=mapping, instances=instances, batch=batch, token_budget=budget)
    )
    return found if isinstance(found, Replicas) else nothing


def _policies(reader: Reader, value: object, folder: Path) -> tuple[str, ...]:
    """Paths of policy files, given relative to ``folder``."""
    entries = value if isinstance(value, list) else [value]
    reader.faults += [f"policies: {quoted(each)} is not the path of a file" for each in entries if not _is_path(each)]
    return tuple(str(folder / str(each)) for each in entries if _is_path(each))


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _systems(reader: Reader, value: object, known: KnownPolicies) -> tuple[SystemChoice, ...]:
    """Names, or ``{kind: dopd, label: dopd_slow, ...}`` with options of the system."""
    entries = value if isinstance(value, list) else [value]
    if not entries:
        reader.faults.append("systems: the list is empty")
    found = []
    for number, entry in enumerate(entries):
        where = f"systems[{number}]" if isinstance(value, list) else "systems"
        given = {"kind": entry} if isinstance(entry, str) else entry
        if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
            reader.faults.append(f"{where}: {quoted(entry)} is neither a name nor {{kind: NAME, ...}}")
            continue
        kind, wished = given["kind"], {key: each for key, each in given.items() if key not in ("kind", "label")}
        if (form := reader.attempt(where, known.form, kind)) is not None:
            before, options = len(reader.faults), _options(reader, where, form, wished)
            if len(reader.faults) == before and known.run:
                reader.attempt(where, lambda kind=kind, options=options: policy_named(kind, **options))
            label = reader.plain_name(f"{where}.label", given.get("label", kind))
            found.append(SystemChoice(kind=kind, label=label, options=tuple(options.items())))
    reader.distinct("systems", tuple(choice.label for choice in found))
    return tuple(found)


def _options(reader: Reader, where: str, form: Form, given: Mapping[Any, Any]) -> dict[str, Any]:
    """Options of a system or a run, each a value of the kind of its default and in its range."""
    if form.whole:
        reader.keys(f"{where}.", given, tuple(form.options))
    found: dict[str, Any] = {}
    for name, known in form.options.items():
        if name not in given or known is None:
            continue
        value = given[name] if isinstance(known.default, bool | str) else plain_number(given[name])
        if fault := known.fault(value):
            reader.faults.append(f"{where}.{name}: {fault}")
        else:
            found[name] = known.like_default(value)
    return found


def _run_options(reader: Reader, value: object) -> RunOptions:
    if not isinstance(value, Mapping):
        reader.faults.append(f"run: {quoted(value)} is not a mapping of keys such as sample_s, start_up_s")
        return RunOptions()
    form = Form(name="run", needs=(), options=options_of(RunOptions))
    given = _options(reader, "run", form, value)
    found = reader.attempt("run", lambda: RunOptions(**given))
    return found if isinstance(found, RunOptions) else RunOptions()


def _capacity(reader: Reader, value: object) -> CapacityAim:
    given = reader.mapping("capacity", value, ("criterion", "share"))
    criterion = reader.choice("capacity.criterion", given.get("criterion", CRITERIA[0]), CRITERIA)
    share = reader.number("capacity.share", given.get("share", CapacityAim().share), low=0.01, high=1.0)
    return CapacityAim(criterion=criterion, share=share)


def _cross_check(reader: Reader, scenario: Scenario, known: KnownPolicies) -> None:
    """What only shows when the values stand together: recipe on system, parts of systems, memory."""
    try:
        what = scenario.setting
    except DisaggSimError as error:
        reader.faults.append(str(error))
        return
    rates = sum(len(source.rate_scales) for source in scenario.traces)
    if not reader.crossed("deployments x rates x systems", len(scenario.deployments), rates, len(scenario.systems)):
        return
    for deployment in scenario.deployments:
        for choice in scenario.systems:
            reader.attempt("deployments", deployment.require, choice.label, known.needs(choice.kind))
        reader.attempt("deployments", require_fit, what, deployment)
