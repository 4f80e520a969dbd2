"""Explain the loss from a plan to a simulation, removing one assumption of the plan at a time.

1. planned: the slower pool's rate at constant lengths, no queue, no transfer;
2. full queue, planned lengths: the same lengths, simulated; what batches, transfers and rounding to whole passes cost;
3. full queue, lengths of the trace: what their spread costs;
4. arrivals of the trace: requests come when they come; where the trace offers less than the plan can serve, the rest
   is no loss but spare capacity. Taken from the first arrival to the last finish: start and drain of a short
   trace count;
5. inside the SLO: of these, the tokens of requests that meet it.

A full queue is a closed loop: as many requests as the pools hold and a few more are always there; its rate is taken
after two and before the last generation of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from disagg_sim.search.deployment import Deployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_result import RunResult
from disagg_sim.simulation.site import request_host
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.trace import Trace

#: Generations of a closed loop: all, those before the rate is taken, and those after it. [1]
GENERATIONS, BEFORE, AFTER = 6, 2, 1
#: The closed loop keeps so many batches of every prefill instance beside the decodes. [1]
PREFILLS_AHEAD = 3
#: Serves a trace in a closed loop of so many requests.
Replay = Callable[[Trace, int], RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedDeployment:
    """What a matched deployment promises."""

    lengths: Lengths
    deployment: Deployment

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens of the slower pool over ALL GPUs. [token/s]"""
        rate = min(pool.request_rate_per_s for pool in (self.deployment.prefill, self.deployment.decode))
        return rate * self.lengths.mean_osl / self.gpus

    @property
    def gpus(self) -> int:
        """GPUs of both pools. [1]"""
        return self.deployment.prefill.gpus + self.deployment.decode.gpus

    @property
    def in_flight(self) -> int:
        """Requests that keep both pools full, those that the host takes in included. [request]"""
        decode = sum(each.batch * count for each, count in self.deployment.decode.members)
        prefill = PREFILLS_AHEAD * sum(each.batch * count for each, count in self.deployment.prefill.members)
        rate = min(pool.request_rate_per_s for pool in (self.deployment.prefill, self.deployment.decode))
        at = self.deployment.prefill.members[0][0].setup
        host = request_host(at) if at is not None else 0.0
        return decode + prefill + math.ceil(rate * host)


def loss(plan: MatchedDeployment, trace: Trace, row: Summary, replay: Replay) -> pd.DataFrame:
    """Tabulate the steps from planned to simulated throughput; simulates two closed loops.

    Returns ``step``, ``tokens_per_s_per_gpu``, ``share_of_plan``, ``change`` against the step before, ``because``.
    """
    planned, lengths = plan.tokens_per_s_per_gpu, plan.lengths
    constant = trace.with_lengths(round(lengths.mean_isl), max(round(lengths.mean_osl), 1))
    offered = trace.rate * float(trace.output_tokens.mean()) / plan.gpus
    limits = f"TTFT {row.slo_ttft_s:g} s and TPOT {row.slo_tpot_s:g} s"
    steps = (
        ("planned", planned, f"slower pool at {lengths.mean_isl:g}/{lengths.mean_osl:g} tokens, no queue, no transfer"),
        ("full queue, planned lengths", _saturated(plan, constant, replay), "batches, transfers, whole passes"),
        ("full queue, lengths of the trace", _saturated(plan, trace, replay), _spread(trace)),
        (
            "arrivals of the trace",
            row.throughput_tokens_per_s / plan.gpus,
            f"the trace offers {offered:.4g} tokens/s/GPU, {offered / planned:.0%} of the plan; start and drain are in",
        ),
        (
            "inside the SLO",
            row.goodput_tokens_per_s / plan.gpus,
            f"{row.slo_attainment:.1%} of the requests meet {limits}",
        ),
    )
    frame = pd.DataFrame(steps, columns=["step", "tokens_per_s_per_gpu", "because"])
    values = frame["tokens_per_s_per_gpu"]
    frame.insert(2, "share_of_plan", values / planned)
    frame.insert(3, "change", values / values.shift(1) - 1)
    return frame


def _spread(trace: Trace) -> str:
    isl, osl = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    spread = float(trace.input_tokens.std()) / isl
    return f"mean lengths {isl:.0f}/{osl:.0f}, inputs with a coefficient of variation of {spread:.2f}"


def _saturated(plan: MatchedDeployment, lengths: Trace, replay: Replay) -> float:
    """Output tokens per second and GPU of a closed loop with the lengths of a trace, taken in turn. [token/s]"""
    held = plan.in_flight
    rows = np.arange(GENERATIONS * held) % len(lengths)
    loop = Trace(
        arrival=np.zeros(rows.size),
        input_tokens=lengths.input_tokens[rows],
        output_tokens=lengths.output_tokens[rows],
        name=lengths.name,
    )
    requests = replay(loop, held).requests
    done = np.flatnonzero(requests.status == Outcome.COMPLETED)
    order = done[np.argsort(requests.finish_s[done], kind="stable")]
    part = order[BEFORE * held : (GENERATIONS - AFTER) * held]
    tokens = np.cumsum(requests.output_tokens[part])
    slope, _ = np.polyfit(requests.finish_s[part], tokens, 1)  # whole batches finish together
    return float(slope) / plan.gpus
