"""Read conditions on the rows of a table: expressions that Python's parser reads into a tree, and that never run.

``system == 'h100' and m*n >= 5e11``, ``dtype not in ['fp8', 'bf16']``: columns of words are compared with texts by
``==``, ``!=`` and ``in``, columns of numbers, or products of them, with numbers.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Collection
from operator import eq, ge, gt, le, lt, ne
from sys import float_info
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import DisaggSimError, nearest, quoted

Marks = NDArray[np.bool_]
#: Says whether each row fulfils a condition, (rows,).
Condition = Callable[[pd.DataFrame], Marks]

#: What a condition may be made of, for messages.
ALLOWED = (
    "columns compared by ==, !=, <, <=, >, >= with a number or a quoted text, or by in [...]; columns multiplied by *; "
    "and, or, not, ( )"
)
#: Longest condition, and how deep its parentheses and ``not`` may stand in each other. [1]
LONGEST, DEEPEST = 2000, 50
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}


class ConditionError(DisaggSimError):
    """A faulty condition: the text found, its place, and what is allowed there."""


def parse_condition(text: str, *, words: Collection[str], numbers: Collection[str]) -> Condition:
    """A condition from its text; columns of ``words`` hold texts, columns of ``numbers`` numbers."""
    if len(text) > LONGEST:
        raise ConditionError(f"it has {len(text)} characters; allowed: up to {LONGEST}")
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(text.strip(" \t"), mode="eval").body
    except SyntaxError as error:
        raise ConditionError(f"character {error.offset or 1}: {quoted(text)} is not understood") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConditionError(f"{quoted(text)} is not understood") from None
    return _Reader(text.strip(" \t"), frozenset(words), frozenset(numbers)).condition(tree)


class _Reader:
    """Makes a condition of a tree."""

    def __init__(self, text: str, words: frozenset[str], numbers: frozenset[str]) -> None:
        self.text, self.words, self.numbers = text, words, numbers

    def condition(self, node: ast.expr, depth: int = 0) -> Condition:
        if depth > DEEPEST:
            raise ConditionError(f"more than {DEEPEST} levels of 'not' and parentheses")
        if isinstance(node, ast.BoolOp):
            parts, joined = [self.condition(each, depth + 1) for each in node.values], np.all  # noqa: PD011
            if isinstance(node.op, ast.Or):
                joined = np.any
            return lambda rows: np.asarray(joined([part(rows) for part in parts], axis=0))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self.condition(node.operand, depth + 1)
            return lambda rows: np.logical_not(part(rows))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.comparison(self.columns(node.left), node.ops[0], node.comparators[0])
        raise self.refused(node, "a comparison")

    def comparison(self, columns: tuple[str, ...], sign: ast.cmpop, right: ast.expr) -> Condition:
        wordy = columns[0] in self.words
        if isinstance(sign, ast.In | ast.NotIn):
            if len(columns) > 1:
                raise ConditionError("a product cannot be compared by 'in'")
            if not isinstance(right, ast.List) or not right.elts:
                raise self.refused(right, "a list such as [1, 2]")
            known = [self.literal(each, columns[0]) for each in right.elts]
            found = isinstance(sign, ast.In)
            return lambda rows: np.asarray(rows[columns[0]].isin(known) == found)
        if type(sign) not in _ORDER or (wordy and not isinstance(sign, ast.Eq | ast.NotEq)):
            allowed = "==, != and in" if wordy else "==, !=, <, <=, >, >= or in"
            raise ConditionError(f"column {columns[0]!r} holds {'words' if wordy else 'numbers'}; allowed: {allowed}")
        literal, compare = self.literal(right, columns[0]), _ORDER[type(sign)]

        def holds(rows: pd.DataFrame) -> Marks:
            if wordy:
                return np.asarray(compare(rows[columns[0]].to_numpy(dtype=object), literal), dtype=np.bool_)
            with np.errstate(over="ignore"):  # as floats: a product of large sizes does not wrap around
                return np.asarray(compare(np.prod([rows[each].to_numpy(float) for each in columns], axis=0), literal))

        return holds

    def columns(self, node: ast.expr) -> tuple[str, ...]:
        """Names of a column, or of a product of columns."""
        names: list[str] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            names += self.columns(node.right)
            node = node.left
        if not isinstance(node, ast.Name):
            raise self.refused(node, "a column")
        if node.id not in (known := sorted(self.words | self.numbers)):
            near = f"{nearest(node.id, known)}; columns: {', '.join(known)}"
            raise ConditionError(f"character {node.col_offset + 1}: no column {quoted(node.id)}{near}")
        names.append(node.id)
        if len(names) > 1 and (wordy := [each for each in names if each in self.words]):
            raise ConditionError(f"column {wordy[0]!r} holds words, and only numbers can be multiplied")
        return tuple(names)

    def literal(self, node: ast.expr, column: str) -> float | str:
        """A text or a number, as the column holds them."""
        sign, inner = 1.0, node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign, inner = -1.0 if isinstance(node.op, ast.USub) else 1.0, node.operand
        value = inner.value if isinstance(inner, ast.Constant) else None
        if column in self.words and isinstance(value, str) and inner is node:
            return value
        held = column in self.numbers and not isinstance(value, bool)
        if held and isinstance(value, int | float) and abs(value) <= float_info.max:
            return sign * float(value)
        raise self.refused(node, "a text in quotation marks" if column in self.words else "a number")

    def refused(self, node: ast.expr, wanted: str) -> ConditionError:
        found = quoted(ast.get_source_segment(self.text, node) or self.text)
        return ConditionError(f"character {node.col_offset + 1}: {found} stands where {wanted} is allowed")
