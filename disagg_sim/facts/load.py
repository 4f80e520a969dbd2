"""Names to frozen specs: ``load_system("h100_sxm")``, ``load_model("llama-3.1-70b")``, or a path to a YAML file.

A file is parsed once for each of its versions; equal names give the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BeforeValidator

from disagg_sim.errors import InputError, UnknownNameError, quoted
from disagg_sim.facts.faults import expected
from disagg_sim.facts.yaml_files import (
    NOUNS,
    PATH_VARIABLE,
    canonical_name,
    find_file,
    is_path,
    list_specs,
    read_mapping,
    spec_error,
    spec_files,
)

if TYPE_CHECKING:
    from disagg_sim.facts.efficiency import EfficiencySpec
    from disagg_sim.facts.engine import EngineSpec
    from disagg_sim.facts.hardware import SystemSpec
    from disagg_sim.facts.model import ModelSpec
    from disagg_sim.facts.precision import Precision, PrecisionRecipe
    from disagg_sim.facts.profile import ProfileSpec
    from disagg_sim.facts.traffic import TrafficSpec
    from disagg_sim.facts.uncertainty import UncertaintySpec

__all__ = [
    "list_specs",
    "load_efficiency",
    "load_engine",
    "load_model",
    "load_precision",
    "load_profile",
    "load_system",
    "load_traffic",
    "load_uncertainty",
    "resolve_precision",
    "spec_name",
]


def load_system(name: str | Path) -> SystemSpec:
    """A GPU system (``hw_specs/``) by name or path, in SI.

    Arithmetic [FLOP/s], bandwidths [B/s], memory [B], latencies [s], domain sizes [1], power [W].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: SystemSpec = _load("hardware", name)
    return spec


def load_model(name: str | Path) -> ModelSpec:
    """A model (``models/``) by name or path, in SI.

    Layers, widths and parameters [1], context limit [token].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: ModelSpec = _load("model", name)
    return spec


def load_precision(name: str | Path) -> PrecisionRecipe:
    """A precision recipe (``hw_specs/precision/``) by name or path, in SI.

    Formats by operator; ``resolve(model)`` gives their sizes [B].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: PrecisionRecipe = _load("precision", name)
    return spec


def load_profile(name: str | Path) -> ProfileSpec:
    """A profile of assumptions (``hw_specs/profiles/``) by name or path, in SI.

    What the physics takes for granted: utilisation and imbalance [1], fixed memory [B].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: ProfileSpec = _load("profile", name)
    return spec


def load_engine(name: str | Path) -> EngineSpec:
    """A serving engine (``hw_specs/engines/``) by name or path, in SI.

    Host times [s], token budget of a step [token], share of memory [1].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: EngineSpec = _load("engine", name)
    return spec


def load_traffic(name: str | Path) -> TrafficSpec:
    """A family of traffic cases (``traffic/``) by name or path, in SI.

    Cases with input and output lengths [token].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: TrafficSpec = _load("traffic", name)
    return spec


def load_uncertainty(name: str | Path) -> UncertaintySpec:
    """Spreads of calibrated times (``hw_specs/uncertainty/``) by name or path.

    Standard deviations of logarithms and shares of variances [1].
    The file says the source of every value.

    Raises
    ------
    UnknownNameError, InputError, SpecError
        An unknown name, what is neither name nor path, a fault of the file.
    """
    spec: UncertaintySpec = _load("uncertainty", name)
    return spec


def load_efficiency(system: str | Path) -> EfficiencySpec | None:
    """Fitted efficiencies of a system (``hw_specs/efficiency/``); None when it has no such file."""
    if not is_path(system) and canonical_name(str(system)) not in spec_files("efficiency"):
        return None
    spec: EfficiencySpec = _load("efficiency", system)
    return spec


def resolve_precision(name: str | Path, model: ModelSpec, system: SystemSpec) -> Precision:
    """The formats of a recipe for a model, on a system that has the arithmetic.

    Raises
    ------
    InputError
        When the GPU lacks an arithmetic of the recipe; names the recipes that it can run.
    """
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


def spec_name(kind: str) -> BeforeValidator:
    """Mark of a text that names a spec: it is loaded, and given back in its canonical spelling."""
    noun = NOUNS.get(kind, kind)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not the name of a {noun}")
        if is_path(value):
            raise ValueError(f"{quoted(value)} is a path; give the name, and its directory in {PATH_VARIABLE}")
        return str(expected(_load, kind, value).name)

    return BeforeValidator(read)


def _load(kind: str, name: str | Path) -> Any:
    if not isinstance(name, str | Path):
        raise InputError(f"{NOUNS.get(kind, kind)} {quoted(name)} is neither a name nor the path of a file")
    path = find_file(kind, name)
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _load_file(kind, path, stamp)


@lru_cache(maxsize=256)
def _load_file(kind: str, path: Path, stamp: int) -> Any:  # noqa: ARG001 - a new version of the file is another entry
    from disagg_sim.facts.formats import efficiency, engine, model, recipe, system, traffic, uncertainty

    data, name = read_mapping(path), canonical_name(path.stem)
    if kind == "efficiency":
        return efficiency.efficiency_of(path, data, lambda parent: _parent(path, parent))
    build: dict[str, Callable[[Path, dict[str, Any], str], Any]] = {
        "hardware": system.system_of,
        "model": model.model_of,
        "precision": recipe.recipe_of,
        "profile": recipe.profile_of,
        "engine": engine.engine_of,
        "traffic": traffic.traffic_of,
        "uncertainty": uncertainty.uncertainty_of,
    }
    return build[kind](path, data, name)


#: Efficiency files that are being read, each because the one before it inherits from it.
_HEIRS: ContextVar[tuple[Path, ...]] = ContextVar("_HEIRS", default=())
#: Longest such chain. [1]
_MOST_HEIRS = 20


def _parent(path: Path, parent: str) -> EfficiencySpec:
    """Fits of the system that a file inherits from; a fault of the name is a fault of the file."""
    heirs = (*_HEIRS.get(), path)
    try:
        ancestor = find_file("efficiency", parent)
    except UnknownNameError as error:
        raise spec_error(path, [str(error)]) from None
    names = [canonical_name(each.stem) for each in (*heirs, ancestor)]
    if names[-1] in names[:-1]:
        circle = " -> ".join(names[names.index(names[-1]) :])
        said = f"{quoted(parent)} cannot inherit from itself" if len(heirs) == 1 else f"inherits in a circle: {circle}"
        raise spec_error(path, [said])
    if len(heirs) > _MOST_HEIRS:
        raise spec_error(path, [f"inherits through more than {_MOST_HEIRS} files: {' -> '.join(names[:4])} -> ..."])
    token = _HEIRS.set(heirs)
    try:
        spec: EfficiencySpec = _load("efficiency", ancestor)
    finally:
        _HEIRS.reset(token)
    return spec
