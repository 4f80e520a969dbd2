"""Kinds of attention and feed-forward layers, one class each: operators, weights, cache, shards, hand-over.

To add a kind: a spec in ``facts.attention`` (or anywhere) registered by ``facts.kinds.register``, a class
registered by ``attention`` or ``ffn``, and fits of its ``kind`` in the efficiency files of the systems.
"""

from __future__ import annotations

from disagg_sim.errors import check_word
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.blocks import compressed, feed_forward, gqa, linear, mla, sparse  # noqa: F401 - register kinds
from disagg_sim.physics.blocks.base import ATTENTION, elementwise, layer_of, layers_of
from disagg_sim.physics.blocks.linear import LinearBlock
from disagg_sim.physics.blocks.mla import MLA_FORMS

__all__ = [
    "ATTENTION",
    "MLA_FORMS",
    "LinearBlock",
    "check_form",
    "chunk_forms",
    "elementwise",
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
