"""Draw figures 1, 2, 4, 7, 8 and 9 of Arrow (arXiv 2505.11916) from runs on its authors' engine.

For figure 2 there are no axes at hand: it shows the correlations that the text prints with the traces.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from disagg_sim.workload.statistics import per_minute
from lab.studies.arrow.claims import AROUND, by_gpus, correlation
from lab.studies.arrow.setup import ALL, AZURE, CASES, CLIP, COUNTS, ArrowBench, loads
from lab.studies.paper_figures import read_figures

MOMENTS = 120  # of figure 4 [1]
#: Correlations of the input and output tokens of a minute that the paper prints. [1]
CORRELATIONS = {"code": 0.95, "conversation": 0.29}


def lengths(bench: ArrowBench) -> pd.DataFrame:
    """Tokens of every minute of the traces, as they were recorded."""
    frames = []
    for name in ALL:
        trace = bench.workloads[name].trace
        for kind, tokens in (("input", trace.input_tokens), ("output", trace.output_tokens)):
            found = per_minute(trace.arrival, tokens)
            frames.append(pd.DataFrame({"trace": name, "kind": kind, "minute": range(found.size), "tokens": found}))
    return pd.concat(frames)


def correlations(bench: ArrowBench) -> pd.DataFrame:
    """Output over input tokens of the minutes of each trace."""
    frames = []
    for name in ALL:
        trace = bench.workloads[name].trace
        inputs, outputs = (per_minute(trace.arrival, tokens) for tokens in (trace.input_tokens, trace.output_tokens))
        printed = f" (paper {CORRELATIONS[name]:g})" if name in CORRELATIONS else ""
        said = f"{name}: correlation {correlation(inputs, outputs):.2f}{printed}"
        frames.append(
            pd.DataFrame({"trace": said, "curve": "a minute", "input": inputs / 1e3, "output": outputs / 1e3})
        )
    return pd.concat(frames)


def phases(bench: ArrowBench) -> pd.DataFrame:
    """Requests in prefill and in decode over the clip, static 4 + 4 at its capacity."""
    scale = bench.capacity("conversation", "least_load").rate_scale
    step = bench.workloads[CLIP].trace.duration / scale / MOMENTS
    both = loads(bench.result(CLIP, "least_load", scale), step)
    return pd.concat(
        pd.DataFrame({"time": np.arange(load.size) * step, "phase": phase, "requests": load})
        for phase, load in zip(("prefill", "decode"), both, strict=True)
    )


def _attainment(bench: ArrowBench, names: tuple[str, ...], cases: tuple[str, ...]) -> pd.DataFrame:
    """Attainment of every run of some cases so far, and of those around the capacity of minimal load."""
    rows = [
        {
            "trace": name,
            "policy": CASES[case].label,
            "rate": seen.summary.rate_scale * bench.workloads[name].trace.rate,
            "attainment": 100 * seen.summary.slo_attainment,
        }
        for name, case, seen in bench.runs_seen()
        if name in names and case in cases
    ]
    return pd.DataFrame(rows)


def against_baselines(bench: ArrowBench) -> pd.DataFrame:
    """Attainment over the rate, from the searches for capacities."""
    cases = ("arrow_printed", "vllm", "disaggregated")
    for name in ALL:
        for case in cases:
            bench.capacity(name, case)
    return _attainment(bench, ALL, cases)


def ablation(bench: ArrowBench) -> pd.DataFrame:
    """SLO-aware flips, minimal load and round robin at the same rates."""
    cases = ("arrow_printed", "least_load", "round_robin")
    for name in AZURE:
        scales = tuple(factor * bench.capacity(name, "least_load").rate_scale for factor in AROUND)
        for case in cases:
            bench.attainments(name, case, scales)
    return _attainment(bench, AZURE, cases)


def counts(bench: ArrowBench) -> pd.DataFrame:
    """Attainment over GPUs at the rate that eight serve."""
    frames = [
        pd.DataFrame({"trace": name, "policy": policy, "gpus": COUNTS, "attainment": 100 * found})
        for name in AZURE
        for policy, found in zip(("SLO-aware", "minimal load"), by_gpus(bench, name), strict=True)
    ]
    return pd.concat(frames)


FIGURES = read_figures(__file__, globals())
