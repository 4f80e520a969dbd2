"""Count the hand-over of caches in a sweep: what a link takes, which prefill pools leave room for it, which do not.

The FTL limit holds for a prefill with the hand-over of its cache. That depends on both mappings, of the receiver on how
many GPUs hold distinct heads and on its stages: decode mappings that agree in these are matched together, with the
prefill configurations that leave room for a hand-over to them.
"""

from __future__ import annotations

import json
import math
from collections import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import SHARDING, Sharding
from disagg_sim.facts.schema import Axis, OneOf, Range, Strict, Unless, Written
from disagg_sim.physics.kv_transfer import (
    ORDERS,
    PATHS,
    ROUNDED,
    KvHandOver,
    KvLayout,
    KvLoad,
    blocks_of,
    hand_over,
    path_bandwidth,
    unique_gpus,
)
from disagg_sim.physics.setup import Setup
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, prefill_candidates
from disagg_sim.serving.points import Column
from disagg_sim.techniques.prefix.search import stored_bytes
from disagg_sim.units import US
from disagg_sim.workload.lengths import Lengths

#: What rows have beside ``points.COLUMNS`` in a sweep that counts links.
LINK_COLUMNS: tuple[Column, ...] = (
    Column("kv_descriptors", "float64", "1", "descriptors of a cache that a GPU of the receiver posts"),
    Column("hand_over_post_s", "float64", "s", "time to post them"),
    Column("hand_over_s", "float64", "s", "of a cache that shares its link with no other, posting included"),
    Column("ftl_with_hand_over_s", "float64", "s", "ftl_s and hand_over_s, which the FTL limit holds for"),
)
#: Columns of a frontier that say what the link of a case is: all rows of a case agree.
LINK, LINK_BANDWIDTH = "kv_link", "kv_link_bytes_per_s"
#: Column of the class of receivers that a prefill configuration is a candidate for.
TAKER = "taker"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWire:
    """What the hand-over of a cache takes."""

    path: str = ""  # of ``kv_transfer.PATHS``; "" = the wire takes no time
    descriptor_s: float | None  # to post one; None = as the profile says [s]
    layout: KvLayout = KvLayout()  # noqa: RUF009 (frozen)
    threads: int = 1  # that post together [1]

    @property
    def counts(self) -> bool:
        """Whether a hand-over takes time at all."""
        return bool(self.path) or self.descriptor_s != 0.0

    def __str__(self) -> str:
        """``no_link``, or what is not as usual: ``link_rail_2.4us_nhd``."""
        if not self.counts:
            return "no_link"
        usual, layout = KvLayout(), self.layout
        said = [self.path, "" if self.descriptor_s is None else f"{self.descriptor_s / US:.12g}us"]
        said += [layout.order if layout.order != usual.order else "", "cross_layer" * layout.cross_layer]
        said += [f"blocks{layout.block_tokens}" if layout.block_tokens != usual.block_tokens else ""]
        said += [f"run{layout.run:.12g}" if layout.run != usual.run else ""]
        said += [f"threads{self.threads}" if self.threads > 1 else ""]
        return "_".join(["link", *filter(None, said)])

    def bandwidth(self, *ends: Setup) -> float:
        """What a GPU moves over the path of the slower end, one way; inf without a path. [B/s]"""
        return min((path_bandwidth(at.system, at.profile, self.path) for at in ends if self.path), default=math.inf)

    def load(self, at: Setup, lengths: Lengths, size: float) -> KvLoad:
        """What a prompt of a case sends, on average; ``size`` in all. [B]"""
        model = at.cached_layers
        blocks = lengths.mean_over_prompts(lambda tokens: float(blocks_of(model, tokens, self.layout)))
        return KvLoad(blocks, size, lengths.mean_isl, stored_bytes(at, lengths))

    def over(self, ends: tuple[Setup, Setup], sender: Sharding, receiver: Sharding, load: KvLoad) -> KvHandOver:
        """Hand-overs between instances, of the shape of their mappings."""
        return hand_over(
            (ends[0].with_draft_layers, ends[1].with_draft_layers),
            sender,
            receiver,
            load,
            path=self.path,
            layout=self.layout,
            descriptor_s=self.descriptor_s,
            threads=self.threads,
        )


#: Counted in a sweep that counts others, too: no time.
NO_LINK = KvWire(descriptor_s=0.0)


class _LinkKeys(Strict):
    """The link of a sweep's file."""

    path: Annotated[str, OneOf(PATHS), Unless("none", "")] = ""
    descriptor_us: Annotated[float, Range(0.0, 1e6, "us")] | None = None
    block_tokens: Annotated[int, Range(1, 10**6)] = KvLayout().block_tokens
    order: Annotated[str, OneOf(ORDERS)] = KvLayout().order
    cross_layer: bool = False
    run: Annotated[float, Range(1.0, 1e6)] = 1.0
    threads: Annotated[int, Range(1, 1024)] = 1


def _wire(keys: _LinkKeys) -> KvWire:
    layout = KvLayout(block_tokens=keys.block_tokens, order=keys.order, cross_layer=keys.cross_layer, run=keys.run)
    descriptor = None if keys.descriptor_us is None else keys.descriptor_us * US
    return KvWire(path=keys.path, descriptor_s=descriptor, layout=layout, threads=keys.threads)


#: ``none``, or ``{path: rail, descriptor_us: 2.4}``.
LinkAxis = Axis[Annotated[KvWire, Written(_LinkKeys, _wire), Unless("none", NO_LINK)]]


def takers_of(mappings: Sharding, at: Setup) -> Sharding:
    """A mapping of each class of receivers: of those whose hand-overs differ."""
    _, first = np.unique(_receiver_key(mappings, at), axis=0, return_index=True)
    return mappings[first]


def classes_of(mappings: Sharding, takers: Sharding, at: Setup) -> Ints:
    """Class of each decode mapping among those of ``takers_of``, (rows,). [1]"""
    classes = {tuple(key): place for place, key in enumerate(_receiver_key(takers, at).tolist())}
    return np.array([classes[tuple(key)] for key in _receiver_key(mappings, at).tolist()], dtype=np.int64)


def _receiver_key(mappings: Sharding, at: Setup) -> Floats:
    """What hand-overs depend on in a receiver: distinct heads, GPUs that carry a request, stages, shares of tokens."""
    model, ranks = at.with_draft_layers.model, mappings.dp_attn
    plain = replace(mappings, dcp=np.ones_like(mappings.dcp))
    heads, parts = (unique_gpus(model, each) / (ranks * mappings.pp) for each in (plain, mappings))
    return np.round(np.stack(np.broadcast_arrays(heads, parts, mappings.pp, mappings.dcp), axis=1), ROUNDED)


class Linked(NamedTuple):
    """Prefill configurations that can win, for each class of receivers."""

    frame: pd.DataFrame
    header: str
    least: Floats  # shortest hand-over of each row of the grid, (rows,) [s]


def linked_candidates(
    wire: KvWire, grid: PhaseGrid, taker_at: Setup, takers: Sharding, *, ftl_limit: float, nic_limit: float | None
) -> Linked:
    """Keep of a block of prefill what can win a match with a class of receivers within the FTL limit."""
    load = wire.load(grid.setup, grid.lengths, grid.kv_bytes_per_request)
    frames, headers, least = [], [], np.full(len(grid.mappings), np.inf)
    for place in range(len(takers)):
        over = wire.over((grid.setup, taker_at), grid.mappings, takers[place], load)
        after = np.broadcast_to(np.asarray(over.time, dtype=np.float64), least.shape)
        least = np.minimum(least, after)
        kept = prefill_candidates(grid, ftl_limit=ftl_limit, nic_limit=nic_limit, after=after)
        frames.append(kept.to_frame().assign(**{TAKER: place}))
        headers.append(kept.header())
    return Linked(pd.concat(frames, ignore_index=True), json.dumps(headers), least)


def merged_candidates(blocks: Sequence[tuple[pd.DataFrame, str]]) -> list[PrefillCandidates]:
    """Candidates of all blocks of a case, for each class of receivers."""
    read = [(frame, json.loads(header)) for frame, header in blocks]
    return [
        reduce(
            PrefillCandidates.merge,
            (PrefillCandidates.from_frame(frame[frame[TAKER] == place], headers[place]) for frame, headers in read),
        )
        for place in range(len(read[0][1]))
    ]


def parts_of(grid: PhaseGrid, kind: Ints) -> Iterator[tuple[int, PhaseGrid]]:
    """Rows of a decode grid by the class of their mapping."""
    for place in np.unique(kind).tolist():
        yield place, grid.part(np.flatnonzero(kind == place))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The hand-over of a cache, as a row of a sweep says it."""

    link: str  # as its case is called; "" where the table does not say
    bandwidth: float  # of a GPU, one way; inf = the wire takes no time, or is not known [B/s]
    size: float  # cache of a prompt, each element once [B]
    descriptors: float  # that a GPU of the receiver posts [1]
    post: float  # to post them [s]
    wire: float  # latency, and the bytes of the busiest GPU [s]
    time: float  # both [s]
    ftl: float  # with it, which the FTL limit holds for [s]


def handed_over(row: abc.Mapping[str, Any]) -> HandedOver | None:
    """Read what the hand-over of a row takes; None where none was counted."""
    count, post, time, ftl = (float(row.get(column.name, 0.0)) for column in LINK_COLUMNS)
    if not time > 0.0:
        return None
    return HandedOver(
        link=str(row.get(LINK, "")),
        bandwidth=float(row.get(LINK_BANDWIDTH, math.inf)),
        size=float(row["kv_bytes_per_request"]),
        descriptors=count,
        post=post,
        wire=time - post,
        time=time,
        ftl=ftl,
    )


def with_link(points: pd.DataFrame, wire: KvWire, ends: tuple[Setup, Setup], lengths: Lengths) -> pd.DataFrame:
    """Add ``LINK_COLUMNS`` to points of any mode; one instance hands nothing over."""
    count = len(points)
    values = {column.name: np.zeros(count) for column in LINK_COLUMNS}
    ftl = points["ftl_s"].to_numpy(dtype=float)
    if wire.counts and count and points["prefill_instances"].iloc[0]:
        degrees: list[dict[str, Any]] = [
            {name: points[f"{side}_{name}"].to_numpy() for name in SHARDING} for side in ("prefill", "decode")
        ]
        sender, receiver = (Sharding(**columns) for columns in degrees)
        size = float(points["kv_bytes_per_request"].iloc[0])
        over = wire.over(ends, sender, receiver, wire.load(ends[0], lengths, size))
        found = (over.descriptors, over.post, over.time)
        values |= {column.name: np.broadcast_to(each, count) for column, each in zip(LINK_COLUMNS, found, strict=False)}
    return points.assign(**values | {LINK_COLUMNS[-1].name: ftl + values["hand_over_s"]})
