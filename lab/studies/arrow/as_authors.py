"""Judge the claims of Arrow as its authors set them up: vLLM V0, default chunks, running tokens, figures 4 and 9.

The paper is "developed based on vLLM" (section 6) without a version; 7.1 names 0.7.3 for vLLM-disaggregated alone, so
that V0 is inferred. Baselines have the default chunk of 2,048 tokens, and Arrow counts running tokens and corrects no
prediction, as printed.
Acceptances were set before these runs; where they are not this project's own, ``inferred`` says what they read.
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.arrow.account import prompt_time
from disagg_sim.workload.arrivals import named_rng
from lab.studies.arrow import TEXT
from lab.studies.arrow.claims import AROUND, FIFO_LOAD, by_gpus, fewer, flips, points, ttft_in_turn
from lab.studies.arrow.setup import ALL, AZURE, CLIP, COUNTS, MODEL, ArrowBench, loads
from lab.studies.claims import Finding, Told, Without

#: The engine that "developed based on vLLM" is read as.
ENGINES = ("vllm_v0",)
#: Median relative error of a TTFT that counts as "accurately predicted". [1]
ACCURATE = 0.05
PROFILED = 400  # prompts of a trace that the fit at launch profiles [1]
BUDGET = 2048  # tokens of a step [token]
QUEUED = 2000  # prompts in turn whose TTFT is predicted [1]
#: Shares of the capacity of the static 4 + 4 at which figure 4 is drawn, and its windows of smoothing in a clip. [1]
SHARES, WINDOWS = (0.5, 1.0), 100
LINEAR = 0.9  # R^2 of "nearly linear" [1]
BELOW = 0.95  # attainment under which growth with GPUs is judged: the rest is saturated [1]


@TEXT.authors("A2", data=AZURE)
def least_load(bench: ArrowBench) -> Told:
    """Largest attainment of least load less that of round robin, static both."""
    found = points(bench, AZURE, AROUND, "least_load", "round_robin", at="least_load")
    said = ", ".join(f"{name} up to {each.max():.1f} points" for name, each in found.items())
    return said, all(0 < each.max() <= 10 for each in found.values())


@TEXT.authors("A4", data=ALL)
def predictor(bench: ArrowBench) -> Told:
    """TTFT of prompts in turn by a quadratic that is fitted at launch to prompts of the trace that is served."""
    table = StepTable.build(bench.setting(MODEL), Sharding())
    said, worst, relative = [], 0.0, []
    for name in ALL:
        lengths = bench.workloads[name].trace.input_tokens
        drawn = named_rng(0, f"prompts of {name}").choice(lengths, PROFILED + QUEUED)
        times = np.array([prompt_time(table, length, BUDGET) for length in drawn.tolist()])
        known, prompts = drawn[:PROFILED], drawn[PROFILED:]
        whole = times[PROFILED:]
        arrival = np.cumsum(named_rng(0, "arrivals").exponential(whole.mean() / FIFO_LOAD, QUEUED))
        errors = []
        for weights in (np.ones(PROFILED), 1 / times[:PROFILED]):
            fitted = np.polyval(np.polyfit(known, times[:PROFILED], 2, w=weights), prompts)
            errors.append(np.abs(ttft_in_turn(arrival, fitted) / ttft_in_turn(arrival, whole) - 1))
        half, most = (float(np.quantile(errors[0], share)) for share in (0.5, 0.9))
        worst = max(worst, half)
        said.append(f"{name} {half:.1%}, {most:.1%}")
        relative.append(f"{name} {np.median(errors[1]):.1%}")
    return (
        f"median and P90 error of a TTFT: {'; '.join(said)}; by least squares of relative errors medians "
        f"{', '.join(relative)}",
        worst <= ACCURATE,
    )


def phases(load: Ints, step: float) -> tuple[float, float, float]:
    """Onset, peak and decline of a load: where it crosses halfway between its median and its peak. [s]"""
    window = max(load.size // WINDOWS, 1)
    total = np.concatenate(([0], np.cumsum(load)))
    last = np.arange(load.size) + (window + 1) // 2  # of a window, exclusive; there is no load outside
    smooth: Floats = (total[np.minimum(last, load.size)] - total[np.maximum(last - window, 0)]) / window
    peak = int(smooth.argmax())
    half = (float(np.median(smooth)) + float(smooth[peak])) / 2
    before, after = np.flatnonzero(smooth[:peak] < half), np.flatnonzero(smooth[peak:] < half)
    onset = int(before[-1]) if before.size else 0
    decline = peak + int(after[0]) if after.size else smooth.size
    return onset * step, peak * step, decline * step


@TEXT.authors("A6", data=(CLIP,))
def decode_later(bench: ArrowBench) -> Finding:
    """Onset, peak and decline of the load of decode after those of prefill, on the clip of figure 4."""
    found = {}
    for share in SHARES:
        scale = share * bench.capacity("conversation", "least_load").rate_scale
        step = bench.workloads[CLIP].trace.duration / scale / 10_000
        prefill, decode = (phases(load, step) for load in loads(bench.result(CLIP, "least_load", scale), step))
        lags = [there - here for here, there in zip(prefill, decode, strict=True)]
        said = f"onset, peak, decline at {share:g} of capacity: {', '.join(f'{lag:+.1f}' for lag in lags)} s"
        found[share] = said, min(lags) > 0
    half, full = (found[share] for share in SHARES)
    return Finding(*full, without=Without(f"{SHARES[0]:g} of the rate", *half))


@TEXT.authors("A8", data=AZURE)
def scaling(bench: ArrowBench) -> Told:
    """Attainment over GPUs at the rate that eight serve, SLO-aware and by minimal load."""
    said, holds = [], True
    for name in AZURE:
        aware, least = by_gpus(bench, name)
        grows = aware < BELOW
        line = np.corrcoef(np.array(COUNTS)[grows], aware[grows])[0, 1] ** 2 if grows.sum() > 2 else math.nan
        holds = holds and bool((aware >= least).all()) and line >= LINEAR
        said.append(
            f"{name} {', '.join(f'{100 * share:.0f}' for share in aware)} against "
            f"{', '.join(f'{100 * share:.0f}' for share in least)} %, R2 {line:.2f}"
        )
    return f"{COUNTS[0]} to {COUNTS[-1]} GPUs: {'; '.join(said)}", holds


@TEXT.authors("A16", data=ALL)
def oscillation(bench: ArrowBench) -> Finding:
    """Flips as printed at the capacity and at twice as much; as a reading, those of overload over the instances."""
    found = flips(bench, "arrow_printed")
    said, holds = fewer(found)
    most = max(beyond for _, beyond in found.values())
    return Finding(
        f"flips at the capacity and at twice as much: {said}",
        holds,
        without=Without(
            "roles oscillate where instances flip more than once each",
            f"at most {most:,} flips of eight instances",
            most <= 8,
        ),
    )
