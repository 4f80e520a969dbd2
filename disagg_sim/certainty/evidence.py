"""Name what evidence for a forecast is told apart by: how an instance is laid out, and the family of its model."""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.uncertainty import ServedSpread

#: Families of models whose steps cost differently: no experts, experts behind latent attention, other experts.
FAMILIES = ("dense", "mla_moe", "other_moe")
#: Kinds of layouts of one stage: attention tensor or data parallel, experts cut or spread.
LAYOUTS = ("TP", "TP-EP", "DP", "DP-EP")


def family_of(model: ModelSpec) -> str:
    """Tell the family of a model, which the evidence of served runs is told apart by."""
    if not model.is_moe:
        return FAMILIES[0]
    return FAMILIES[1] if "mla" in model.attention_kinds else FAMILIES[2]


def layout_kinds(mapping: Sharding) -> NDArray[np.str_]:
    """Name the kind of layout of each row of a mapping.

    One GPU, and a dense model on any number of ranks, is ``TP`` unless its attention is data parallel. The result has
    shape (rows,): one of ``LAYOUTS``, with ``-PP`` where the row has several stages and ``-CP`` where GPUs share the
    tokens of a sequence.
    """
    rows = len(mapping)

    def above_one(value: Any) -> NDArray[np.bool_]:
        return np.broadcast_to(np.asarray(value) > 1, (rows,))

    stage = 2 * above_one(mapping.dp_attn).astype(int) + above_one(mapping.ep)
    kinds = np.array(LAYOUTS)[stage]
    kinds = np.where(above_one(mapping.pp), np.char.add(kinds, "-PP"), kinds)
    shared = above_one(mapping.dcp) | above_one(mapping.pcp)
    return np.where(shared, np.char.add(kinds, "-CP"), kinds) if np.any(shared) else kinds


def served_sigma(spread: ServedSpread, told: Table[str, Sequence[str]]) -> Floats:
    """Multiply the s.d. of the logarithm of what an engine adds by a factor for each kind of evidence; (rows,). [1]"""
    rows = len(next(iter(told.values())))
    found = np.full(rows, spread.base)
    for kind, levels in told.items():
        known = {level: spread.factor(kind, level) for level in set(levels)}
        found = found * np.array([known[level] for level in levels])
    return found
