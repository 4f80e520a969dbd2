"""A pass taken apart: seconds of every operator over all layers of one GPU, without overlap."""

from collections import defaultdict

from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import elementwise, layers_of
from disagg_sim.physics.cost import exchange_cost, expert_cost, kernel_cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Tokens, all_reduce, embedding, head
from disagg_sim.techniques.experts.physics import ExpertRouting


def seconds_by_operator(
    at: Setup, mapping: Sharding, tokens: Tokens, *, phase: str, stage_tokens: float, imbalance: float | None = 1.0
) -> dict[str, float]:
    """Time of each operator times the layers that have it; dispatch and combine under those names. [s]"""
    tp, precision = mapping.tp_attn, at.precision
    found: defaultdict[str, float] = defaultdict(float)
    for layer, count in layers_of(at.model):
        attend = layer.attention.prefill if phase == "prefill" else layer.attention.decode
        operators = layer.attention.projections(at.model, precision, tp, tokens.linear)
        operators.append(all_reduce("attention all-reduce", tokens.linear, at.model, precision, tp))
        operators += attend(precision, tp, tokens, "auto")[0]
        operators.append(elementwise(at.model, layer, tp, tokens.linear))
        operators += layer.ffn.local(at.model, precision, tp, tokens.linear)
        operators += layer.ffn.beside(at.model, precision, tp, tokens.linear)
        if layer.ffn.picks:
            routed = layer.ffn.routed(at.model, precision, mapping, stage_tokens, ExpertRouting(imbalance))
            found["routed experts"] += count * float(expert_cost(routed, mapping.ep, mapping.tp_ffn, at).time)
            dispatch, combine = exchange_cost(tokens.linear / tp, mapping, layer.ffn, phase, at)
            found["dispatch"] += count * float(dispatch.time)
            found["combine"] += count * float(combine.time)
        for op in operators:
            found[op.name] += count * float(kernel_cost(op, at).time)
    found["head"] = float(kernel_cost(head(at.model, precision, tp, tokens.emitted), at).time)
    found["embedding"] = float(kernel_cost(embedding(at.model, precision, tokens.linear), at).time)
    return dict(found)
