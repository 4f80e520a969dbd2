"""Hold every design point of one phase, rows of mappings x batch sizes, feasible or not; find the fastest of a size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import BOUNDS, MAPPING_COLUMNS, Sharding, Status
from disagg_sim.notebook import Shown
from disagg_sim.physics.blocks import MLA_FORMS, forms_of
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.search.deployment import Instance
from disagg_sim.techniques.prefix.search import stored_bytes
from disagg_sim.workload.lengths import Lengths

PHASES = ("prefill", "decode")
#: Forms of MLA of a point, in the order of the integer codes of ``PhaseGrid.mla_form``. "auto" stands where every chunk
#: takes the faster of "naive" and "absorbed", "none" where the model has no MLA.
CHOSEN_FORMS = (*MLA_FORMS, "none")


#: Most tokens of a rank that enter a pipeline at once, unless one prompt has more: the usual budget of engines
#: (``hw_specs/schedulers/``). A larger pass holds up all that follow as it walks through the stages. [token]
STAGE_TOKENS = 8192

#: Arrays of a grid that have a value for each point, the last of prefill.
_OF_POINTS = ("latency", "request_rate", "memory_bytes", "microbatches", "bound", "mla_form", "drafts", "stall")


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseGrid(Shown):
    """Every design point of one phase: rows x batch sizes, feasible or not.

    A row is a mapping with its chunk size; two-dimensional arrays have shape (rows, batches).
    """

    phase: str  # "prefill" or "decode"
    setup: Setup
    mappings: Sharding  # columns of shape (rows,)
    lengths: Lengths
    batch: Ints  # (batches,) requests of an instance [request]
    latency: Floats  # FTL (prefill) or TTL (decode) [s]
    request_rate: Floats  # of one instance at full rate [request/s]
    memory_bytes: Floats  # on the fullest GPU [B]
    microbatches: Ints  # (rows, batches) [1]
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``
    mla_form: NDArray[np.int8]  # (rows, batches) index into ``CHOSEN_FORMS``
    drafts: NDArray[np.int8]  # (rows, batches) draft tokens of a decode step; 0 = no speculation [token]
    stall: Floats | None  # time between passes of prefill in which the slowest stage of a pipeline waits [s]
    ftl_quantile: float | None = None  # share of prompts whose FTL is at most ``latency``; None = the mean [1]

    @property
    def gpus(self) -> Ints:
        """GPUs of one instance of each row. [1]"""
        return np.asarray(self.mappings.gpus)

    @property
    def memory_limit(self) -> float:
        """What a GPU may hold. [B]"""
        return self.setup.memory_limit

    @cached_property
    def status(self) -> NDArray[np.int8]:
        """(rows, batches) of ``Status``."""
        return np.where(self.memory_bytes > self.memory_limit, Status.OUT_OF_MEMORY, Status.OK).astype(np.int8)

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """(rows, batches): which points may be used."""
        return np.asarray(self.status == Status.OK)

    @cached_property
    def entered(self) -> Mask:
        """(rows, batches): which batches engines let in: of prefill in a pipeline, of each rank one prompt at a time, a
        chunk of one, or several of ``STAGE_TOKENS`` in all; of decode every one.
        """
        if self.phase == "decode":
            return np.ones(self.latency.shape, dtype=bool)
        pp, dp, chunk = (
            each[:, None] for each in (self.mappings.pp, self.mappings.dp_attn, self.mappings.chunk_tokens)
        )
        own = np.ceil(self.batch / dp)
        together = np.where(chunk > 0, own, np.ceil(own / np.minimum(pp, own)))
        packed = (chunk == 0) & (together * self.lengths.mean_new <= STAGE_TOKENS)
        return np.asarray((pp == 1) | (together == 1) | packed)

    @cached_property
    def kv_bytes_per_request(self) -> float:
        """Expected cache that a prompt sends, each element once, with a drafter's; windows saturate by prompt. [B]"""
        return self.lengths.mean_over_prompts(self.setup.handed_bytes)

    @cached_property
    def stored_bytes_per_request(self) -> float:
        """Expected cache that a prompt of prefill adds to shared tiers over the NIC (``prefixes.stored_bytes``). [B]"""
        return stored_bytes(self.setup, self.lengths) if self.phase == "prefill" else 0.0

    @cached_property
    def unique_gpus(self) -> Ints:
        """(rows,) GPUs of an instance that hold distinct cache; whole ones where layers differ in it. [1]"""
        at = self.setup
        distinct = unique_gpus(at.cached_layers, self.mappings.for_grid(), self.lengths.mean_isl, at.precision)
        return np.broadcast_to(distinct, (len(self.mappings), 1))[:, 0].astype(np.int64)

    def part(self, rows: Any) -> PhaseGrid:
        """Take some of the rows."""
        held: dict[str, Any] = {name: getattr(self, name) for name in _OF_POINTS}
        arrays = {name: each[rows] for name, each in held.items() if each is not None}
        return replace(self, mappings=self.mappings[rows], **arrays)

    def chosen(self, rows: Any, columns: Any) -> Sharding:
        """Mappings of the points at these places, with their draft tokens: a row, or columns of shape (points,)."""
        drafts = self.drafts[rows, columns]
        return replace(self.mappings[rows], draft_tokens=int(drafts) if np.ndim(drafts) == 0 else drafts.astype(int))

    @property
    def step(self) -> Floats:
        """(rows, batches) time of a decode step: the mean TTL times the accepted tokens. [s]"""
        return (
            self.latency if self.setup.speculation is None else self.latency * self.setup.accepted_length(self.drafts)
        )

    def instance(self, row: int, column: int) -> Instance:
        """The configuration at (row, column) as a value object."""
        return Instance(
            phase=self.phase,
            mapping=self.chosen(row, column),
            batch=int(self.batch[column]),
            latency_s=float(self.latency[row, column]),
            request_rate_per_s=float(self.request_rate[row, column]),
            memory_bytes=float(self.memory_bytes[row, column]),
            setup=self.setup,
            lengths=self.lengths,
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a design point, by mapping and then by batch, infeasible ones too; units in the names of columns."""
        shape = self.latency.shape

        def by_row(values: Ints) -> Any:
            return np.repeat(values, shape[1])

        latency = "ftl_s" if self.phase == "prefill" else "ttl_s"
        columns = {name: by_row(getattr(self.mappings, name)) for name in MAPPING_COLUMNS}
        columns |= {
            "gpus": by_row(self.gpus),
            "batch": np.tile(self.batch, shape[0]),
            latency: self.latency.ravel(),
            "request_rate_per_s": self.request_rate.ravel(),
            "requests_per_s_per_gpu": (self.request_rate / self.gpus[:, None]).ravel(),
            "memory_bytes": self.memory_bytes.ravel(),
            "microbatches": self.microbatches.ravel(),
            "feasible": self.feasible.ravel(),
            "bound": pd.Categorical.from_codes(self.bound.ravel(), categories=pd.Index(BOUNDS)),
            "mla_form": pd.Categorical.from_codes(self.mla_form.ravel(), categories=pd.Index(CHOSEN_FORMS)),
        }
        if self.phase == "decode" and self.setup.speculation is not None:
            columns["draft_tokens"] = self.drafts.ravel()
        return pd.DataFrame(columns)


def form_code(at: Setup, form: str) -> np.int8:
    """Find the index of a form of MLA in ``CHOSEN_FORMS``; that of "none" where the model has no MLA. [1]

    >>> from disagg_sim.physics.setup import setup
    >>> models = [setup(name, "h200_sxm", "fp8", profile="ideal") for name in ("deepseek_r1", "llama_3_1_8b")]
    >>> [CHOSEN_FORMS[form_code(at, "naive")] for at in models]
    ['naive', 'none']
    """
    return np.int8(CHOSEN_FORMS.index(form if len(forms_of(at.model)) > 1 else "none"))


def best_per_size(gpus: Ints, rate: Floats, order: Ints) -> Ints:
    """Index of the fastest entry of every size, by rising size; among equal rates the lowest ``order``.

    Only these can be part of a best pool or pair: put a faster instance of the same size in the place of a slower one
    and the GPUs stay, no pool gets slower and no pool gets more varied.

    >>> best_per_size(np.array([1, 2, 1]), np.array([5.0, 9.0, 6.0]), np.arange(3)).tolist()
    [2, 1]
    """
    if gpus.size == 0:
        return np.empty(0, dtype=np.int64)
    best = np.full(int(gpus.max()) + 1, -np.inf)
    np.maximum.at(best, gpus, rate)
    fastest = np.flatnonzero(rate == best[gpus])
    fastest = fastest[np.lexsort((order[fastest], gpus[fastest]))]
    first = np.unique(gpus[fastest], return_index=True)[1]
    return fastest[first].astype(np.int64)


def fastest_points(grid: PhaseGrid, rates: Floats, usable: Mask) -> tuple[Ints, Ints]:
    """Find the fastest usable point of every instance size, by rising size; ties go to the lexicographic order.

    Of the two instances of two GPUs, the tensor parallel one is faster:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal")
    >>> sizes = [Sharding(), Sharding(pp=2), Sharding(tp_attn=2, tp_ffn=2)]
    >>> grid = ds.decode_grid(at, sizes, ds.lengths(2048, 256), batch=[1, 8])
    >>> [places.tolist() for places in fastest_points(grid, 1 / grid.latency, grid.feasible)]
    [[0, 2], [0, 0]]
    """
    rate = np.where(usable, rates, -np.inf)
    columns = rate.argmax(axis=1)  # of equal ones the smallest batch
    rows = np.flatnonzero(usable[np.arange(columns.size), columns])
    order = np.empty(grid.gpus.size, dtype=np.int64)  # rank of every row by its mapping
    order[np.lexsort([getattr(grid.mappings, name) for name in reversed(MAPPING_COLUMNS)])] = np.arange(order.size)
    keep = rows[best_per_size(grid.gpus[rows], rate[rows, columns[rows]], order[rows])]
    return keep, columns[keep]


def least(values: NDArray[Any], mask: Mask) -> float:
    """Find the smallest of some values; infinity where none counts."""
    return float(np.min(values.astype(np.float64, copy=False), where=mask, initial=np.inf))
