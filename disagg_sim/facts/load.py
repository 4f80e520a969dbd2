"""Load specs by name or path: ``load_system("h100_sxm")``, ``load_model("llama-3.1-70b")``.

A file is parsed again only after it changed; equal names give the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BeforeValidator

from disagg_sim.errors import InputError, UnknownNameError, quoted
from disagg_sim.facts.efficiency import EfficiencySpec, efficiency_of
from disagg_sim.facts.engine import EngineSpec, SchedulerSpec, engine_of, scheduler_of
from disagg_sim.facts.failures import FailureSpec
from disagg_sim.facts.faults import expected
from disagg_sim.facts.hardware import SystemSpec, system_of
from disagg_sim.facts.hub.files import is_config
from disagg_sim.facts.launcher import CheckpointSpec, LauncherSpec, launcher_of
from disagg_sim.facts.layouts import EvidenceSpec, LayoutRules, evidence_of
from disagg_sim.facts.model import ModelSpec, model_of
from disagg_sim.facts.power import PowerSpec, power_of
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.precision_recipe import PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec, profile_and_skew, profile_of, with_skew
from disagg_sim.facts.schema import sourced_spec, spec_of
from disagg_sim.facts.speculation import Speculation, speculation_in_words
from disagg_sim.facts.traffic import TrafficSpec
from disagg_sim.facts.uncertainty import UncertaintySpec, uncertainty_of
from disagg_sim.facts.yaml_files import (
    NOUNS,
    PATH_VARIABLE,
    canonical_name,
    find_file,
    is_path,
    kind_of,
    list_specs,
    read_mapping,
    spec_error,
    spec_files,
)

S = TypeVar("S")
#: Makes a spec from a path, the content of the file and a name.
Reader = Callable[[Path, dict[str, Any], str], object]


def load_system(name: str | Path) -> SystemSpec:
    """Load a GPU system (``hw_specs/``): arithmetic [FLOP/s], bandwidths [B/s], memory [B], domains [1], power [W].

    Parameters
    ----------
    name : str or Path
        In a name, upper and lower case are equal, and ``-``, ``.`` and ``_``; a path ends with ``.yaml``.

    Returns
    -------
    SystemSpec
        The vendor's figures in SI; a link's bandwidth is one way, per GPU.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, a value that is neither name nor path, all faults of the file; so for all ``load_*``.

    Examples
    --------
    >>> h100 = load_system("h100_sxm")
    >>> h100.nvlink_domain, f"{h100.hbm_bandwidth / 1e12:.2f} TB/s"
    (8, '3.35 TB/s')
    """
    return _load(SystemSpec, name)


def load_model(name: str | Path) -> ModelSpec:
    """Load the model ``name`` (``models/``): layers, widths and parameters [1], context limit [token].

    Parameters
    ----------
    name
        As in ``load_system``; or a Hugging Face ``config.json``, a directory with one, ``org/name`` on the hub.

    Returns
    -------
    ModelSpec
        Layers in order, embedding and head.

    Examples
    --------
    >>> llama = load_model("llama-3.1-8b")
    >>> llama.hidden, len(llama.layers)
    (4096, 32)
    """
    if is_config(name) and is_own_file(name):
        from disagg_sim.facts.hub.imported import imported_spec  # loaded only when needed

        return imported_spec(name)
    return _load(ModelSpec, name)


def load_precision(name: str | Path) -> PrecisionRecipe:
    """Load the precision recipe ``name`` (``hw_specs/precision/``); ``resolve(model)`` gives sizes of formats [B].

    Parameters
    ----------
    name
        As in ``load_system``.

    Returns
    -------
    PrecisionRecipe
        Names of the formats of weights, cache and exchange.

    Examples
    --------
    >>> load_precision("fp8").cache
    'fp8'
    """
    return _load(PrecisionRecipe, name)


def load_profile(name: str | Path) -> ProfileSpec:
    """Load the profile ``name`` (``hw_specs/profiles/``): utilisation [1], imbalance [1], fixed memory [B].

    ``measured_skew0.5`` is ``measured`` with experts whose popularity varies by 0.5 of its mean.

    >>> [(name, load_profile(name).fitted) for name in ("ideal", "measured")]
    [('ideal', False), ('measured', True)]
    """
    base, skew = profile_and_skew(name) if isinstance(name, str) else (name, 0.0)
    return with_skew(load_profile(base), skew) if skew else _load(ProfileSpec, base)


def load_traffic(name: str | Path) -> TrafficSpec:
    """Load the traffic cases ``name`` (``traffic/``): input and output lengths [token].

    Parameters
    ----------
    name
        As in ``load_system``.

    Returns
    -------
    TrafficSpec
        Cases of input and output lengths.

    Examples
    --------
    >>> load_traffic("reasoning").shapes[0]
    (1024, 32768)
    """
    return _load(TrafficSpec, name)


def load_speculation(name: str | Path) -> Speculation:
    """Load the drafter and acceptance ``name`` (``speculation/``): marginal shares by position [1].

    Parameters
    ----------
    name
        As in ``load_system``; or a method with acceptances by position, ``"mtp 0.8 0.6"`` or
        ``"draft_model llama_3_1_8b 0.8 0.6"``.

    Returns
    -------
    Speculation
        Drafter, and acceptance as measured or as given in ``name``.

    Examples
    --------
    >>> [load_speculation(name).acceptance for name in ("deepseek_r1_mtp", "mtp 0.8 0.6")]
    [(0.816,), (0.8, 0.6)]
    """
    if isinstance(name, str) and " " in name and not is_path(name):
        return speculation_in_words(name, load_model)
    found = _load(Speculation, name)
    if not found.draft_model:
        return found
    drafter = load_model(found.draft_model)
    return replace(found, draft_model=drafter.name, drafter=drafter)


def load_checkpoints(name: str | Path = "published") -> CheckpointSpec:
    """Load names of checkpoints (``hw_specs/checkpoints/``) by model and format of weights."""
    return _load(CheckpointSpec, name)


def load_efficiency(system: str | Path) -> EfficiencySpec | None:
    """Load the fitted efficiencies of a system (``hw_specs/efficiency/``): shares of peaks [1], times [s]; or None."""
    return _load(EfficiencySpec, system) if _has("efficiency", system) else None


def load_power(system: str | Path) -> PowerSpec | None:
    """Load the fitted power of kernels of a system (``hw_specs/power/``): shares of its power limit [1]; or None."""
    return _load(PowerSpec, system) if _has("power", system) else None


def _has(kind: str, name: str | Path) -> bool:
    return is_path(name) or canonical_name(str(name)) in spec_files(kind)


def resolve_precision(name: str | Path, model: ModelSpec, system: SystemSpec) -> Precision:
    """Find the formats of a recipe for a model; refuse formats whose arithmetic the system lacks."""
    precision = load_precision(name).resolve(model)
    lacking = sorted(precision.arithmetics - set(system.peak_flops))
    if lacking:
        recipes = [load_precision(known).resolve(model) for known in list_specs("precision")]
        able = [recipe.name for recipe in recipes if recipe.arithmetics <= set(system.peak_flops)]
        raise InputError(
            f"precision {precision.name!r} needs {' and '.join(lacking)} arithmetic, which {system.name} lacks; "
            f"recipes that it can run: {', '.join(able) or 'none'}"
        )
    return precision


def is_own_file(name: str | Path) -> bool:
    """Tell whether a name is a file, a directory or a hub model, and no shipped spec."""
    return is_path(name) or (is_config(name) and not _has("model", name))


def spec_name(kind: str) -> BeforeValidator:
    """Validate the name of a spec: load it, return its canonical spelling."""
    noun = NOUNS.get(kind, kind)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not the name of a {noun}")
        if is_path(value):
            also = "; disagg-sim model import makes its file" if kind == "model" and is_config(value) else ""
            raise ValueError(f"{quoted(value)} is a path; give the name, and its directory in {PATH_VARIABLE}{also}")
        spec: Any = expected(load_spec, kind, value)
        return str(spec.name)

    return BeforeValidator(read)


def load_spec(kind: str, name: str | Path) -> object:
    """Load the spec ``name`` of any ``kind`` of ``list_specs``, except sweeps and scenarios."""
    return _load(next(of for of, (known, _) in _KINDS.items() if known == kind), name)


def check_file(path: Path) -> str:
    """Load a file of facts and return its kind; sweeps and scenarios, which other rooms know, are not loaded."""
    kind = kind_of(path)
    if kind not in ("sweep", "scenario"):
        load_spec(kind, path)
    return kind


def _load(of: type[S], name: str | Path) -> S:
    kind, read = _KINDS[of]
    if not isinstance(name, str | Path):
        raise InputError(f"{NOUNS.get(kind, kind)} {quoted(name)} is neither a name nor the path of a file")
    path = find_file(kind, name)
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    spec = _load_file(read, path, stamp)
    assert isinstance(spec, of)
    return spec


@lru_cache(maxsize=256)
def _load_file(read: Reader, path: Path, stamp: int) -> object:  # noqa: ARG001 - a changed file is another entry of the cache
    return read(path, read_mapping(path), canonical_name(path.stem))


#: The serving engine (``hw_specs/engines/``): host times [s], token budget of a step [token].
load_engine: Callable[[str | Path], EngineSpec] = partial(_load, EngineSpec)
#: The failure rates (``hw_specs/failures/``) of GPUs, nodes and links of a measured cluster. [s]
load_failures: Callable[[str | Path], FailureSpec] = partial(_load, FailureSpec)
#: The scheduler (``hw_specs/schedulers/``) of an engine: admission, watermark, defaults of a step.
load_scheduler: Callable[[str | Path], SchedulerSpec] = partial(_load, SchedulerSpec)
#: The spreads of calibrated times (``hw_specs/uncertainty/``): deviations of logarithms [1].
load_uncertainty: Callable[[str | Path], UncertaintySpec] = partial(_load, UncertaintySpec)
#: The layouts that an engine can start (``hw_specs/layouts/``): allowed degrees, blocks of weights [1].
load_layout_rules: Callable[[str | Path], LayoutRules] = partial(_load, LayoutRules)
#: The kinds of layouts that served runs have checked (``hw_specs/evidence/``): runs and errors [1].
load_evidence: Callable[[str | Path], EvidenceSpec] = partial(_load, EvidenceSpec)
#: The launcher (``hw_specs/launchers/``): options of an engine or orchestrator, with sources.
load_launcher: Callable[[str | Path], LauncherSpec] = partial(_load, LauncherSpec)

#: Type of a spec -> the kind of its files, and their reader.
_KINDS: dict[type, tuple[str, Reader]] = {
    SystemSpec: ("hardware", system_of),
    ModelSpec: ("model", model_of),
    PrecisionRecipe: ("precision", partial(spec_of, PrecisionRecipe)),
    ProfileSpec: ("profile", profile_of),
    EngineSpec: ("engine", engine_of),
    SchedulerSpec: ("scheduler", scheduler_of),
    TrafficSpec: ("traffic", partial(spec_of, TrafficSpec)),
    Speculation: ("speculation", partial(spec_of, Speculation)),
    UncertaintySpec: ("uncertainty", uncertainty_of),
    LayoutRules: ("layout", partial(sourced_spec, LayoutRules, ("title", "version"))),
    EvidenceSpec: ("evidence", evidence_of),
    FailureSpec: ("failures", partial(sourced_spec, FailureSpec, ("title",))),
    LauncherSpec: ("launcher", launcher_of),
    CheckpointSpec: ("checkpoint", partial(spec_of, CheckpointSpec)),
    EfficiencySpec: (
        "efficiency",
        lambda path, data, _: efficiency_of(path, data, partial(_parent, EfficiencySpec, path)),
    ),
    PowerSpec: ("power", lambda path, data, _: power_of(path, data, partial(_parent, PowerSpec, path))),
}


#: Files of fits being read; each inherits from the next.
_CHILDREN: ContextVar[tuple[Path, ...]] = ContextVar("_CHILDREN", default=())
#: Longest chain of inheritance. [1]
_MOST_CHILDREN = 20


def _parent(of: type[S], path: Path, parent: str) -> S:
    """Load the fits that the file at ``path`` inherits from; report an unknown parent as a fault of that file."""
    children = (*_CHILDREN.get(), path)
    try:
        ancestor = find_file(_KINDS[of][0], parent)
    except UnknownNameError as error:
        raise spec_error(path, [str(error)]) from None
    names = [canonical_name(each.stem) for each in (*children, ancestor)]
    if names[-1] in names[:-1]:
        circle = " -> ".join(names[names.index(names[-1]) :])
        alone = len(children) == 1
        fault = f"{quoted(parent)} cannot inherit from itself" if alone else f"inherits in a circle: {circle}"
        raise spec_error(path, [fault])
    if len(children) > _MOST_CHILDREN:
        raise spec_error(path, [f"inherits through more than {_MOST_CHILDREN} files: {' -> '.join(names[:4])} -> ..."])
    token = _CHILDREN.set(children)
    try:
        return _load(of, ancestor)
    finally:
        _CHILDREN.reset(token)
