"""Names of ``ds``, equations and what a policy calls say what goes in and what comes out; cited pages exist."""

import ast
import re
from pathlib import Path

from test_architecture import BOTH, tree_of

ROOT = Path(__file__).parent.parent
#: Rooms of equations, and how the docstring of one shows it.
EQUATIONS = ("physics", "search", "serving", "planning", "workload")
FORMULA_OR_SOURCE = re.compile(r"\.\. math::|:math:|Source:|References:|page, section")
#: Modules of which a policy calls functions; docs/policies.md names them.
POLICY_API = re.compile(r"disagg_sim\.simulation\.(policy|options|run|policies\..*)")


def names_of_ds() -> set[tuple[str, str]]:
    stub = ast.parse((ROOT / "disagg_sim/__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {(f"disagg_sim.{node.module}", alias.name) for node in imports for alias in node.names}


def is_overload(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "overload" for each in node.decorator_list)


def test_names_of_ds_equations_and_the_policy_api_have_parameters_and_returns():
    trees = {".".join(path.relative_to(ROOT).with_suffix("").parts): tree_of(path) for path in BOTH}
    imported = {
        (node.module, alias.name)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    public, page = names_of_ds(), (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    called = set(re.findall(r"\b(\w+)\(", page))
    counted, silent = {"ds": 0, "equation": 0, "policy API": 0}, []
    for module, tree in sorted(trees.items()):
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or is_overload(node):
                continue
            text, room = ast.get_docstring(node) or "", module.split(".")[1]
            if (module, node.name) in public:
                kind = "ds"
            elif POLICY_API.fullmatch(module) and node.name in called:
                kind = "policy API"
            elif room in EQUATIONS and (module, node.name) in imported and FORMULA_OR_SOURCE.search(text):
                kind = "equation"
            else:
                continue
            counted[kind] += 1
            wanted = ["Parameters\n---"] * bool(node.args.args or node.args.kwonlyargs)
            lacking = [section.split("\n")[0] for section in wanted if section not in text]
            lacking += ["Returns"] * ("Returns\n---" not in text and "Yields\n---" not in text)
            lacking += ["a unit"] * (kind == "equation" and not re.search(r"\[[^\]]+\]", text))
            if lacking:
                silent.append(f"{module}.{node.name} ({kind}) lacks {', '.join(lacking)}")
    assert counted["ds"] > 40
    assert counted["equation"] > 20
    assert counted["policy API"] >= 5
    assert not silent, "\n".join(silent)


def test_a_cited_page_has_the_section():
    """``physics page, sections 5 to 7``; ``speculation page, "What is counted"``."""
    cited = 0
    for path in BOTH:
        text = " ".join(path.read_text().split())
        for page, numbers, title in re.findall(r'(\w+) page, (?:sections? ([\d, toand-]*\d)|"([^"]+)")', text):
            headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / f"{page.lower()}.md").read_text(), re.MULTILINE)
            wanted = [title] if title else [f"{number}. " for number in re.findall(r"\d+", numbers)]
            for each in wanted:
                assert any(heading.startswith(each) for heading in headings), f"{path}: {page} page has no {each}"
            cited += 1
    assert cited > 40
