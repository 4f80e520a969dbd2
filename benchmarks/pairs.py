"""Time two checkouts in turn, old, new, old, new: does a change of structure cost time?

    git worktree add ../before HEAD~1
    python benchmarks/pairs.py ../before .                     # all workloads, a quarter of an hour
    python benchmarks/pairs.py ../before . explain piggyback --pairs 9

Each run is a process of its own on one core. It prints the least CPU time of some rounds and its peak memory; the first
run of each checkout, which compiles, does not count. A ratio is the median of the new checkout's over that of the old
one's; its band holds 80 % of what resampled pairs give. More pairs are measured where it lies above the limit; the exit
code is 1 where it still does. ``make bench`` compares parts with a recorded baseline instead, more coarsely.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

#: Times that pairs are measured, as long as their band lies above the limit: a busy machine errs, too. [1]
ATTEMPTS = 3
#: Ratio from which a workload has grown slower. [1]
LIMIT, LIMITS = 1.10, {"piggyback": 1.20, "sweep": 1.05}
R1 = """import disagg_sim as ds
at, lengths = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(16_384, 2048)
mappings = ds.enumerate_mappings(at)"""
SEARCH = f"""{R1}
try: from disagg_sim.serving.search_cache import _kept as kept  # of older trees
except ImportError: kept = dict()
spread = ds.lengths("log_normal_4096_512")
def anew(search, lengths): kept.clear(); search(at, mappings, lengths)"""
FRONT = f"""{R1}
grids = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
def front(): return ds.pareto_front(ds.disaggregated(*grids, ftl_limit=10.0, gpu_cap=576))"""
COMMAND = """import subprocess, sys
quiet = subprocess.DEVNULL
def run(*argv): subprocess.run([sys.executable, *argv], check=True, stdout=quiet, stderr=quiet)
cli = "from disagg_sim.cli.main import main; main()" """
DEMO = f"""{COMMAND}
import atexit, shutil, tempfile, yaml
folder = tempfile.mkdtemp()
atexit.register(shutil.rmtree, folder)
spec = yaml.safe_load(open("sweeps/demo.yaml"))
spec |= {{key: spec[key][:1] for key in ("models", "traffic")}} | {{"systems": dict([*spec["systems"].items()][:1])}}
with open(folder + "/first.yaml", "w") as file: yaml.safe_dump(spec, file)
last = "--overwrite", "--jobs", "1" """


class Workload(NamedTuple):
    """Code that is run before, and code that is timed so often."""

    before: str
    timed: str
    rounds: int = 5


WORKLOADS = {
    "decode": Workload(R1, "ds.decode_grid(at, mappings, lengths)", 60),
    "prefill": Workload(R1, "ds.prefill_grid(at, mappings, lengths)", 20),
    "colocated": Workload(SEARCH, "anew(ds.colocated, lengths)", 8),
    "piggyback": Workload(SEARCH, "anew(ds.piggyback, lengths)", 8),
    "co. of a distribution": Workload(SEARCH, "anew(ds.colocated, spread)", 2),
    "pig. of a distribution": Workload(SEARCH, "anew(ds.piggyback, spread)", 2),
    "disaggregated": Workload(FRONT, "front()", 20),
    "plan": Workload("import disagg_sim as ds", 'ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), rate=40)'),
    "large plan": Workload(
        "import disagg_sim as ds", 'ds.plan("deepseek_r1", "gb200_nvl72", ds.lengths(4096, 512), rate=100)', 2
    ),
    "sweep": Workload(DEMO, 'run("-c", cli, "sweep", folder + "/first.yaml", "--out", folder + "/out", *last)', 1),
    "simulate": Workload(
        "import disagg_sim as ds; from made import conversations, deployment; trace = conversations(2000, 2)",
        'ds.simulate(deployment(2), trace, "vllm").summary()',
        20,
    ),
    "explain": Workload(f"{FRONT}\nrow = front().iloc[[0]]", "ds.breakdown(row, origin=ds.Origin(lengths=lengths))"),
    "uncertainty": Workload(f"{FRONT}\ntable = front()", "ds.uncertainty(table, origin=ds.Origin(lengths=lengths))", 8),
    "import": Workload(COMMAND, 'run("-c", "import disagg_sim")', 10),
    "help": Workload(COMMAND, 'run("-c", cli, "--help")', 6),
}
CHILD = """import pathlib, resource, disagg_sim
assert pathlib.Path(disagg_sim.__file__).resolve().is_relative_to(pathlib.Path.cwd()), disagg_sim.__file__
def used(): return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
def cpu(): return sum(each.ru_utime + each.ru_stime for each in used())
{before}
spent = []
for _ in range({rounds}):
    begun = cpu()
    {timed}
    spent.append(cpu() - begun)
print(min(spent), max(each.ru_maxrss for each in used()) / 1024)
"""


def measured(checkout: Path, workload: Workload) -> tuple[float, float]:
    """CPU seconds and peak memory of one process. [s], [MiB]"""
    paths = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    code, env = CHILD.format(**workload._asdict()), os.environ | one | {"PYTHONPATH": paths}
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=checkout, env=env, text=True)
    seconds, memory = map(float, shown.split()[-2:])
    return seconds, memory


def ratio(pairs: list[tuple[float, float]]) -> float:
    old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
    return new / old


def band(pairs: list[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """The middle 80 % of ratios of pairs that are drawn again."""
    chance = random.Random(0)
    found = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return found[draws // 10], found[-draws // 10]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("names", nargs="*", default=[*WORKLOADS], help=", ".join(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    if unknown := {*given.names} - WORKLOADS.keys():
        parser.error(f"{', '.join(unknown)}: no such workload")
    both, slower = (given.old.resolve(), given.new.resolve()), False
    print(
        f"{'workload':<15}{'old CPU s':>11}{'new':>9}{'ratio':>8}{'80 % band':>14}{'limit':>7}{'old MiB':>9}{'new':>7}"
    )
    for name in given.names:
        runs: list[list[tuple[float, float]]] = []
        limit = LIMITS.get(name, LIMIT)
        for _ in range(ATTEMPTS):
            runs += [[measured(each, WORKLOADS[name]) for each in both] for _ in range(given.pairs + 1)][1:]
            pairs = [(old[0], new[0]) for old, new in runs]
            low, high = band(pairs)
            if low <= limit:
                break
        old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
        memory = [statistics.median(run[which][1] for run in runs) for which in (0, 1)]
        line = f"{name:<15}{old:>11.4f}{new:>9.4f}{ratio(pairs):>8.3f}{f'{low:.3f}-{high:.3f}':>14}{limit:>7.2f}"
        print(line + f"{memory[0]:>9.0f}{memory[1]:>7.0f}" + "  SLOWER" * (low > limit), flush=True)
        slower |= low > limit
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
