"""Find the shipped precision recipe that is nearest to the quantisation of a checkpoint."""

from __future__ import annotations

from disagg_sim.facts.hub.quantisation import NAMES, SHARED, Formats, Quantisation, groups_of
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.precision_recipe import recipe_of
from disagg_sim.facts.yaml_files import read_mapping, spec_files

#: What a group is worth in the search: where most weights are counts most. [1]
_WORTH = {"expert": 16.0, "ffn": 8.0, "attention_projection": 2.0, "cache": 1.0, SHARED: 0.5, "head": 0.25}


def nearest_recipe(quantisation: Quantisation, model: ModelSpec) -> tuple[str, list[str]]:
    """Find the recipe that differs least from a checkpoint.

    Returns name of the recipe, and a line for each difference; "" where no recipe has the format of most weights, and
    why.
    """
    if quantisation.unknown:
        return "", [f"{quantisation.unknown} is no format of a recipe"]
    found = {}
    for name, path in spec_files("precision").items():
        recipe = recipe_of(path, read_mapping(path), name).resolve(model)
        found[name] = _differences(quantisation.formats, recipe, model)
    best = min(found, key=lambda name: sum(_WORTH[group] for group in found[name]))
    most = "expert" if groups_of(model)["expert"] else "ffn"
    if most in found[best]:
        return "", [f"{getattr(quantisation.formats, most)} is no format of a recipe"]
    return best, list(found[best].values())


def _differences(found: Formats, recipe: Precision, model: ModelSpec) -> dict[str, str]:
    """Say in which groups a recipe differs from a checkpoint."""
    groups = groups_of(model)
    projected = " and ".join(sorted({each.name for each in recipe.projections}))
    formats = {
        "attention_projection": projected or found.attention_projection,
        "ffn": recipe.ffn.name,
        "expert": recipe.expert.name,
        SHARED: recipe.expert.name,
        "head": recipe.head.name,
        "cache": recipe.cache.name,
    }
    return {
        group: f"{NAMES.get(group, group)} {own}, not {other}"
        for group, other in formats.items()
        if groups.get(group, True) and (own := getattr(found, group)) != other
    }
