"""Parse conditions on the rows of a table: a small language, read into a tree, never run as code.

```text
condition   choice {"or" choice}
choice      term {"and" term}
term        "not" term  |  "(" condition ")"  |  comparison
comparison  product ("==" | "!=" | "<" | "<=" | ">" | ">=") literal
            column ["not"] "in" "[" literal {"," literal} "]"
product     column {"*" column}
literal     a number, or a text in quotation marks
```

A column of words is compared with texts by ``==``, ``!=`` and ``in``, a column of numbers with numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NoReturn, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import DisaggSimError, nearest, quoted

Marks = NDArray[np.bool_]
Literal = float | str

#: What a condition may be made of, for messages.
ALLOWED = (
    "columns compared by ==, !=, <, <=, >, >= with a number or a quoted text, or by in [...]; columns multiplied by *; "
    "and, or, not, ( )"
)
#: Longest condition, and how deep its parentheses and ``not`` may stand in each other. [1]
LONGEST, DEEPEST = 2000, 50
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))|(?P<text>'[^']*'|"[^"]*")"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<sign>==|!=|<=|>=|[<>()\[\],*]))""",
    re.ASCII,
)
_WORDS = frozenset({"and", "or", "not", "in"})


class ConditionError(DisaggSimError):
    """A faulty condition: the text found, its place, and what is allowed there."""


class Condition(Protocol):
    """A condition as a tree."""

    def holds(self, rows: pd.DataFrame) -> Marks:
        """Whether each row fulfils it, (rows,)."""
        ...


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of a column, or a product of columns, with a literal."""

    columns: tuple[str, ...]
    sign: str  # of ``COMPARISONS``
    literal: Literal

    def holds(self, rows: pd.DataFrame) -> Marks:
        """See ``Condition``."""
        if isinstance(self.literal, str):
            left: Any = rows[self.columns[0]].to_numpy(dtype=object)
        else:  # as floats: a product of large sizes does not wrap around; beyond them it is infinite
            with np.errstate(over="ignore"):
                left = np.prod([rows[column].to_numpy(dtype=np.float64) for column in self.columns], axis=0)
        return np.asarray(COMPARISONS[self.sign](left, self.literal), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of the parts at least."""

    parts: tuple[Condition, ...]

    def holds(self, rows: pd.DataFrame) -> Marks:
        """See ``Condition``."""
        return np.asarray(np.any([part.holds(rows) for part in self.parts], axis=0))


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part."""

    parts: tuple[Condition, ...]

    def holds(self, rows: pd.DataFrame) -> Marks:
        """See ``Condition``."""
        return np.asarray(np.all([part.holds(rows) for part in self.parts], axis=0))


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of the part."""

    part: Condition

    def holds(self, rows: pd.DataFrame) -> Marks:
        """See ``Condition``."""
        return np.logical_not(self.part.holds(rows))


def parse_condition(text: str, *, words: Collection[str], numbers: Collection[str]) -> Condition:
    """A condition as a tree.

    Parameters
    ----------
    text
        The condition.
    words, numbers
        Columns that hold texts, and columns that hold numbers.

    Raises
    ------
    ConditionError
        What is wrong, at which character of the text.
    """
    if len(text) > LONGEST:
        raise ConditionError(f"it has {len(text)} characters; allowed: up to {LONGEST}")
    return _Parser(_tokens(text), frozenset(words), frozenset(numbers)).whole()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "number", "text", "name", "sign", "end"
    text: str
    at: int  # character, from 1


def _tokens(text: str) -> list[_Token]:
    found, place = [], 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            at = place + len(text[place:]) - len(text[place:].lstrip())
            raise ConditionError(f"character {at + 1}: {quoted(text[at : at + 20])} is not understood")
        found.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1))
        place = match.end()
    return [*found, _Token("end", "", len(text) + 1)]


class _Parser:
    """Recursive-descent parser; each method reads the construct that it is named after."""

    def __init__(self, tokens: Sequence[_Token], words: frozenset[str], numbers: frozenset[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0
        self.words, self.numbers = words, numbers

    def whole(self) -> Condition:
        found = self.condition()
        if self.next.kind != "end":
            self.refuse("'and', 'or' or the end")
        return found

    def condition(self) -> Condition:
        parts = [self.choice()]
        while self.take("or"):
            parts.append(self.choice())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def choice(self) -> Condition:
        parts = [self.term()]
        while self.take("and"):
            parts.append(self.term())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def term(self) -> Condition:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ConditionError(f"character {self.next.at}: more than {DEEPEST} levels of 'not' and parentheses")
        found: Condition
        if self.take("not"):
            found = Not(self.term())
        elif self.take("("):
            found = self.condition()
            self.need(")")
        else:
            found = self.comparison()
        self.depth -= 1
        return found

    def comparison(self) -> Condition:
        columns = [self.column()]
        while self.take("*"):
            columns.append(self.column())
        if wordy := [column for column in columns if column in self.words and len(columns) > 1]:
            raise ConditionError(f"column {wordy[0]!r} holds words, and only numbers can be multiplied")
        negated = self.take("not")
        if negated or self.next.text == "in":
            self.need("in")
            if len(columns) > 1:
                raise ConditionError("a product cannot be compared by 'in'")
            member = AnyOf(tuple(Compared((columns[0],), "==", each) for each in self.members(columns[0])))
            return Not(member) if negated else member
        sign = self.next
        if sign.text not in COMPARISONS:
            self.refuse("==, !=, <, <=, >, >= or in")
        self.place += 1
        if columns[0] in self.words and sign.text not in ("==", "!="):
            raise ConditionError(
                f"character {sign.at}: column {columns[0]!r} holds words; allowed: ==, != and in, not {sign.text}"
            )
        return Compared(tuple(columns), sign.text, self.literal(columns[0]))

    def members(self, column: str) -> list[Literal]:
        self.need("[")
        found = [self.literal(column)]
        while self.take(","):
            found.append(self.literal(column))
        self.need("]")
        return found

    def column(self) -> str:
        token = self.next
        if token.kind != "name" or token.text in _WORDS:
            self.refuse("a column")
        known = sorted(self.words | self.numbers)
        if token.text not in known:
            near = nearest(token.text, known)
            raise ConditionError(
                f"character {token.at}: no column {quoted(token.text)}{near}; columns: {', '.join(known)}"
            )
        self.place += 1
        return token.text

    def literal(self, column: str) -> Literal:
        token, wanted = self.next, "text" if column in self.words else "number"
        if token.kind not in ("text", "number"):
            self.refuse("a text in quotation marks" if wanted == "text" else "a number")
        if token.kind != wanted:
            held = "words: write the value in quotation marks" if wanted == "text" else "numbers"
            raise ConditionError(f"character {token.at}: {token.text} next to column {column!r}, which holds {held}")
        self.place += 1
        return token.text[1:-1] if wanted == "text" else float(token.text)

    @property
    def next(self) -> _Token:
        return self.tokens[self.place]

    def take(self, text: str) -> bool:
        """Whether ``text`` comes next; it is then read."""
        token = self.next
        found = token.text == text and token.kind in ("name", "sign")
        self.place += found
        return found

    def need(self, text: str) -> None:
        if not self.take(text):
            self.refuse(repr(text))

    def refuse(self, wanted: str) -> NoReturn:
        token = self.next
        found = "the condition ends" if token.kind == "end" else f"{quoted(token.text)} stands"
        raise ConditionError(f"character {token.at}: {found} where {wanted} is allowed")
