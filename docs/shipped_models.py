"""Make the files of shipped models of their own ``config.json``: ``python docs/shipped_models.py DIR``.

``shipped_models.csv`` names each model, its configuration and the published numbers of parameters. A row without a
configuration has a file that was written by hand. ``DIR`` holds the configurations as ``ORG--NAME.json``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree

from disagg_sim.facts.hub.imported import import_model  # noqa: E402

TABLE = Path(__file__).with_suffix(".csv")
#: Where a configuration was read, by its word in the table.
STORES = {
    "aic": "as stored in ai-dynamo/aiconfigurator model_configs/ (commit 095f58a5)",
    "inference-sim": "as stored in inference-sim/inference-sim model_configs/ (commit f90a1e3)",
    "infersim": "as stored in alibaba/InferSim hf_configs/ (commit f2293da)",
}


class Shipped(NamedTuple):
    """A row of the table."""

    name: str
    title: str
    config: str  # org/name on the hub; "" = the file is written by hand
    stored: str  # key of ``STORES``
    published_b: str  # parameters [1e9]; "" = unknown
    published_active_b: str
    published_in: str

    @property
    def file(self) -> str:
        """Name of the configuration's file."""
        return f"{self.config.replace('/', '--', 1)}.json"

    def yaml(self, config: Path) -> str:
        """Text of the model's file, from its configuration; of all its checkpoints, so without a recipe."""
        origin = f"{self.config} (Hugging Face), {STORES[self.stored]}"
        found = import_model(config, self.name, self.title, origin).yaml
        return "".join(
            line for line in found.splitlines(keepends=True) if not line.startswith(("recipe:", "no_recipe:"))
        )


def shipped() -> Iterator[Shipped]:
    """All rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        yield from (Shipped(**row) for row in csv.DictReader(file))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Make models/*.yaml of the config.json files of a directory.")
    parser.add_argument("configs", type=Path, help="directory with ORG--NAME.json")
    configs = parser.parse_args().configs
    for model in shipped():
        if model.config:
            path = ROOT / "models" / f"{model.name}.yaml"
            path.write_text(model.yaml(configs / model.file), encoding="utf-8")


if __name__ == "__main__":
    main()
