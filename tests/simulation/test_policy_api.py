"""Policies of the package ask for what they want, as a policy file of a user does: they read, and touch nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import disagg_sim

POLICIES = Path(disagg_sim.__file__).parent / "simulation" / "policies"
#: What docs/policies.md gives a policy, and of the kernel columns, constants and functions that only read.
API = {"policy", "wishes", "view", "site", "options", "faults", "instances", "instance_variants", "clients"}
READ = {
    **dict.fromkeys(("addresses", "compiled", "layout", "ranking")),
    "ranks": {"uncounted"},
    "runs": {"steps_time"},
    "step_table": {"StepTable"},
    "times": {"aware_prefill", "step_time"},
}
#: Names of every ``NamedTuple``, which are public.
TUPLES = {"_replace", "_fields", "_asdict"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(POLICIES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(POLICIES)}:{getattr(node, 'lineno', 0)}", node


def allowed(module: str, name: str) -> bool:
    room, _, rest = module.removeprefix("disagg_sim.simulation.").partition(".")
    if room != "kernel":
        return room == "policies" or room in API
    return rest in READ and (READ[rest] is None or name in READ[rest])


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_policies_import_what_the_policy_api_has():
    seen = [
        (place, node.module, each.name)
        for place, node in nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disagg_sim.simulation.")
        for each in node.names
    ]
    assert len(seen) > 100
    assert [each for each in seen if not allowed(*each[1:])] == []


def test_policies_read_no_private_name_of_others_and_write_into_no_view():
    private, written, attributes = [], [], 0
    for place, node in nodes():
        if isinstance(node, ast.Attribute):
            attributes += 1
            hidden = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in TUPLES
            if hidden and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                private.append((place, node.attr))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            written += [place for each in targets if not isinstance(each, ast.Name) and root(each) == "view"]
    assert attributes > 1000
    assert private == written == []
