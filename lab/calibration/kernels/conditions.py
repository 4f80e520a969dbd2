"""Read conditions on the rows of a table: comparisons joined by ``and``, which never run.

``system == 'h100' and m*n >= 5e11 and dtype not in ['fp8', 'bf16']``: columns of words are compared with texts by
``==``, ``!=`` and ``in``, columns of numbers, or products of them, with numbers.
"""

from __future__ import annotations

import ast
import re
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
    "comparisons joined by and"
)
#: Longest condition. [1]
LONGEST = 2000
_ORDER: dict[str, Callable[[Any, Any], Any]] = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}
_WORD_SIGNS = ("==", "!=", "in", "not in")
_COMPARISON = re.compile(r"\s*([^=!<>]*?)\s*(==|!=|<=|>=|<|>|\bnot\s+in\b|\bin\b)\s*(.*?)\s*", flags=re.DOTALL)


class ConditionError(DisaggSimError):
    """A faulty condition: the text found, and what is allowed there."""


def parse_condition(text: str, *, words: Collection[str], numbers: Collection[str]) -> Condition:
    """A condition from its text; columns of ``words`` hold texts, columns of ``numbers`` numbers."""
    if len(text) > LONGEST:
        raise ConditionError(f"it has {len(text)} characters; allowed: up to {LONGEST}")
    parts = [_comparison(part, words, numbers) for part in re.split(r"\band\b", text)]
    return lambda rows: np.logical_and.reduce([part(rows) for part in parts])


def _comparison(text: str, words: Collection[str], numbers: Collection[str]) -> Condition:
    """One comparison of a column, or of a product of columns."""
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise ConditionError(f"{quoted(text.strip())} stands where a comparison is allowed")
    left, sign, right = found[1], " ".join(found[2].split()), found[3]
    columns = [name.strip() for name in left.split("*")]
    known = sorted({*words, *numbers})
    for name in columns:
        if name not in known:
            raise ConditionError(f"no column {quoted(name)}{nearest(name, known)}; columns: {', '.join(known)}")
        if name in words and len(columns) > 1:
            raise ConditionError(f"column {name!r} holds words, and only numbers can be multiplied")
    wordy = columns[0] in words
    if wordy and sign not in _WORD_SIGNS:
        raise ConditionError(f"column {columns[0]!r} holds words; allowed: ==, != and in")
    literal = _literal(right, wordy=wordy, several=sign not in _ORDER)

    def holds(rows: pd.DataFrame) -> Marks:
        if wordy:
            value: Any = rows[columns[0]].to_numpy(dtype=object)
        else:
            with np.errstate(over="ignore"):  # as floats: a product of large sizes does not wrap around
                value = np.prod([rows[each].to_numpy(float) for each in columns], axis=0)
        if sign in _ORDER:
            return np.asarray(_ORDER[sign](value, literal), dtype=np.bool_)
        return np.asarray(pd.Series(value).isin(literal) == (sign == "in"))

    return holds


def _literal(text: str, *, wordy: bool, several: bool) -> Any:
    """A text or a number, or a list of such, as the column holds them."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    values = value if several and isinstance(value, list) and value else [] if several else [value]
    kinds = str if wordy else int | float
    if values and all(isinstance(each, kinds) and not isinstance(each, bool) for each in values):
        if wordy:
            return value
        if all(abs(each) <= float_info.max for each in values):
            return [float(each) for each in values] if several else float(value)
    wanted = "a text in quotation marks" if wordy else "a number"
    raise ConditionError(f"{quoted(text)} stands where {'a list of such: ' * several}{wanted} is allowed")
