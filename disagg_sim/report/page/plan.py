"""What the page of a plan shows: ``plan.json``, and the screen as it was printed."""

from __future__ import annotations

from pathlib import Path

from disagg_sim.domain import SHARDING
from disagg_sim.errors import InputError
from disagg_sim.reading import read_json
from disagg_sim.report.page.assemble import Content
from disagg_sim.report.page.reading import as_content_faults
from disagg_sim.report.schemas import POOLS
from disagg_sim.report.words import MODE_TEXT, beside_text, degrees_text

SCHEMA = "disagg-sim/plan/"


def plan_content(root: Path) -> Content:
    """Read the directory of a plan for its page.

    Returns times in s.
    """
    path, text = root / "plan.json", root / "plan.txt"
    with as_content_faults(path, f"a plan of schema {SCHEMA}..."):
        plan = read_json(path)
        if plan["schema"] == POOLS:
            raise InputError(f"{path}: a plan of further pools (plan --pools) has no page; plan.txt has the screen")
        if not plan["schema"].startswith(SCHEMA):
            raise ValueError(plan["schema"])
        for design in filter(None, [plan["best"], *plan["runners_up"]]):
            design["mode_text"] = MODE_TEXT.get(design["mode"], design["mode"])
            for pool in design["pools"]:
                degrees = degrees_text(**{name: pool[name] for name in SHARDING if name in pool})
                pool["mapping"] = degrees + beside_text(pool.get("chunk_tokens", 0), pool.get("draft_tokens", 0))
        said = {"question": plan["question"]["model"], "verdict": [plan["status"]], "why": [], "changes": None}
        plan["said"] = said | plan.get("said", {})  # plans of earlier versions have no sentences
    with as_content_faults(text, "a text"):
        screen = text.read_text(encoding="utf-8") if text.is_file() else ""
    facts = {"name": root.resolve().name, "plan": plan, "screen": screen}
    return Content(kind="plan", title=f"Plan {plan['question']['model']}", facts=facts)
