"""Papers on serving policies: what running one leaves behind, and where each is found.

A module of this room that is named in ``HOMES`` has

    reproduce(out, *, traces, listener, quick) -> PaperResults

It writes figures with their data and ``claims.csv`` below ``out``, in the columns of the study of frontiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from disagg_sim.atomic import write_text
from disagg_sim.errors import InputError, UnknownNameError, nearest
from disagg_sim.report.panels import Picture, draw_picture
from disagg_sim.sweep.run import Listener
from disagg_sim.sweep.store import Store

if TYPE_CHECKING:
    import pandas as pd

#: Columns of ``claims.csv``.
COLUMNS = ("id", "statement", "kind", "profile", "value", "acceptance", "holds", "note")
#: Kinds of claims: said in a paper's text, following from its equations, or a reading of this project's own.
PAPER, DERIVED, OWN = "paper", "derived", "own"
#: Module of this room by paper.
HOMES = {"arrow": "arrow.experiments", "dopd": "dopd.experiments", "dynaserve": "dynaserve.experiments"}

Evidence = TypeVar("Evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim and when it counts as reproduced."""

    id: str
    statement: str
    kind: str  # of ``PAPER``, ``DERIVED``, ``OWN``
    acceptance: str


class Finding(NamedTuple):
    """What an evaluator found."""

    value: str  # the numbers that the acceptance speaks of
    holds: bool
    note: str  # what stands beside them, and what a miss comes from; "stand-in: ..." where data is not the paper's


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaperResults:
    """What was written."""

    claims: pd.DataFrame  # ``claims.csv``
    pictures: tuple[Path, ...]  # each with its data beside it, ``.csv``
    simulations: int  # runs of a trace through a deployment [1]


class Reproduction(Protocol):
    """All experiments of a paper."""

    def __call__(self, out: Path, *, traces: Path | None, listener: Listener, quick: bool) -> PaperResults:
        """Write figures and claims below ``out``.

        Parameters
        ----------
        out : Path
            Directory, made if need be.
        traces : Path, optional
            Directory of published traces; without it stand-ins are drawn, and the claims say so.
        listener : Listener
            Told how far it is.
        quick : bool
            Short samples, to see that it works: the verdicts mean little.
        """
        ...


def paper_names() -> tuple[str, ...]:
    """Papers that can be reproduced."""
    return tuple(HOMES)


def paper(name: str) -> Reproduction:
    """The experiments of a paper; ``UnknownNameError`` names the nearest."""
    if name not in HOMES:
        raise UnknownNameError(f"unknown paper {name!r}{nearest(name, HOMES)}; known: {', '.join(HOMES)}")
    found: Reproduction = import_module(f"disagg_sim.study.{HOMES[name]}").reproduce
    return found


def evaluate(
    claims: Mapping[Claim, Callable[[Evidence], Finding]],
    evidence: Evidence,
    profile: str,
    listener: Listener | None = None,
) -> pd.DataFrame:
    """Every claim, judged by its evaluator, as rows of ``claims.csv``; the listener hears of each."""
    import pandas as pd

    rows = []
    for claim, evaluator in claims.items():
        rows.append(asdict(claim) | {"profile": profile} | evaluator(evidence)._asdict())
        if listener is not None:
            listener.advance(1)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def prepare(out: Path) -> None:
    """Make the directory; ``StoreError`` when it cannot be written."""
    Store(out).prepare()


def write_claims(out: Path, claims: pd.DataFrame) -> None:
    """``claims.csv``."""
    write_text(out / "claims.csv", as_csv(claims))


def write_picture(out: Path, name: str, picture: Picture) -> Path:
    """A picture with its data beside it; the path of the picture."""
    path = out / f"{name}.png"
    write_text(path.with_suffix(".csv"), as_csv(picture.table))
    draw_picture(picture, path)
    return path


def as_csv(table: pd.DataFrame) -> str:
    """A table as text."""
    return table.to_csv(index=False, float_format="%.10g", lineterminator="\n")


def trace_file(traces: Path, *names: str) -> Path:
    """The first file of these names below a directory of traces; ``InputError`` when there is none."""
    for name in names:
        found = sorted(traces.rglob(name))
        if found:
            return found[0]
    raise InputError(f"{traces}: no trace {' or '.join(names)} there or below")
