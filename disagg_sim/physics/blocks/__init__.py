"""Kinds of attention and feed-forward layers, one class each: operators, weights, cache, shards, hand-over.

To add a kind: a spec in ``facts.attention`` (or anywhere) registered by ``facts.layers.register``, a class
registered by ``attention`` or ``ffn``, and fits of its ``kind`` in the efficiency files of the systems.
"""

from __future__ import annotations

from disagg_sim.errors import check_word
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks.base import (
    ATTENTION,
    FFN,
    AttentionBlock,
    FfnBlock,
    Layer,
    Unattended,
    Unfed,
    attention,
    elementwise,
    ffn,
    layer_of,
    layers_of,
)
from disagg_sim.physics.blocks.compressed import Csa, Hca
from disagg_sim.physics.blocks.feed_forward import Dense, Moe
from disagg_sim.physics.blocks.gqa import Gqa
from disagg_sim.physics.blocks.linear import Gdn, Kda, LinearBlock, Mamba2
from disagg_sim.physics.blocks.mla import MLA_FORMS, Mla
from disagg_sim.physics.blocks.sparse import Dsa, Msa

__all__ = [
    "ATTENTION",
    "FFN",
    "MLA_FORMS",
    "AttentionBlock",
    "Csa",
    "Dense",
    "Dsa",
    "FfnBlock",
    "Gdn",
    "Gqa",
    "Hca",
    "Kda",
    "Layer",
    "LinearBlock",
    "Mamba2",
    "Mla",
    "Moe",
    "Msa",
    "Unattended",
    "Unfed",
    "attention",
    "check_form",
    "chunk_forms",
    "elementwise",
    "ffn",
    "forms_of",
    "layer_of",
    "layers_of",
]


def forms_of(model: ModelSpec) -> tuple[str, ...]:
    """Forms of attention that can be forced in some layer of a model; "auto" first."""
    return tuple(dict.fromkeys(form for layer, _ in layers_of(model) for form in layer.attention.forms))


def chunk_forms(model: ModelSpec, form: str) -> tuple[str, ...]:
    """Forms to try in chunks of a prompt: "auto" may also keep the up-projected past, at the cost of memory."""
    return ("auto", "cached") if form == "auto" and "cached" in forms_of(model) else (form,)


def check_form(form: str) -> None:
    """``InputError`` unless ``form`` is one of ``MLA_FORMS``; models without MLA ignore it."""
    check_word("mla_form", form, MLA_FORMS)
