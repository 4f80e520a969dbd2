"""One row schema for serving measurements of all forms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from disagg_sim.domain import Sharding
from lab.calibration.files import kept_from_fits

#: Why a mean TTFT is not judged that is right all the same, as in Little's law.
UNKNOWN_START = "the mean of a run whose number of prompts is not stated: how much of it is the start?"
#: Why a run is not judged that tells all the same what was run.
UNKNOWN_LENGTHS = "lengths are not stated"
#: Why a run is not judged whose layout nothing else tells.
MULTIPLIED = "more GPUs than a node: the source multiplies degrees of the same GPUs"
#: Forms whose load generators draw the tokens of prompts at random.
RANDOM_TOKENS = (
    "inferencex_dsr1",
    "inferencex_dense",
    "inferencex_models",
    "nvidia_gap",
    "trtllm_docs",
    "drafted_cells",
)
#: Digits of the word of an operating point. [1]
POINT_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured number of a row; a throughput counts tokens of its ``basis`` over ``gpus`` GPUs."""

    name: str  # "tpot", "ttft", "latency", "throughput", "transfer"
    measured: float  # [s], or [1/s] for a throughput
    statistic: str = "mean"
    basis: str = ""
    gpus: float = 1.0  # [1]
    reason: str = ""  # why this quantity is not evaluated; "" = it is


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """Equal workers of one kind: co-located instances, prefill workers or decode workers."""

    count: int = 1
    mapping: Sharding = field(default_factory=Sharding)

    @property
    def gpus(self) -> int:
        """GPUs of all of them. [1]"""
        return self.count * int(self.mapping.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measured run. Names are ours; blank names and a ``reason`` mean that it cannot be evaluated."""

    file: str
    row: str  # row_id, or the line of the file (the header is line 1)
    form: str
    quantities: tuple[Measurement, ...]
    others: tuple[Measurement, ...] = ()  # further statistics of these quantities, which no steady state has
    model: str = ""
    system: str = ""
    engine: str = ""
    recipe: str = ""
    load: str = (
        ""  # in flight: "closed_loop", "offline" (all queued), "server" (Poisson), "static"; "prefill", "decode"
    )
    mode: str = ""  # "aggregated" or "disaggregated"
    workers: WorkerGroup | None = None  # co-located, or decode workers when disaggregated
    prefill: WorkerGroup | None = None  # prefill workers when disaggregated
    isl: float = float("nan")  # [token]
    osl: float = float("nan")  # [token]
    concurrency: float = float("nan")  # in flight in the whole deployment [request]
    rate: float = float("nan")  # of a Poisson stream [request/s]
    batch: float = float("nan")  # sequences of a static batch or a step, of the whole deployment [request]
    waves: float = 0.0  # prompts of a run per concurrency slot; 0 = endless [1]
    spread: float = 0.1  # half width of the service times over their mean [1]
    chunk_tokens: int = 0  # token budget of a step where the source states it; 0 = the engine's [token]
    poll_steps: int = 1  # decode steps from one look at new requests, or split from one send, to the next [1]
    gather_steps: int = 0  # decode steps that a prompt waits for others to come with it; 0 = none [1]
    held_iters: int = 0  # that prompts wait for other ranks at most, the last begins them; 0 = as the engine's [1]
    slots: int = 0  # of a decode rank of split workers, where the launch says so; 0 = as the load tells [request]
    overlap: str = ""  # whether it was launched to form steps ahead, "on" or "off"; "" = by its version
    cold: bool = False  # nothing was sent before: its first requests hold what a server does once
    speculative: bool = False
    drafts: int = 1  # of a step, where it is; 1 where the source states none [token]
    accepted: tuple[float, ...] = ()  # share of steps that accept each of them, where the source states it [1]
    assumed_layout: bool = False  # the source states GPUs alone
    submitter: str = ""  # who sent a result to a benchmark
    scenario: str = ""  # of a benchmark
    ttft_limit: float = float("nan")  # that p99 of the requests kept, as its rules say [s]
    tpot_limit: float = float("nan")  # likewise [s]
    qa_flag: str = ""
    hardware: str = ""  # as the source writes it
    framework: str = ""  # as the source writes it
    version: str = ""  # of the framework, "1.2"; "" where the source states none
    reason: str = ""
    digest: str = ""  # first digits of the SHA-256 of the file

    @property
    def random_tokens(self) -> bool:
        """Whether prompts are known to be tokens drawn at random, as the load generators of these sources make them."""
        return self.form in RANDOM_TOKENS

    @property
    def gpus(self) -> float:
        """GPUs of the deployment, nan where they are unknown. [1]"""
        if self.workers is None:
            return float("nan")
        return float(self.workers.gpus + (self.prefill.gpus if self.prefill else 0))

    @property
    def configuration(self) -> str:
        """What was run, without the load, of what the source states alone: rows of one configuration stay together when
        data are split, and the split does not move with our reading.
        """
        gpus = (self.workers.gpus if self.workers else 0, self.prefill.gpus if self.prefill else 0)
        lengths = (f"{length:.0f}" for length in (self.isl, self.osl))
        names = (self.form, self.system, self.model, self.framework, self.recipe.partition("_")[0], self.mode)
        return "|".join(map(str, (*names, *gpus, *lengths)))

    @property
    def point(self) -> str:
        """Operating point, a word: runs of one configuration, layout, lengths and load have the same, on any day, with
        any version of the engine.
        """
        workers = [(each.count, each.mapping) if each else None for each in (self.workers, self.prefill)]
        load = (self.load, self.concurrency, self.rate, self.batch)
        what = (self.form, self.system, self.model, self.framework, self.recipe, self.mode)
        told = repr((what, workers, f"{self.isl:.0f}", f"{self.osl:.0f}", load))
        return hashlib.sha256(told.encode()).hexdigest()[:POINT_DIGITS]

    @property
    def held_out(self) -> bool:
        """Whether the row is kept from fits of engine parameters: a stable hash of its configuration."""
        return kept_from_fits(self.configuration)

    def refused(self, reason: str) -> ServingRow:
        """The same row with a reason, unless it has one."""
        return self if self.reason else replace(self, reason=reason)
