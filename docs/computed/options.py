"""Tables of the options of commands, from the questions that these are made of."""

from __future__ import annotations

from dataclasses import MISSING
from typing import get_args

from disagg_sim.question import ExplainQuestion, LaunchQuestion, fields_of
from docs.computed import quick, table


def _options(question: type) -> str:
    """Make a table with one row for each option: its spelling, its help and its default."""
    rows = []
    for each in fields_of(question):
        count = int in (each.kind, *get_args(each.kind))
        value = "" if each.kind is bool else each.ask.value or ("N" if count else "NAME")
        unless = "required" if each.default is MISSING else f"`{each.default}`" if each.default else ""
        option = value if each.ask.argument else f"{each.flag} {value}".strip()
        rows.append((f"`{option}`".replace("|", r"\|"), each.ask.help.replace("*", r"\*"), unless))
    return table(("option", "what", "default"), rows)


@quick
def options_of_explain() -> str:
    """Every option of ``disagg-sim explain``."""
    return _options(ExplainQuestion)


@quick
def options_of_launch() -> str:
    """Every option of ``disagg-sim launch``."""
    return _options(LaunchQuestion)
