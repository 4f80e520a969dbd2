"""The only owner of the axes: rows are mappings (and CPP chunk sizes), columns are batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Instance, Mapping
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAPPING_COLUMNS = ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp", "chunk_tokens")


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseGrid:
    """Every design point of one phase: rows x batch sizes, feasible or not.

    One-dimensional arrays have one entry per row (a mapping and its chunk size); two-dimensional
    ones have shape (rows, batches).
    """

    phase: str  # "prefill" or "decode"
    model: ModelSpec
    system: SystemSpec
    precision: str
    profile: str
    engine: str  # "" = the profile's own choice
    isl: int  # [token]
    osl: int  # [token]
    tp_attn: Ints
    dp_attn: Ints
    tp_ffn: Ints
    ep: Ints
    pp: Ints
    chunk_tokens: Ints  # 0 = unchunked [token]
    batch: Ints  # (batches,) requests of an instance [request]
    latency: Floats  # FTL (prefill) or TTL (decode) [s]
    request_rate: Floats  # of one instance at full rate [request/s]
    memory_bytes: Floats  # on the fullest GPU [B]
    memory_limit: float  # what a GPU may hold [B]
    microbatches: Ints  # (rows, batches) [1]
    status: NDArray[np.int8]  # (rows, batches) of ``Status``
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``
    kv_bytes_per_request: float  # cache of one prompt of ``isl`` tokens, each element once [B]
    unique_gpus: Ints  # (rows,) GPUs of an instance that hold distinct cache [1]

    @property
    def gpus(self) -> Ints:
        """GPUs of one instance of each row. [1]"""
        return self.tp_attn * self.dp_attn * self.pp

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """(rows, batches): which points may be used."""
        return self.status == 0

    def mapping(self, row: int) -> Mapping:
        """The mapping of a row as a value object."""
        return Mapping(**{name: int(getattr(self, name)[row]) for name in MAPPING_COLUMNS})

    def instance(self, row: int, column: int) -> Instance:
        """The configuration at (row, column) as a value object."""
        return Instance(
            phase=self.phase,
            mapping=self.mapping(row),
            batch=int(self.batch[column]),
            latency_s=float(self.latency[row, column]),
            request_rate_per_s=float(self.request_rate[row, column]),
            memory_bytes=float(self.memory_bytes[row, column]),
        )
