"""Draw table I and figures 3 and 6 to 10 of DOPD from runs on its authors' engine."""

from __future__ import annotations

import pandas as pd

from disagg_sim.workload.statistics import MINUTE
from lab.studies.dopd.as_authors import BUILT_IN, split_in_loop
from lab.studies.dopd.claims_runs import MOST_PREFILL, SPLITS, throughputs, utilisations
from lab.studies.dopd.setup import AS_ALGORITHM_2, CASES, SHAPES, TIMES, DopdBench
from lab.studies.paper_figures import read_figures

LOOPS = (25, 50, 100, 150, 200)  # requests in flight of figure 3
#: Table I: lengths [token], and requests in flight.
LENGTHS, DECODING = (100, 200, 700, 1200, 1700), (104, 200, 248)


def times(bench: DopdBench) -> pd.DataFrame:
    """A prefill on one GPU and a decode step on two, over the length."""
    prefill = [1e3 * bench.table(1).pass_time(length)[1] for length in LENGTHS]
    curves = {("prefill", "prefill"): prefill}
    for count in DECODING:
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


FIGURES = read_figures(__file__, globals())
