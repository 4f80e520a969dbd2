"""Precision recipes: what a file says of the format of each operator group, and what that is for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from disagg_sim.errors import InputError
from disagg_sim.facts.kinds import ATTENTION_KINDS
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import FORMATS, FP8, FP8_BLOCK, Format, Precision
from disagg_sim.facts.schema import NOT_IN_FILE, Line, NotEmpty, OneOf, Quantity
from disagg_sim.notebook import Shown

#: Kind of attention under which a recipe gives the format of all kinds that it does not name.
ANY_KIND = "any"
#: What a recipe may name: ``fp8`` is that of the model's checkpoints, ``fp8_tensor`` has no block scales in any model.
_NAMED = FORMATS | {"fp8_tensor": FP8}

_Format = Annotated[str, OneOf(_NAMED)]
_Arithmetic = Annotated[str, OneOf(("bf16", "fp8"))]
_Bytes = Annotated[float, Quantity("B", 0.5, 4.0)]
_Kind = Annotated[str, OneOf(lambda: (*ATTENTION_KINDS, ANY_KIND))]
#: ``{gqa: fp8, mla: bf16}``; one format is that of any kind.
_any_kind = BeforeValidator(lambda value: {ANY_KIND: value} if isinstance(value, str) else value)
_ByKind = Annotated[Mapping[_Kind, _Format], NotEmpty, _any_kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe(Shown):
    """A recipe as ``hw_specs/precision/`` writes it, before it meets a model.

    ``"fp8"`` weights mean per tensor scales, or 128x128 blocks where the model's checkpoints have them.
    """

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    attention_projection: _ByKind  # by kind of attention; ``ANY_KIND``: of those that are not named
    ffn: _Format
    expert: _Format
    attention: _Arithmetic  # arithmetic of scores and values: "bf16" or "fp8"
    cache: _Arithmetic
    embedding: _Format
    head: _Format
    router: _Format
    dispatch_bytes: _Bytes  # of an activation on the wire [B]
    combine_bytes: _Bytes  # [B]
    source: str

    def resolve(self, model: ModelSpec) -> Precision:
        """The format of every operator group for one model."""

        def weight(name: str) -> Format:
            return FP8_BLOCK if name == "fp8" and model.block_scaled_fp8 else _NAMED[name]

        def projection(kind: str) -> Format:
            wanted = (kind, ATTENTION_KINDS[kind].projected_as, ANY_KIND)
            name = next((self.attention_projection[each] for each in wanted if each in self.attention_projection), None)
            if name is None:
                raise InputError(
                    f"precision {self.name!r} gives no attention_projection for attention of kind {kind!r}, which "
                    f"{model.name} has; it does for {', '.join(self.attention_projection)}"
                )
            return weight(name)

        return Precision(
            name=self.name,
            attention_projection={kind: projection(kind) for kind in model.attention_kinds},
            ffn=weight(self.ffn),
            expert=weight(self.expert),
            attention=self.attention,
            cache=FORMATS[self.cache],
            embedding=weight(self.embedding),
            head=weight(self.head),
            router=weight(self.router),
            dispatch_bytes=self.dispatch_bytes,
            combine_bytes=self.combine_bytes,
            source=self.source,
        )
