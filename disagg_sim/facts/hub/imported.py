"""Import a model from its Hugging Face ``config.json``: ``import_model("Qwen3-8B/config.json")``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.document import document_of, model_yaml, text_config, unread_keys
from disagg_sim.facts.hub.families import FAMILIES
from disagg_sim.facts.hub.files import CONFIG, ModelFiles, model_files
from disagg_sim.facts.hub.quantisation import Quantisation, formats_text, nearest_recipe, quantisation_of
from disagg_sim.facts.model import ModelSpec, model_of
from disagg_sim.facts.yaml_files import canonical_name, shown
from disagg_sim.notebook import Shown


class Parsed(NamedTuple):
    """A model as its files describe it."""

    model: ModelSpec
    document: Mapping[str, Any]  # keys of its file
    quantisation: Quantisation
    config: Config
    architecture: str  # class of the text model


def parsed(files: ModelFiles, name: str = "", title: str = "", origin: str = "") -> Parsed:
    """Make the spec of a model, under the name of the hub or the directory unless it gets one."""
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
    """The spec of a model from a ``config.json``, a directory or ``org/name`` on the hub, which is read once."""
    path = Path(source)
    file = path / CONFIG if path.is_dir() else path
    return _spec(source, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=64)
def _spec(source: str | Path, stamp: int) -> ModelSpec:  # noqa: ARG001 - a new version of the file is another entry
    return parsed(model_files(source)).model


#: ``235B`` or ``2.4T`` in a name, with ``-A22B`` behind it; not ``8x22B``, nor ``17B-128E``, whose 17B are active.
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbTt])(?![A-Za-z0-9])(?!-\d+E)(?:-A(\d+(?:\.\d+)?)B)?")
#: ``Number of Parameters: 32.8B`` and its like in a card.
_IN_CARD = re.compile(
    r"(?:number of|total|#\s*total)\s+param(?:eter)?s?\W{0,20}(?:\*\*)?\s*(\d+(?:[.,]\d+)?)\s*(B|T|billion|trillion)\b",
    re.IGNORECASE,
)
_UNITS = {"b": 1e9, "t": 1e12}


class Published(NamedTuple):
    """A count that is stated somewhere."""

    params: float  # [1]
    where: str
    digits: float  # last digit that is printed, such as 1e9 of 235B; half of it is rounding [1]

    def difference(self, counted: int) -> float:
        """Relative difference of the count, from the published figure. [1]"""
        return counted / self.params - 1


@dataclass(frozen=True, kw_only=True)
class ImportedModel(Shown):
    """A model from a ``config.json``: its spec, the text of its file, and what was found on the way."""

    model: ModelSpec
    architecture: str  # class of the text model
    yaml: str  # text of models/NAME.yaml
    quantisation: Quantisation
    recipe: str  # nearest shipped precision recipe; "" = none
    recipe_differs: tuple[str, ...]  # where the checkpoint is not as the recipe says, or why there is none
    published: Published | None
    assumed: tuple[str, ...]  # what the file does not say, and what was left out
    unknown: tuple[str, ...]  # keys that were not understood

    def lines(self) -> Iterator[tuple[str, str]]:
        """What to know of the import, by key."""
        model = self.model
        yield "name", f"{model.name} ({self.architecture}, {len(model.layers)} layers)"
        counted = f"{model.total_params:,}"
        if self.published is not None:
            difference = self.published.difference(model.total_params)
            counted += f"; {difference:+.2%} against {self.published.params / 1e9:g}e9 in {self.published.where}"
        yield "parameters", counted
        yield "active parameters", f"{model.active_params:,}"
        yield "quantisation", f"{self.quantisation.said}: {formats_text(self.quantisation.formats, model)}"
        yield "recipe", self.recipe or f"none: {self.recipe_differs[0]}"
        for each in self.recipe_differs if self.recipe else ():
            yield "checkpoint differs", each
        for each in (*self.quantisation.remarks, *self.assumed):
            yield "assumed", each
        if self.unknown:
            yield "not understood", f"keys {', '.join(self.unknown)}; they were left out"

    def write(self, place: str | Path) -> Path:
        """Write the model's file: into a directory of specs, or to a path that ends with ``.yaml``.

        Raises
        ------
        InputError
            When the file is there already, or cannot be written.
        """
        path = Path(place)
        if path.suffix not in (".yaml", ".yml"):
            path = path / f"{self.model.name}.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(self.yaml)
        except FileExistsError:
            raise InputError(f"{shown(path)} is there already; remove it, or give another path") from None
        except OSError as error:
            raise InputError(f"{shown(path)}: cannot be written: {error.strerror}") from None
        return path


def import_model(source: str | Path, name: str = "", title: str = "", origin: str = "") -> ImportedModel:
    """Import a model from its Hugging Face files.

    Parameters
    ----------
    source
        A ``config.json`` (or a JSON file of another name), a directory with one, or ``org/name`` on the hub where
        ``huggingface_hub`` is installed. ``hf_quant_config.json`` beside it is read, too, and for the number of
        parameters ``model.safetensors.index.json`` and ``README.md``.
    name
        Of the model; "" = that of the hub or of the directory.
    title, origin
        What it is, and where its file comes from, for the YAML; "" = as the hub calls it.

    Returns
    -------
    ImportedModel
        Spec with parameters [1], the text of its file, recipe and notes.

    Raises
    ------
    SpecError
        One line for a file that is none, and for what cannot be expressed, with its key.

    Examples
    --------
    >>> import json, tempfile
    >>> sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> sizes |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> _ = path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | sizes))
    >>> found = import_model(path, "llama")
    >>> found.model.total_params, found.recipe
    (8030261248, 'bf16')
    """
    files = model_files(source)
    found = parsed(files, name, title, origin)
    recipe, lines = nearest_recipe(found.quantisation, found.model)
    return ImportedModel(
        model=found.model,
        architecture=found.architecture,
        yaml=model_yaml(found.document),
        quantisation=found.quantisation,
        recipe=recipe,
        recipe_differs=tuple(lines),
        published=published_params(files),
        assumed=tuple(found.config.assumed),
        unknown=tuple(unread_keys(found.config)),
    )


def published_params(files: ModelFiles) -> Published | None:
    """Find the published number of parameters: exact ones first, then the card, then the name."""
    if files.index is not None:
        metadata = files.index.get("metadata")
        total = metadata.get("total_parameters") if isinstance(metadata, dict) else None
        if isinstance(total, int) and not isinstance(total, bool) and total > 0:
            return Published(float(total), "index of its weights", 1.0)
    if found := _IN_CARD.search(files.card):
        return _figure(found[1].replace(",", "."), found[2], "its card")
    if found := _IN_NAME.search(files.hub_name.rpartition("/")[2]):
        return _figure(found[1], found[2], "its name")
    return None


def _figure(number: str, unit: str, where: str) -> Published:
    size = _UNITS[unit[0].lower()]
    decimals = len(number.partition(".")[2])
    return Published(float(number) * size, where, size / 10**decimals)
