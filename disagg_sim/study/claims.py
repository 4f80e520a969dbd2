"""Register claims of a paper: the statement, when it counts as reproduced, and the function that tests it.

``claim`` turns an evaluator into a ``Claim``, so that text, acceptance and evaluator stand together:

>>> @claim("T1", kind=DERIVED, statement="twice two is four", acceptance="exact")
... def twice_two(two: float) -> Finding:
...     return Finding(f"{2 * two:g}", 2 * two == 4, "")
>>> evaluate([twice_two], {"measured": 2.0}).to_dict("records")[0]["holds"]
True

Nothing is tuned for a claim: a miss stands with the number that explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, NamedTuple, Protocol, TypeVar

import pandas as pd

#: Columns of ``claims.csv``.
COLUMNS = ("id", "statement", "kind", "profile", "value", "acceptance", "holds", "note")
#: Where a claim comes from: a paper's text, its pictures, its equations, or a reading of this project's own.
PAPER, FIGURE, DERIVED, OWN = "paper", "figure", "derived", "own"

#: What the evaluators of a paper look at.
Evidence = TypeVar("Evidence")


class Finding(NamedTuple):
    """What an evaluator found."""

    value: str  # the numbers that the acceptance speaks of
    holds: bool
    note: str  # what stands beside them, and what a miss comes from; "stand-in: ..." where data is not the paper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[Evidence]):
    """A claim, its acceptance, and the function that tests it; calling the claim tests it."""

    id: str  # a letter of the paper and a number
    kind: str  # of ``PAPER``, ``FIGURE``, ``DERIVED``, ``OWN``, or two of them
    statement: str
    acceptance: str
    judge: Callable[[Evidence], Finding]

    def __call__(self, evidence: Evidence) -> Finding:
        """Judge the claim."""
        return self.judge(evidence)


class Progress(Protocol):
    """Listener that learns how many claims have been tested."""

    def advance(self, points: int) -> None:
        """So many more."""


def claim(
    name: str, *, kind: str, statement: str, acceptance: str
) -> Callable[[Callable[[Evidence], Finding]], Claim[Evidence]]:
    """Make the decorated evaluator a ``Claim``.

    Parameters
    ----------
    name : str
        A letter of the paper and a number, such as ``"C12"``: claims come in the order of their numbers.
    kind : str
        Of ``PAPER``, ``FIGURE``, ``DERIVED``, ``OWN``, or two of them.
    statement : str
        What is claimed.
    acceptance : str
        When the claim counts as reproduced.
    """
    return lambda judge: Claim(id=name, kind=kind, statement=statement, acceptance=acceptance, judge=judge)


def claims_of(*modules: ModuleType) -> tuple[Claim[Evidence], ...]:
    """Collect the claims of some modules in the order of their numbers."""
    found = {each.id: each for module in modules for each in vars(module).values() if isinstance(each, Claim)}
    return tuple(sorted(found.values(), key=lambda each: int(each.id[1:])))


def evaluate(
    claims: Iterable[Claim[Evidence]], evidence: Mapping[str, Evidence], listener: Progress | None = None
) -> pd.DataFrame:
    """Judge every claim under every profile.

    Parameters
    ----------
    claims : iterable of Claim
        The claims of a paper.
    evidence : mapping of str to Evidence
        What their evaluators look at, by efficiency profile.
    listener : Progress, optional
        Told of each claim.

    Returns
    -------
    DataFrame
        Columns ``COLUMNS``; a row per claim and profile, in order of claims.
    """
    rows = []
    for each in claims:
        about = {"id": each.id, "statement": each.statement, "kind": each.kind, "acceptance": each.acceptance}
        rows += [about | {"profile": profile} | each(seen)._asdict() for profile, seen in evidence.items()]
        if listener is not None:
            listener.advance(1)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def holding(claims: pd.DataFrame) -> pd.DataFrame:
    """Count the claims that hold under each profile.

    Parameters
    ----------
    claims
        As ``evaluate`` returns them: columns ``COLUMNS``.

    Returns
    -------
    DataFrame
        A row a profile: ``profile``, ``holds`` and ``of`` (counts) [1], ``misses`` (their ids).

    Examples
    --------
    >>> claims = pd.DataFrame({"profile": "measured", "id": ["C1", "C2", "C3"], "holds": [True, False, True]})
    >>> holding(claims).values.tolist()
    [['measured', 2, 3, 'C2']]
    """
    rows = [
        {
            "profile": profile,
            "holds": int(part["holds"].sum()),
            "of": len(part),
            "misses": " ".join(part.loc[~part["holds"].astype(bool), "id"]),
        }
        for profile, part in claims.groupby("profile", sort=False)
    ]
    return pd.DataFrame(rows)
