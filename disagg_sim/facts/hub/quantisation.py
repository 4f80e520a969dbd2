"""Read how a checkpoint is quantised, and find the precision recipe that is nearest to it.

Formats are told by ``quantization_config`` of ``config.json`` or by ``hf_quant_config.json``; modules that stay in 16
bit by their names. A group of modules counts as left out when that is so in most of its layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.precision_recipe import PrecisionRecipe
from disagg_sim.facts.schema import spec_of
from disagg_sim.facts.yaml_files import read_mapping, spec_files

#: Word of a quantisation algorithm -> format of its weights.
ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "MXFP8": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "MXFP4": "mxfp4",
    "W8A8_SQ_PER_CHANNEL": "int8",
}
#: What a recipe cannot say of them.
REMARKS = {
    "MXFP8": "MXFP8 has a scale for 32 values; taken as fp8 in blocks",
    "W4A16_NVFP4": "W4A16_NVFP4 multiplies in 16 bit; taken as NVFP4",
}
#: Group of modules -> what their names hold. ``shared`` goes with the experts in recipes.
SHARED = "shared"
GROUPS = {
    SHARED: re.compile(r"shared_experts?(?!_gate)"),
    "expert": re.compile(r"(?<!shared_)\bexperts?\b"),
    "attention_projection": re.compile(
        r"(self_attn|linear_attn|\battn)(\W*$|\*)"
        r"|(self_attn|attn|mixer)\.(in|out|q|k|v|o|qkv|q_a|q_b|kv_b|in_proj_qkv)_?(proj)?\b"
    ),
    "ffn": re.compile(
        r"(?<!_)\b(mlp|feed_forward|ffn)(\*|$|\.\*|\.\W*(gate|up|down|gate_up)(_proj|\|))"
        r"|\.\(?(gate|up|down)[^.]*_proj"
    ),
    "head": re.compile(r"\bhead\b|lm_head"),
}
_LAYER_GROUPS = ("attention_projection", "ffn", "expert", SHARED)
#: Number of a layer in a name, and a name that means all of a layer.
_LAYER, _WHOLE_LAYER = re.compile(r"\.(\d{1,6})\b"), re.compile(r"layers\.\d+\.?\*$")
#: What messages call groups.
NAMES = {
    "attention_projection": "attention projections",
    "ffn": "dense layers",
    "expert": "experts",
    SHARED: "shared experts",
}
#: Share of the layers of a group that must be left out for the group to count as left out. [1]
MOST_LAYERS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Format of each group of weights, and of the cache, as a checkpoint has them."""

    attention_projection: str = "bf16"
    ffn: str = "bf16"
    expert: str = "bf16"
    shared: str = "bf16"
    head: str = "bf16"
    cache: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint is quantised."""

    formats: Formats
    said: str  # what the files say, in a few words
    remarks: tuple[str, ...] = ()
    unknown: str = ""  # a method that no recipe has, with its key

    @property
    def block_scaled(self) -> bool:
        """Whether fp8 weights have scales of 128x128 blocks."""
        return "fp8_block" in (self.formats.ffn, self.formats.expert, self.formats.attention_projection)


def quantisation_of(config: Config, beside: Mapping[str, Any] | None, model: ModelSpec) -> Quantisation:
    """Read the quantisation of a checkpoint."""
    inner = beside.get("quantization") if beside else None
    own = config.find("quantization_config")[1]
    told = {**(own if isinstance(own, dict) else {}), **(inner if isinstance(inner, dict) else {})}
    if not told:
        return Quantisation(formats=Formats(), said="no quantisation")
    method, base, unknown = _base(told)
    remarks = [REMARKS[method]] if method in REMARKS else []
    if unknown:
        return Quantisation(formats=Formats(), said=method, unknown=unknown)
    formats = dict.fromkeys(("attention_projection", "ffn", "expert", SHARED), base) | {"head": "bf16"}
    if isinstance(layers := told.get("quantized_layers"), dict) and layers:
        formats |= _by_layer(layers, remarks)
    if fp4 := (told.get("expert_dtype") or config.find("expert_dtype")[1]) == "fp4" and base == "fp8_block":
        formats["expert"] = "mxfp4"
    if told.get("moe_quant_algo") in ALGORITHMS:
        formats["expert"] = ALGORITHMS[told["moe_quant_algo"]]
    for group in _left_out(told, model):
        if not (group == "expert" and fp4):
            formats[group] = "bf16"
    cache = told.get("kv_cache_quant_algo") or told.get("kv_cache_scheme")
    fp8 = cache == "FP8" or (isinstance(cache, dict) and cache.get("num_bits") == 8)
    formats["cache"] = "fp8" if fp8 else "bf16"
    return Quantisation(formats=Formats(**formats), said=method, remarks=tuple(dict.fromkeys(remarks)))


def _base(told: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the files call the method, the format of most weights, and what is unknown about it."""
    algorithm = str(told.get("quant_algo") or "").upper()
    if algorithm in ALGORITHMS:
        return algorithm, ALGORITHMS[algorithm], ""
    if algorithm == "MIXED_PRECISION":
        return algorithm, "fp8_block" if told.get("weight_block_size") else "bf16", ""
    method = str(told.get("quant_method") or algorithm or "none")
    if method == "fp8":
        return _fp8(told.get("weight_block_size"))
    if method == "mxfp4":
        return method, "mxfp4", ""
    if method == "compressed-tensors":
        return _compressed(told)
    return method, "bf16", f"quant_method {method!r}"


def _fp8(block: object) -> tuple[str, str, str]:
    if block is None:
        return "fp8", "fp8", ""
    if block == [128, 128]:
        return "fp8, blocks of 128x128", "fp8_block", ""
    return "fp8", "fp8_block", f"weight_block_size {block!r}"


def _compressed(told: Mapping[str, Any]) -> tuple[str, str, str]:
    """The format of the first group of ``compressed-tensors``."""
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        return "compressed-tensors", "bf16", "config_groups without weights"
    kind, bits, group = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    said = f"compressed-tensors, {kind} of {bits} bits"
    if (kind, bits) == ("float", 8):
        return said, "fp8_block" if weights.get("strategy") == "block" else "fp8", ""
    if (kind, bits) == ("int", 8):
        return said, "int8", ""
    if (kind, bits) == ("float", 4):
        return said, "mxfp4" if group == 32 else "nvfp4", ""
    return said, "bf16", f"weights of {kind} {bits} bits in config_groups"


def _group(module: str) -> str | None:
    """Group of a module, or of a pattern of modules, by its name."""
    plain = module.removeprefix("re:").replace(".*", "*").replace("\\.", ".").lstrip("*")
    return next((group for group, pattern in GROUPS.items() if pattern.search(plain)), None)


def _by_layer(layers: Mapping[str, Any], remarks: list[str]) -> dict[str, str]:
    """Format of most modules of each group that is listed with its own; bf16 for groups that are not."""
    counted: dict[str, Counter[str]] = {}
    for name, entry in layers.items():
        algorithm = str(entry.get("quant_algo")) if isinstance(entry, dict) else ""
        if (group := _group(str(name))) and algorithm in ALGORITHMS:
            counted.setdefault(group, Counter())[algorithm] += 1
    found = {group: counts.most_common(1)[0][0] for group, counts in counted.items()}
    remarks += [REMARKS[algorithm] for algorithm in found.values() if algorithm in REMARKS]
    return {group: ALGORITHMS[algorithm] for group, algorithm in found.items()}


def _left_out(told: Mapping[str, Any], model: ModelSpec) -> list[str]:
    """Groups whose modules stay in 16 bit in most layers."""
    lists = (told.get(key) for key in ("ignore", "exclude_modules", "modules_to_not_convert"))
    names = [str(name) for name in next((each for each in lists if isinstance(each, list) and each), ())]
    number = len(model.layers)
    within: dict[str, set[int]] = {}
    for name in names:
        group, digits = _group(name), _LAYER.search(name)
        layers = {int(digits[1])} & {*range(number)} if digits else {*range(number)}
        for each in (group,) if group else _LAYER_GROUPS if _WHOLE_LAYER.search(name) else ():
            within.setdefault(each, set()).update(layers)
    return [group for group, held in within.items() if len(held) >= MOST_LAYERS * _layers_of(group, model)]


def _layers_of(group: str, model: ModelSpec) -> int:
    """Layers that have modules of a group. [1]"""
    if group in ("expert", SHARED):
        return max(1, sum(kind.ffn.routes for kind in model.layers))
    if group == "ffn":
        return max(1, sum(kind.ffn.kind == "dense" for kind in model.layers))
    return max(1, sum(kind.attention.kind != "none" for kind in model.layers))


def groups_of(model: ModelSpec) -> dict[str, bool]:
    """Whether a model has each group that not all have."""
    ffns = [kind.ffn for kind in model.kinds]
    return {
        "ffn": any(ffn.kind == "dense" for ffn in ffns),
        "expert": any(ffn.routes for ffn in ffns),
        SHARED: any(getattr(ffn, "shared_experts", 0) for ffn in ffns),
    }


def formats_text(formats: Formats, model: ModelSpec) -> str:
    """Write the formats of the groups of weights that a model has, and of its cache."""
    groups = groups_of(model)
    said = {field.name: getattr(formats, field.name) for field in fields(formats)}
    named = {field.name: field.name.replace("_", " ") for field in fields(formats)} | NAMES
    return ", ".join(f"{named[key]} {value}" for key, value in said.items() if groups.get(key, True))


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
        recipe = spec_of(PrecisionRecipe, path, read_mapping(path), name).resolve(model)
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
