"""Judge the claims of DOPD as its authors set them up: vLLM V0 inside Dynamo, closed loops, algorithm 2 as printed.

The paper extends Dynamo and does not name the engine inside (section V); the published code (liao4s/DOPD, c1d793e) has
Dynamo of July 2025 with vLLM V0, chunked prefill off and preemption by swap. Here prompts go in chunks (in D18 one a
pass, too), and preempted sequences are swapped. Acceptances were set before these runs; those that differ from this
project's own say why in ``inferred``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lab.studies.claims import Finding, Told, Ways, Without
from lab.studies.dopd import TEXT, claims_runs
from lab.studies.dopd.claims import required_ratio
from lab.studies.dopd.claims_runs import SPLITS, of_order, throughputs, utilisations
from lab.studies.dopd.setup import (
    AS_ALGORITHM_2,
    AS_CONFIGURED,
    AUTHORS_ENGINE,
    LOAD_2025,
    SHAPES,
    TIMES,
    DopdBench,
    steady_rate,
)

#: The engine of the published code.
ENGINES = (AUTHORS_ENGINE,)
#: Relative distance of the ratio by eq. (15) from the simulated knee that counts as validated, set before the run. [1]
NEAR = 0.1
#: Requests in flight of the closed loop of figure 3; the paper has a curve up to 50 for the worst split. [request]
IN_FLIGHT = (100, 150)
#: Figure 3: the best split over the worst, in throughput, TTFT, and utilisation less 1. [1]
FIGURE_3 = (3.2, 15.32, 0.86)
AT_TIMES = f"T = {', '.join(f'{each:g}' for each in TIMES)} s"
#: Dynamo's built-in planners as the paper has them: whole queues and the SLA, no tuned thresholds.
BUILT_IN = ("SLA-driven", LOAD_2025)


@TEXT.authors("D4")
def linear_to_the_ratio(bench: DopdBench) -> Told:
    """Throughput by prefill instances, and the ratio of eq. (15) with the times of the instances that serve."""
    said, holds = [], True
    for shape in SHAPES:
        ratio, _ = required_ratio(bench, *shape)
        found = throughputs(bench, shape=shape)
        gains, knee = np.diff([0.0, *found]) / found[0], found[-1] / found[0]
        holds = holds and bool((gains[: math.floor(ratio)] >= 0.9).all()) and abs(ratio / knee - 1) <= NEAR
        said.append(
            f"{shape[0]}/{shape[1]}: eq. (15) {ratio:.2f}, knee {knee:.2f}; "
            f"{', '.join(f'{rate:.1f}' for rate in found)} requests/s"
        )
    return "; ".join(said), holds


@TEXT.authors("D5")
def idle_beyond_the_ratio(bench: DopdBench) -> Told:
    """Utilisation of prefill on either side of the ratio of eq. (15)."""
    said, holds = [], True
    for shape in SHAPES:
        ratio, _ = required_ratio(bench, *shape)
        shares = utilisations(bench, shape=shape)
        below, beyond = shares[: math.floor(ratio)], shares[math.ceil(ratio) :]
        holds = holds and min(below) > 0.97 and (not beyond or max(beyond) <= 0.97)
        said.append(f"{shape[0]}/{shape[1]}: " + ", ".join(f"{n}P {share:.3f}" for n, share in enumerate(shares, 1)))
    return "; ".join(said), holds


@TEXT.authors("D14")
def bursts(bench: DopdBench) -> Finding:
    """Attainment over hours of bursts, algorithm 2 as printed against the two planners that Dynamo had."""
    theirs = {name: float(bench.attainments(name).mean()) for name in BUILT_IN}
    ours = {key: float(bench.attainments(name).mean()) for key, name in AS_ALGORITHM_2.items()}

    def ordered(sizing: str) -> tuple[str, bool]:
        shares, (sla, load) = [ours[sizing, seconds] for seconds in TIMES], theirs.values()
        said = ", ".join(f"{share:.1%}" for share in shares)
        return f"{AT_TIMES}: DOPD {said}; SLA-driven {sla:.1%}, load-driven {load:.1%}", shares[0] > sla > load

    published, holds = ordered("published")
    first, second, third = (float(bench.attainments(name).mean()) for name in AS_CONFIGURED)
    configured = f"with its budgets and periods DOPD {first:.1%}, SLA-driven {second:.1%}, load-driven {third:.1%}"
    return Finding(
        *ordered("printed"),
        without=Without(
            "sizes as in the published code", f"{published}; {configured}", holds or first > second > third
        ),
    )


class InLoop(NamedTuple):
    """What a split shows at a number of requests in flight."""

    rate: float  # [request/s]
    ttft: float  # median [s]
    used: float  # of the GPU time, at work [1]
    whole: float  # end to end, mean [s]


def split_in_loop(bench: DopdBench, split: tuple[int, int], loop: int) -> InLoop:
    """Equal requests of 1000/150 on a split of eight GPUs, so many in flight."""
    result = bench.saturated(*split, in_flight=loop)
    requests, machines = result.requests, result.instances
    settled = slice(len(requests.request) // 4, None)
    return InLoop(
        steady_rate(result),
        float(np.median((requests.first_token_s - requests.arrival_s)[settled])),
        float((machines.busy_s * machines.gpus).sum() / machines.gpus.sum() / result.duration_s),
        float(np.mean((requests.finish_s - requests.arrival_s)[settled])),
    )


@TEXT.authors("D15", ways=Ways(*IN_FLIGHT, "a larger loop"))
def closed_loop(bench: DopdBench, loop: int) -> Told:
    """The best against the worst split of eight GPUs, at equal requests in flight."""
    rows = np.array([split_in_loop(bench, split, loop) for split in SPLITS])
    ratios = rows.max(axis=0) / rows.min(axis=0)
    found = ratios[0], ratios[1], ratios[2] - 1
    said = f"throughput {found[0]:.2f}, TTFT 1/{found[1]:.1f}, utilisation {found[2]:+.1%}"
    return f"{loop} in flight: {said}, end to end {ratios[3]:.2f}", of_order(found, FIGURE_3)


@TEXT.authors("D17")
def resources(bench: DopdBench) -> Finding:
    """GPU-hours and attainment of algorithm 2 as printed against Dynamo's built-in planners."""
    first, second, third = (
        claims_runs.less_for_more(bench, planner, others)
        for planner, others in (
            (AS_ALGORITHM_2["printed", TIMES[0]], BUILT_IN),
            (AS_ALGORITHM_2["published", TIMES[0]], BUILT_IN),
            (AS_CONFIGURED[0], AS_CONFIGURED[1:]),
        )
    )
    found = f"{second.value}; {third.value}"
    return first._replace(without=Without("sizes as in the published code", found, second.holds or third.holds))
