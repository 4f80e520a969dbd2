"""What the page of a reproduced study shows: its claims with their verdicts, and its pictures."""

from __future__ import annotations

import base64
from pathlib import Path

from disagg_sim.errors import InputError
from disagg_sim.report.page.assemble import Content
from disagg_sim.report.page.reading import as_content_faults, read_table


def study_content(root: Path) -> Content:
    """Read the directory of a reproduced study for its page.

    >>> study_content(Path("no/study"))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: no/study: no claims.csv with a claim, so there is nothing to show
    """
    claims = read_table(root / "claims.csv", texts=["id", "statement", "profile", "verdict"])
    if not len(claims):
        raise InputError(f"{root}: no claims.csv with a claim, so there is nothing to show")
    with as_content_faults(root, "the pictures of a study"):
        pictures = [
            {
                "name": str(each.relative_to(root).with_suffix("")),
                "png": base64.b64encode(each.read_bytes()).decode("ascii"),
            }
            for each in sorted([*root.glob("*.png"), *root.glob("*/*.png")])
        ]
    facts = {"name": root.resolve().name, "pictures": pictures}
    return Content(kind="study", title=f"Study {facts['name']}", facts=facts, tables={"claims": claims})
