"""A pass taken apart: seconds of every operator over all layers of one GPU, without overlap."""

from __future__ import annotations

from collections import defaultdict

from disagg_sim.domain import Mapping
from disagg_sim.facts.model import DenseFfn
from disagg_sim.physics import layer
from disagg_sim.physics.cost import exchange_cost, expert_cost, kernel_cost
from disagg_sim.physics.layer import Tokens
from disagg_sim.physics.setup import Setup


def seconds_by_operator(
    at: Setup, degrees: Mapping, tokens: Tokens, *, phase: str, stage_tokens: float, imbalance: float = 1.0
) -> dict[str, float]:
    """Time of each operator times the layers that have it; dispatch and combine under those names. [s]"""
    tp, precision = degrees.tp_attn, at.precision
    found: defaultdict[str, float] = defaultdict(float)
    attend = layer.prefill_attention if phase == "prefill" else layer.decode_attention
    for kind, count in zip(at.model.kinds, at.model.kind_counts, strict=True):
        operators = layer.projections(at.model, kind, precision, tp, tokens.linear)
        operators += attend(kind, precision, tp, tokens, "auto")[0]
        operators.append(layer.elementwise(at.model, kind, tp, tokens.linear))
        if isinstance(kind.ffn, DenseFfn):
            operators += layer.dense_ffn(at.model, kind.ffn, precision, tp, tokens.linear)
        else:
            operators += layer.moe_local(at.model, kind.ffn, precision, tp, tokens.linear)
            operators += layer.shared_experts(at.model, kind.ffn, precision, tp, tokens.linear)
            routed = layer.routed_experts(
                at.model,
                kind.ffn,
                precision,
                ep=degrees.ep,
                tp_ffn=degrees.tp_ffn,
                tokens=stage_tokens,
                imbalance=imbalance,
            )
            found["routed experts"] += count * float(expert_cost(routed, degrees.ep, degrees.tp_ffn, at).time)
            dispatch, combine = exchange_cost(tokens.linear / tp, degrees, kind.ffn.top_k, phase, at)
            found["dispatch"] += count * float(dispatch.time)
            found["combine"] += count * float(combine.time)
        for op in operators:
            found[op.name] += count * float(kernel_cost(op, at).time)
    found["head"] = float(kernel_cost(layer.head(at.model, precision, tp, tokens.emitted), at).time)
    found["embedding"] = float(kernel_cost(layer.embedding(at.model, precision, tokens.linear), at).time)
    return dict(found)
