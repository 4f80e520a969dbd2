"""Measure cost against size: CPU time and peak memory of sweeps, matching and simulations, each size in a process.

    python benchmarks/scaling.py                   # what fits in minutes; writes benchmarks/scaling.csv
    python benchmarks/scaling.py --largest 1e8     # larger sweeps, too
    python benchmarks/scaling.py --only matching
    python docs/figures.py scaling                 # draws it, with the fitted lines drawn on to the sizes not measured

Time is that of all processes, after imports and a small run that warms caches. Peak memory is that of the process, with
what Python and its libraries take (0.2 to 0.3 GB). The sweep of 10^9 points is the command of docs/scale.md, timed as a
whole, two processes and their imports included; it stays in the table when smaller ones are measured anew. The
exponent b of CPU time = a * size^b is fitted by least squares in logarithms over sizes from ``Kind.fitted_from`` on,
where fixed costs are small; its standard error is that of the slope.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pandas as pd
from made import conversations, deployment, drawn_conversations, grids, sweep

import disagg_sim as ds
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.sweep.run import run_sweep
from disagg_sim.units import HOUR
from disagg_sim.workload.stream import WINDOW

TABLE = Path(__file__).parent / "scaling.csv"
#: A size is the first whole cases that have so many points; one so many times larger was measured otherwise. [1]
BEYOND = 10.0
#: Instances of the simulated deployment.
INSTANCES = 16
#: Prepares a size; its work, and the size that it has exactly.
Prepared = tuple[Callable[[], object], int]


def sweeps(size: float) -> Prepared:
    """A whole sweep: planned, all three modes, what is near a frontier stored, tables and manifest written."""
    folder = Path(tempfile.mkdtemp())
    plan = sweep(size, folder)
    points = sum(block.points for block in plan.blocks)
    return lambda: run_sweep(sweep(size, folder), folder / "out", jobs=1, listener=Mock()), points


def matching(size: float) -> Prepared:
    """Candidates, matching and the frontier, from scored grids."""
    prefill, decode = grids(size)
    points = prefill.latency.size + decode.latency.size
    return lambda: match_pools(prefill, decode, Rules(keep="frontier")), points


def simulated(policy: str, size: float) -> Prepared:
    """A run of a policy, records kept."""
    trace, place, slo = conversations(round(size), INSTANCES), deployment(INSTANCES), ds.Slo(ttft=2.0, tpot=0.15)
    return lambda: ds.simulate(place, trace, policy, slo=slo), round(size)


def in_pieces(policy: str, size: float, window: int) -> Prepared:
    """The same without records; requests leave the run, and are drawn ``window`` at a time, or 0 = at once, before."""
    place, slo, count = deployment(INSTANCES), ds.Slo(ttft=2.0, tpot=0.15), round(size)
    options = RunOptions(records="none", sample_s=HOUR)

    def work() -> object:
        trace = drawn_conversations(count, INSTANCES, window=window)
        return ds.simulate(place, trace, policy, slo=slo, options=options)

    return work, count


class Kind(NamedTuple):
    """What grows."""

    prepare: Callable[[float], Prepared]
    fitted_from: float  # sizes below are left out of the fit
    largest: float  # that is measured where nothing else is asked for
    wanted: float  # to which the fitted line is drawn


KINDS = {
    "sweeps": Kind(sweeps, 9e5, 1e7, 1e9),
    "matching": Kind(matching, 9e5, 1e7, 1e9),
    "co-located": Kind(lambda size: simulated("vllm", size), 9e3, 1e6, 1e8),
    "disaggregated": Kind(lambda size: simulated("disaggregated", size), 9e3, 1e6, 1e8),
    "co-located, pieces": Kind(lambda size: in_pieces("vllm", size, 0), 9e4, 1e7, 1e7),
    "co-located, windows": Kind(lambda size: in_pieces("vllm", size, WINDOW), 9e4, 1e7, 1e8),
    "disaggregated, pieces": Kind(lambda size: in_pieces("disaggregated", size, 0), 9e4, 1e7, 1e7),
    "disaggregated, windows": Kind(lambda size: in_pieces("disaggregated", size, WINDOW), 9e4, 1e7, 1e8),
}


class Fit(NamedTuple):
    """A line in logarithms: time or memory = exp(intercept) * size^exponent."""

    exponent: float  # [1]
    error: float  # its standard error [1]
    intercept: float

    def at(self, size: float) -> float:
        """Value at a size."""
        return math.exp(self.intercept + self.exponent * math.log(size))


def fitted(sizes: pd.Series, values: pd.Series) -> Fit:
    """Least squares in logarithms."""
    x, y = np.log(sizes.to_numpy(float)), np.log(values.to_numpy(float))
    far = x - x.mean()
    slope = float(far @ y / (far @ far))
    rest = y - y.mean() - slope * far
    error = math.sqrt(float(rest @ rest) / max(x.size - 2, 1) / float(far @ far))
    return Fit(slope, error, float(y.mean() - slope * x.mean()))


def fits(rows: pd.DataFrame) -> dict[str, Fit]:
    """Line of CPU time [s] over size of each kind."""
    large = rows[rows["size"] >= rows["kind"].map({kind: each.fitted_from for kind, each in KINDS.items()})]
    return {str(kind): fitted(part["size"], part["cpu_s"]) for kind, part in large.groupby("kind", sort=False)}


def one(kind: str, size: float) -> None:
    """Measure a size in this process, and print it."""
    prepare = KINDS[kind].prepare
    prepare(1e4)[0]()
    work, exact = prepare(size)
    begun = time.process_time()
    work()
    cpu = time.process_time() - begun
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"kind": kind, "size": exact, "cpu_s": round(cpu, 4), "peak_bytes": peak}))


def main() -> None:
    """Measure, write the table, print the fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--largest", type=float, help="largest size, instead of that of each kind")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SIZE"), help="in this process; prints a line of JSON")
    given = parser.parse_args()
    if given.one:
        one(given.one[0], float(given.one[1]))
        return
    rows = pd.read_csv(TABLE).to_dict("records") if TABLE.exists() else []
    for kind in given.only:
        largest = given.largest or KINDS[kind].largest
        rows = [row for row in rows if row["kind"] != kind or row["size"] > BEYOND * largest]
        for size in 10.0 ** np.arange(4, math.log10(largest) + 0.1, 0.5):
            command = [sys.executable, __file__, "--one", kind, str(size)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(said.splitlines()[-1]))
            print("{kind:<14}{size:>12,}{cpu_s:>10.2f} CPU s{peak_bytes:>15,} B".format(**rows[-1]), flush=True)
        pd.DataFrame(rows).to_csv(TABLE, index=False)
    for kind, fit in fits(pd.DataFrame(rows)).items():
        wanted = KINDS[kind].wanted
        spent = f"{fit.at(wanted):,.0f} CPU s at {wanted:.0e}"
        print(f"{kind:<14}exponent {fit.exponent:.3f}, standard error {fit.error:.3f}; {spent}")


if __name__ == "__main__":
    main()
