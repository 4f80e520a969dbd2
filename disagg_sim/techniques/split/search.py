"""Score decode over an attention and a feed-forward pool: rows are splits, columns sequences of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import MAX_DOMAIN_GPUS, MAX_INSTANCE_GPUS, UNSAID, Sharding
from disagg_sim.errors import InputError, whole_number
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric
from disagg_sim.search.axes import MAX_BATCH, batch_sizes
from disagg_sim.search.blocks import given_sizes, row_blocks
from disagg_sim.search.mappings import degrees, least_redundant_slots
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.registry import clashes
from disagg_sim.techniques.split.physics import Split, split_bytes, split_step
from disagg_sim.workload.lengths import Lengths

#: Micro-batches in the ping-pong that are tried. [1]
MICROBATCHES = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInstance:
    """One configuration of attention and feed-forward ranks that decode together, as a grid scored it."""

    attention: Sharding
    ffn: Sharding
    microbatches: int  # [1]
    batch: int  # requests over all attention ranks and micro-batches [request]
    latency_s: float  # TTL [s]
    request_rate_per_s: float  # at full rate [request/s]
    attention_idle: float  # share of a step in which an attention rank waits [1]
    ffn_idle: float  # and a feed-forward rank [1]
    systems: tuple[str, str]  # of attention, of the feed-forward part

    @property
    def gpus(self) -> int:
        """GPUs of both pools. [1]"""
        return int(self.attention.gpus + self.ffn.gpus)


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitGrid:
    """Every design point of decode over two pools: rows x sequences; arrays of shape (rows, sequences)."""

    setup: Setup  # of the attention pool
    ffn_setup: Setup  # of the feed-forward pool
    splits: Split  # columns of shape (rows,)
    lengths: Lengths
    sequences: Ints  # (sequences,) of a micro-batch on one attention rank [request]
    latency: Floats  # TTL [s]
    request_rate: Floats  # of one instance at full rate [request/s]
    attention_bytes: Floats  # on the fullest attention GPU [B]
    ffn_bytes: Floats  # on the fullest feed-forward GPU [B]
    attention_idle: Floats  # [1]
    ffn_idle: Floats  # [1]

    @property
    def batch(self) -> Ints:
        """Requests of an instance. [request]"""
        held = self.splits.attention.dp_attn * self.splits.microbatches
        return np.asarray(held[:, None] * self.sequences)

    @property
    def feasible(self) -> Mask:
        """Which points fit into the memory of both pools."""
        fits = self.attention_bytes <= self.setup.memory_limit
        return np.asarray(fits & (self.ffn_bytes <= self.ffn_setup.memory_limit))

    @property
    def attention_gpus(self) -> Ints:
        """(rows,) GPUs of the attention pool of an instance. [1]"""
        return np.asarray(self.splits.attention.gpus)

    @property
    def ffn_gpus(self) -> Ints:
        """(rows,) GPUs of the feed-forward pool of an instance. [1]"""
        return np.asarray(self.splits.ffn.gpus)

    @property
    def gpus(self) -> Ints:
        """(rows,) GPUs of an instance. [1]"""
        return self.attention_gpus + self.ffn_gpus

    @property
    def kv_bytes_per_request(self) -> float:
        """Expected cache of one prompt, each element once. [B]"""
        at = self.setup
        return self.lengths.mean_over_prompts(lambda isl: kv_bytes_per_request(at.model, at.precision, isl))

    @property
    def unique_gpus(self) -> Ints:
        """(rows,) attention GPUs of an instance that hold distinct cache. [1]"""
        at = self.setup
        found = unique_gpus(at.model, self.splits.attention, self.lengths.mean_isl, at.precision)
        return np.broadcast_to(found, self.gpus.shape).astype(np.int64)

    def instance(self, row: int, column: int) -> SplitInstance:
        """The configuration at (row, column) as a value object."""
        return SplitInstance(
            attention=self.splits.attention[row],
            ffn=self.splits.ffn[row],
            microbatches=int(self.splits.microbatches[row]),
            batch=int(self.batch[row, column]),
            latency_s=float(self.latency[row, column]),
            request_rate_per_s=float(self.request_rate[row, column]),
            attention_idle=float(self.attention_idle[row, column]),
            ffn_idle=float(self.ffn_idle[row, column]),
            systems=(self.setup.system.name, self.ffn_setup.system.name),
        )


def setups_of(pools: EncodeStep | PhaseGrid | SplitGrid) -> tuple[Setup, ...]:
    """Of each pool of an instance."""
    return (pools.setup, pools.ffn_setup) if isinstance(pools, SplitGrid) else (pools.setup,)


def split_grid(
    at: Setup,
    lengths: Lengths,
    *,
    ffn: Setup | None = None,
    max_gpus: int | None = None,
    microbatches: tuple[int, ...] = MICROBATCHES,
    allow_long_context: bool = False,
) -> SplitGrid:
    """Score every way to decode over an attention pool and a feed-forward pool.

    Attention ranks are ``tp_attn`` x ``dp_attn`` GPUs. Experts lie on ``ep`` GPUs, which share the tokens of shared
    experts and dense layers; the feed-forward part of a dense model is sharded over ``tp_attn`` GPUs, of which there
    may be several groups.

    Parameters
    ----------
    at : Setup
        Model, system, recipe, profile and engine of the attention pool.
    lengths : Lengths
        Of the requests, from ``lengths``.
    ffn : Setup, optional
        Of the feed-forward pool, by default ``at``; the same model.
    max_gpus : int, optional
        Most GPUs of an instance, both pools together; by default 64, or one NVLink domain where that is larger. [1]
    microbatches : tuple of int
        To try; 1 lets each half wait for the other. [1]
    allow_long_context : bool
        Score requests beyond the model's context limit instead of refusing them.

    Returns
    -------
    SplitGrid
        Latency is the mean TTL [s]; arrays of shape (splits, sequences), four numbers of sequences of a micro-batch on
        one attention rank a doubling, up to the memory limit.

    Raises
    ------
    InputError
        Setups of two models, a drafter, values out of range, no split within ``max_gpus``.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")
    >>> grid = split_grid(at, lengths(4096, 512), max_gpus=32, microbatches=(2, 3))
    >>> bool((grid.gpus <= 32).all()), grid.latency.shape == (grid.gpus.size, grid.sequences.size)
    (True, True)
    """
    theirs = at if ffn is None else ffn
    if theirs.model.name != at.model.name:
        raise InputError(f"attention and feed-forward pool differ in model: {at.model.name} and {theirs.model.name}")
    require_no_drafts(at)
    lengths = lengths.at_checkpoints(at)
    at.model.check_context(lengths.mean_isl, lengths.mean_osl, allow_long=allow_long_context)
    domain = at.system.nvlink_domain
    limit = domain if domain >= MAX_DOMAIN_GPUS else MAX_INSTANCE_GPUS
    limit = limit if max_gpus is None else whole_number("max_gpus", max_gpus, 2)
    splits = _splits(at, theirs, limit, given_sizes("microbatches", microbatches).tolist())
    sizes = _sizes(at, theirs, splits, lengths)
    shape = (splits.microbatches.size, sizes.size)
    found = [np.empty(shape) for _ in range(5)]
    for rows in row_blocks(*shape):
        here, axis = _rows(splits, rows), sizes[None, :].astype(float)
        load = lengths.on_ranks(axis * here.attention.dp_attn * here.microbatches, here.attention.dp_attn)
        fullest = axis if load.batch is None else load.batch / here.microbatches
        step = split_step(at, theirs, here, sequences=axis, context=load.context, fullest=fullest)
        held = split_bytes(at, theirs, here, sequences=fullest, cached=lengths.resident)
        for array, values in zip(found, (step.ttl, step.attention_idle, step.ffn_idle, *held), strict=True):
            array[rows] = values
    ttl, attention_idle, ffn_idle, attention_bytes, ffn_bytes = found
    batch = (splits.attention.dp_attn * splits.microbatches)[:, None] * sizes
    return SplitGrid(
        setup=at,
        ffn_setup=theirs,
        splits=splits,
        lengths=lengths,
        sequences=sizes,
        latency=ttl,
        request_rate=lengths.request_rate(batch, ttl),
        attention_bytes=attention_bytes,
        ffn_bytes=ffn_bytes,
        attention_idle=attention_idle,
        ffn_idle=ffn_idle,
    )


def _rows(splits: Split, rows: slice) -> Split:
    """Some rows as columns of shape (rows, 1)."""
    m = splits.microbatches[rows, None].astype(float)
    return Split(splits.attention[rows].for_grid(), splits.ffn[rows].for_grid(), m)


def _sizes(at: Setup, ffn: Setup, splits: Split, lengths: Lengths) -> Ints:
    """Sequences of a micro-batch from 1 to what the most spacious split holds. [request]"""

    def fits(sequences: Numeric) -> Mask:
        held = split_bytes(at, ffn, _rows(splits, slice(None)), sequences=sequences, cached=lengths.resident)
        return np.asarray(np.any((held[0] <= at.memory_limit) & (held[1] <= ffn.memory_limit), axis=0))

    doublings = 2.0 ** np.arange(MAX_BATCH.bit_length())[None, :]
    upper = doublings[0][fits(doublings)]
    if not upper.size:
        return batch_sizes(1)
    sizes = batch_sizes(int(upper[-1]) * 2)
    return sizes[: int(np.flatnonzero(fits(sizes[None, :].astype(float)))[-1]) + 1]


def _splits(at: Setup, ffn: Setup, limit: int, microbatches: list[int]) -> Split:
    """Every pair of pools within the limit, with every number of micro-batches; columns of shape (rows,)."""
    found = [
        (attention, experts, m)
        for attention, experts, m in product([*_attention(at, limit)], [*_ffn(ffn, limit)], microbatches)
        if attention.gpus + experts.gpus <= limit
    ]
    if not found:
        raise InputError(f"{at.model.name} has no split over an attention and a feed-forward pool of {limit} GPUs")
    attention, experts, m = zip(*found, strict=True)
    return Split(Sharding.stack(attention), Sharding.stack(experts), np.array(m, dtype=np.int64))


def _attention(at: Setup, limit: int) -> Iterator[Sharding]:
    """Attention pools: TP inside the NVLink domain, any number of DP ranks."""
    blocks = [layer.attention for layer, _ in layers_of(at.model)]
    for tp, dp in product(degrees(at.system, min(limit, at.system.nvlink_domain)), degrees(at.system, limit)):
        if not any(block.rejects(tp) for block in blocks):
            yield Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp, ep=dp)


def _ffn(at: Setup, limit: int) -> Iterator[Sharding]:
    """Feed-forward pools: EP over all GPUs of a model with experts, groups of TP of a dense model."""
    sizes = degrees(at.system, limit)
    blocks = [layer.ffn for layer, _ in layers_of(at.model)]
    if at.model.is_moe:
        for ep in sizes:
            slots = least_redundant_slots(at.model, ep)
            if slots is None:
                continue
            mapping = Sharding(dp_attn=ep, ep=ep, redundant_slots=slots if ep > 1 else 0)
            if not any(block.rejects(mapping) for block in blocks):
                yield mapping
        return
    for tp, groups in product(sizes, sizes):
        mapping = Sharding(tp_attn=tp, dp_attn=groups, tp_ffn=tp, ep=groups)
        if tp <= at.system.nvlink_domain and not any(block.rejects(mapping) for block in blocks):
            yield mapping


def ffn_mapping(at: Setup, gpus: int, tp: int = 0) -> Sharding:
    """Shard the feed-forward part of a model over GPUs of its own; ``tp`` 0 = all."""
    whole_number("GPUs of the feed-forward part", gpus)
    if at.model.is_moe:
        if tp:
            raise InputError(f"tp {tp} of the feed-forward part: {at.model.name} has experts; allowed: of dense models")
        slots = least_redundant_slots(at.model, gpus)
        if slots is None:
            raise InputError(f"{gpus} GPUs of the feed-forward part are more than experts of {at.model.name} fill")
        found = Sharding(dp_attn=gpus, ep=gpus, redundant_slots=slots if gpus > 1 else 0)
    else:
        tp = tp or gpus
        if gpus % tp:
            raise InputError(f"tp {tp} does not divide the {gpus} GPUs of the feed-forward part")
        found = Sharding(tp_attn=tp, dp_attn=gpus // tp, tp_ffn=tp, ep=gpus // tp)
    for layer, _ in layers_of(at.model):
        if reason := layer.ffn.rejects(found):
            raise InputError(f"the feed-forward part of {at.model.name} on {gpus} GPUs: {reason}")
    return found


def check_split(at: Setup, split: Split) -> None:
    """Raise where an instance cannot be split so.

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    >>> check_split(at, Split(Sharding(dp_attn=8, ep=8, pp=2), ffn_mapping(at, 8), 2))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: attention GPUs beside a feed-forward pool have tp and dp alone, not pp 2
    """
    for name in ("pp", "dcp", "pcp", "chunk_tokens"):
        if (value := getattr(split.attention, name)) > UNSAID.get(name, int(name == "pp")):
            raise InputError(f"attention GPUs beside a feed-forward pool have tp and dp alone, not {name} {value}")
    if copies := split.attention.redundant_slots:
        raise InputError(*clashes({"split": "ffn", "experts": f"redundant_slots {copies}"}, "simulate"))
    require_no_drafts(at)
    tp = 0 if at.model.is_moe else int(split.ffn.tp_attn)
    usual = ffn_mapping(at, int(split.ffn.gpus), tp)
    if replace(usual, redundant_slots=split.ffn.redundant_slots) != split.ffn:
        form = "EP over all GPUs" if at.model.is_moe else "groups of TP"
        raise InputError(f"{split.ffn} is no feed-forward part of {at.model.name}; allowed: {form}, as of ffn_mapping")
    for layer, _ in layers_of(at.model):
        if reason := layer.attention.rejects(split.attention.tp_attn):
            raise InputError(f"attention of {at.model.name} on {split.attention.gpus} GPUs: {reason}")


def require_no_drafts(at: Setup) -> None:
    """Raise where a setup has a drafter, which neither pool has a place for."""
    if at.speculation is not None:
        raise InputError(*clashes({"split": "pools", "speculation": f"speculation {at.speculation.name!r}"}, "plan"))
