"""Write the page of a directory of results, whichever command made it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from disagg_sim.atomic import write_text
from disagg_sim.errors import InputError
from disagg_sim.report.page.assemble import Content, page_html
from disagg_sim.report.page.plan import plan_content
from disagg_sim.report.page.simulation import simulation_content
from disagg_sim.report.page.study import study_content
from disagg_sim.report.page.sweep import BESIDE, sweep_content
from disagg_sim.sweep.manifest import MANIFEST

#: Stands in every page, so that a file of somebody else is never replaced.
MARK = '<meta name="generator" content="disagg-sim">'
#: File that tells a directory of results, the command that writes it, and what reads it.
KINDS: dict[str, tuple[str, Callable[[Path], Content]]] = {
    MANIFEST: ("sweep", sweep_content),
    "plan.json": ("plan", plan_content),
    "summary.csv": ("simulate", simulation_content),
    "claims.csv": ("reproduce", study_content),
}


def content_of(root: Path, *, beside: int = BESIDE, jobs: int = 1, breakdowns: bool = True) -> Content:
    """Read a directory of results for its page."""
    if not root.is_dir():
        raise InputError(f"{root}: no such directory")
    for file, (_, read) in KINDS.items():
        if (root / file).is_file():
            if read is sweep_content:
                return sweep_content(root, beside=beside, jobs=jobs, breakdowns=breakdowns)
            return read(root)
    told = ", ".join(f"{file} of {command}" for file, (command, _) in KINDS.items())
    raise InputError(f"{root}: no results to report; allowed: a directory with {told}")


def write_page(content: Content, path: Path) -> int:
    """Write a page. [B]"""
    text = page_html(content)
    write_text(path, text)
    return len(text.encode())
