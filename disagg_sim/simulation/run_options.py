"""Options of a run other than deployment and policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from disagg_sim.errors import InputError, check_kinds
from disagg_sim.facts.traffic import Reuse
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.simulation.admission import AdmissionKind
from disagg_sim.simulation.kernel.layout import Scheduling
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import ServiceClass
from disagg_sim.simulation.options import (
    FULL,
    LEAST_PERIOD_S,
    LONGEST_S,
    MOST,
    MOST_SAMPLES,
    RECORDS,
    check_options,
    option,
)
from disagg_sim.simulation.site import SCHEDULER
from disagg_sim.simulation.transfers import FIRST_TOKENS, WAYS
from disagg_sim.techniques.availability.play import Failures
from disagg_sim.techniques.prefix.play_stated import check_reuse
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run other than deployment and policy."""

    concurrency: int = option(
        0,
        "closed loop: so many requests, or sessions, are always there; 0: the arrivals of the trace",
        unit="request",
        low=0,
        high=MOST,
    )
    start_up_s: float = option(
        30.0,
        "time from the wish for an instance until it serves; weights are cached",
        unit="s",
        low=0.0,
        high=LONGEST_S,
    )
    flip_s: float = option(
        0.0, "time out of service of a drained instance that changes its role", unit="s", low=0.0, high=LONGEST_S
    )
    link: LinkSpec = field(default_factory=LinkSpec)
    admission: AdmissionKind | None = None  # beside that of the policy; None = all are admitted
    classes: tuple[ServiceClass, ...] = ()  # of requests with limits of their own
    failures: Failures | None = None  # None = nothing fails
    transfer: str = option(
        "policy",
        "how a cache moves: pulled once the receiver has reserved blocks; pushed into blocks reserved from the start; "
        "pushed in chunks into blocks that each takes when it is computed; into an unlimited buffer of the receiver; "
        "or as in the system of the policy",
        choices=("policy", *WAYS),
    )
    first_token: str = option(
        "decode",
        "who emits the first token of a request that goes on elsewhere: the instance of its prefill, or that of its "
        "decode in its first step",
        choices=FIRST_TOKENS,
    )
    prefix_cache: bool = option(
        False, "instances remember prompts in the free part of their KV memory, until requests take its blocks"
    )
    tiers: tuple[str, ...] = ()  # below HBM, of ``kv_tiers`` of the system, the fastest first; () = none
    reuse: Reuse | None = None  # pasts as stated, in place of what caches find; None = what they find
    sample_s: float = option(
        10.0,
        "time between two samples of the state; a scenario without it takes a 200th of the trace",
        unit="s",
        low=LEAST_PERIOD_S,
        infinite=True,
    )
    gap_limit_s: float = option(
        math.inf,
        "gap between two tokens above which it counts as late: late_gaps of each request; by default they do not count",
        unit="s",
        low=0.0,
        above=True,
        infinite=True,
    )
    until_s: float = option(math.inf, "time at which the run is cut", unit="s", low=0.0, above=True, infinite=True)
    scheduler: str = option(
        SCHEDULER,
        "what engines admit, keep and hold in a step by default (hw_specs/schedulers)",
        choices=list_specs("scheduler"),
    )
    scheduling: str = option(
        "fcfs",
        "order in which engines serve what waits: as it came, or classes of a higher priority first; where blocks "
        "lack, the newest request is preempted, or the newest of the lowest priority",
        choices=tuple(each.name.lower() for each in Scheduling),
    )
    preemption: str = option(
        "recompute",
        "what becomes of a sequence that gives way where blocks lack: computed again, or swapped to the host's memory "
        "over the dram of kv_tiers, for which the steps that move it wait (vLLM V0)",
        choices=("recompute", "swap"),
    )
    records: str = option(
        FULL,
        "what is kept of requests: all until the end (full); they leave in pieces, as the run goes, into their table "
        "(stream); or they leave and are dropped (none). Without full, TTFT and TPOT percentiles are 0.5 % off at most",
        choices=RECORDS,
    )
    step_by_step: bool = option(False, "compute every decode step by itself, for comparison with the closed form")

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        check_options(self)
        check_kinds(self)
        if self.transfer == "chunks" and self.link.push != "chunk":
            raise InputError(f"link push {self.link.push!r} with transfer 'chunks'; allowed: 'chunk'")
        if self.preemption == "swap" and self.prefix_cache:
            raise InputError("preemption 'swap' with prefix_cache; allowed: 'recompute'")
        if self.reuse is not None:
            if self.prefix_cache:
                raise InputError("reuse states what caches find; allowed: without prefix_cache")
            check_reuse(self.reuse, self.tiers)
        elif self.tiers and not self.prefix_cache:
            raise InputError(
                f"tiers {', '.join(self.tiers)} below instances that remember nothing; allowed: beside prefix_cache"
            )

    @property
    def whole(self) -> bool:
        """Whether a run needs all requests at once: all records, classes, closed loops, caches, failures."""
        caches = self.prefix_cache or self.reuse
        return bool(self.records == FULL or self.classes or self.concurrency or caches or self.failures)

    def last_arrival(self, trace: Trace | TraceStream) -> float:
        """Time at which the last request comes, or the run is cut; 0 in a closed loop. [s]"""
        return 0.0 if self.concurrency else min(trace.last_s, self.until_s)

    def check_samples(self, trace: Trace | TraceStream) -> None:
        """``InputError`` where a trace lasts for more than ``MOST_SAMPLES`` samples."""
        end = self.last_arrival(trace)
        if end / self.sample_s > MOST_SAMPLES:
            raise InputError(
                f"sample_s {self.sample_s:g}: trace {trace.name} lasts {end:g} s, {end / self.sample_s:,.0f} samples; "
                f"allowed: up to {MOST_SAMPLES:,} samples, sample_s from {end / MOST_SAMPLES:.3g} s"
            )
