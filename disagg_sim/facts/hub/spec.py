"""The spec of a model from its Hugging Face files: ``config.json`` and ``hf_quant_config.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.document import document_of, text_config
from disagg_sim.facts.hub.families import FAMILIES
from disagg_sim.facts.hub.files import CONFIG, ModelFiles, model_files
from disagg_sim.facts.hub.quantisation import Quantisation, nearest_recipe, quantisation_of
from disagg_sim.facts.model import ModelSpec, model_of
from disagg_sim.facts.yaml_files import canonical_name


class Parsed(NamedTuple):
    """A model as its files describe it."""

    model: ModelSpec
    document: Mapping[str, Any]  # keys of its file
    quantisation: Quantisation
    config: Config
    architecture: str  # class of the text model


def parsed(files: ModelFiles, name: str = "", title: str = "", origin: str = "") -> Parsed:
    """Make the spec of a model.

    Takes ``name``, ``title`` and ``origin`` ("" = as the hub or the directory calls it).
    """
    config, architecture = text_config(files)
    called = name or _name_of(files)
    whence = origin or (f"{files.hub_name} (Hugging Face)" if files.hub_name else called)
    document: dict[str, Any] = {
        "title": title or re.sub(r"[-_]+", " ", called).strip(),
        **document_of(config, FAMILIES[architecture]),
    }
    source = "; ".join([f"{CONFIG} of {whence}", *config.assumed])
    model = model_of(files.path, document | {"source": source}, canonical_name(called))
    quantisation = quantisation_of(config, files.quantisation, model)
    if quantisation.block_scaled:
        document["block_scaled_fp8"] = True
    recipe, lines = nearest_recipe(quantisation, replace(model, block_scaled_fp8=quantisation.block_scaled))
    document |= {"recipe": recipe} if recipe else {"no_recipe": lines[0]}
    document["source"] = source
    return Parsed(model_of(files.path, document, model.name), document, quantisation, config, architecture)


def _name_of(files: ModelFiles) -> str:
    told = files.hub_name.rpartition("/")[2]
    if not told:
        told = files.path.resolve().parent.name if files.path.name == CONFIG else files.path.stem
    if not re.search(r"[A-Za-z0-9]", told):
        raise InputError(f"{quoted(told)} is no name of a model; give one")
    return told


def imported_spec(source: str | Path) -> ModelSpec:
    """The spec of a model from its Hugging Face files, which are read once while they do not change.

    Takes ``source`` (a ``config.json``, a directory with one, or ``org/name`` on the hub).
    """
    path = Path(source)
    file = path / CONFIG if path.is_dir() else path
    return _spec(source, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=64)
def _spec(source: str | Path, stamp: int) -> ModelSpec:  # noqa: ARG001 - a new version of the file is another entry
    return parsed(model_files(source)).model
