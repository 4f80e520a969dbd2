"""What commands print, as the pages show it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docs.computed import quick

PAGES = Path(__file__).parents[1]


@quick
def explain_sample() -> str:
    """What the last command of the page of ``explain`` prints, but for its last column, the ranges of the fits."""
    (line,) = re.findall(r"^\$ disagg-sim (explain --model .*)$", (PAGES / "explain.md").read_text(), re.MULTILINE)
    code = "from disagg_sim.cli.main import main; main()"
    wide = {**os.environ, "COLUMNS": "240", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code, *line.split()]
    found = subprocess.run(command, env=wide, capture_output=True, encoding="utf-8", check=True).stdout
    text, _, sources = found.rpartition("\nwhat the parts rest on\n")
    lines = sources.splitlines()
    cut = lines[0].index(" range")
    kept = [each[:cut].rstrip() for each in lines if each[:1].strip()]
    return "\n```text\n" + text + "\nwhat the parts rest on\n" + "\n".join(kept) + "\n```\n"
