"""Launchers: engines and orchestrators of a version, the options that commands and manifests for them may use.

One file a launcher in ``hw_specs/launchers/``, every option with its source; published checkpoints of the models in
``hw_specs/checkpoints/``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from disagg_sim.errors import quoted
from disagg_sim.facts.schema import NOT_IN_FILE, Line, NotEmpty, OneOf, spec_of
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown

#: What an option takes; a ``switch`` nothing.
TAKES = ("switch", "int", "float", "text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOption:
    """A flag of a command, a key of a configuration file, or a field of a manifest."""

    takes: Annotated[str, OneOf(TAKES)]
    choices: tuple[str, ...] = ()  # what it may be; empty = no such list
    source: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorSupport:
    """That a launcher starts systems of a vendor."""

    lacks: tuple[str, ...] = ()  # options that it has not there
    source: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSpec(Shown):
    """A launcher of one version, and what its commands and manifests may say."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    version: Line
    image: Line  # container image
    checked: Line  # against what the options were checked
    vendors: Annotated[Mapping[str, VendorSupport], NotEmpty]  # of systems that it starts; on others it does not run
    options: Annotated[Mapping[str, LauncherOption], NotEmpty]


def checkpoint_name(text: str) -> str:
    """Check a name of a checkpoint on the hub, or its path; it goes into scripts and manifests."""
    if not re.fullmatch(r"[\w./~][\w ./~@:+=,-]{0,1023}", text, re.ASCII):
        raise ValueError(
            f"{quoted(text)} is no name of a checkpoint; allowed: ASCII letters, digits, spaces, / . _ - ~ @ : + = ,"
        )
    return text


#: Name or path of a checkpoint.
Checkpoint = Annotated[str, AfterValidator(checkpoint_name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(Shown):
    """Names of published checkpoints: model -> format of its weights -> name on the Hugging Face hub."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    models: Annotated[Mapping[str, Mapping[str, Checkpoint]], NotEmpty]
    source: Line


def launcher_of(path: Path, data: Mapping[str, Any], name: str) -> LauncherSpec:
    """Read a launcher from its file.

    >>> option = {"takes": "switch", "choices": ["on"], "source": "its parser"}
    >>> head = {"title": "mine", "version": "1", "image": "mine:1", "checked": "by hand"}
    >>> head["vendors"] = {"NVIDIA": {"source": "its page"}}
    >>> launcher_of(Path("mine.yaml"), head | {"options": {"--fast": option}}, "mine")
    Traceback (most recent call last):
    disagg_sim.errors.SpecError: mine.yaml: options.--fast: a switch has no choices
    """
    spec = spec_of(LauncherSpec, path, data, name)
    odd = [flag for flag, option in spec.options.items() if option.choices and option.takes != "text"]
    said = [f"options.{flag}: a {spec.options[flag].takes} has no choices" for flag in odd]
    for vendor, support in spec.vendors.items():
        said += [f"vendors.{vendor}.lacks: no option {flag}" for flag in support.lacks if flag not in spec.options]
    if said:
        raise spec_error(path, said)
    return spec
