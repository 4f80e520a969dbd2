"""Name the pools that a request passes, and say which of them serve one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg_sim.choices import TWO
from disagg_sim.errors import check_kinds
from disagg_sim.facts.load import load_model
from disagg_sim.facts.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images of a request; their tokens are part of its prompt."""

    images: int  # of a request [1]
    height: int  # [pixel]
    width: int  # [pixel]
    cached: float = 0.0  # share whose embeddings are kept, below 1 [1]

    def __post_init__(self) -> None:
        """``InputError`` for a value of another kind; ``encode_step`` checks ranges."""
        check_kinds(self)


def pool_faults(
    pools: Sequence[str],
    images: Images | None,
    models: Sequence[str | ModelSpec],
    shortest: float,
    options: dict[str, object],
) -> Iterator[str]:
    """Say which pools do not serve a request, and which keys do not go with them.

    >>> list(pool_faults(("prefill", "attention"), None, ["llama_3_1_8b"], 1024, {}))
    ['pools: attention and ffn decode together; give both or neither']
    """
    asked = {*pools} or {*TWO}
    if ("encode" in asked) != (images is not None):
        told = "need encode among the pools, as encode,prefill,decode"
        yield f"images: {'are missing: encode needs them' if images is None else told}"
    if asked == {*TWO}:
        return
    if len({"attention", "ffn"} & asked) == 1:
        yield "pools: attention and ffn decode together; give both or neither"
    elif "prefill" not in asked or not {"decode", "attention"} & asked:
        yield f"pools: {', '.join(pools)} serve no request; allowed: prefill with decode, or with attention and ffn"
    for key, value in options.items():
        if value:
            yield f"{key}: {value} does not go with pools other than prefill and decode"
    if images is None or "encode" not in asked:
        return
    for model in (each if isinstance(each, ModelSpec) else load_model(each) for each in models):
        if model.encoder is None:
            yield f"pools: encode needs a model with an encoder, and {model.name} has none"
        elif (tokens := images.images * model.encoder.tokens(images.height, images.width)) > shortest:
            most = f"the shortest prompt, {shortest:.0f}, which counts them"
            yield f"images: {tokens} tokens of {model.name} are more than {most}"
