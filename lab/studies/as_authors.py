"""Judge claims of a paper as its authors set them up: engine, loop, sizes and rules, with what they leave open.

``claims.csv`` has a claim in the setting of this project: its default engine, tuned baselines, rules mended.
``AsAuthors`` is the same claim in the paper's: where it stands, what was measured there, the number of the paper, what
is inferred where the paper is silent, and an acceptance that was set before the run. ``as_authors.csv`` has both
verdicts of a claim; ``docs/studies/`` keeps that of the run whose verdicts a page shows.

>>> from lab.studies.claims import DERIVED, claim
>>> @claim("T1", kind=DERIVED, statement="twice two is four", acceptance="exact")
... def twice(two: float) -> Finding:
...     return Finding(f"{2 * two:g}", 2 * two == 4, "")
>>> both = AsAuthors(twice, place="2.1", setting="by hand", paper="4")
>>> ours = pd.DataFrame([{"id": "T1", "value": "5", "verdict": "fails", "note": "by hand"}])
>>> row = evaluate_as_authors([both], {"by head": 2.0}, ours)
>>> row.loc[0, ["verdict", "our_verdict"]].tolist()
['holds', 'fails']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import pandas as pd

from lab.studies.claims import Claim, Evidence, Finding, PaperText, Verdict

if TYPE_CHECKING:
    from disagg_sim.sweep.store import RunListener

#: Columns of ``as_authors.csv``.
COLUMNS = (
    *("id", "statement", "place", "setting", "paper", "inferred", "engine", "acceptance", "value", "verdict"),
    *("second_reading", "why", "note", "our_acceptance", "our_value", "our_verdict", "our_note"),
)

#: What a claim has in the setting of its paper, beside its judge.
TOLD = ("statement", "place", "setting", "paper", "inferred", "acceptance", "why")
#: Verdicts that need no reason.
GOOD = (Verdict.HOLDS, Verdict.BY_CONSTRUCTION)


@dataclass
class AsAuthors(Generic[Evidence]):
    """A claim in the setting of its paper; without ``judge`` it is judged as the claim is, by the rules as printed."""

    claim: Claim[Evidence]
    place: str  # section, figure
    setting: str  # what was measured, and on what
    paper: str  # its numbers
    statement: str = ""  # in the paper's words, where the claim goes beyond them
    inferred: str = ""  # of the setting, where the paper is silent
    acceptance: str = ""
    judge: Callable[[Evidence], Finding] | None = None
    why: str = ""  # of a verdict other than "holds", one sentence
    judged: bool = True  # False: what decides it is not to be had

    def __post_init__(self) -> None:
        """Take from the claim what the paper's setting leaves as it is."""
        self.statement = self.statement or self.claim.statement
        self.acceptance = self.acceptance or self.claim.acceptance

    def __call__(self, evidence: Evidence) -> Finding:
        """Judge the claim; a second reading of the paper is its ``without``."""
        if self.judge is not None:
            return self.judge(evidence)
        found = self.claim(evidence)
        return found if found.without is None else Finding(found.without.value, found.without.holds, found.note)

    def verdict(self, found: Finding) -> Verdict:
        """What a finding comes to."""
        return found.verdict(Verdict.READING, by_construction=self.claim.by_construction)


def as_authors(
    text: PaperText, claims: Iterable[Claim[Evidence]], judges: Mapping[str, Callable[[Evidence], Finding]]
) -> tuple[AsAuthors[Evidence], ...]:
    """Put claims into the setting of their paper; ``judges`` are those, by number, that are not the claims' own."""
    return tuple(AsAuthors(each, judge=judges.get(each.id), **text.authors(each.id)) for each in claims)


def evaluate_as_authors(
    claims: Iterable[AsAuthors[Evidence]],
    evidence: Mapping[str, Evidence],
    ours: pd.DataFrame,
    listener: RunListener | None = None,
) -> pd.DataFrame:
    """Judge claims on the engines of a paper's authors, beside this project's verdicts.

    Takes ``ours`` (a row a claim, with ``id``, ``value``, ``verdict`` and ``note``). Returns columns ``COLUMNS``; a row
    a claim and engine.
    """
    own = ours.set_index("id")
    rows = []
    for each in claims:
        said = own.loc[each.claim.id]
        about = {
            "id": each.claim.id,
            **{name: getattr(each, name) for name in TOLD},
            **{f"our_{name}": said[name] for name in ("value", "verdict", "note")},
            "our_acceptance": each.claim.acceptance,
        }
        if not each.judged:
            rows.append(about | {"engine": "", "value": "", "verdict": Verdict.NOT_JUDGED, "without": "", "note": ""})
        for engine, seen in evidence.items() if each.judged else ():
            found = each(seen)
            rows.append(about | {"engine": engine, "verdict": each.verdict(found)} | found.texts)
        if listener is not None:
            listener.advance(1)
    return pd.DataFrame(rows).rename(columns={"without": "second_reading"}).reindex(columns=list(COLUMNS))


def verdict_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Lay out both verdicts of each claim: id, claim, as its authors set it up, ours, and why one is not "holds"."""
    rows: list[tuple[str, ...]] = []
    for name, part in table.fillna("").groupby("id", sort=False):
        row = part.iloc[0]
        verdicts = set(part["verdict"])
        verdict = verdicts.pop() if len(verdicts) == 1 else _by_engine(part, "verdict")
        why = row["why"] if set(part["verdict"]) - set(GOOD) else ""
        if not why and row["our_verdict"] not in GOOD:
            why = row["our_note"]
        rows.append((str(name), row["statement"], verdict, row["our_verdict"], why))
    return rows


def detail_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Lay out what a verdict rests on: id, place and setting, inferred, the paper, here, accepted; ours, accepted."""
    rows: list[tuple[str, ...]] = []
    for name, part in table.fillna("").groupby("id", sort=False):
        row = part.iloc[0]
        here = _by_engine(part, "value")
        seconds = _by_engine(part[part["second_reading"] != ""], "second_reading")
        here += f"; second reading: {seconds}" if seconds else ""
        about = (str(name), f"{row['place']}: {row['setting']}", row["inferred"], row["paper"], here, row["acceptance"])
        rows.append((*about, row["our_value"], row["our_acceptance"]))
    return rows


def _by_engine(part: pd.DataFrame, column: str) -> str:
    """What each engine came to, in one cell."""
    begins = [f"{engine}: " if len(part) > 1 else "" for engine in part["engine"]]
    return "; ".join(begin + said for begin, said in zip(begins, part[column], strict=True) if said)
