"""Add routed experts and their exchange to the layers of a pass (physics page, sections 5 to 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import FfnBlock, layers_of
from disagg_sim.physics.cost import exchange_cost, expert_cost
from disagg_sim.physics.expert_load import ExpertRouting
from disagg_sim.physics.passes.layers import AttentionSide, LayerTimes
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import DistinctCounts, Lookups, evaluate, look_up, side_by_side
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
    return evaluate(expert_lookups(at, mapping, side, phase=phase, rank=rank, total=total))


def expert_lookups(
    at: Setup, mapping: Sharding, side: AttentionSide, *, phase: str, rank: DistinctCounts, total: DistinctCounts
) -> Lookups[LayerTimes]:
    """Ask for what ``join_experts`` adds."""
    layers, sums = list(side.layers), side.sums
    kinds = [(index, *kind) for index, kind in enumerate(layers_of(at.model)) if kind[0].ffn.picks]
    asked: list[Lookups[Any]] = []
    for _, layer, count in kinds:
        asked.append(_routed(at, layer.ffn, count, mapping, phase, total))
        asked.append(_exchange(at, layer.ffn, count, mapping, phase, rank))
    found = yield from side_by_side(asked)
    for (index, _, _), (routed, routed_sums), (dispatch, combine, exchange_sums) in zip(
        kinds, found[::2], found[1::2], strict=True
    ):
        overlap = np.maximum if at.profile.shared_expert_overlaps_dispatch else np.add
        together = overlap(side.shared[index], dispatch)
        layers[index] = layers[index] + routed + together + combine
        sums = sums.plus(routed_sums).plus(exchange_sums)
    return LayerTimes(tuple(layers), side.scores, side.embedding, side.head, sums)


def routed_time(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, total: DistinctCounts
) -> tuple[Numeric, Sums]:
    """Time of the routed experts of one layer, and the sums of all ``layers`` of its kind. [s]"""
    return evaluate(_routed(at, ffn, layers, mapping, phase, total))


@dataclass(frozen=True, slots=True)
class _Experts:
    """Time of the routed experts of one layer on the degrees of expert TP and EP, and sums of all of its kind. [s]"""

    at: Setup
    ffn: FfnBlock[Any]
    layers: int
    routing: ExpertRouting

    def __call__(self, tp_ffn: Numeric, ep: Numeric, redundant: Numeric, tokens: Numeric) -> tuple[Numeric, Sums]:
        held = Sharding(tp_ffn=tp_ffn, ep=ep, redundant_slots=redundant)
        op = self.ffn.routed(self.at.model, self.at.precision, held, tokens, self.routing)
        cost = expert_cost(op, ep, tp_ffn, self.at)
        return cost.time, Sums().plus(cost.sums, self.layers)


def _routed(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, total: DistinctCounts
) -> Lookups[tuple[Numeric, Sums]]:
    profile = at.profile
    routing = ExpertRouting(profile.prefill_imbalance if phase == "prefill" else profile.decode_imbalance)
    if profile.random_routing:
        routing = ExpertRouting(skew=profile.expert_skew)
    experts = _Experts(at, ffn, layers, routing)
    return look_up(experts, (mapping.tp_ffn, mapping.ep, mapping.redundant_slots), total)


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Times of dispatch and combine of one layer, and the sums of all ``layers`` of its kind. [s]"""

    at: Setup
    ffn: FfnBlock[Any]
    layers: int
    phase: str

    def __call__(
        self, tp: Numeric, dp: Numeric, tp_ffn: Numeric, ep: Numeric, tokens: Numeric
    ) -> tuple[Numeric, Numeric, Sums]:
        here = Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp_ffn, ep=ep)
        width = self.ffn.wire_width(self.at.model.hidden)
        dispatch, combine = exchange_cost(tokens / tp, here, self.ffn.picks, self.phase, self.at, width=width)
        sums = Sums().plus(dispatch.sums, self.layers).plus(combine.sums, self.layers)
        return dispatch.time, combine.time, sums


def _exchange(
    at: Setup, ffn: FfnBlock[Any], layers: int, mapping: Sharding, phase: str, rank: DistinctCounts
) -> Lookups[tuple[Numeric, Numeric, Sums]]:
    if np.all(np.asarray(mapping.token_ranks) == 1):
        return 0.0, 0.0, Sums()
    degrees = mapping.tp_attn, mapping.token_ranks, mapping.tp_ffn, mapping.ep
    found: tuple[Numeric, Numeric, Sums] = yield from look_up(_Exchanged(at, ffn, layers, phase), degrees, rank)
    return found
