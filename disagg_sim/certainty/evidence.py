"""Name what evidence for a forecast is told apart by: how an instance is laid out, and the family of its model."""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats
from disagg_sim.domain import Mapping
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.uncertainty import ServedSpread

#: Families of models whose steps cost differently: no experts, experts behind latent attention, other experts.
FAMILIES = ("dense", "mla_moe", "other_moe")
#: Kinds of layouts of one stage: attention tensor or data parallel, experts cut or spread.
LAYOUTS = ("TP", "TP-EP", "DP", "DP-EP")


def family_of(model: ModelSpec) -> str:
    """Family of a model, one of ``FAMILIES``."""
    if not model.is_moe:
        return FAMILIES[0]
    return FAMILIES[1] if "mla" in model.attention_kinds else FAMILIES[2]


def layout_kinds(mapping: Mapping) -> NDArray[np.str_]:
    """Kind of layout of each row of a mapping: one of ``LAYOUTS``, with ``-PP`` where it has several stages.

    One GPU, and a dense model on any number of ranks, is ``TP`` unless its attention is data parallel.

    >>> layout_kinds(Mapping(dp_attn=8, ep=8)).tolist(), layout_kinds(Mapping(tp_attn=4, tp_ffn=4, pp=2)).tolist()
    (['DP-EP'], ['TP-PP'])
    """
    rows = len(mapping)

    def above_one(value: Any) -> NDArray[np.bool_]:
        return np.broadcast_to(np.asarray(value) > 1, (rows,))

    stage = 2 * above_one(mapping.dp_attn).astype(int) + above_one(mapping.ep)
    kinds = np.array(LAYOUTS)[stage]
    return np.where(above_one(mapping.pp), np.char.add(kinds, "-PP"), kinds)


def served_sigma(spread: ServedSpread, told: Table[str, Sequence[str]]) -> Floats:
    """S.d. of the logarithm of what an engine adds, by the evidence for each row. [1]

    Parameters
    ----------
    told
        Kinds of evidence (``facts.uncertainty.EVIDENCE``) and the level of each row; "" is not stated.
    """
    rows = len(next(iter(told.values())))
    found = np.full(rows, spread.base)
    for kind, levels in told.items():
        known = {level: spread.factor(kind, level) for level in set(levels)}
        found = found * np.array([known[level] for level in levels])
    return found
