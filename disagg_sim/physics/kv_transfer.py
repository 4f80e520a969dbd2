"""Size the KV transfer from prefill to decode: bytes, unique shards, bandwidth.

Physics page, section 8: equations (1) and (2) of arXiv 2506.05508 ("Beyond the Buzz") with pipelined rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, check_word, whole_number
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric

#: Decimals of a count of GPUs that follows from a division.
ROUNDED = 9
#: Blocks of attention are enlarged by so many tokens at a time. [token]
BLOCK_STEP = 16


def kv_bytes_per_request(model: ModelSpec, precision: Precision, isl: float) -> float:
    """Size the cache, and the state, of one prompt, each element once. [B]

    Llama-3.1-70B in fp8: 80 layers x 2 x 8 KV heads x 128 x 1 B = 164 kB a token.
    """
    return model.kv_bytes(isl, precision)


def checkpoint_tokens(model: ModelSpec, precision: Precision) -> int:
    """Find how far apart the places are at which a cached prefix can be taken up again. [token]

    A recurrent state can be taken up only where it was saved: vLLM keeps states in blocks of the KV pool and enlarges
    the blocks of attention until one of them is as large as a state, and saves a state at each of their ends
    (``--mamba-cache-mode align``). Compressed attention goes on at the end of an entry. Returns 1 where every token
    will do.
    """
    specs = [kind.attention for kind in model.kinds]
    entries = math.lcm(*(spec.entry_tokens for spec in specs))
    states = [spec.recurrent_bytes for spec in specs if spec.recurrent_bytes]
    if not states:
        return entries
    cached = [sum(store.token_bytes for store in spec.stores(precision.cache.bytes)) for spec in specs]
    if not any(cached):
        return model.max_context
    block = math.ceil(max(states) / min(each for each in cached if each) / BLOCK_STEP) * BLOCK_STEP
    return math.lcm(block, entries)


def prefix_bytes(model: ModelSpec, precision: Precision, tokens: float) -> float:
    """Size a cached prefix of so many tokens with the states that were saved along it. [B]"""
    saved = tokens // checkpoint_tokens(model, precision)
    return model.kv_bytes(tokens, precision) - model.state_bytes + saved * model.recurrent_bytes


def unique_gpus(
    model: ModelSpec, mapping: Sharding, tokens: float | None = None, precision: Precision | None = None
) -> Numeric:
    """Count the GPUs of an instance that hold distinct parts of the cache. [1]

    Every stage and DP rank is distinct; in a TP group min(tp, n_kv) GPUs are, and one for MLA. Where kinds of attention
    differ in this, a GPU sends the sum of its parts: ``sum(e_i)/sum(e_i/n_i)`` over the bytes ``e_i`` of the kinds at
    ``tokens`` cached tokens (None = the longest context), each on ``n_i`` GPUs. Under DCP each of the GPUs that share
    the tokens of a KV head has its own; copies over PCP ranks count once.
    """
    length, tp = model.max_context if tokens is None else tokens, mapping.tp_attn
    apart = {n for kind in model.kinds for n in kind.attention.distinct_parts}
    distinct: Numeric = np.minimum(tp, min(apart, default=1))
    shared = bool(np.any(np.asarray(mapping.dcp) > 1))
    if shared or any(np.any(np.minimum(tp, other) != distinct) for other in apart):
        element = ACTIVATION_BYTES if precision is None else precision.cache.bytes
        whole: Numeric = 0.0
        sent: Numeric = 0.0
        for layer, count in layers_of(model):
            whole = whole + count * layer.attention.spec.sequence_bytes(length, element)
            sent = sent + count * layer.attention.sent(length, element, tp, mapping.dcp)
        distinct = np.round(whole / sent, ROUNDED) if shared else whole / sent
    return mapping.dp_attn * mapping.pp * distinct


def descriptors(model: ModelSpec, tokens: int, block_tokens: int) -> int:
    """Count the pieces of memory that hold a cache: a block of each tensor of each layer, and each state. [1]"""
    total = 0
    for layer, count in layers_of(model):
        spec = layer.attention.spec
        blocks = sum(store.tensors * -(-int(store.tokens(tokens)) // block_tokens) for store in spec.stores(1.0))
        total += int(count) * (blocks + bool(spec.state_bytes))
    return total


def own_link_bandwidth(system: SystemSpec, profile: ProfileSpec, *, within_domain: bool) -> float:
    """Find what a GPU sends or receives of caches, one way: over NVLink inside one domain, else over its NIC. [B/s]

    >>> from disagg_sim.facts.load import load_profile, load_system
    >>> ideal, h200 = load_profile("ideal"), load_system("h200_sxm")
    >>> [f"{own_link_bandwidth(h200, ideal, within_domain=near) / 1e9:.0f} GB/s" for near in (True, False)]
    ['450 GB/s', '50 GB/s']
    """
    return profile.p2p_efficiency * (system.nvlink_bandwidth if within_domain else system.nic_bandwidth)


def bandwidth_per_gpu(request_rate: Numeric, kv_bytes: Numeric, unique: Numeric) -> Numeric:
    """Find egress or ingress of each GPU with distinct cache: ``rate*kv_bytes(ISL)/G_unique``. [B/s]

    With rate = b/busy this is Eq. (1) for any pipeline, with rate = B/(TTL*(OSL-1)) Eq. (2). Takes
    ``request_rate`` [req/s]. The result is of the broadcast shape.
    """
    return request_rate * kv_bytes / unique


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
    heads than those of the sender takes a part of each block from each of them. Times the blocks of all tensors and
    layers (``kv_transfer.descriptors``) it is those of the GPU.

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
    """Count the blocks of a cache on a GPU that holds a share of every one: of each tensor of each layer, or of all."""
    whole = math.ceil(tokens)
    return -(-whole // layout.block_tokens) if layout.cross_layer else descriptors(model, whole, layout.block_tokens)


def posted_share(model: ModelSpec, sender: Sharding, receiver: Sharding, layout: KvLayout) -> Numeric:
    """Count the descriptors that a GPU of the receiver posts for one of the blocks of ``blocks_of``, on average.

    Where tokens lie before heads, each token is a piece if heads are cut anew; a block of all layers comes to every
    pipeline stage.

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


#: Classes of paths between two GPUs, from near to far: inside a host or an NVLink domain over NVLink; under one leaf
#: switch, on a rail, over the NICs; across the spine, whose uplinks may be fewer than the NICs below.
PATHS = ("host", "domain", "rail", "spine")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHandOver:
    """Caches on their way from prefill to decode instances that share their links with nobody; numbers, or arrays."""

    descriptors: Any  # of a receiving GPU [1]
    gpu_bytes: Any  # that the busier of a sending and a receiving GPU moves [B]
    latency: float  # before the first byte [s]
    post: Any  # of all descriptors [s]
    wire: Any  # of all bytes [s]

    @property
    def time(self) -> Any:
        """From the first descriptor to the last byte. [s]"""
        return self.latency + self.post + self.wire

    def exposed(self, prefill: float, pieces: int) -> Any:
        """What is left of it after a prefill that it starts in, in ``pieces`` (layers, chunks) as these are ready. [s]

        ``max(t/n, t - t_prefill*(n-1)/n)``: the last of n pieces leaves when all is computed. One piece: all of it, as
        where the receiver pulls when prefill is done (NIXL in vLLM).
        """
        whole_number("pieces", pieces)
        return np.maximum(self.time / pieces, self.time - prefill * (pieces - 1) / pieces)


def path_of(system: SystemSpec, gpus: float, other: SystemSpec | None = None) -> str:
    """Find the class of path, of ``PATHS``, that two GPUs of a deployment of ``gpus`` may need.

    Never "host", as no system says how many GPUs one has.
    """
    if gpus <= system.nvlink_domain and (other is None or other == system):
        return "domain"
    leaf = min((each.leaf_gpus for each in (system, other) if each is not None and each.leaf_gpus), default=None)
    return "rail" if leaf is None or gpus <= leaf else "spine"


def path_bandwidth(system: SystemSpec, profile: ProfileSpec, path: str) -> float:
    """Find what a GPU moves over a path, one way. [B/s]"""
    check_word("path", path, PATHS)
    inside = path in ("host", "domain")
    reached = profile.kv_efficiency_inside if inside else profile.kv_efficiency_across
    link = own_link_bandwidth(system, profile, within_domain=inside) * reached
    return link / ((system.spine_oversubscription or 1.0) if path == "spine" else 1.0)


class KvLoad(NamedTuple):
    """What a prompt sends, on average."""

    blocks: float  # of ``blocks_of`` [1]
    size: float  # each element once [B]
    tokens: float  # [token]
    stored: float = 0.0  # that goes to a shared tier meanwhile, over the NIC of the sender [B]


def hand_over(
    ends: tuple[Setup, Setup],
    sender: Sharding,
    receiver: Sharding,
    load: KvLoad,
    *,
    path: str,
    layout: KvLayout,
    descriptor_s: float | None,
    threads: int,
) -> KvHandOver:
    """Time the transfer of a cache between instances as ``kv_hand_over``, of many pairs, over the slower link."""
    at, model = ends[0], ends[0].model
    count = load.blocks * posted_share(model, sender, receiver, layout)
    # a request lives on one DP rank of each instance, whose GPUs with distinct parts carry it
    stored = load.stored if path in ("rail", "spine") else 0.0
    carried = np.maximum(
        *(
            size / (unique_gpus(model, mapping, load.tokens, at.precision) / mapping.dp_attn)
            for mapping, size in ((sender, load.size + stored), (receiver, load.size))
        )
    )
    descriptor = max(end.profile.kv_descriptor for end in ends) if descriptor_s is None else descriptor_s
    latency, wire = 0.0, 0.0 * carried
    if path:
        bandwidth = min(path_bandwidth(end.system, end.profile, path) for end in ends)
        profiles, inside = [end.profile for end in ends], path in ("host", "domain")
        hops = [each.p2p_latency_inside if inside else each.p2p_latency_across for each in profiles]
        latency = max(each.kv_transfer_latency + hop for each, hop in zip(profiles, hops, strict=True))
        wire = carried / bandwidth
    return KvHandOver(
        descriptors=count, gpu_bytes=carried, latency=latency, post=count * descriptor / threads, wire=wire
    )


def kv_hand_over(
    at: Setup,
    sender: Sharding,
    receiver: Sharding,
    tokens: int,
    *,
    path: str,
    layout: KvLayout | None = None,
    descriptor_s: float | None = None,
    threads: int = 1,
) -> KvHandOver:
    """Time the transfer of the cache of a prompt of ``tokens`` between two instances, with that of a drafter. [s]

    ``path`` is of ``PATHS``; posting a descriptor takes ``descriptor_s`` [s], by default as the profile says.

    Each of four GPUs sends 1.34 GB at 50 GB/s in 27 ms; 327,680 descriptors of each of the eight that receive take 164
    ms to post at half a microsecond, 2,048 of blocks of all layers 1 ms:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> ends = at, Sharding(tp_attn=4, tp_ffn=4), Sharding(tp_attn=8, tp_ffn=8), 32_768
    >>> plain, crossed = (
    ...     kv_hand_over(*ends, path="rail", layout=KvLayout(cross_layer=crossed), descriptor_s=0.5e-6)
    ...     for crossed in (False, True)
    ... )
    >>> f"{1e3 * plain.wire:.0f} ms, {1e3 * plain.post:.0f} and {1e3 * crossed.post:.0f} ms"
    '27 ms, 164 and 1 ms'
    """
    whole_number("tokens", tokens)
    whole_number("threads", threads)
    check_word("path", path, PATHS)
    layout = layout or KvLayout()
    load = KvLoad(blocks_of(at.cached_layers, tokens, layout), at.handed_bytes(tokens), tokens)
    return hand_over(
        (at, at), sender, receiver, load, path=path, layout=layout, descriptor_s=descriptor_s, threads=threads
    )
