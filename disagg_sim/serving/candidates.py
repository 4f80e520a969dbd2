"""Select the prefill configurations that can win a match: the fastest of every instance size."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import MAPPING_COLUMNS, Sharding
from disagg_sim.errors import InfeasibleError, InputError, above_zero
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu
from disagg_sim.search.phase_grid import PhaseGrid, best_per_size, fastest_points, least
from disagg_sim.techniques.split.search import SplitGrid
from disagg_sim.units import GB


def kv_rate_per_gpu(grid: PhaseGrid) -> Floats:
    """Find the cache that each distinct GPU sends (prefill) or receives (decode) at full rate. [B/s]

    Equations (1) and (2) of arXiv 2506.05508: ``physics.kv_transfer.bandwidth_per_gpu``. What prefill adds to a shared
    tier leaves by the same port, and counts; what it loads from there comes in by the other direction, and does not.
    """
    moved = grid.kv_bytes_per_request + grid.stored_bytes_per_request
    rate: Floats = bandwidth_per_gpu(grid.request_rate, moved, grid.unique_gpus[:, None])
    return rate


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillCandidates:
    """The fastest prefill configuration of every instance size, and how close the others come to the limits.

    Arrays have shape (candidates,), by rising GPUs of an instance. Small and free of the grid that
    it came from, so the blocks of a large sweep can be scored apart and merged.
    """

    model: str
    system: str
    precision: str
    profile: str
    engine: str
    isl: float  # whole where lengths are constant, else the mean [token]
    cache_format: str  # of the KV cache
    speculation: str  # drafter whose cache is handed over, too; "" = none
    kv_bytes_per_request: float  # that goes to decode [B]
    stored_bytes_per_request: float = 0.0  # that goes to a shared tier, by the same port [B]
    ftl_limit: float  # [s]
    nic_limit: float  # inf = none [B/s]
    tp_attn: Ints
    dp_attn: Ints
    tp_ffn: Ints
    ep: Ints
    pp: Ints
    redundant_slots: Ints
    dcp: Ints
    pcp: Ints
    chunk_tokens: Ints  # [token]
    mla_form: NDArray[np.int8]  # index into ``search.phase_grid.CHOSEN_FORMS``
    batch: Ints  # [request]
    latency: Floats  # FTL [s]
    request_rate: Floats  # p of one instance [request/s]
    memory_bytes: Floats  # [B]
    unique_gpus: Ints  # [1]
    feasible: int  # design points that fit in memory [1]
    best_ftl: float  # lowest FTL of the feasible points; inf if none [s]
    least_egress: float  # lowest KV egress of the points within the FTL limit; inf if none [B/s]
    least_shortfall: float  # memory that the closest infeasible point lacks; inf if none [B]

    @property
    def mapping(self) -> Sharding:
        """The mappings as columns."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in MAPPING_COLUMNS}
        return Sharding(**columns)

    @property
    def gpus(self) -> Ints:
        """GPUs of one instance of each candidate. [1]"""
        return np.asarray(self.mapping.gpus)

    @property
    def egress(self) -> Floats:
        """KV egress of each distinct GPU at full rate. [B/s]"""
        moved = self.kv_bytes_per_request + self.stored_bytes_per_request
        rate: Floats = bandwidth_per_gpu(self.request_rate, moved, self.unique_gpus)
        return rate

    @property
    def order(self) -> Ints:
        """Rank of each candidate in the lexicographic order of mapping and batch. [1]"""
        keys = [self.batch, *(getattr(self, name) for name in reversed(MAPPING_COLUMNS))]
        rank = np.empty(self.batch.size, dtype=np.int64)
        rank[np.lexsort(keys)] = np.arange(rank.size)
        return rank

    def merge(self, other: PrefillCandidates) -> PrefillCandidates:
        """The candidates of two blocks of one grid together; the order of merging does not matter."""
        for name in _SAME:
            if getattr(self, name) != getattr(other, name):
                ours, theirs = getattr(self, name), getattr(other, name)
                raise InputError(f"cannot merge prefill candidates of {name} {ours} and {theirs}")
        joint: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS}
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        values["feasible"] = self.feasible + other.feasible
        values |= {name: min(getattr(self, name), getattr(other, name)) for name in _LEAST}
        both = PrefillCandidates(**values, **joint)
        keep = best_per_size(both.gpus, both.request_rate, both.order)
        kept: dict[str, Any] = {name: array[keep] for name, array in joint.items()}
        return PrefillCandidates(**values, **kept)

    def to_frame(self) -> pd.DataFrame:
        """One row a candidate; ``header`` holds what is not an array."""
        return pd.DataFrame({name: getattr(self, name) for name in _ARRAYS})

    def header(self) -> str:
        """Everything that is not an array, as a text that Python's ``json`` reads back."""
        return json.dumps({name: getattr(self, name) for name in (*_SAME, "feasible", *_LEAST)})

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, header: str) -> PrefillCandidates:
        """Back from ``to_frame`` and ``header``."""
        scalars: dict[str, Any] = json.loads(header)
        arrays: dict[str, Any] = {name: frame[name].to_numpy() for name in _ARRAYS}
        return cls(**scalars, **arrays)

    def require(self) -> None:
        """Raise ``InfeasibleError`` with what binds, and by how much, unless there is a candidate."""
        where = f"{self.model} on {self.system}"
        if self.batch.size:
            return
        if not self.feasible:
            raise InfeasibleError(
                f"{where}: no prefill mapping fits in memory; "
                f"the closest lacks {self.least_shortfall / GB:.4g} GB per GPU"
            )
        if self.best_ftl > self.ftl_limit:
            raise InfeasibleError(
                f"{where}: no prefill configuration meets the FTL limit of {self.ftl_limit:g} s; "
                f"the best FTL is {self.best_ftl:.4g} s"
            )
        raise InfeasibleError(
            f"{where}: no prefill configuration within the FTL limit stays below the NIC limit of "
            f"{self.nic_limit:g} B/s per GPU; the least KV egress is {self.least_egress:.4g} B/s"
        )


_ARRAYS = (*MAPPING_COLUMNS, "mla_form", "batch", "latency", "request_rate", "memory_bytes", "unique_gpus")
_LEAST = ("best_ftl", "least_egress", "least_shortfall")
_SAME = tuple(f.name for f in fields(PrefillCandidates) if f.name not in {*_ARRAYS, "feasible", *_LEAST})


def prefill_candidates(
    prefill: PhaseGrid, *, ftl_limit: float, nic_limit: float | None = None, after: Floats | None = None
) -> PrefillCandidates:
    """Find the fastest prefill configuration of every instance size within the limits [s], [B/s], by rising GPUs.

    Pipelines take the passes that engines let into them (``PhaseGrid.entered``).

    Ties go to the lexicographic order of mapping, then batch. The best configuration by rate per GPU, which the paper's
    Algorithm 1 picks, is among them.
    """
    if prefill.phase != "prefill":
        raise InputError(f"expected a prefill grid, got a {prefill.phase} grid")
    ftl_limit = above_zero("ftl_limit", ftl_limit, "s")
    limit = np.inf if nic_limit is None else above_zero("nic_limit", nic_limit, "B/s")
    feasible = prefill.feasible
    whole = prefill.latency if after is None else prefill.latency + after[:, None]
    fast = feasible & (whole <= ftl_limit)
    egress = kv_rate_per_gpu(prefill)
    usable = fast & (egress <= limit) & prefill.entered
    rows, columns = fastest_points(prefill, prefill.request_rate, usable)
    at, kept = prefill.setup, prefill.mappings[rows]
    return PrefillCandidates(
        model=at.model.name,
        system=at.system.name,
        precision=at.precision.name,
        profile=at.profile.name,
        engine=at.engine,
        isl=prefill.lengths.mean_isl,
        cache_format=at.precision.cache.name,
        speculation=at.speculation.name if at.speculation else "",
        kv_bytes_per_request=prefill.kv_bytes_per_request,
        stored_bytes_per_request=prefill.stored_bytes_per_request,
        ftl_limit=ftl_limit,
        nic_limit=limit,
        **{name: getattr(kept, name) for name in MAPPING_COLUMNS},
        mla_form=prefill.mla_form[rows, columns],
        batch=prefill.batch[columns],
        latency=prefill.latency[rows, columns],
        request_rate=prefill.request_rate[rows, columns],
        memory_bytes=prefill.memory_bytes[rows, columns],
        unique_gpus=prefill.unique_gpus[rows],
        feasible=int(feasible.sum()),
        best_ftl=least(whole, feasible),
        least_egress=least(egress, fast),
        least_shortfall=least(prefill.memory_bytes - prefill.memory_limit, ~feasible),
    )


def check_same_case(prefill: PhaseGrid | PrefillCandidates, decode: PhaseGrid | SplitGrid) -> None:
    """Raise ``InputError`` unless model, prompt length, speculation and format of the cache agree."""
    written, read = _handed_over(prefill), _handed_over(decode)
    for name, left, right in zip(("model", "isl", "speculation"), written[:3], read[:3], strict=True):
        if left != right:
            raise InputError(f"prefill and decode differ in {name}: {left or 'none'} and {right or 'none'}")
    if written[3] != read[3]:
        formats = (f"{cache} (precision {precision})" for *_, cache, precision in (written, read))
        raise InputError(
            f"prefill writes its KV cache in {' and decode reads '.join(formats)}; "
            "take precision recipes with the same cache format"
        )


def _handed_over(side: PhaseGrid | PrefillCandidates | SplitGrid) -> tuple[str, str, str, str, str]:
    """Model, prompt length, speculation, cache format and recipe of one side."""
    if isinstance(side, PrefillCandidates):
        return side.model, f"{side.isl:.10g}", side.speculation, side.cache_format, side.precision
    at = side.setup
    drafter = at.speculation.name if at.speculation else ""
    return at.model.name, f"{side.lengths.mean_isl:.10g}", drafter, at.precision.cache.name, at.precision.name
