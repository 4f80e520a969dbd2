"""Put a page together: styles, scripts and data in one HTML file that no network and no other script can touch."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

import pandas as pd

from disagg_sim.report.page.packing import pack

#: Scripts in the order in which the browser runs them; those of others first.
LIBRARY, LICENCE = "vendor/uPlot.iife.min.js", "vendor/uPlot.LICENSE"
SCRIPTS = (
    "dom.js",
    "tables.js",
    "pens.js",
    "figure.js",
    "chart.js",
    "controls.js",
    "table_view.js",
    "provenance.js",
    "design.js",
    "gains.js",
    "views.js",
    "sweep.js",
    "runs.js",
    "simulation.js",
    "plan.js",
    "study.js",
    "app.js",
)
STYLES = ("vendor/uPlot.min.css", "page.css")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a page shows."""

    kind: str  # "sweep", "simulation", "plan" or "study": which script shows it
    title: str
    facts: Mapping[str, Any]  # of JSON's own types; numbers that are not finite become None
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def page_html(content: Content) -> str:
    """Write a page as HTML.

    The page states a content security policy: it may load nothing, and runs no script but the one whose hash it names.
    Names from files are data, never HTML.
    """
    packed = pack(content.tables)
    told = {"kind": content.kind, "title": content.title, "facts": _plain(content.facts), "tables": packed.tables}
    style = "\n".join(_asset(name) for name in STYLES)
    own = "\n".join(_asset(name) for name in SCRIPTS)
    script = f"{_asset(LIBRARY)}\n(() => {{\n{own}\n}})();\n"
    parts = {
        "title": escape(content.title),
        "licence": _asset(LICENCE),
        "policy": _policy(script, style),
        "style": style,
        "content": _inside_script(json.dumps(told, ensure_ascii=False, separators=(",", ":"))),
        "data": packed.data,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("disagg_sim.report.page").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _inside_script(text: str) -> str:
    """JSON that no HTML parser mistakes for the end of its element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
