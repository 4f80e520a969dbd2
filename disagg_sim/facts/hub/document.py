"""Turn a ``config.json`` into the keys of ``models/*.yaml``: sizes, blocks, and the runs of layers that use them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.faults import value_text
from disagg_sim.facts.hub.config import Config
from disagg_sim.facts.hub.families import FAMILIES, TEXT_KEYS, TEXT_OF, Family
from disagg_sim.facts.hub.files import ModelFiles
from disagg_sim.facts.hub.keys import NO_SIZE, NO_SIZE_BEGINS, NO_SIZE_ENDS, ONLY
from disagg_sim.facts.hub.vision import encoder_of
from disagg_sim.facts.layers import AND, NONE

#: Keys of modules for prediction of further tokens, which are left out.
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp")
#: What a model's file says of some keys.
_COMMENTS = {
    "max_context": "input + output tokens",
    "block_scaled_fp8": "fp8 checkpoints carry 128x128 block scales",
    "recipe": "of this checkpoint; plans take it unless another is named",
}
#: Longest context that a file may state. [token]
MOST_CONTEXT = 10**9
#: Longest pattern of layers that is looked for. [1]
_LONGEST_PATTERN = 24


def text_config(files: ModelFiles) -> tuple[Config, str]:
    """The keys of the text model, and its class."""
    data = files.data
    config = Config(files.path, data)
    name = _class(config)
    inner = next((key for key in TEXT_KEYS if isinstance(data.get(key), dict)), None)
    if name is None and inner is not None:
        name = _class(Config(files.path, data[inner]))
    if name is None:
        known = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"} & {*data}
        said = "missing key 'architectures'" if known else "not a model's config.json: missing key 'architectures'"
        raise config.fault(said)
    text = TEXT_OF.get(name, name)
    if text not in FAMILIES:
        known_names = (*FAMILIES, *TEXT_OF)
        raise config.fault(f"architectures: {quoted(name)} is unknown{nearest(name, known_names)}")
    if inner is None:
        return config, text
    outer = {key: value for key, value in data.items() if key in ("tie_word_embeddings", "quantization_config")}
    found = Config(files.path, outer | data[inner])
    vision = data.get("vision_config")
    found.encoder = encoder_of(vision) if isinstance(vision, dict) else None
    left = [key for key in ("vision_config", "audio_config") if data.get(key)]
    left = left if found.encoder is None else left[1:]
    said = "; vision_config as encoder" if found.encoder is not None else ""
    found.assume(f"{inner}: the text model alone{said}" + (f"; {' and '.join(left)} left out" if left else ""))
    return found, text


def _class(config: Config) -> str | None:
    names = config.find("architectures")[1]
    config.find("model_type")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.fault(f"architectures: {value_text(names)} is not a list of class names")
    return names[0]


def document_of(config: Config, family: Family) -> dict[str, Any]:
    """The keys of a model's file, ``title`` and ``source`` apart."""
    for key, (allowed, reason) in ONLY.items():
        value = config.find(key)[1]
        if value is not None and value not in allowed:
            raise config.fault(f"{key}: {value_text(value)}: {reason}")
    attention, ffn = family.attention(config), family.ffn(config)
    layers = tuple(zip(attention.layers, ffn.layers, strict=True))
    document: dict[str, Any] = {
        "hidden": config.hidden,
        "vocab": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=family.tied),
        **family.whole(config),
        "block_scaled_fp8": False,
        "max_context": config.count("max_position_embeddings", most=MOST_CONTEXT),
        "max_context_sure": True,
        "attention": {name: attention.known[name] for name in dict.fromkeys(attention.layers) if name != NONE},
        "ffn": {name: ffn.known[name] for name in dict.fromkeys(ffn.layers) if name != NONE},
        "layers": runs_of(layers),
    }
    if config.encoder is not None:
        document["encoder"] = config.encoder
    modules = [key for key in _MTP if config.find(key)[1] not in (None, 0, False)]
    if modules:
        config.assume(f"{modules[0]}: modules that predict further tokens are left out")
    return document


def unread_keys(config: Config) -> list[str]:
    """Keys with a value that no reader asked for, and that are not known to move no size."""
    return sorted(
        key
        for key, value in config.data.items()
        if value not in (None, False, 0, "", [], {})
        and key not in config.read
        and key not in NO_SIZE
        and not key.startswith(NO_SIZE_BEGINS)
        and not key.endswith(NO_SIZE_ENDS)
    )


def runs_of(layers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Write layers as runs: one layer, or a pattern of several, so many times.

    Returns them as ``layers`` of a model's file lists them.

    >>> for run in runs_of([("gqa", "dense")] + [("local", "moe"), ("full", "none")] * 3):
    ...     print(run)
    {'count': 1, 'attention': 'gqa', 'ffn': 'dense'}
    {'count': 3, 'pattern': ['local + moe', 'full + none']}
    """
    found, start = [], 0
    while start < len(layers):
        # of equal reach the shortest pattern; one that is not repeated is no pattern
        size, times = max(
            ((size, _repeats(layers, start, size)) for size in range(1, _LONGEST_PATTERN + 1)),
            key=lambda each: (each[0] * each[1] if each[1] > 1 or each[0] == 1 else 0, -each[0]),
        )
        unit = layers[start : start + size]
        one = dict(zip(("attention", "ffn"), unit[0], strict=True))
        found.append({"count": times} | (one if size == 1 else {"pattern": [f" {AND} ".join(names) for names in unit]}))
        start += size * times
    return found


def _repeats(layers: Sequence[tuple[str, str]], start: int, size: int) -> int:
    """How often the ``size`` layers from ``start`` follow each other; 0 where there are not so many."""
    unit, times = layers[start : start + size], 0
    while len(unit) == size and layers[start + times * size : start + (times + 1) * size] == unit:
        times += 1
    return times


def model_yaml(document: Mapping[str, Any]) -> str:
    """Write the text of a model's file.

    >>> block = {"kind": "gqa", "q_heads": 1, "qk_norm": True}
    >>> print(model_yaml({"title": "Tiny", "hidden": 64, "attention": {"gqa": block}, "source": "own"}), end="")
    title: Tiny
    hidden: 64
    attention:
      gqa: {kind: gqa, q_heads: 1, qk_norm: true}
    source: "own"
    """
    lines = []
    for key, value in document.items():
        if value is False and key != "tied_embeddings":  # as without the key
            continue
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  - {_flow(run)}" for run in value)]
        elif isinstance(value, Mapping):
            lines += [f"{key}:", *(f"  {name}: {_flow(block)}" for name, block in value.items())]
        else:
            said = f"        # {_COMMENTS[key]}" if key in _COMMENTS else ""
            lines.append(f"{key}: {_text(value) if key in ('title', 'source', 'no_recipe') else _flow(value)}{said}")
    return "\n".join([*lines, ""])


def _text(value: str) -> str:
    """A text, in quotation marks unless it is plain words."""
    if re.fullmatch(r"[A-Za-z][\w .-]*", value) and "config.json" not in value and len(value) > 3:
        return value
    return json.dumps(value, ensure_ascii=False)


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
