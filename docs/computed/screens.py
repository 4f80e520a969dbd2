"""Screens of ``disagg-sim plan`` that README and the tutorial show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from docs.computed import quick

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 3  # of a screen that are shown: title, verdict and pools, latencies


def _first_lines(page: str) -> str:
    """The first blocks of what the first complete ``plan`` command of a page prints."""
    found = re.search(r"^\$ disagg-sim (plan --model [^#\n]*)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{page} has no plan"
    code = f"from disagg_sim.cli.main import run; run({shlex.split(found[1])!r})"
    wide = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    said = subprocess.run([sys.executable, "-c", code], env=wide, capture_output=True, encoding="utf-8", check=True)
    title, *blocks = said.stdout.split("\n\n")
    return "\n```text\n" + "\n\n".join([title, *blocks[:BLOCKS]]).rstrip() + "\n```\n"


@quick
def plan_screen() -> str:
    """The first lines of the plan in the first commands of README."""
    return _first_lines("README.md")


@quick
def tutorial_screen() -> str:
    """The first lines of the plan of the tutorial."""
    return _first_lines("docs/tutorial.md")
