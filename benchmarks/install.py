"""Measure what an installation costs: seconds and megabytes of the core and of every extra, and the first commands.

    python benchmarks/install.py              # the wheel of this checkout; prints the tables of docs/install.md
    python benchmarks/install.py --wheel dist/disagg_sim-0.1.0-py3-none-any.whl --extras core all

Every environment is made anew with ``python -m venv`` and removed again. ``pip install`` compiles, as it does by
default. Run it twice: the second run takes packages from pip's cache, so that the network is not measured.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The question that is asked first; README has it.
PLAN = "plan --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20"
#: Commands by what the table calls them.
COMMANDS = {
    "`disagg-sim --help`": "--help",
    "`disagg-sim plan`": PLAN,
    "`disagg-sim explain`": "explain --model llama_3_1_8b --system h100_sxm --precision fp8 --phase decode --batch 64",
    "`disagg-sim sweep smoke` (18,576 design points)": "sweep smoke --out results --overwrite",
}
WARM_RUNS = 5
#: What these install is for a machine of its own, or for work on the package itself.
LEFT_OUT = {"measure", "dev", "docs"}


def megabytes(folder: Path) -> float:
    """Disk space of a folder, as ``du -sm`` counts it."""
    inodes = {each.stat().st_ino: each.stat() for each in folder.rglob("*") if not each.is_symlink()}
    return sum(512 * found.st_blocks for found in inodes.values()) / 2**20


class Took(NamedTuple):
    """Time of a command. [s]"""

    wall: float
    cpu: float  # of all its processes


def took(command: list[str], at: Path) -> Took:
    """Run a command with its output thrown away."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_NO_COMPILE"))}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=at, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def installed(wheel: Path, extra: str, home: Path) -> tuple[Took, float]:
    """Install the wheel with an extra into a new environment; time of pip, and megabytes of the environment."""
    took([sys.executable, "-m", "venv", str(home)], home.parent)
    what = f"{wheel}[{extra}]" if extra != "core" else str(wheel)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what]
    return took(pip, home.parent), megabytes(home)


def commands(home: Path, at: Path) -> list[str]:
    """A row a command: the first run in the environment, and the median of the next ones."""
    rows = []
    python, run = str(home / "bin" / "python"), str(home / "bin" / "disagg-sim")
    timed = {"`import disagg_sim`": [python, "-c", "import disagg_sim"]}
    timed |= {name: [run, *line.split()] for name, line in COMMANDS.items()}
    for name, command in timed.items():
        first, *later = [took(command, at) for _ in range(1 + WARM_RUNS)]
        wall, cpu = (statistics.median(column) for column in zip(*later, strict=True))
        rows.append(f"| {name} | {first.wall:.2f} | {first.cpu:.2f} | {wall:.2f} | {cpu:.2f} |")
    return rows


def main() -> None:
    """Print both tables."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = ["core", *(name for name in declared if name not in LEFT_OUT)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="default: build that of this checkout")
    parser.add_argument("--extras", nargs="+", default=known, choices=known, help="default: all of them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        wheel = given.wheel and given.wheel.resolve()
        if wheel is None:
            subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", at, ROOT], check=True)
            (wheel,) = at.glob("*.whl")
        print("| installed | seconds | CPU seconds | MB |\n| --- | --- | --- | --- |")
        for extra in given.extras:
            time_, size = installed(wheel, extra, at / extra)
            print(f"| {extra} | {time_.wall:.0f} | {time_.cpu:.0f} | {size:.0f} |", flush=True)
        home = at / given.extras[0]
        print(
            "\n| command | first run | CPU | later | CPU |\n| --- | --- | --- | --- | --- |",
            *commands(home, at),
            sep="\n",
        )


main()
