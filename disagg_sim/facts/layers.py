"""Layers of a model: which kind of attention and of feed-forward part each of them has.

``models/*.yaml`` names blocks of these kinds, and the runs of layers that use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from disagg_sim.errors import quoted
from disagg_sim.facts import attention, ffn, linear_attention, sparse_attention  # noqa: F401 - register their kinds
from disagg_sim.facts.attention import MlaAttention
from disagg_sim.facts.ffn import NoFfn
from disagg_sim.facts.kinds import ATTENTION_KINDS, FFN_KINDS, AttentionSpec, FfnSpec
from disagg_sim.facts.schema import NotEmpty, OneKind, Range

__all__ = ["ATTENTION_KINDS", "NONE", "LayerKind", "LayerRun", "Layers", "MlaAttention", "NoFfn", "Part"]

#: Name of the part that a layer does not have.
NONE = "none"
#: Between the two names of a layer that a pattern writes as a word.
AND = "+"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One transformer layer: an attention and a feed-forward part, one of which may be missing."""

    attention: AttentionSpec
    ffn: FfnSpec

    @property
    def parts(self) -> int:
        """Attention and feed-forward part, those that it has. [1]"""
        return self.attention.norms + self.ffn.norms

    def norms(self, *, behind: bool) -> int:
        """Norms of the hidden size: one before each part, and one ``behind`` each where the model has these. [1]"""
        return 2 * self.parts + self.ffn.inner_norms if behind else self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Names of the blocks of one layer; ``none`` for a part that it does not have."""

    attention: str
    ffn: str

    def __post_init__(self) -> None:
        """``ValueError`` where a layer has neither part."""
        if self.attention == self.ffn == NONE:
            raise ValueError("has neither attention nor ffn")


def named_part(value: object) -> object:
    """Read a layer that is written as ``attention + ffn``."""
    if not isinstance(value, str):
        return value
    names = [name.strip() for name in value.split(AND)]
    if len(names) != 2 or not all(names):
        raise ValueError(f"{quoted(value)} names no layer; allowed: 'ATTENTION {AND} FFN', either may be '{NONE}'")
    return dict(zip(("attention", "ffn"), names, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Layers that follow each other: ``count`` times one layer, or ``count`` times a pattern of several."""

    count: Annotated[int, Range(1, 10_000)] = 1
    attention: str = ""
    ffn: str = ""
    pattern: Annotated[tuple[Annotated[Part, BeforeValidator(named_part)], ...], NotEmpty] = ()

    def __post_init__(self) -> None:
        """``ValueError`` unless exactly one of the two forms is there."""
        if (self.attention or self.ffn) if self.pattern else not (self.attention and self.ffn):
            raise ValueError("needs either 'attention' and 'ffn', or 'pattern'")
        if self.attention == self.ffn == NONE:
            raise ValueError("has neither attention nor ffn")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Layers that are repeated."""
        return self.pattern or (Part(attention=self.attention, ffn=self.ffn),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What a model's file says of its layers: blocks by name, and the runs of layers that use them."""

    attention: Annotated[Mapping[str, Annotated[AttentionSpec, OneKind(ATTENTION_KINDS)]], NotEmpty]
    ffn: Annotated[Mapping[str, Annotated[FfnSpec, OneKind(FFN_KINDS)]], NotEmpty]
    layers: Annotated[tuple[LayerRun, ...], NotEmpty]
