"""Add routed experts and their exchange to the layers of a pass (physics page, sections 5 to 7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import FfnBlock, layers_of
from disagg_sim.physics.cost import exchange_cost, expert_cost
from disagg_sim.physics.expert_load import ExpertRouting
from disagg_sim.physics.passes.layers import AttentionSide, LayerTimes
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, tabulate
from disagg_sim.physics.work import Numeric


def join_experts(
    at: Setup, mapping: Sharding, side: AttentionSide, *, phase: str, rank: DistinctCounts, total: DistinctCounts
) -> LayerTimes:
    """Add routed experts and their exchange to the attention side.

    The shared expert hides dispatch where the profile says so (physics page, section 5, overlap rules).

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance. [1]
    side
        Times of the attention ranks. [s]
    phase
        "prefill" or "decode": whose imbalance and whose exchange count.
    rank, total
        Tokens of one attention rank, and of all ranks of the stage. [token]

    Returns
    -------
    LayerTimes
        Times of one layer of each kind and sums of all layers, of the broadcast shape of mapping and tokens. [s]

    Examples
    --------
    Only the second kind of layers of DeepSeek-R1 has routed experts:

    >>> from disagg_sim.physics.operators import Tokens
    >>> from disagg_sim.physics.passes.layers import attention_side
    >>> from disagg_sim.physics.setup import setup
    >>> at, wide = setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal"), Sharding(dp_attn=16, ep=16)
    >>> side = attention_side(at, 1, Tokens(decodes=64.0, context=1000.0, emitted=64.0), "auto", "decode")
    >>> times = join_experts(at, wide, side, phase="decode", rank=DistinctCounts(64.0), total=DistinctCounts(1024.0))
    >>> [bool(joined > alone) for joined, alone in zip(times.layers, side.layers)]
    [False, True]
    """
    layers, sums = list(side.layers), side.sums
    together = np.maximum if at.profile.shared_expert_overlaps_dispatch else np.add
    for index, (layer, count) in enumerate(layers_of(at.model)):
        if not layer.ffn.picks:
            continue
        routed, routed_sums = routed_time(at, layer.ffn, count, mapping, phase, total)
        dispatch, combine, exchange_sums = _exchange(at, layer.ffn, count, mapping, phase, rank)
        layers[index] = layers[index] + routed + together(side.shared[index], dispatch) + combine
        sums = sums.plus(routed_sums).plus(exchange_sums)
    return LayerTimes(tuple(layers), side.scores, side.embedding, side.head, sums)


def routed_time(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, total: DistinctCounts
) -> tuple[Numeric, Sums]:
    """Time of the routed experts of one layer, and the sums of all ``layers`` of its kind. [s]"""
    profile = at.profile
    routing = ExpertRouting(profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance)
    if profile.random_routing:
        routing = ExpertRouting(skew=profile.expert_skew)

    def experts(tp_ffn: Numeric, ep: Numeric, redundant: Numeric, tokens: Numeric) -> tuple[Numeric, Sums]:
        held = Sharding(tp_ffn=tp_ffn, ep=ep, redundant_slots=redundant)
        cost = expert_cost(ffn.routed(at.model, at.precision, held, tokens, routing), ep, tp_ffn, at)
        return cost.time, Sums().plus(cost.sums, layers)

    return tabulate(experts, (mapping.tp_ffn, mapping.ep, mapping.redundant_slots), total)


def _exchange(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, rank: DistinctCounts
) -> tuple[Numeric, Numeric, Sums]:
    if np.all(np.asarray(mapping.token_ranks) == 1):
        return 0.0, 0.0, Sums()

    def exchanged(
        tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, tokens: Numeric
    ) -> tuple[Numeric, Numeric, Sums]:
        here, width = Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp_ffn, ep=ep), ffn.wire_width(at.model.hidden)
        dispatch, combine = exchange_cost(tokens / tp, here, ffn.picks, phase, at, width=width)
        return dispatch.time, combine.time, Sums().plus(dispatch.sums, layers).plus(combine.sums, layers)

    return tabulate(exchanged, (mapping.tp_attn, mapping.token_ranks, mapping.tp_ffn, mapping.ep), rank)
