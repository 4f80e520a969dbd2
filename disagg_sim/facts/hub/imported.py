"""Import a model from its Hugging Face ``config.json``: ``import_model("Qwen3-8B/config.json")``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disagg_sim.errors import InputError
from disagg_sim.facts.hub.document import model_yaml, unread_keys
from disagg_sim.facts.hub.files import model_files
from disagg_sim.facts.hub.published import Published, published_params
from disagg_sim.facts.hub.quantisation import Quantisation, formats_text
from disagg_sim.facts.hub.recipe import nearest_recipe
from disagg_sim.facts.hub.spec import parsed
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.yaml_files import shown
from disagg_sim.notebook import Shown


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
