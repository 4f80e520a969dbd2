"""Register claims of a paper: the statement, when it counts as reproduced, and the function that tests it.

``claim`` turns an evaluator into a ``Claim``, so that text, acceptance and evaluator stand together:

>>> @claim("T1", kind=DERIVED, statement="twice two is four", acceptance="exact")
... def twice_two(two: float) -> Finding:
...     return Finding(f"{2 * two:g}", 2 * two == 4, "")
>>> evaluate([twice_two], {"measured": 2.0}).to_dict("records")[0]["verdict"]
'holds'

A claim counts as reproduced only if it could have failed, and does not need a rule that the paper does not have: see
``Verdict``. A miss stands with the number that explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import pandas as pd

from disagg_sim.facts.yaml_files import read_mapping

if TYPE_CHECKING:
    from disagg_sim.sweep.store import RunListener

#: Columns of ``claims.csv``.
COLUMNS = ("id", "statement", "kind", "profile", "value", "acceptance", "verdict", "without", "note")
#: Where a claim comes from: a paper's text, its pictures, its equations, or a reading of this project's own.
PAPER, FIGURE, DERIVED, OWN = "paper", "figure", "derived", "own"

#: What the evaluators of a paper look at.
Evidence = TypeVar("Evidence")


class Verdict(StrEnum):
    """What a claim comes to; the words of ``claims.csv``."""

    HOLDS = "holds"
    FAILS = "fails"
    #: With a rule or a cap that this project adds the answer is another than without it.
    ADDED_RULE = "rests on an added rule"
    #: An identity of the equations, or of the code under test: no run could have refuted it.
    BY_CONSTRUCTION = "by construction"
    #: The paper's words, or what it leaves open, can be read in two ways that give two answers.
    READING = "rests on a reading"
    #: What decides it is not to be had: an engine, a distribution, a file.
    NOT_JUDGED = "not to be judged"


class Without(NamedTuple):
    """The same claim without a rule or a cap that this project adds to the paper's."""

    rule: str  # how it is without: "requests that wait do not count, as printed"
    value: str  # the numbers that the acceptance speaks of
    holds: bool


class Finding(NamedTuple):
    """What an evaluator found."""

    value: str  # the numbers that the acceptance speaks of
    holds: bool
    note: str  # what stands beside them, and what a miss comes from; "stand-in: ..." where data is not the paper's
    without: Without | None = None  # of a claim that uses an added rule

    def verdict(self, otherwise: Verdict, *, by_construction: bool) -> Verdict:
        """What it comes to; ``otherwise`` where the second finding is another."""
        if self.without is not None and self.holds != self.without.holds:
            return otherwise
        if not self.holds:
            return Verdict.FAILS
        return Verdict.BY_CONSTRUCTION if by_construction else Verdict.HOLDS

    @property
    def texts(self) -> dict[str, str]:
        """Its columns in a table: ``value``, ``without`` and ``note``."""
        other = self.without
        without = "" if other is None else f"{other.rule}: {other.value}; {'holds' if other.holds else 'fails'}"
        return {"value": self.value, "without": without, "note": self.note}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[Evidence]):
    """A claim, its acceptance, and the function that tests it; calling the claim tests it."""

    id: str  # a letter of the paper and a number
    kind: str  # of ``PAPER``, ``FIGURE``, ``DERIVED``, ``OWN``, or two of them
    statement: str
    acceptance: str
    judge: Callable[[Evidence], Finding]
    by_construction: bool = False

    def verdict(self, found: Finding) -> Verdict:
        """What a finding on this claim comes to."""
        return found.verdict(Verdict.ADDED_RULE, by_construction=self.by_construction)

    def __call__(self, evidence: Evidence) -> Finding:
        """Judge the claim."""
        return self.judge(evidence)


def claim(
    name: str, *, kind: str, statement: str, acceptance: str, by_construction: bool = False
) -> Callable[[Callable[[Evidence], Finding]], Claim[Evidence]]:
    """Make the decorated evaluator a ``Claim``.

    Takes ``kind`` (of ``PAPER``, ``FIGURE``, ``DERIVED``, ``OWN``, or two of them).
    """

    def registered(judge: Callable[[Evidence], Finding]) -> Claim[Evidence]:
        return Claim(
            id=name, kind=kind, statement=statement, acceptance=acceptance, judge=judge, by_construction=by_construction
        )

    return registered


class PaperText:
    """The claims of a paper in words: ``claims.yaml`` beside the code that tests them.

    A claim has its statement, acceptance and kind, ``PAPER`` where none is told, and under ``authors`` what
    ``AsAuthors`` takes. Phrases that several texts use are ``words``, and stand in braces where they are used.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "claims.yaml"

    @cached_property
    def _table(self) -> dict[str, Any]:
        return read_mapping(self._file)

    def _filled(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        words = self._table.get("words", {})
        return {key: text.format(**words) if isinstance(text, str) else text for key, text in texts.items()}

    def claim(self, name: str) -> Callable[[Callable[[Evidence], Finding]], Claim[Evidence]]:
        """Make the decorated evaluator the claim of a number."""
        texts = {"kind": PAPER} | self._filled(self._table["claims"][name])
        return claim(name, **{key: text for key, text in texts.items() if key != "authors"})

    def authors(self, name: str) -> dict[str, Any]:
        """Take what the claim is in the setting of its paper."""
        return self._filled(self._table["claims"][name]["authors"])


def claims_of(*modules: ModuleType) -> tuple[Claim[Evidence], ...]:
    """Collect the claims of some modules in the order of their numbers."""
    found = {each.id: each for module in modules for each in vars(module).values() if isinstance(each, Claim)}
    return tuple(sorted(found.values(), key=lambda each: int(each.id[1:])))


def evaluate(
    claims: Iterable[Claim[Evidence]], evidence: Mapping[str, Evidence], listener: RunListener | None = None
) -> pd.DataFrame:
    """Judge every claim under every profile.

    Returns columns ``COLUMNS``; a row per claim and profile, in order of claims.
    """
    rows = []
    for each in claims:
        about = {"id": each.id, "statement": each.statement, "kind": each.kind, "acceptance": each.acceptance}
        for profile, seen in evidence.items():
            found = each(seen)
            rows.append(about | {"profile": profile, "verdict": str(each.verdict(found))} | found.texts)
        if listener is not None:
            listener.advance(1)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def holding(claims: pd.DataFrame) -> pd.DataFrame:
    """Count the claims that hold under each profile.

    Returns a row a profile: ``profile``; ``holds`` and ``of``, counts without those by construction [1]; the ids of all
    others: ``fails``, ``added_rule`` and ``by_construction``.
    """
    rows = []
    for profile, part in claims.groupby("profile", sort=False):
        ids = {verdict: part.loc[part["verdict"] == verdict, "id"] for verdict in Verdict}
        rows.append(
            {
                "profile": profile,
                "holds": len(ids[Verdict.HOLDS]),
                "of": len(part) - len(ids[Verdict.BY_CONSTRUCTION]),
                "fails": " ".join(ids[Verdict.FAILS]),
                "added_rule": " ".join(ids[Verdict.ADDED_RULE]),
                "by_construction": " ".join(ids[Verdict.BY_CONSTRUCTION]),
            }
        )
    return pd.DataFrame(rows)
