"""Import the laboratory beside the package: ``lab/`` of a clone, which a wheel does not bring.

It is taken from that folder alone: what the working directory, ``PYTHONPATH`` or an installed package has under the
name ``lab`` is neither found nor run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from disagg_sim.errors import MissingExtraError
from disagg_sim.facts.yaml_files import shipped_root

LAB = "lab"
#: Where there is none; the page on installation shows it.
MISSING = (
    "{what} is part of the laboratory beside the package: "
    "clone the repository and install it there, pip install -e '.[all]'"
)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def lab_folder(what: str = "this") -> Path:
    """Find the folder of the laboratory."""
    root = Path(__file__).resolve().parents[1]
    if shipped_root().resolve() != root or not (root / LAB / "__init__.py").is_file():
        raise MissingExtraError(MISSING.format(what=what))
    return root / LAB


def import_lab(module: str, what: str = "this") -> ModuleType:
    """Import a module of the laboratory."""
    folder = lab_folder(what)
    if LAB not in sys.modules:
        spec = spec_from_file_location(LAB, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[LAB] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[LAB])
    places = [Path(each).resolve() for each in getattr(sys.modules[LAB], "__path__", ())]
    if places != [folder]:
        raise MissingExtraError(f"{what} needs {folder}: another module {LAB!r} is imported in this process")
    return import_module(f"{LAB}.{module}" if module else LAB)


@dataclass(frozen=True, slots=True)
class LabFunction:
    """A function of the laboratory that travels by its name, and opens the laboratory where it arrives."""

    module: str  # below ``lab``
    name: str

    def __post_init__(self) -> None:  # noqa: D105
        import_lab("")

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function."""
        return getattr(import_lab(self.module), self.name)(*given, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make it anew where it is unpickled: before its arguments are, whose types may be of the laboratory."""
        return LabFunction, (self.module, self.name)


def in_workers(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Make a function of the laboratory one that worker processes find, too."""
    return LabFunction(function.__module__.removeprefix(f"{LAB}."), function.__name__)
