"""The map in docs/architecture.md, held over the syntax trees of all modules."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import disagg_sim
from disagg_sim.errors import given_twice
from disagg_sim.extras import EXTRAS
from disagg_sim.techniques import registry

ROOT = Path(disagg_sim.__file__).parent
LAB = ROOT.parent / "lab"
SHARED = {"units", "errors", "extras", "notebook", "domain", "atomic", "arrays", "parquet", "memory", "reading"}
SHARED |= {"choices", "question"}
#: Rooms that the laboratory, commands and the notebook API may all use.
ABOVE = {"facts", "physics", "search", "serving", "certainty", "simulation", "sweep", "scenario"}
ABOVE |= {"workload", "planning", "launch"}
#: room -> rooms that it may import beside the shared ones and itself
ALLOWED = {shared: set() for shared in SHARED} | {
    "facts": set(),
    "workload": {"facts", "physics"},
    "physics": {"facts"},
    "search": {"facts", "physics", "workload"},
    "serving": {"facts", "physics", "search", "workload"},
    "certainty": {"facts", "physics", "search", "serving", "workload"},
    "simulation": {"facts", "physics", "search", "workload"},
    "planning": {"facts", "physics", "search", "serving", "certainty", "simulation", "workload"},
    "sweep": {"facts", "physics", "search", "serving", "certainty", "workload"},
    "scenario": {"facts", "physics", "search", "serving", "simulation", "workload", "sweep"},
    "launch": {"facts", "physics", "search", "certainty", "simulation", "workload", "planning", "report"},
    "report": ABOVE - {"launch"},
    "laboratory": {"facts"},
    "cli": ABOVE | {"report", "laboratory"},
    "__init__": ABOVE | {"report"},
    "lab/__init__": set(),
    "lab/calibration": ABOVE | {"report", "laboratory"},
    "lab/studies": ABOVE | {"report", "laboratory", "lab/calibration"},
    "lab/cli": ABOVE | {"report", "laboratory", "cli", "lab/calibration", "lab/studies"},
}
#: room -> third-party packages that it may use
PACKAGES = {plain: set() for plain in SHARED | {"laboratory", "lab/__init__"}} | {
    "domain": {"numpy"},
    "arrays": {"numpy"},
    "parquet": {"numpy", "pandas", "duckdb"},
    "reading": {"pandas"},
    "facts": {"yaml", "pydantic", "pydantic_core", "annotated_types", "huggingface_hub"},
    "workload": {"numpy", "pandas"},
    "physics": {"numpy", "pandas"},
    "search": {"numpy", "pandas"},
    "serving": {"numpy", "pandas", "pulp", "highspy"},
    "certainty": {"numpy", "pandas"},
    "simulation": {"numpy", "numba", "pandas", "statsmodels"},
    "planning": {"numpy", "pandas"},
    "launch": {"pandas", "yaml"},
    "sweep": {"numpy", "pandas", "joblib", "dask", "distributed", "ray", "fsspec", "yaml", "pydantic", "pydantic_core"},
    "scenario": {"numpy", "pandas", "joblib", "yaml", "pydantic", "pydantic_core"},
    "report": {"numpy", "pandas", "matplotlib", "pydantic", "typing_extensions"},
    "cli": {"typer", "click", "rich", "pandas", "pydantic", "typing_extensions", "mcp"},
    "__init__": {"lazy_loader"},
    "lab/calibration": {"numpy", "scipy", "pandas", "yaml", "torch"},
    "lab/studies": {"numpy", "pandas", "pydantic", "yaml"},
    "lab/cli": {"typer", "pandas"},
}
#: Room of techniques, a folder each, and first word of a file there -> room whose rules hold for it.
TECHNIQUES = "techniques"
OF_A_TECHNIQUE = {"requests": "workload", "law": "serving", "plan": "planning", "play": "simulation"}
OF_A_TECHNIQUE |= {name: name for name in ("facts", "physics", "search")} | {"registry": "question"}
#: Technique -> files outside of its folder that import it, at most. Take a number down when it falls.
MOST_IMPORTERS = {
    "availability": 14,
    "context": 1,
    "encode": 15,
    "experts": 5,
    "prefill_delay": 8,
    "prefix": 17,
    "ranks": 3,
    "speculation": 5,
    "split": 15,
}
#: Of the package; of the laboratory beside it; of both.
MODULES, BESIDE = sorted(ROOT.rglob("*.py")), sorted(LAB.rglob("*.py"))
BOTH = [*MODULES, *BESIDE]
#: Packages of an extra: what is not in the core.
OPTIONAL = {package for extra in EXTRAS.values() for package in extra.packages}
#: What an installation without extras runs: the notebook interface but for simulation, and these commands.
CORE_COMMANDS = {"plan", "sweep", "explain", "launch", "report", "sensitivity", "compare", "specs", "trace"}
#: Modules that import an optional package when they are imported; no other may.
OPTIONAL_AT_ONCE = {"simulation/kernel/compiled.py", "simulation/kernel/addresses.py"}
OPTIONAL_AT_ONCE |= {"lab/calibration/served/engine_fit.py"}
#: Lines past which the head of a file gives a reason, and past which it is split.
LONG, TOO_LONG = 400, 600


def where_of(path: Path) -> str:
    """A path in the package from its room on, in the laboratory from ``lab`` on."""
    return path.relative_to(ROOT if path.is_relative_to(ROOT) else LAB.parent).as_posix()


def room_of(path: Path) -> str:
    """The room whose rules hold for a module; of a technique that which the first word of its file names."""
    parts = where_of(path).removesuffix(".py").split("/")
    if parts[0] == TECHNIQUES:
        return OF_A_TECHNIQUE[parts[-1].split("_")[0]] if parts[-1] != "__init__" else TECHNIQUES
    return "/".join(parts[:2]) if path.is_relative_to(LAB) else parts[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


@dataclass(frozen=True)
class Source:
    """What the tests ask of a module, from one reading of its syntax tree."""

    lines: int
    docstring: str
    imports: frozenset[str]
    run_imports: frozenset[str]  # without those under TYPE_CHECKING: they never run
    first_imports: frozenset[str]  # of them, those that run when the module is imported: outside functions
    functions: tuple[tuple[int, str, int], ...]  # line, name, arguments
    numbers: tuple[tuple[int, float], ...]  # line and value
    calls: tuple[tuple[int, str, str], ...]  # line, what is called, and of what


def walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool, bool]]:
    """All nodes, whether each stands under TYPE_CHECKING, and whether in a function."""
    rest = deque([(tree, False, False)])
    while rest:
        node, for_types, later = rest.popleft()
        yield node, for_types, later
        for child in ast.iter_child_nodes(node):
            checking = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
            called = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            rest.append((child, for_types or checking, later or called))


def imported(node: ast.Import | ast.ImportFrom, path: Path) -> set[str]:
    """The modules that a statement imports."""
    names = {alias.name for alias in node.names}
    if isinstance(node, ast.Import):
        return names
    assert node.level == 0, f"{path}: relative import"
    return {node.module or ""} | ({f"disagg_sim.{name}" for name in names} if node.module == "disagg_sim" else set())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def source_of(path: Path) -> Source:
    text, tree = path.read_text(), tree_of(path)
    imports, run_imports, first_imports, functions, numbers, calls = set(), set(), set(), [], [], []
    for node, for_types, later in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= imported(node, path)
            run_imports |= set() if for_types else imported(node, path)
            first_imports |= set() if for_types or later else imported(node, path)
        elif isinstance(node, ast.FunctionDef):
            functions.append((node.lineno, node.name, arguments_of(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
            numbers.append((node.lineno, node.value))
        elif isinstance(node, ast.Call):
            owner = getattr(getattr(node.func, "value", None), "id", "")
            calls.append((node.lineno, name_of(node), owner))
    return Source(
        lines=len(text.splitlines()),
        docstring=ast.get_docstring(tree) or "",
        imports=frozenset(imports),
        run_imports=frozenset(run_imports),
        first_imports=frozenset(first_imports),
        functions=tuple(functions),
        numbers=tuple(numbers),
        calls=tuple(calls),
    )


def arguments_of(function: ast.FunctionDef) -> int:
    """Arguments that a caller may give: ``self`` and ``cls`` do not count."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def name_of(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_imports_go_up_only_and_packages_stay_in_their_rooms():
    for path in BOTH:
        room, where = room_of(path), where_of(path)
        for name in source_of(path).imports:
            parts = name.split(".")
            if parts[0] == "disagg_sim":
                if len(parts) == 1:
                    assert room in {"cli", "sweep", "scenario", "__init__"}, f"{where} imports the whole package"
                    continue
                other = parts[1]
                if other == TECHNIQUES:
                    other = room_of(ROOT.parent.joinpath(*parts).with_suffix(".py"))
                if (ROOT / f"{other}.py").exists() or (ROOT / other).is_dir():
                    assert other in SHARED | ALLOWED[room] | {room}, f"{where}: {room} may not import {name}"
            elif parts[0] == LAB.name:
                other = "/".join(parts[:2])
                assert other in ALLOWED[room] | {room}, f"{where}: {room} may not import {name}"
            elif parts[0] not in sys.stdlib_module_names:
                assert parts[0] in PACKAGES[room], f"{where}: {room} may not use {parts[0]}"


def importers_of(technique: str) -> list[str]:
    """Files of the package outside of a technique's folder that import from it."""
    folder, prefix = ROOT / TECHNIQUES / technique, f"disagg_sim.{TECHNIQUES}.{technique}."
    outside = [path for path in MODULES if not path.is_relative_to(folder)]
    return [where_of(path) for path in outside if any(each.startswith(prefix) for each in source_of(path).imports)]


def test_few_files_know_a_technique():
    for name, most in MOST_IMPORTERS.items():
        assert len(importers_of(name)) <= most, f"{name}: {importers_of(name)}"
    folders = {path.name for path in (ROOT / TECHNIQUES).iterdir() if path.is_dir() and path.name[0] != "_"}
    assert {*MOST_IMPORTERS} == folders == {each.name for each in registry.TECHNIQUES}


def test_the_core_imports_no_package_of_an_extra():
    """What a command of the core loads before it is called, and what that loads, needs no extra."""
    for path in BOTH:
        taken = OPTIONAL & {name.split(".")[0] for name in source_of(path).first_imports}
        where = where_of(path)
        assert bool(taken) == (where in OPTIONAL_AT_ONCE), f"{where} imports {taken} outside a function"
    names = {module_of(path): path for path in MODULES}
    for command in sorted(CORE_COMMANDS):
        rest, why = [f"disagg_sim.cli.{command}"], {f"disagg_sim.cli.{command}": command}
        while rest:
            name = rest.pop()
            where = where_of(names[name])
            assert where not in OPTIONAL_AT_ONCE, f"{why[name]} needs {where}: import it in the function that needs it"
            for other in source_of(names[name]).first_imports:
                found = other if other in names else f"{other}.__init__"
                if found in names and found not in why:
                    why[found] = f"{why[name]} -> {other}"
                    rest.append(found)


def test_parquet_is_read_and_written_in_one_place():
    """By DuckDB, which the core has; pandas would ask for pyarrow, which it has not."""
    for path in BOTH:
        taken = {(owner, name) for _, name, owner in source_of(path).calls if "parquet" in name}
        assert ("pd", "read_parquet") not in taken, f"{where_of(path)}: disagg_sim.parquet reads it"
        assert "to_parquet" not in {name for _, name in taken}, f"{where_of(path)}: disagg_sim.parquet writes it"


def test_extras_are_those_of_the_distribution():
    """Packages of ``EXTRAS`` are required by their extra alone; ``all`` has those that are not large."""
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    brought = {
        name: {re.split(r"[^\w-]", each)[0] for each in needs}
        for name, needs in declared["optional-dependencies"].items()
    }
    core = {re.split(r"[^\w-]", each)[0] for each in declared["dependencies"]}
    assert not core & OPTIONAL
    for name, each in EXTRAS.items():
        assert {*each.packages} <= brought[name], name
    (every,) = declared["optional-dependencies"]["all"]
    assert {*every.partition("[")[2].rstrip("]").split(",")} == {*EXTRAS} - {"measure", "dask", "ray"}
    assert declared["optional-dependencies"]["dev"][0] == "disagg-sim[all,dask,ray]"


#: Module and what it imports against the order of the modules, with the reason.
AGAINST_THE_ORDER: dict[tuple[str, str], str] = {}


def test_no_import_cycle_between_modules():
    """Imports inside functions and under TYPE_CHECKING count. Depth first; colour 1 = on the path, 2 = done."""
    names = {module_of(path): path for path in BOTH}
    graph = {n: {i for i in source_of(p).imports if i in names and i != n} for n, p in names.items()}
    for (name, other), reason in AGAINST_THE_ORDER.items():
        assert reason
        graph[name].remove(other)  # an exception that nothing needs is a fault, too
    colour: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert colour.get(name) != 1, " -> ".join((*path, name))
        if colour.get(name) == 2:
            return
        colour[name] = 1
        for other in graph[name]:
            visit(other, (*path, name))
        colour[name] = 2

    for name in graph:
        visit(name, ())


#: Arguments of a public function; past this a value object is waiting.
MOST_ARGUMENTS = 8


def test_no_public_function_has_many_arguments():
    """Commands are exempt: their options are their arguments."""
    for path in BOTH:
        for line, name, arguments in source_of(path).functions:
            where = f"{where_of(path)}:{line} {name}"
            exempt = room_of(path) in {"cli", "lab/cli"} or name.startswith("_")
            assert exempt or arguments <= MOST_ARGUMENTS, f"{where} has {arguments} arguments"


def test_a_file_can_be_read_in_a_sitting():
    for path in BOTH:
        lines, reason = source_of(path).lines, f"Past {LONG} lines: " in source_of(path).docstring
        assert (lines > LONG) == reason, f"{path}: {lines} lines, reason in its head: {reason}"
        assert lines <= TOO_LONG, f"{path}: {lines} lines; split it"


def test_only_units_writes_powers_of_ten_and_two():
    for path in BOTH:
        for line, value in source_of(path).numbers:
            assert value not in (2**30, 2**40) or path.name == "units.py", f"{where_of(path)}:{line}: {value}"


#: What turns a text or bytes into code: called nowhere, but where a module of the user's own is imported.
RUNS_CODE = {"eval", "exec", "query", "compile", "unsafe_load", "full_load", "read_pickle", "exec_module", "__import__"}
RUNS_CODE |= {"system", "popen", "Popen", "run_path", "run_module", "to_pickle"}
MAY_RUN = {("scenario/options.py", "exec_module"), ("laboratory.py", "exec_module"), ("re", "compile")}


def test_nothing_from_outside_becomes_code():
    """Exceptions: policy files that a scenario names, and the laboratory beside the package; see docs/security.md."""
    for path in BOTH:
        where = where_of(path)
        source = source_of(path)
        risky = {"pickle", "marshal", "shelve", "subprocess", "joblib.memory"}
        assert not risky & source.imports, where
        for line, name, owner in source.calls:
            allowed = name not in RUNS_CODE or (where, name) in MAY_RUN or (owner, name) in MAY_RUN
            assert allowed, f"{where}:{line} calls {name}"


def test_the_stub_lists_every_public_name_once():
    """``__init__.pyi`` is the list: what it imports is public, sorted, and there."""
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    imported = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    (listed,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed) == sorted(imported) == sorted(disagg_sim.__all__)
    assert len(set(imported)) == len(imported)
    assert all(hasattr(disagg_sim, name) for name in imported)


@pytest.mark.parametrize("name", sorted(disagg_sim._MOVED))
def test_a_name_that_left_works_for_a_release_and_says_where_it_is(name):
    assert name not in disagg_sim.__all__
    with pytest.warns(
        DeprecationWarning, match=rf"ds\.{name} goes with the next release: from ([\w.]+) import (\w+)$"
    ) as told:
        value = getattr(disagg_sim, name)
    module, there = re.search(r"from ([\w.]+) import (\w+)$", str(told[0].message)).groups()
    assert getattr(importlib.import_module(module), there) is value
    assert told[0].filename == __file__


def test_public_docstrings_name_every_parameter():
    for name in disagg_sim.__all__:
        public = getattr(disagg_sim, name)
        text = inspect.getdoc(public)
        assert text, f"{name} has no docstring"
        parameters = inspect.signature(public).parameters if inspect.isfunction(public) else ()
        missing = [each for each in parameters if not re.search(rf"\b{each}\b", text)]
        assert not missing, f"the docstring of {name} is silent on {missing}"


def test_no_two_test_files_have_one_name():
    """Pytest imports them by their names alone: it could not collect both."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert not given_twice(names)


def test_tests_read_public_data_by_name_and_list_no_data_folder():
    """A file that is added to the data folder must not change what a test checks, nor whether it runs."""
    listing = r"\b(i?glob|rglob|iterdir|listdir|scandir|walk)\("
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text()
        if path.name == "shared_data.py":  # which knows where public data lie
            assert not re.search(listing, text), f"{path.name} lists a folder"
        elif path != Path(__file__):
            assert not re.search(r'/ "shared["/]|shared/data', text), (
                f"{path.name}: ask shared_data.shared_file for data"
            )
            assert not re.search(rf"shared_file\([^\n]*{listing}", text), f"{path.name} lists a data folder"
