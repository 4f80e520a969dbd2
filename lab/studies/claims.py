"""Register claims of a paper: the statement, when it counts as reproduced, and the function that tests it.

``claims.csv`` has a claim in the setting of this project: its default engine, tuned baselines, rules mended. It counts
as reproduced only if it could have failed, and does not need a rule that the paper does not have: see ``Verdict``. What
a miss comes from is told in one sentence (``why``); beside a value stand the numbers that a page tells.

``AsAuthors`` is the same claim as the authors of the paper set it up: where it stands, what was measured there, the
number of the paper, what is inferred where the paper is silent, and an acceptance that was set before the run.
``as_authors.csv`` has both verdicts of a claim; ``docs/studies/`` keeps that of the run whose verdicts a page shows.

>>> claim = Claim(id="T1", kind="derived", statement="twice two is four", acceptance="exact",
...     judge=lambda two: Finding(f"{2 * two:g}", 2 * two == 4, ""))
>>> evaluate([claim], {"measured": 2.0}).to_dict("records")[0]["verdict"]
'holds'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, wraps
from importlib import import_module
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import pandas as pd

from disagg_sim.facts.yaml_files import read_mapping

if TYPE_CHECKING:
    from disagg_sim.sweep.store import RunListener

#: Columns of ``claims.csv`` and of ``as_authors.csv``.
COLUMNS = ("id", "statement", "kind", "profile", "value", "acceptance", "verdict", "without", "note")
BOTH_COLUMNS = (
    *("id", "statement", "place", "setting", "paper", "inferred", "engine", "acceptance", "value", "verdict"),
    *("second_reading", "why", "note", "our_acceptance", "our_value", "our_verdict", "our_note"),
)

#: What a claim has in the setting of its paper, beside its judge.
TOLD = ("statement", "place", "setting", "paper", "inferred", "acceptance", "why")

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


#: Verdicts that need no reason.
GOOD = (Verdict.HOLDS, Verdict.BY_CONSTRUCTION)


class Without(NamedTuple):
    """The same claim without a rule or a cap that this project adds to the paper's."""

    rule: str  # how it is without: "requests that wait do not count, as printed"
    value: str  # the numbers that the acceptance speaks of
    holds: bool


class Finding(NamedTuple):
    """What an evaluator found."""

    value: str  # the numbers that the acceptance speaks of
    holds: bool
    note: str = ""  # numbers that a page tells beside them; "stand-in: ..." where data is not the paper's
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


class Ways(NamedTuple):
    """Two ways in which a claim is judged: an argument of its judge, first as we have it, then as ``rule`` says."""

    ours: Any
    theirs: Any
    rule: str


Judge = TypeVar("Judge", bound=Callable[..., Any])
#: What a judge says: value, whether it holds, and where there are some, numbers beside them.
Told = tuple[str, bool] | tuple[str, bool, str]


def finding(
    judge: Callable[..., Told | Finding], *, ways: Ways | None = None, data: Sequence[str] = (), **given: Any
) -> Callable[[Any], Finding]:
    """Make of a judge with the arguments ``given`` one of evidence alone, in both ways, with the stand-ins of ``data``
    noted.
    """

    def found(evidence: Any) -> Finding:
        first, *others = [judge(evidence, way, **given) for way in ways[:2]] if ways else [judge(evidence, **given)]
        result = Finding(*first)
        for value, holds, *_ in others:
            result = result._replace(without=Without(ways.rule if ways else "", value, holds))
        return result._replace(note=f"{evidence.stand_ins(*data)}{result.note}") if data else result

    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[Evidence]):
    """A claim, its acceptance, and the function that tests it; calling the claim tests it."""

    id: str  # a letter of the paper and a number
    kind: str  # where it comes from, one or two of: "paper" (its text), "figure", "derived" (its equations), "own"
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


class PaperText:
    """The claims of a paper: words in ``claims.yaml`` beside its code, functions that test them under decorators.

    A claim of the file has a statement, an acceptance, a kind (without one: "paper"), and under ``authors`` the fields
    of ``AsAuthors``. A phrase that several texts use is one of ``words``; texts name it in braces.
    """

    def __init__(self, package: str) -> None:
        self._package, self._folder = package, Path(str(files(package)))
        self._claims: dict[str, Claim[Any]] = {}
        self._judges: dict[str, Callable[[Any], Finding]] = {}

    @cached_property
    def _table(self) -> dict[str, Any]:
        return read_mapping(self._folder / "claims.yaml")

    def _filled(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        words = self._table.get("words", {})
        return {key: text.format(**words) if isinstance(text, str) else text for key, text in texts.items()}

    def claim(self, name: str, /, **settings: Any) -> Callable[[Callable[..., Told | Finding]], Claim[Any]]:
        """Make the decorated judge, under the settings of ``finding``, the claim of a number."""
        texts = {"kind": "paper"} | self._filled(self._table["claims"][name])
        del texts["authors"]

        def registered(judge: Callable[..., Told | Finding]) -> Claim[Any]:
            made = self._claims[name] = Claim(id=name, judge=finding(judge, **settings), **texts)
            return made

        return registered

    def authors(self, name: str, /, **settings: Any) -> Callable[[Judge], Judge]:
        """Let the decorated judge test a claim as its authors set it up, in place of the judge of the claim."""

        def registered(judge: Judge) -> Judge:
            self._judges[name] = finding(judge, **settings)
            return judge

        return registered

    @property
    def claims(self) -> tuple[Claim[Any], ...]:
        """The claims of the package, in the order of their numbers."""
        for path in self._folder.glob("*.py"):
            if path.stem.startswith("claims"):
                import_module(f"{self._package}.{path.stem}")
        return tuple(sorted(self._claims.values(), key=lambda each: int(each.id[1:])))

    @property
    def as_authors(self) -> tuple[AsAuthors[Any], ...]:
        """The same in the setting of their paper."""
        texts = {each: self._filled(self._table["claims"][each.id]["authors"]) for each in self.claims}
        return tuple(AsAuthors(each, judge=self._judges.get(each.id), **text) for each, text in texts.items())


def evaluate(
    claims: Iterable[Claim[Evidence]], evidence: Mapping[str, Evidence], listener: RunListener | None = None
) -> pd.DataFrame:
    """Judge every claim under every profile: ``COLUMNS``, a row per claim and profile, in order of claims."""
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
    """Count the claims that hold under each profile of those not by construction; list the ids of all others."""
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


def evaluate_as_authors(
    claims: Iterable[AsAuthors[Evidence]],
    evidence: Mapping[str, Evidence],
    ours: pd.DataFrame,
    listener: RunListener | None = None,
) -> pd.DataFrame:
    """Judge claims on the engines of a paper's authors, beside this project's verdicts (``ours``, a row a claim):
    ``BOTH_COLUMNS``, a row a claim and engine.
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
    return pd.DataFrame(rows).rename(columns={"without": "second_reading"}).reindex(columns=list(BOTH_COLUMNS))


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


Kept = TypeVar("Kept")
Method = TypeVar("Method", bound=Callable[..., Any])


class Keeping:
    """Whatever a study computes, each once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], compute: Callable[[], Kept]) -> Kept:
        """Return what was kept under a key; compute it the first time."""
        if key not in self._kept:
            self._kept[key] = compute()
        found: Kept = self._kept[key]
        return found


def kept(method: Method) -> Method:
    """Compute what a method of ``Keeping`` gives once for each of its arguments."""
    sign = signature(method)

    @wraps(method)
    def found(self: Keeping, *given: Any, **named: Any) -> Any:
        bound = sign.bind(self, *given, **named)
        bound.apply_defaults()
        key = (method.__qualname__, *list(bound.arguments.values())[1:])
        return self.once(key, lambda: method(self, *given, **named))

    return found  # type: ignore[return-value]
