"""Read ``models/*.yaml``: named attention and feed-forward blocks, and the layers that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.model import (
    AttentionSpec,
    DenseFfn,
    FfnSpec,
    GqaAttention,
    LayerKind,
    MlaAttention,
    ModelSpec,
    MoeFfn,
)
from disagg_sim.facts.schema import (
    checked,
    integer,
    line,
    list_of,
    mapping_of,
    optional,
    schema_of,
    table,
    tagged,
    validate,
    values,
)
from disagg_sim.facts.yaml_files import spec_error

#: Layers of one model; the deepest known has some hundred. [1]
MOST_LAYERS = 10_000
_count = integer(1, 10**7)


def _heads_divide(block: Any) -> Any:
    if block.q_heads % block.kv_heads:
        raise ValueError(f"kv_heads {block.kv_heads} does not divide q_heads {block.q_heads}")
    return block


def _picks_exist(block: Any) -> Any:
    if block.top_k > block.experts:
        raise ValueError(f"top_k {block.top_k} is above experts {block.experts}")
    return block


#: Group of a model's file ("attention", "ffn") -> word of a kind -> its spec, and the schema of its keys.
_SPECS: dict[str, dict[str, type[Any]]] = {"attention": {}, "ffn": {}}
_SCHEMAS: dict[str, dict[str, Any]] = {"attention": {}, "ffn": {}}


def register(
    spec: type[AttentionSpec] | type[FfnSpec], types: Mapping[str, Any], check: Callable[[Any], Any] | None = None
) -> None:
    """Let files of models use a kind of attention or of feed-forward layer.

    Parameters
    ----------
    spec
        Frozen dataclass of the keys of the kind; its ``kind`` is the word in a file.
    types
        Units and ranges of keys, by name (``facts.schema``); others have the type of their annotation.
    check
        Looks at all keys together and raises ValueError.
    """
    group = "attention" if issubclass(spec, AttentionSpec) else "ffn"
    schema: Any = schema_of(spec, types, kind=spec.kind)
    _SPECS[group][spec.kind] = spec
    _SCHEMAS[group][spec.kind] = schema if check is None else checked(schema, check)
    _schema.cache_clear()


def attention_kinds() -> tuple[str, ...]:
    """Words of all kinds of attention."""
    return tuple(_SPECS["attention"])


_Part = table("Part", attention=str, ffn=str)
_Run = table(
    "Run",
    count=integer(1, 10_000),
    attention=(optional(str), None),
    ffn=(optional(str), None),
    pattern=(optional(list_of(_Part, at_least=1)), None),
)


@cache
def _schema() -> Any:
    kinds = {group: tagged(*schemas.values()) for group, schemas in _SCHEMAS.items()}
    return table(
        "Model",
        title=line(),
        hidden=_count,
        vocab=_count,
        tied_embeddings=bool,
        layer_norm=(bool, False),
        learned_positions=(integer(0, 10**7), 0),
        block_scaled_fp8=(bool, False),
        max_context=integer(1, 10**9),
        max_context_sure=bool,
        attention=mapping_of(str, kinds["attention"], at_least=1),
        ffn=mapping_of(str, kinds["ffn"], at_least=1),
        layers=list_of(_Run, at_least=1),
        source=str,
    )


register(
    GqaAttention,
    {"q_heads": _count, "kv_heads": _count, "head_dim": _count, "window": integer(0, 10**9)},
    check=_heads_divide,
)
register(MlaAttention, dict.fromkeys(("q_heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"), _count))
register(DenseFfn, {"width": _count, "matrices": integer(2, 3)})
register(
    MoeFfn,
    dict.fromkeys(("experts", "top_k", "width"), _count)
    | {"shared_experts": integer(0, 100), "shared_width": integer(0, 10**7)},
    check=_picks_exist,
)


def model_of(path: Path, data: Mapping[str, Any], name: str) -> ModelSpec:
    """A model from its file."""
    file: Any = validate(_schema(), data, path)
    blocks = {
        group: {
            key: specs[block.kind](**values(block, without=("kind",))) for key, block in getattr(file, group).items()
        }
        for group, specs in _SPECS.items()
    }
    found: list[str] = []
    layers: list[LayerKind] = []
    if (many := sum(run.count * max(len(_parts(run)), 1) for run in file.layers)) > MOST_LAYERS:
        raise spec_error(path, [f"layers: {many} in all; allowed: up to {MOST_LAYERS}"])
    for index, run in enumerate(file.layers):
        parts = _parts(run)
        if not parts:
            found.append(f"layers[{index}]: needs either 'attention' and 'ffn', or 'pattern'")
        unknown = [
            f"layers[{index}].{group}: {quoted(used)} is unknown{nearest(used, known)}; allowed: {', '.join(known)}"
            for part in parts
            for group, known in blocks.items()
            if (used := getattr(part, group)) not in known
        ]
        found += unknown
        if not unknown:
            kinds = [LayerKind(blocks["attention"][part.attention], blocks["ffn"][part.ffn]) for part in parts]
            layers += kinds * run.count
    if found:
        raise spec_error(path, list(dict.fromkeys(found)))
    return ModelSpec(name=name, layers=tuple(layers), **values(file, without=("attention", "ffn", "layers")))


def _parts(run: Any) -> list[Any]:
    """Layers that a run repeats; none when it is written in neither form, or in both."""
    if run.pattern is None:
        return [run] if run.attention is not None and run.ffn is not None else []
    return list(run.pattern) if run.attention is None and run.ffn is None else []
