"""Count the descriptors of a transfer of a cache: blocks in which it lies, and the pieces in which they come."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, check_word, whole_number
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.kv_transfer import descriptors, unique_gpus
from disagg_sim.physics.work import Numeric

#: How a block of a layer's keys lies in memory: heads, then tokens; or tokens, then heads.
ORDERS = ("hnd", "nhd")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How engines keep caches, which decides how many descriptors a transfer has."""

    block_tokens: int = 16  # of the smaller blocks, where sender and receiver differ [token]
    order: str = "hnd"  # of ``ORDERS``
    cross_layer: bool = False  # a block holds all layers (vLLM ``enable_cross_layers_blocks``)
    run: float = 1.0  # blocks that follow each other in memory and take one descriptor together, on average [1]

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        whole_number("block_tokens", self.block_tokens)
        check_word("order", self.order, ORDERS)
        if not self.run >= 1.0:
            raise InputError(f"run {self.run} is out of range; allowed: from 1")


def post_share(model: ModelSpec, sender: Sharding, receiver: Sharding) -> Numeric:
    """Count the descriptors that a GPU of the receiver posts for a block of one tensor of one layer, on average. [1]

    A pipeline stage has the blocks of its layers, a GPU that shares tokens its share of the blocks; a GPU with more
    heads than those of the sender takes a part of each block from each of them.

    Parameters
    ----------
    model
        Whose cache moves.
    sender, receiver
        Mappings of the instances.

    Returns
    -------
    numeric
        Of their shape; times the blocks of all tensors and layers (``kv_transfer.descriptors``) those of the GPU.

    Examples
    --------
    >>> from disagg_sim.facts.load import load_model
    >>> one, two, stages = Sharding(), Sharding(tp_attn=2, tp_ffn=2), Sharding(pp=2)
    >>> [float(post_share(load_model("llama_3_1_70b"), *pair)) for pair in ((one, two), (two, one), (one, stages))]
    [1.0, 2.0, 0.5]
    """
    # a block comes in parts: one of each sender whose heads the receiving GPU holds
    parts: Numeric = np.maximum(_heads_apart(model, sender) / _heads_apart(model, receiver), 1.0)
    return parts / (receiver.pp * receiver.dcp)


def _heads_apart(model: ModelSpec, mapping: Sharding) -> Numeric:
    """GPUs of a TP group that hold distinct heads. [1]"""
    return unique_gpus(model, replace(mapping, dcp=1)) / (mapping.dp_attn * mapping.pp)


def blocks_of(model: ModelSpec, tokens: float, layout: KvLayout) -> int:
    """Count the blocks of a cache on a GPU that holds a share of every one: of each tensor of each layer, or of all.

    Takes ``model`` and ``tokens`` (layers, and cached tokens, rounded up [token]).

    >>> from disagg_sim.facts.load import load_model
    >>> llama = load_model("llama_3_1_70b")
    >>> [blocks_of(llama, 1888, KvLayout(cross_layer=crossed)) for crossed in (False, True)]
    [18880, 118]
    """
    whole = math.ceil(tokens)
    return -(-whole // layout.block_tokens) if layout.cross_layer else descriptors(model, whole, layout.block_tokens)


def posted_share(model: ModelSpec, sender: Sharding, receiver: Sharding, layout: KvLayout) -> Numeric:
    """Count the descriptors that a GPU of the receiver posts for one of the blocks of ``blocks_of``, on average.

    Parameters
    ----------
    model, sender, receiver
        As in ``post_share``.
    layout
        How blocks lie: with tokens before heads each token is a piece where heads are cut anew; a block of all layers
        comes to every pipeline stage.

    Returns
    -------
    numeric
        Of the shape of the mappings. [1]

    Examples
    --------
    >>> from disagg_sim.facts.load import load_model
    >>> four, eight = Sharding(tp_attn=4, tp_ffn=4), Sharding(tp_attn=8, tp_ffn=8)
    >>> llama, orders = load_model("llama_3_1_70b"), (KvLayout(), KvLayout(order="nhd"))
    >>> [float(posted_share(llama, four, eight, layout)) for layout in orders]
    [1.0, 16.0]
    """
    share = post_share(model, sender, receiver) * (receiver.pp if layout.cross_layer else 1.0)
    unlike = _heads_apart(model, sender) != _heads_apart(model, receiver)
    tokens = layout.block_tokens if layout.order == "nhd" else 1
    found: Numeric = share * np.where(unlike, tokens, 1.0) / layout.run
    return found
