"""Measure the house: sizes, circles of imports, small functions, traced files, technique files, and words of pages.

    python benchmarks/house.py            # tables by room; --json has the names behind each number
    python benchmarks/house.py --quick    # without the traces of a decode step and of a plan

Counts are over syntax trees. The row ``lab`` is the laboratory beside the package, which all other counts leave out. A
file has a word of a technique in its code, without docstrings and comments. A use of a
function is its name in an expression or as an attribute anywhere in the package, so functions whose name has several
homes are left out. Traces are of a second call: what caches keep is read by the first. Words of pages have a letter or
a digit; the bars of tables and comments are none.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from test_architecture import BESIDE, MODULES, MOST_IMPORTERS, ROOT, importers_of, source_of, where_of  # noqa: E402

#: Technique -> words by which code names it.
TECHNIQUES = {
    "speculation": r"speculat|draft",
    "context parallelism": r"\bdcp|\bpcp|_dcp|_pcp|context_parallel",
    "prefix cache": r"prefix|Prefix|reuse|Reuse|cached_tokens|\.cached\b|pasts",
    "prefix tiers": r"(?<!fron)tier(?!ed)",
    "attention-FFN split": r"attention_ffn|ffn_gpus|\bafd|split_grid|halves",
    "encode pools": r"encoder|encode_|encode\b(?!\()|EncodeStep|EncodeUse",
    "expert copies": r"redundan",
    "expert skew": r"skew",
    "rank imbalance": r"imbalance|uneven",
    "availability": r"availab|spare|Spare|failures",
    "hold prompts": r"hold.(steps|prompts)|held_prompts|prefill_delay|PrefillDelay",
    "sparse attention": r"sparse|indexer",
    "linear attention": r"linear_attention|\bgdn|Gdn|mamba|Mamba|kda|recurrent",
    "piggyback, chunks": r"piggyback|chunk",
    "energy": r"joule|energy|watt",
}
#: Most lines of the body of a small function.
SMALL = 6
#: Pages that are named with their words.
LARGEST = 8
Names = dict[str, list[str]]
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def span(nodes: list[ast.stmt]) -> int:
    """Lines from the first statement to the last."""
    return (nodes[-1].end_lineno or 0) - nodes[0].lineno + 1 if nodes else 0


def by_room(paths: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(path.split("/")[0].removesuffix(".py") for path in paths).items()))


def circles(kind: str) -> list[list[str]]:
    """Sets of modules that all reach each other by their imports, of ``run_imports`` or all ``imports``."""
    names = {".".join(("disagg_sim", *path.relative_to(ROOT).with_suffix("").parts)): path for path in MODULES}
    graph = {name: getattr(source_of(path), kind) & names.keys() - {name} for name, path in names.items()}
    reached: dict[str, set[str]] = {}
    for name in graph:
        rest, reached[name] = [name], set()
        while rest:
            new = graph[rest.pop()] - reached[name]
            reached[name] |= new
            rest += new
    found = {
        frozenset({name, *(other for other in others if name in reached[other])}) for name, others in reached.items()
    }
    return sorted(sorted(each) for each in found if len(each) > 1)


def classes(trees: dict[str, ast.Module]) -> Names:
    """Public classes of modules whose name has several homes."""
    homes = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}


def small_functions(trees: dict[str, ast.Module]) -> Names:
    """Functions of few lines that the package uses once, by file."""
    used: Counter[str] = Counter()
    functions = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                used[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                functions.append((path, node.name, span(body)))
    defined = Counter(name for _, name, _ in functions)
    found = defaultdict(list)
    for path, name, lines in functions:
        if 0 < lines <= SMALL and used[name] == defined[name] == 1:
            found[path].append(name)
    return dict(found)


def parameter_lines(tree: ast.Module) -> int:
    """Lines of docstrings with a Parameters block."""
    documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return sum(span(node.body[:1]) for node in documented if "Parameters\n---" in (ast.get_docstring(node) or ""))


def code_of(tree: ast.Module) -> str:
    """The code without docstrings and comments; the tree loses the former."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def traced(call: Callable[[], Any]) -> list[str]:
    """Files of the package of which a second call runs a function."""
    call()
    files: set[str] = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(where_of(path) for path in MODULES if str(path) in files)


def traces() -> Names:
    import disagg_sim as ds
    from disagg_sim.physics.passes.decode import decode_step

    at, asked = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="kernels"), ds.lengths(2048, 256)
    part, one = (ds.Replicas(mapping=ds.Sharding(), instances=1),), {"input_tokens": [1000], "output_tokens": [20]}
    two = ds.ServedDeployment(name="two", gpus=2, prefill=part, decode=part, setup=at)
    return {
        "decode step": traced(lambda: decode_step(at, ds.Sharding(), batch=8, context=2048.0)),
        "plan": traced(lambda: ds.plan("llama_3_1_8b", "h100_sxm", asked, rate=40)),
        "simulated request, beside compiled files": traced(
            lambda: ds.simulate(two, ds.Trace(arrival=[0.0], **one), "disaggregated").summary()
        ),
    }


def words_of_pages() -> dict[str, int]:
    """Words of each page of ``docs/``, the largest first."""
    docs = TESTS.parent / "docs"
    texts = {path: re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL) for path in docs.rglob("*.md")}
    counted = {
        str(path.relative_to(docs)): sum(any(map(str.isalnum, word)) for word in text.split())
        for path, text in texts.items()
    }
    return dict(sorted(counted.items(), key=lambda each: -each[1]))


def measured(*, quick: bool) -> dict[str, Any]:
    """All numbers, and the names behind them."""
    texts = {where_of(path): path.read_text() for path in [*MODULES, *BESIDE]}
    parsed = {path: ast.parse(text) for path, text in texts.items()}
    trees = {where_of(path): parsed[where_of(path)] for path in MODULES}
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    small = small_functions(parsed)
    for path, text in texts.items():
        mine = {"files": 1, "lines": len(text.splitlines()), "parameters": parameter_lines(parsed[path])}
        for room in (path.split("/")[0].removesuffix(".py"), *(["all"] if path in trees else [])):
            rooms[room].update(mine | {"small": len(small.get(path, ()))})
    tests: Counter[str] = Counter()
    for path in TESTS.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        tests.update({path.relative_to(TESTS).parts[0].removesuffix(".py"): lines, "all": lines})
    running, every = circles("run_imports"), circles("imports")
    several, code = classes(trees), {path: code_of(tree) for path, tree in trees.items()}
    return {
        "rooms": {room: dict(counts) for room, counts in rooms.items()},
        "tests": dict(tests),
        "pages": words_of_pages(),
        "circles": {"at run time": running, "by types": [each for each in every if each not in running]},
        "classes": several,
        "small": small,
        "traces": {} if quick else traces(),
        "importers": {name: importers_of(name) for name in MOST_IMPORTERS},
        "techniques": {
            name: [path for path, text in code.items() if re.search(words, text)] for name, words in TECHNIQUES.items()
        },
    }


def shown(counts: dict[str, int]) -> str:
    return ", ".join(f"{room} {n}" for room, n in counts.items())


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """The tables."""
    rooms = sorted(found["rooms"], key=lambda room: -found["rooms"][room]["lines"])
    yield f"{'room':<14}{'files':>8}{'lines':>9}{'Parameters':>12}{'small, once':>13}{'tests':>9}"
    for room in rooms:
        each = found["rooms"][room]
        numbers = f"{each['files']:>8}{each['lines']:>9,}{each['parameters']:>12,}{each['small']:>13}"
        yield f"{room:<14}{numbers}{found['tests'].get(room, 0):>9,}"
    yield "Parameters: lines of docstrings with such a block; small, once: functions of at most six lines with one use"
    pages = found["pages"]
    yield f"\nwords of {len(pages)} pages: {sum(pages.values()):,}"
    yield f"  {shown(dict(list(pages.items())[:LARGEST]))}"
    for kind, each in found["circles"].items():
        yield f"\ncircles of imports {kind}: {len(each)}"
        yield from (f"  {' '.join(name.removeprefix('disagg_sim.') for name in names)}" for names in each)
    yield f"\nclass names with several homes: {len(found['classes'])}"
    yield "  " + ", ".join(f"{name} {len(homes)}" for name, homes in found["classes"].items())
    yield "\nfiles of which a call runs something"
    for name, files in found["traces"].items():
        yield f"  {name}: {len(files)} ({shown(by_room(files))})"
    for title, key in (
        ("import a technique from its folder", "importers"),
        ("have a word of a technique", "techniques"),
    ):
        yield f"\nfiles that {title}"
        for name, files in found[key].items():
            counts = by_room(files)
            yield f"  {name:<20}{len(files):>4} in {len(counts):>2}: {shown(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="names and numbers as JSON")
    parser.add_argument("--quick", action="store_true", help="without traces")
    given = parser.parse_args()
    found = measured(quick=given.quick)
    print(json.dumps(found, indent=1) if given.json else "\n".join(lines_of(found)))


if __name__ == "__main__":
    main()
