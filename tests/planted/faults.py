"""Small faults that could slip into a formula, found in the syntax trees of the package.

A fault changes one expression: a constant by a tenth or by one, a sign, a quotient to a product, a minimum to a
maximum, a bound to its neighbour, prefill to decode, the input length to the output length. Which ones are planted is
decided by a hash of the function and the expression, so that moving a file changes nothing.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Share of the faults by room.
ROOMS = {"physics": 0.3, "search": 0.1, "serving": 0.1, "simulation": 0.2, "workload": 0.05}
ROOMS |= {"planning": 0.15, "certainty": 0.1}
#: First word of a file of a technique -> its room, where the two differ.
OF_A_TECHNIQUE = {"law": "serving", "plan": "planning", "play": "simulation", "requests": "workload"}
#: Faults that a constant takes: a tenth more of a measure, one more of a count.
TENTH, ONE = 1.1, 1
#: Names that are easily mistaken for each other.
TWINS = {
    "isl": "osl",
    "prefill": "decode",
    "tp_attn": "tp_ffn",
    "dp_attn": "tp_attn",
    "nvlink_bandwidth": "nic_bandwidth",
    "flops": "hbm_bandwidth",
    "q_heads": "kv_heads",
    "minimum": "maximum",
    "min": "max",
    "ceil": "floor",
    "argmin": "argmax",
    "any": "all",
    "sum": "max",
    "cumsum": "cumprod",
    "left": "right",
}
TWINS |= {new: old for old, new in TWINS.items() if new not in TWINS}
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One expression replaced by another."""

    path: Path  # inside the package
    function: str
    line: int
    start: int  # characters from the beginning of the file [1]
    end: int  # the same [1]
    old: str
    new: str
    around: str  # the line that it stands in

    def planted(self, text: str) -> str:
        """The text of the file with the fault in it."""
        assert text[self.start : self.end] == self.old
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.old} -> {self.new} in `{self.around}`"


def faults_of(package: Path) -> Iterator[tuple[str, Fault]]:
    """Every possible fault with its room."""
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if (room := room_of(place)) in ROOMS:
            text = path.read_text()
            for fault in _faults(ast.parse(text), text, place, ""):
                yield room, fault


def room_of(place: Path) -> str:
    """The room of a file; of a technique that which the first word of the file names."""
    if place.parts[0] != "techniques":
        return place.parts[0]
    word = place.stem.split("_")[0]
    return OF_A_TECHNIQUE.get(word, word)


def chosen(package: Path, count: int, seed: int, within: str = "") -> list[Fault]:
    """``count`` faults, at most one a function: by room as ``ROOMS`` says, or all from a folder or file."""
    first: dict[str, dict[str, tuple[str, Fault]]] = {room: {} for room in ROOMS}
    for room, fault in faults_of(package):
        if not fault.path.is_relative_to(within):
            continue
        said = f"{seed} {fault.function} {fault.old} {fault.new} {fault.around}"
        ranked = (hashlib.sha256(said.encode()).hexdigest(), fault)
        kept = first[room].get(fault.function)
        if kept is None or ranked[0] < kept[0]:
            first[room][fault.function] = ranked
    planted = []
    for room, share in ROOMS.items():
        ordered = [fault for _, fault in sorted(first[room].values(), key=lambda each: each[0])]
        planted += ordered if within else ordered[: round(count * share)]
    return planted[:count]


def _faults(node: ast.AST, text: str, path: Path, function: str) -> Iterator[Fault]:
    """Faults in a node and below; what is said, raised or annotated is left out."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        if (node.name.startswith("__") and node.name != "__post_init__") or node.name in ("refuse", "error_with_place"):
            return
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
        return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("option", "whole_number", "quantity", "TypeVar"):
        return
    yield from _own_faults(node, text, path, function)
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_comment"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_doc(child):
                yield from _faults(child, text, path, function)


def _is_doc(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _own_faults(node: ast.AST, text: str, path: Path, function: str) -> Iterator[Fault]:
    starts = _line_starts(text)

    def at(line: int, column: int) -> int:
        begun = starts[line - 1]
        return begun + len(text[begun:].split("\n", 1)[0].encode()[:column].decode())

    def fault(line: int, start: int, old: str, new: str) -> Fault:
        around = text[starts[line - 1] :].split("\n", 1)[0].strip()
        return Fault(path, function or "module", line, start, start + len(old), old, new, around)

    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            new = repr(value + ONE) if isinstance(value, int) else f"{(value or ONE) * TENTH:.12g}"
            yield fault(node.lineno, start, text[start:end], new)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield from _between(text, at, fault, left, right, *OPERATORS[type(op)])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            yield from _between(text, at, fault, left, right, *OPERATORS[type(op)])
        case ast.BoolOp(op=op, values=[left, right]):
            yield from _between(text, at, fault, left, right, *OPERATORS[type(op)])
        case ast.Attribute(attr=name) if name in TWINS:
            end = at(node.end_lineno or 0, node.end_col_offset or 0)
            yield fault(node.end_lineno or 0, end - len(name), name, TWINS[name])
        case ast.Name(id=name, ctx=ast.Load()) if name in TWINS:
            yield fault(node.lineno, at(node.lineno, node.col_offset), name, TWINS[name])


@cache
def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _between(text, at, fault, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Fault]:
    """The fault of an operator, which stands between its two sides."""
    begin = at(left.end_lineno, left.end_col_offset)
    end = at(right.lineno, right.col_offset)
    gap = text[begin:end]
    if gap.count(old) == 1 and "#" not in gap:
        yield fault(left.end_lineno, begin + gap.index(old), old, new)
