"""Time operators: every kernel and collective at its fitted (or ideal) rates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.physics.attention import decode_attention_cost, prefill_attention_cost
from disagg_sim.physics.attention_parts import part_cost
from disagg_sim.physics.blocks.base import FfnBlock
from disagg_sim.physics.collectives import (
    AllToAllRate,
    LinkCurve,
    MessageTime,
    all_reduce_bytes,
    gather_bytes,
    hierarchical_all_reduce,
    pipeline_hop,
)
from disagg_sim.physics.experts import MoeRate, moe_cost
from disagg_sim.physics.gemm import gemm_cost
from disagg_sim.physics.roofline import NOTHING, Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import of_distinct
from disagg_sim.physics.work import Numeric, Operator, Work

#: Numbers of a kernel of experts that differ by regime.
OF_REGIME = (
    "flops",
    "bandwidth",
    "t0",
    "blend",
    "least_rows",
    "per_expert",
    "handling",
    "passing",
    "block_rows",
    "input_multiple",
    "multiple",
)
#: Work of a transfer: no arithmetic, no HBM traffic.
NOTHING_DONE = Work(0.0, 0.0)


def kernel_cost(op: Operator, at: Setup) -> Cost:
    """Time one operator of one layer (collectives inside the attention group included). [s]"""
    return adjusted(op, _kernel_cost(op, at), at)


def adjusted(op: Operator, cost: Cost, at: Setup) -> Cost:
    """Adjust the cost of an operator for the power cap and by ``Rates.adjust``, where the setup has them. [s]"""
    if at.system.power_cap is not None:
        from disagg_sim.physics.power import slowed  # few systems have a cap, and most runs no power laws

        cost = slowed(op, cost, at)
    return cost if at.rates.adjust is None else at.rates.adjust(op, cost)


def _kernel_cost(op: Operator, at: Setup) -> Cost:
    match op.kind:
        case "gemm":
            cost = gemm_cost(*op.shape, op.work, at.rates.gemm[op.format])
            return cost if np.ndim(op.runs) == 0 and op.runs == 1.0 else cost * op.runs
        case "prefill_attention":
            return prefill_attention_cost(op.work, op.attention, op.keys, at.rates.prefill_attention[op.table])
        case "decode_attention":
            return decode_attention_cost(op.work, op.attention, at.rates.decode_attention[op.table])
        case "attention_part":
            return part_cost(op.work, op.attention, at.rates.attention_parts[op.table])
        case "elementwise" | "copy":
            memory = op.work.hbm_bytes / at.rates.elementwise_bandwidth
            floor = at.profile.elementwise_latency * op.runs if op.kind == "elementwise" else 0.0
            return Cost(floor + memory, Sums(0.0, memory, 0.0, floor))
        case "all_reduce" | "gather":
            return all_reduce_cost(op.size, op.ranks, at) if op.kind == "all_reduce" else group_cost(op, at)
    raise ValueError(f"no cost for operator kind {op.kind!r}")


def total_cost(operators: Iterable[Operator], at: Setup) -> Cost:
    """Cost of operators run one after the other: their times, and those in arithmetic, memory and links, summed. [s]"""
    total = NOTHING
    for op in operators:
        total = total + kernel_cost(op, at)
    return total


def cheapest(alternatives: Iterable[Cost]) -> Cost:
    """Take the fastest alternative at each point, with its own time by resource. [s]"""
    best, *others = alternatives
    for other in others:
        faster = other.time < best.time
        sums = Sums(*(np.where(faster, new, old) for new, old in zip(other.sums, best.sums, strict=True)))
        best = Cost(np.where(faster, other.time, best.time), sums)
    return best


def _wire_cost(transfer: MessageTime) -> Cost:
    return Cost(transfer.time, Sums(0.0, 0.0, transfer.wire, transfer.latency))


def all_reduce_cost(size: Numeric, n: Numeric, at: Setup) -> Cost:
    """All-reduce of ``size`` bytes over ``n`` ranks, across domains hierarchically; n = 1 costs nothing."""
    system, profile = at.system, at.profile
    inner = np.minimum(n, system.nvlink_domain)
    volume = all_reduce_bytes(size, inner, best=profile.best_algorithm, in_switch=system.in_switch_reduction)
    latency, wire = at.rates.all_reduce.transfer(size, inner, volume)
    inside = MessageTime(np.where(inner > 1, latency, 0.0), wire)
    if np.all(np.asarray(n) <= system.nvlink_domain):
        return _wire_cost(inside)
    nic = profile.nic_efficiency * system.nic_bandwidth
    return _wire_cost(
        hierarchical_all_reduce(
            size, n, system.nvlink_domain, inside=inside, nic_bandwidth=nic, nic_latency=profile.nic_latency
        )
    )


def _gather_cost(size: Numeric, n: Numeric, curve: LinkCurve) -> Cost:
    latency, wire = curve.transfer(size, n, gather_bytes(size, n))
    return _wire_cost(MessageTime(np.where(n > 1, latency, 0.0), wire))


def group_cost(op: Operator, at: Setup) -> Cost:
    """Time an all-gather or a reduce-scatter of a group of ranks that may span NVLink domains.

    With n' ranks in each of m domains ``(n'-1)/n'*S`` crosses the links of a domain, and before it ``(m-1)/m*S/n'`` the
    NIC of each rank, in ``ceil(log2 m)`` hops: ranks of the same place in their domains exchange their parts. Takes
    ``op`` (full tensor [B], ranks of the group and the domains that it spans [1]; its name starts with that of the
    collective). Returns arrays of the broadcast shape, 0 for one rank [s].
    """
    curve = at.rates.reduce_scatter if op.name.startswith("reduce-scatter") else at.rates.all_gather
    inner = np.maximum(op.ranks / op.domains, 1.0)
    inside = _gather_cost(op.size, inner, curve)
    if not np.any(np.asarray(op.domains) > 1):
        return inside
    domains = np.minimum(op.domains, op.ranks)  # a rank's own TP group may fill several
    nic = at.profile.nic_efficiency * at.system.nic_bandwidth
    latency = at.profile.nic_latency * np.ceil(np.log2(domains))
    return inside + _wire_cost(MessageTime(latency, gather_bytes(op.size, domains) / inner / nic))


def peer_cost(op: Operator, across: Numeric, at: Setup) -> Cost:
    """Time sending ``op.size`` bytes to one other rank: by NVLink, or by NIC where it is ``across`` domains. [s]"""
    profile, system = at.profile, at.system
    latency = np.where(across, profile.p2p_latency_across, profile.p2p_latency_inside)
    link = np.where(across, system.nic_bandwidth, system.nvlink_bandwidth) * profile.p2p_efficiency
    return adjusted(op, _wire_cost(pipeline_hop(op.size, latency=latency, bandwidth=link)), at)


def expert_cost(op: Operator, ep: Numeric, tp_ffn: Numeric, at: Setup) -> Cost:
    """Time the grouped GEMM of the experts with the fastest kernel. [s]

    Where fits differ by regime, those of the regime that contains (ep, tp_ffn) count.
    """
    return adjusted(op, _expert_cost(op, ep, tp_ffn, at), at)


def _expert_cost(op: Operator, ep: Numeric, tp_ffn: Numeric, at: Setup) -> Cost:
    first, *others = at.rates.moe.values()
    if all(kernels is first for kernels in others):
        return cheapest(moe_cost(op.experts, op.work, rate) for rate in first)
    regimes = {
        "single": (ep == 1) & (tp_ffn == 1),
        "tp": (ep == 1) & (tp_ffn > 1),
        "ep2_8": (ep > 1) & (ep <= 8),
        "ep16_256": ep > 8,
    }
    regime = np.select(list(regimes.values()), range(len(regimes)))
    kernels = max(len(at.rates.moe[name]) for name in regimes)
    costs = []
    for index in range(kernels):
        chosen = [at.rates.moe[name][min(index, len(at.rates.moe[name]) - 1)] for name in regimes]
        fits = {name: np.array([getattr(rate, name) for rate in chosen], dtype=float)[regime] for name in OF_REGIME}
        q = fits["blend"]
        if np.all(q == q.flat[0]):
            fits["blend"] = float(q.flat[0])
        costs.append(moe_cost(op.experts, op.work, MoeRate(**fits, element=chosen[0].element)))
    return cheapest(costs)


def _exchange(row: Numeric, groups: Numeric, top_k: int, curve: LinkCurve) -> MessageTime:
    """Time sending ``row`` bytes of tokens, in as many copies as the fit of the curve counts.

    The curve is read at n/(n-1) of the bytes that leave the rank: the send buffer of NCCL's plain all-to-all, which
    stands in for some backends, holds the rank's own part, too.
    """
    volume = row * of_distinct(partial(curve.copies, top_k), groups)
    return curve.transfer(volume * (groups / np.maximum(groups - 1.0, 1.0)), groups, volume)


def all_to_all_cost(
    tokens: Numeric, n: Numeric, domains: Numeric, *, hidden: int, top_k: int, wire_bytes: float, rate: AllToAllRate
) -> Cost:
    """Dispatch or combine of ``tokens`` tokens a rank over ``n`` expert ranks in ``domains`` NVLink domains.

    Inside one domain the fitted volume (one copy per distinct rank, or per pick) crosses NVLink.
    Across domains one copy per domain crosses the NIC, overlapped with the fan-out over NVLink: the
    slower path counts, with the latency of the NIC path. Source: physics page, section 5.
    """
    row = tokens * (hidden * wire_bytes)
    latency, wire = _exchange(row, n, top_k, rate.inside)
    if np.any(np.asarray(domains) > 1):
        nic_latency, nic_wire = _exchange(row, domains, top_k, rate.across)
        nic_wire = np.maximum(nic_wire, row / rate.across.token_bandwidth)
        wire = np.where(domains > 1, np.maximum(wire, nic_wire), wire)
        latency = np.where(domains > 1, nic_latency, latency)
    return _wire_cost(MessageTime(np.where(n > 1, latency, 0.0), np.where(n > 1, wire, 0.0)))


@np.errstate(divide="ignore", invalid="ignore")
def exchange_cost(tokens: Numeric, mapping: Sharding, ffn: FfnBlock[Any], phase: str, at: Setup) -> tuple[Cost, Cost]:
    """Dispatch (with prepare) and combine of an MoE layer, expert-TP gather and scatter included.

    ``tokens`` are those that one GPU sends (its slice of its attention rank's tokens). Without DP attention and PCP (TP
    and TEP) every GPU has all tokens, and nothing is exchanged.
    Under expert TP the picks of an expert group are all-gathered over its ``tp_ffn`` ranks and the
    outputs reduce-scattered: T_g = T*(1-(1-1/ep)^k) of the T tokens of all GPUs, all of them for ep = 1.

    Kernels were timed between equal ranks that start together. In prefill, which is bound by bytes, the exchange over
    expert ranks takes I times as long, as the fullest rank gets I times its share (``lasting_imbalance``).
    In decode with an engine it takes ``exchange_stretch`` times as long; with expert TP alone (ep = 1) attention ranks
    wait ``exchange_wait`` for each other before they gather.
    """
    precision, domain, hidden, top_k = at.precision, at.system.nvlink_domain, ffn.wire_width(at.model.hidden), ffn.picks
    gpus, ep, tp_ffn = mapping.stage_gpus, mapping.ep, mapping.tp_ffn
    exchanges = np.where(np.asarray(mapping.token_ranks) > 1, 1.0, 0.0)
    domains = np.ceil(gpus / domain)
    spread = np.minimum(domains, ep)
    dispatch = all_to_all_cost(
        tokens,
        ep,
        spread,
        hidden=hidden,
        top_k=top_k,
        wire_bytes=precision.dispatch_bytes,
        rate=at.rates.dispatch[phase],
    )
    combine = all_to_all_cost(
        tokens, ep, spread, hidden=hidden, top_k=top_k, wire_bytes=precision.combine_bytes, rate=at.rates.combine[phase]
    )
    if at.rates.prepare is not None:
        delay = np.where(ep > 1, at.rates.prepare.at(ep)[0] + at.rates.prepare_per_token * tokens, 0.0)
        dispatch = dispatch + Cost(delay, Sums(latency=delay))
    wait, longer = 0.0, 1.0
    if phase == "prefill":
        longer = ffn.imbalance(mapping, at.profile.rank_skew)
    elif at.overheads is not None:
        wait, longer = at.overheads.exchange_wait, at.overheads.exchange_stretch
    sent = Operator(f"{phase} dispatch", "all_to_all", NOTHING_DONE, size=tokens, ranks=ep, domains=spread)
    dispatch = adjusted(sent, dispatch, at)
    combine = adjusted(sent._replace(name=f"{phase} combine"), combine, at)
    dispatch, combine = dispatch * longer, combine * longer
    if np.any(np.asarray(tp_ffn) > 1):
        group = tokens * gpus * (1.0 - (1.0 - 1.0 / ep) ** top_k)
        size = group * hidden
        gather = Operator("all-gather", "gather", NOTHING_DONE, size=size * precision.dispatch_bytes, ranks=tp_ffn)
        back = Operator("reduce-scatter", "gather", NOTHING_DONE, size=size * precision.combine_bytes, ranks=tp_ffn)
        gathered = _gather_cost(gather.size, tp_ffn, at.rates.all_gather)
        late = np.where((np.asarray(ep) == 1) & (np.asarray(tp_ffn) > 1), wait, 0.0)
        dispatch = dispatch + adjusted(gather, gathered + Cost(late, Sums(latency=late)), at)
        combine = combine + adjusted(back, _gather_cost(back.size, tp_ffn, at.rates.reduce_scatter), at)
    return dispatch * exchanges, combine * exchanges


def hop_cost(tokens: Numeric, instance_gpus: Numeric, at: Setup) -> Cost:
    """Time the hand-over of one micro-batch to the next pipeline stage, inside or across domains.

    ``t = a + T*d*b/(e*W)`` for T tokens of hidden size d. W is the bandwidth of the NIC where the instance is larger
    than an NVLink domain, of NVLink elsewhere. Source: physics page, section 5.

    Parameters
    ----------
    tokens
        Of the micro-batch on one rank. [token]
    instance_gpus
        GPUs of the whole instance, all stages. [1]
    at
        Setup: hidden size, formats, links and latencies of the profile.

    Returns
    -------
    Cost
        Of one hop; its arrays have the broadcast shape of ``tokens`` and ``instance_gpus``. [s]

    Examples
    --------
    1024 tokens x 8192 x 2 B = 16.8 MB, over NVLink at 450 GB/s inside a domain of 8 GPUs and over a NIC at 50 GB/s
    beyond it:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> [f"{1e6 * hop_cost(1024.0, gpus, at).time:.0f} us" for gpus in (8, 16)]
    ['37 us', '336 us']
    """
    op = Operator("hop", "hop", NOTHING_DONE, size=tokens * (at.model.hidden * at.precision.combine_bytes))
    return peer_cost(op, np.asarray(instance_gpus) > at.system.nvlink_domain, at)
