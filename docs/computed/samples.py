"""What commands print, as the pages show it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from disagg_sim.facts.load import load_efficiency
from disagg_sim.facts.yaml_files import PATH_VARIABLE, find_file
from docs.computed import quick

PAGES = Path(__file__).parents[1]
#: Fits that the sample of ``explain`` shows.
FITS = 5


def _said(arguments: list[str], *, code: int = 0, folder: Path | None = None, **variables: str) -> str:
    """What a command prints on a wide screen, when it ends as expected."""
    wide = {**os.environ, "COLUMNS": "240", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8", **variables}
    command = [sys.executable, "-c", "from disagg_sim.cli.main import main; main()", *arguments]
    found = subprocess.run(command, cwd=folder, env=wide, capture_output=True, encoding="utf-8", check=False)
    assert found.returncode == code, f"{arguments}: {found.stderr}"
    return found.stdout


@quick
def explain_sample() -> str:
    """What the last command of the page of ``explain`` prints, with the first fits and without their ranges."""
    (line,) = re.findall(r"^\$ disagg-sim (explain --model .*)$", (PAGES / "explain.md").read_text(), re.MULTILINE)
    text, _, sources = _said(line.split()).rpartition("\nwhat the parts rest on\n")
    lines = sources.splitlines()
    cut = lines[0].index(" range")
    kept = [each[:cut].rstrip() for each in lines if each[:1].strip()]
    kept[1 + FITS :] = [f"[{len(kept) - 1 - FITS} more lines]"]
    return "\n```text\n" + text + "\nwhat the parts rest on\n" + "\n".join(kept) + "\n```\n"


#: The sample of ``check``: the fit that somebody lowers, by how much, and the points of a frontier that are shown.
LOWERED, TO, SHOWN = ("h100_sxm", 2), 0.98, 3


@quick
def check_sample() -> str:
    """What ``check`` says on the page of CI after a change of one fit, with the first points of each frontier."""
    (sweep,) = re.findall(
        r"^```yaml\n(# curves.yaml\n.*?)^```", (PAGES / "ci.md").read_text(), re.MULTILINE | re.DOTALL
    )
    system, row = LOWERED
    own = find_file("efficiency", system)
    before = load_efficiency(system).decode_attention[row].e_memory
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "curves.yaml").write_text(sweep)
        run = ["sweep", "curves.yaml", "--jobs", "1", "--out"]
        _said([*run, "baselines/curves"], folder=folder)
        changed = folder / "specs" / "hw_specs" / "efficiency" / own.name
        changed.parent.mkdir(parents=True)
        shutil.copy(own, changed)
        changed.write_text(own.read_text().replace(f"e_memory: {before},", f"e_memory: {round(TO * before, 5)},"))
        _said([*run, "results"], folder=folder, **{PATH_VARIABLE: "specs"})
        text = _said(["check", "results", "--baseline", "baselines/curves"], code=1, folder=folder)
    kept: list[str] = []
    for block in text.rstrip().split("\n\n"):
        head, *rows = block.splitlines()
        points = [each for each in rows if each.startswith(("  moved", "  lost", "  new"))]
        ends = rows[1 + len(points) :] if points else rows
        some = [rows[0], *points[:SHOWN], f"  [{len(points) - SHOWN} more points]"] if points else []
        kept.append("\n".join([head, *some, *ends]))
    command = "$ disagg-sim check results --baseline baselines/curves"
    return "\n```text\n" + "\n".join([command, "\n\n".join(kept)]) + "\n```\n"
