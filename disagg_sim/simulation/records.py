"""Records of a run: columns of requests, samples in time, instances, decisions. Values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints


class Outcome(IntEnum):
    """How a request ended; each does so exactly once."""

    COMPLETED = 0
    REJECTED = 1  # refused at arrival: too large for every instance, or by the policy
    FAILED = 2  # its instance failed, or was stopped without draining
    UNFINISHED = 3  # the run was cut short


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """One row a request, in order of the trace; times that did not happen are NaN, instances -1."""

    request: Ints  # index in the trace [1]
    arrival_s: Floats  # [s]
    input_tokens: Ints  # [token]
    output_tokens: Ints  # [token]
    status: Ints  # ``Outcome`` [1]
    prefill_instance: Ints  # of the segment that emitted the first token [1]
    decode_instance: Ints  # of the last segment [1]
    prefill_start_s: Floats  # first step that worked on it [s]
    prefill_end_s: Floats  # its prompt is computed: the first token, or the one that its decode instance emits anew [s]
    first_token_s: Floats  # [s]
    transfer_s: Floats  # of its cache between instances, in all [s]
    exposed_transfer_s: Floats  # part of it that the request waited for [s]
    reserve_wait_s: Floats  # before it, for blocks of the receiver [s]
    decode_start_s: Floats  # first step on the last instance, not before the first token [s]
    finish_s: Floats  # last token [s]
    preemptions: Ints  # [1]
    cached_tokens: Ints  # of the prompt, found in the prefix cache [token]
    segments: Ints  # instances' turns that it took [1]
    transferred_tokens: Ints  # cached tokens that crossed between instances [token]
    migrations: Ints  # times that it began again elsewhere, its instance gone [1]


def frame_of(requests: Requests) -> pd.DataFrame:
    """Tabulate requests.

    Returns a row a request, the columns of ``Requests``; ``status`` in words.

    >>> one = {field.name: np.array([1]) for field in fields(Requests)}
    >>> frame_of(Requests(**one))["status"].tolist()
    ['rejected']
    """
    words = np.array([outcome.name.lower() for outcome in Outcome])
    columns = {field.name: getattr(requests, field.name) for field in fields(requests)}
    return pd.DataFrame(columns | {"status": words[requests.status]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The state at times a fixed period apart; shape (samples,) each."""

    time_s: Floats  # [s]
    arrivals: Ints  # so far [request]
    finished: Ints  # so far [request]
    queued: Ints  # requests that wait for their prefill [request]
    running: Ints  # requests that decode [request]
    kv_use: Floats  # used over all KV blocks of instances in service [1]
    gpus: Ints  # held by instances, starting and draining ones included [1]
    prefill_gpus: Ints  # of them with the role of prefill [1]
    decode_gpus: Ints  # of them with the role of decode, or of both [1]
    transfers: Ints  # in flight [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """One row an instance that ever held GPUs."""

    role: Ints  # at the end; ``policy.Role`` [1]
    gpus: Ints  # [1]
    start_s: Floats  # when it took its GPUs [s]
    stop_s: Floats  # when it gave them back, or the end of the run [s]
    busy_s: Floats  # in steps [s]
    decode_steps: Ints  # steps that held a decode [1]
    decode_s: Floats  # time of those steps [s]
    prefill_tokens: Ints  # prompt tokens computed, recomputation included [token]
    decode_tokens: Ints  # output tokens of decode steps [token]
    flops: Floats  # useful work [FLOP]
    flips: Ints  # changes of role [1]
    kv_blocks: Ints  # [block]
    failed_s: Floats  # out of service after failures, its GPUs held [s]

    @property
    def gpu_s(self) -> Floats:
        """GPU-seconds held. [s]"""
        return self.gpus * (self.stop_s - self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeUse:
    """What an encode pool held and did."""

    gpus: int  # an instance each [1]
    held_s: float  # all of them, to the end of the run [s]
    busy_s: float  # of all together [s]
    flops: float  # useful work [FLOP]

    @property
    def gpu_s(self) -> float:
        """GPU-seconds held. [s]"""
        return self.gpus * self.held_s


class Decision(NamedTuple):
    """One line of the decision log."""

    time_s: float  # [s]
    kind: str  # "flip", "start", "stop", "move", "limits"; "failure", which nobody decided
    instance: int  # that it changed, or started
    wish: str  # in words
    reason: str  # the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Several models of a cluster, and which of them is whose."""

    names: tuple[str, ...]
    request: Ints  # (requests,) place of the model that each asked for among the names [1]
    instance: Ints  # (instances,) of the one that each served [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoads:
    """What prompts found in tiers below HBM; arrays of shape (requests,) or (requests, tiers)."""

    names: tuple[str, ...]  # of the tiers, the fastest first
    tokens: Ints  # loaded from each [token]
    bytes: Floats  # the same [B]
    load_s: Floats  # from the placement of a request until its past was in HBM, waits included [s]
    computed_again: Ints  # found below HBM, but sooner computed than loaded [token]

    @property
    def columns(self) -> dict[str, Ints | Floats]:
        """Columns beside those of the requests."""
        found: dict[str, Ints | Floats] = {}
        for place, name in enumerate(self.names):
            found |= {f"{name}_tokens": self.tokens[:, place], f"{name}_bytes": self.bytes[:, place]}
        return found | {"load_s": self.load_s, "computed_again": self.computed_again}
