"""What the page of a reproduced study shows: its claims with their verdicts, and its pictures."""

from __future__ import annotations

import base64
from pathlib import Path

import pandas as pd

from disagg_sim.errors import InputError
from disagg_sim.report.page.assemble import Content


def study_content(root: Path) -> Content:
    """Read the directory of a reproduced study for its page.

    Parameters
    ----------
    root
        With ``claims.csv``; pictures below it are shown, too.

    Returns
    -------
    Content
        Claims as a table, pictures as data.

    Raises
    ------
    InputError
        One line: no claims, or a damaged table.

    Examples
    --------
    >>> study_content(Path("no/study"))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: no/study/claims.csv: cannot be read: ...
    """
    path = root / "claims.csv"
    try:
        claims = pd.read_csv(path, keep_default_na=False)
        pictures = [
            {
                "name": str(each.relative_to(root).with_suffix("")),
                "png": base64.b64encode(each.read_bytes()).decode("ascii"),
            }
            for each in sorted([*root.glob("*.png"), *root.glob("*/*.png")])
        ]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not {"id", "statement", "verdict"} <= {*claims.columns}:
        raise InputError(f"{path}: not the claims of a study: it lacks a column of id, statement, verdict")
    facts = {"name": root.resolve().name, "pictures": pictures}
    return Content(kind="study", title=f"Study {facts['name']}", facts=facts, tables={"claims": claims})
