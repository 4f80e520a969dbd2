"""A function that another room calls says what goes in, what comes out, and shows it on an example that runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = [path for tree in ("disagg_sim", "lab") for path in sorted((ROOT / tree).rglob("*.py"))]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS]
TREES = dict(zip(NAMES, [ast.parse(path.read_text(encoding="utf-8")) for path in PATHS], strict=True))


def room(module: str) -> str:
    """The commands of the laboratory are of one room with those of the package."""
    return module.split(".")[1]


def test_functions_that_other_rooms_call_have_parameters_returns_and_an_example():
    defined = {
        (module, node.name): node
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    called = {
        (node.module, alias.name)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("disagg_sim.", "lab."))
        for alias in node.names
        if (node.module, alias.name) in defined and room(node.module or "") != room(module)
    }
    assert len(called) > 300
    silent = []
    for module, name in sorted(called):
        node = defined[module, name]
        text = ast.get_docstring(node) or ""
        wanted = ["Parameters"] * bool(node.args.args or node.args.kwonlyargs) + ["Examples"]
        lacking = [section for section in wanted if section not in text]
        lacking += ["Returns"] * ("Returns" not in text and "Yields" not in text)
        if lacking:
            silent.append(f"{module}.{name} lacks {', '.join(lacking)}")
    assert not silent, "\n".join(silent)


def test_a_cited_page_has_the_section():
    """``physics page, sections 5 to 7``; ``speculation page, "What is counted"``."""
    cited = 0
    for path in PATHS:
        text = " ".join(path.read_text().split())
        for page, numbers, title in re.findall(r'(\w+) page, (?:sections? ([\d, toand-]*\d)|"([^"]+)")', text):
            headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / f"{page.lower()}.md").read_text(), re.MULTILINE)
            wanted = [title] if title else [f"{number}. " for number in re.findall(r"\d+", numbers)]
            for each in wanted:
                assert any(heading.startswith(each) for heading in headings), f"{path}: {page} page has no {each}"
            cited += 1
    assert cited > 40
