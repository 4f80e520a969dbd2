"""Draw table I and figures 3 and 6 to 10 of DOPD from runs on its authors' engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from disagg_sim.workload.statistics import MINUTE
from lab.studies.dopd.as_authors import BUILT_IN, split_in_loop
from lab.studies.dopd.claims_runs import AT_CONCURRENCY, MOST_PREFILL, SPLITS, throughputs, utilisations
from lab.studies.dopd.setup import AS_ALGORITHM_2, CASES, SHAPES, TIMES, DopdBench
from lab.studies.paper_figures import Figure

LOOPS = (25, 50, 100, 150, 200)  # requests in flight of figure 3
#: Table I: lengths [token], a prefill of each [ms], and a decode step by the requests in flight [ms].
LENGTHS, PREFILL = (100, 200, 700, 1200, 1700), (36, 46, 125, 193, 269)
DECODE = {104: (28, 31, 33, 35, 37), 200: (45, 46, 47, 50, 53), 248: (47, 49, 53, 57, 61)}


def times(bench: DopdBench) -> pd.DataFrame:
    """A prefill on one GPU and a decode step on two, over the length."""
    prefill = [1e3 * bench.table(1).pass_time(length)[1] for length in LENGTHS]
    curves = {("prefill", "prefill"): prefill}
    for count in DECODE:
        steps = [1e3 * bench.table(2).step_time(count, float(length)) for length in LENGTHS]
        curves["decode", f"cc {count}"] = steps
    return pd.concat(
        pd.DataFrame({"phase": phase, "curve": curve, "length": LENGTHS, "time": values})
        for (phase, curve), values in curves.items()
    )


def splits(bench: DopdBench) -> pd.DataFrame:
    """Splits of eight GPUs over the requests in flight."""
    return pd.DataFrame(
        [
            {"split": f"{p}P + {d}D", "in_flight": loop} | split_in_loop(bench, (p, d), loop)._asdict()
            for p, d in SPLITS
            for loop in LOOPS
        ]
    )


def instances(bench: DopdBench) -> pd.DataFrame:
    """Throughput and time at work over the prefill instances of one decode instance."""
    frames = [
        pd.DataFrame(
            {
                "shape": f"{shape[0]}/{shape[1]}",
                "prefill": range(1, MOST_PREFILL + 1),
                "rate": throughputs(bench, shape=shape),
                "busy": utilisations(bench, shape=shape),
                "curve": "simulated",
            }
        )
        for shape in SHAPES
    ]
    return pd.concat(frames)


def loops(bench: DopdBench, names: tuple[str, ...]) -> pd.DataFrame:
    """Closed loops of the Azure requests, by case."""
    rows = []
    for name in names:
        bench.concurrency(name)
        rows += [{"system": CASES[name].label, "n": n} | found._asdict() for n, found in bench.tried(name)]
    return pd.DataFrame(rows)


def planners(bench: DopdBench) -> pd.DataFrame:
    """Pools over the first hour of bursts, by planner."""
    frames = []
    for name in (AS_ALGORITHM_2["printed", TIMES[0]], *BUILT_IN):
        samples = bench.dynamic(name, 0).samples
        columns = {"prefill": samples.prefill_gpus, "decode": samples.decode_gpus, "queued": samples.queued}
        label = f"{name}: {bench.attainments(name)[0]:.1%} inside"
        frames.append(pd.DataFrame({"planner": label, "minute": samples.time_s / MINUTE} | columns))
    return pd.concat(frames)


AT = {model: float(found) for model, found in AT_CONCURRENCY.items()}
SERVED = {"goodput": "requests/s inside the SLO", "ttft_p90": "P90 TTFT [s]", "tpot_p90": "P90 TPOT [s]"}
LOOP: dict[str, Any] = {"x": "n", "y": SERVED, "x_label": "requests in flight", "x_scale": "log2", "curve": "system"}
FIGURES: dict[str, Figure[DopdBench]] = {
    "table01": Figure(
        title="Table I: time of a prefill and of a decode step, Llama-70B; cc as sequences of a step",
        data=times,
        x="length",
        y={"time": "time [ms]"},
        x_label="tokens of the prompt, of the context",
        panel="phase",
        curve="curve",
        printed=(
            *(("prefill", "prefill", float(x), float(y)) for x, y in zip(LENGTHS, PREFILL, strict=True)),
            *(
                ("decode", f"cc {count}", float(x), float(y))
                for count, steps in DECODE.items()
                for x, y in zip(LENGTHS, steps, strict=True)
            ),
        ),
    ),
    "fig03": Figure(
        title="Figure 3: splits of eight GPUs, 1000/150 (paper: up to 3.2, 15.32, +86.0 %, 1.04)",
        data=splits,
        x="in_flight",
        y={"rate": "requests/s", "ttft": "median TTFT [s]", "used": "GPU time at work [1]", "whole": "end to end [s]"},
        x_label="requests in flight",
        curve="split",
    ),
    "fig06": Figure(
        title="Figure 6: prefill instances beside one decode instance (paper: best at 4.58 and 3.18)",
        data=instances,
        x="prefill",
        y={"rate": "requests/s", "busy": "time at work [1]"},
        x_label="prefill instances",
        panel="shape",
        curve="curve",
    ),
    "fig07_08": Figure(
        title="Figures 7, 8: Llama-70B, Azure conversation, closed loop",
        data=partial(loops, names=("vllm", "dynamo", "dopd")),
        **LOOP,
        printed=(
            ("P90 TPOT [s]", CASES["vllm"].label, AT["llama"], 0.097),
            ("P90 TPOT [s]", CASES["dopd"].label, AT["llama"], 0.079),
        ),
    ),
    "fig09": Figure(
        title="Figure 9: OPT-30B, against DistServe on equal step times",
        data=partial(loops, names=("distserve", "dopd_opt")),
        **LOOP,
        printed=(
            ("P90 TTFT [s]", CASES["distserve"].label, AT["opt"], 7.10),
            ("P90 TTFT [s]", CASES["dopd_opt"].label, AT["opt"], 2.31),
        ),
    ),
    "fig10": Figure(
        title="Figure 10: an hour of bursts (paper: 99.4, 87.3 and 80.8 % inside)",
        data=planners,
        x="minute",
        y={"prefill": "prefill GPUs", "decode": "decode GPUs", "queued": "requests without a first token"},
        x_label="time [min]",
        curve="planner",
    ),
}
