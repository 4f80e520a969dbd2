"""Nouns that every room shares. They carry values and no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from disagg_sim.errors import whole_number
from disagg_sim.notebook import Shown


class Status(IntEnum):
    """Why a design point may be used, or not; an infeasible point keeps its place in the grid."""

    OK = 0
    OUT_OF_MEMORY = 1


class Mode(StrEnum):
    """How prefill and decode share GPUs; the words of tables, files and commands."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    PIGGYBACK = "piggyback"


#: Largest seed of a random stream: tables keep it in 64 bits, and nobody needs more. [1]
MOST_SEED = 2**32
#: Largest instance without a pipeline, least NVLink domain that one may fill instead, largest with a pipeline. [1]
MAX_INSTANCE_GPUS = 64
MAX_DOMAIN_GPUS = 72
MAX_PIPELINE_GPUS = 128

#: What limits a pass, in the order of the integer codes of ``PhaseGrid.bound``.
BOUNDS = ("compute", "memory", "communication", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping(Shown):
    """How one instance is cut over GPUs: tp_attn * dp_attn = tp_ffn * ep inside each of pp stages. [1]"""

    tp_attn: int = 1  # tensor parallel degree of attention, dense and shared feed-forward parts [1]
    dp_attn: int = 1  # data parallel degree of attention [1]
    tp_ffn: int = 1  # tensor parallel degree of routed experts; of a dense model, as tp_attn [1]
    ep: int = 1  # expert parallel degree [1]
    pp: int = 1  # pipeline stages [1]
    chunk_tokens: int = 0  # CPP: tokens of a prompt in a chunk; 0 = whole prompt [token]

    def __post_init__(self) -> None:
        """``InputError`` unless the degrees are whole numbers from 1."""
        for name in ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp"):
            whole_number(name, getattr(self, name))

    @property
    def gpus(self) -> int:
        """GPUs of one instance. [1]"""
        return self.tp_attn * self.dp_attn * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a configuration was scored for, by the names that specs are loaded by."""

    model: str
    precision: str
    profile: str
    engine: str  # "" = the profile's own choice
    isl: float  # mean input length [token]
    osl: float  # mean output length [token]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One configuration of a replica, as a grid scored it."""

    phase: str  # "prefill" or "decode"
    mapping: Mapping
    batch: int  # requests of an instance, summed over DP ranks [request]
    latency_s: float  # FTL or TTL, no queue [s]
    request_rate_per_s: float  # at full rate [request/s]
    memory_bytes: float  # on the fullest GPU [B]
    system: str = ""  # name of the system that it runs on; the pools of a deployment may differ
    conditions: Conditions | None = None  # None of an instance that no grid scored


@dataclass(frozen=True, slots=True)
class Pool(Shown):
    """A multiset of instances: (instance, count) pairs, mostly one pair."""

    members: tuple[tuple[Instance, int], ...]

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool. [1]"""
        return sum(instance.mapping.gpus * count for instance, count in self.members)

    @property
    def request_rate_per_s(self) -> float:
        """Requests that the pool finishes at full rate. [request/s]"""
        return sum(instance.request_rate_per_s * count for instance, count in self.members)


@dataclass(frozen=True, slots=True)
class Deployment(Shown):
    """A prefill pool and a decode pool."""

    prefill: Pool
    decode: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives of requests. [s]"""

    ttft: float
    tpot: float
