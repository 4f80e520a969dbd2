"""A function that another room calls says what goes in, what comes out, and shows it on an example that runs."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "disagg_sim"
TREES = {
    ".".join(("disagg_sim", *path.relative_to(ROOT).with_suffix("").parts)): ast.parse(path.read_text(encoding="utf-8"))
    for path in ROOT.rglob("*.py")
}


def room(module: str) -> str:
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
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disagg_sim.")
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
