"""Names of classes, functions and modules: the field's words, and one class by one name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from test_architecture import BOTH, tree_of, where_of

#: Words that fit every value and so name none. The field has its own: label, result, pending, batch, slot.
WORDS = {"said", "told", "held", "going", "goes", "coming", "comes", "came", "come", "gone"}
WORDS |= {"seat", "seats", "door", "aged", "stayed", "together", "wanted"}
#: No class is called after these either.
OF_CLASSES = WORDS | {"found", "seen"}
#: Names from before this rule, which only become fewer. ``held_out`` is a word of statistics.
KEPT = {
    "lab/calibration/kernels/tables.py: held_out",
    "lab/calibration/served/rows.py: held_out",
    "planning/pools.py: seats",
    "simulation/view.py: coming",
}
#: Class names with two homes, which only become fewer: pools of a launch, and processes of a sweep.
TWICE = {"Workers"}


def words_of(name: str) -> set[str]:
    """``HeldBack`` and ``held_back`` have the same words."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def names_of(path: Path) -> Iterator[tuple[str, bool]]:
    """The module, its folder, and every class and function in it; whether it is a class."""
    yield path.stem, False
    yield path.parent.name, False
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, isinstance(node, ast.ClassDef)


def test_names_are_words_of_the_field():
    found = {
        f"{where_of(path)}: {name}"
        for path in BOTH
        for name, is_class in names_of(path)
        if words_of(name) & (OF_CLASSES if is_class else WORDS)
    }
    assert found - KEPT == set()
    assert KEPT - found == set(), "strike these"


def test_a_class_name_has_one_home():
    homes = defaultdict(list)
    for path in BOTH:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(where_of(path))
    several = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in several.items() if name not in TWICE} == {}
    assert several.keys() == TWICE, "strike these"
