"""Write numbers of plans, explained designs, simulated runs and frontiers in full, and compare them to the byte.

    python benchmarks/goldens.py --write build/goldens      # before a change of structure
    python benchmarks/goldens.py --compare build/goldens    # after it: names what differs, exit code 1
    python benchmarks/goldens.py --compare build/goldens --only '^explain'

It is a tool for one machine: processors differ in the last digits, so what it writes is not for git. The questions,
frontiers and random runs are those of the tests.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import pandas as pd
from typer.testing import CliRunner

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "simulation")]

from test_baselines import CASES, front_of  # noqa: E402
from test_explain_baselines import DESIGNS  # noqa: E402
from test_plan_baselines import QUESTIONS, words  # noqa: E402
from test_reference import by_kernel, case, small_setup  # noqa: E402

import disagg_sim as ds  # noqa: E402
import disagg_sim.cli.plan as command  # noqa: E402
from disagg_sim.cli.main import app  # noqa: E402
from disagg_sim.planning.flips import Changes  # noqa: E402

#: Of the questions, those that take a second or two and ask for most techniques.
PLANS = (
    *("rate", "gpus", "confidence", "infeasible", "p99", "long_prompts", "cached", "cached_remote", "sessions", "nic"),
    *("held_none", "copies", "ranks", "dcp", "pcp", "drafts", "two_systems", "watt", "joule", "spares"),
    *("halves", "encode"),
)
#: Rows of a disaggregated frontier, random runs, and runs a file.
ROWS, RUNS, IN_A_FILE = 3, 200, 25


def printed(name: str, argv: list[str]) -> str:
    """The JSON of a command, without what would change a plan: that takes the time of the plan again."""
    with patch.object(command, "changes_of", lambda _: Changes(flips=(), limits=(), aside=None)):
        shown = CliRunner().invoke(app, [name, *argv, "--json"])
    if not isinstance(shown.exception, SystemExit | None) or not shown.stdout.startswith("{"):
        raise RuntimeError(f"{name} {' '.join(argv)}: {shown.exception!r} {shown.output[-300:]}")
    return shown.stdout


def explained_row(row: int) -> str:
    """The row of a disaggregated frontier that lies so far along it."""
    at, lengths = ds.setup("llama_3_1_70b", "h200_sxm", "fp8"), ds.lengths(4096, 512)
    mappings = ds.enumerate_mappings(at, max_gpus=8)
    grids = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
    front = ds.pareto_front(ds.disaggregated(*grids, ftl_limit=10.0, gpu_cap=64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frontier.csv"
        front.assign(case="golden").to_csv(path, index=False)
        return printed("explain", [str(path), "--row", str(row * (len(front) - 1) // (ROWS - 1))])


def runs(first: int) -> str:
    """Records of requests and instances of random runs, every other with drafts."""
    tables = []
    for seed in range(first, first + IN_A_FILE):
        found, _ = by_kernel(*case(seed, 4, (0, 1, 3) if seed % 2 else (0,)), small_setup())
        for part in (found.requests, found.instances):
            columns = {name: column for name, column in asdict(part).items() if column is not None}
            tables.append(pd.DataFrame(columns).assign(seed=seed))
    return pd.concat(tables).to_csv(index=False)


def texts() -> dict[str, Callable[[], str]]:
    """File name -> what makes its text."""
    asked = {name: QUESTIONS[name] for name in PLANS}
    made: dict[str, Callable[[], str]] = {
        f"plan_{name}.json": partial(printed, "plan", words(argv, Path())) for name, argv in asked.items()
    }
    made |= {
        f"explain_{name}_{phase}.json": partial(printed, "explain", words(f"{argv} --phase {phase}", Path()))
        for name, (argv, phases) in DESIGNS.items()
        for phase in phases
    }
    made |= {f"explain_row_{row}.json": partial(explained_row, row) for row in range(ROWS)}
    made |= {f"runs_{first:03}.csv": partial(runs, first) for first in range(0, RUNS, IN_A_FILE)}
    return made | {f"frontier_{name}.csv": lambda name=name: front_of(name).to_csv(index=False) for name in CASES}


def difference(old: str, new: str) -> str:
    """The first line and value that differ; empty where nothing does."""
    if old == new:
        return ""
    lines = enumerate(zip_longest(old.split("\n"), new.split("\n"), fillvalue="no line"), 1)
    number, pair = next((number, pair) for number, pair in lines if pair[0] != pair[1])
    head, cells = old.split("\n", 1)[0].split(","), [line.split(",") for line in pair]
    if len(head) == len(cells[0]) == len(cells[1]) > 1:
        place = next(place for place, both in enumerate(zip(*cells, strict=True)) if both[0] != both[1])
        return f"line {number}, {head[place]}: {cells[0][place]} -> {cells[1][place]}"
    return f"line {number}: {pair[0].strip()} -> {pair[1].strip()}"


def differences(folder: Path, made: dict[str, Callable[[], str]]) -> Iterator[str]:
    """A line a file that differs."""
    for name, make in made.items():
        path = folder / name
        found = difference(path.read_text(), make()) if path.exists() else "not written"
        if found:
            yield f"{path}: {found}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, metavar="DIR")
    way.add_argument("--compare", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="REGEX", help="files whose names match")
    given = parser.parse_args(argv)
    made = {name: make for name, make in texts().items() if re.search(given.only, name)}
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        for name, make in made.items():
            (given.write / name).write_text(make())
        print(f"{len(made)} files in {given.write}")
        return 0
    found = list(differences(given.compare, made))
    print(*found, f"{len(found)} of {len(made)} files differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
