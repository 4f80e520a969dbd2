"""A shipped model's file is the import of its own ``config.json``, and a published number is told right."""

import sys
from pathlib import Path

from shared_data import shared_file

from disagg_sim.facts.load import list_specs, load_model
from disagg_sim.facts.yaml_files import spec_files

sys.path.insert(0, str(Path(__file__).parents[2]))  # the scripts of the docs are no part of the package

from docs.shipped_models import shipped

MODELS = {model.name: model for model in shipped()}


def test_the_table_has_every_model():
    assert tuple(MODELS) == list_specs("model")
    assert all(model.title == load_model(model.name).title for model in MODELS.values())


def test_the_file_is_the_import_of_its_config():
    for name, model in MODELS.items():
        if not model.config:
            continue
        written = spec_files("model")[name].read_text(encoding="utf-8")
        assert model.yaml(shared_file(f"hf_configs/{model.file}")) == written
