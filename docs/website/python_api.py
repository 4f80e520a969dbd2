"""List the public names of the package by room, for the docstrings to be put in."""

from __future__ import annotations

import ast

from docs.website.pages import ROOT

PACKAGE = ROOT / "disagg_sim"
#: Title of each group, in the order of the page, and the rooms (or modules) whose public names it has.
GROUPS = {
    "Plan a deployment": ("planning",),
    "Start it": ("launch",),
    "Load specs": ("facts", "errors"),
    "Describe the requests": ("workload",),
    "Search configurations": ("domain", "search", "physics"),
    "Compare serving modes and match pools": ("serving",),
    "Simulate": ("simulation", "scenario"),
    "Count optional techniques": ("techniques",),
    "Explain, and say how sure": ("certainty", "report"),
}
HEAD = """# Python

`import disagg_sim as ds`: every public name. Units are those of the docstrings; inside, everything is SI.
"""


def public_names() -> dict[str, str]:
    """Map each public name to the module that has it, as the stub of the package says."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def python_reference() -> str:
    """Make the page: a directive for each public name, which the site fills from its docstring."""
    names = public_names()
    text = HEAD
    for title, rooms in GROUPS.items():
        text += f"\n## {title}\n"
        within = sorted((name for name, module in names.items() if module.split(".")[0] in rooms), key=_functions_first)
        for name in within:
            options = f"    options:\n      heading: ds.{name}\n      toc_label: {name}\n"
            text += f"\n::: disagg_sim.{names[name]}.{name}\n{options}"
    return text


def _functions_first(name: str) -> tuple[bool, str]:
    """Order functions before the classes that they take and return."""
    return not name.islower(), name


def ungrouped() -> list[str]:
    """List the public names that no group of the page has."""
    rooms = {room for group in GROUPS.values() for room in group}
    return [name for name, module in public_names().items() if module.split(".")[0] not in rooms]
