"""List the papers that can be reproduced, run their experiments and write the results.

A paper on serving policies is a ``Paper`` in the module that ``HOMES`` names; the study of frontiers
(``beyond_the_buzz``) writes the same files with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import pandas as pd

from disagg_sim.atomic import write_csv
from disagg_sim.errors import InputError, check_word
from disagg_sim.sweep.store import RunListener, Store
from lab.studies.claims import PaperText, evaluate, evaluate_as_authors

if TYPE_CHECKING:  # simulations take a third of the start of a study that has none
    from lab.studies.bench import Bench

#: Module of this room by paper.
HOMES = {name: f"lab.studies.{name}.experiments" for name in ("arrow", "dopd", "dynaserve")}

#: Significant digits of numbers in tables. [1]
DIGITS = 10

AnyBench = TypeVar("AnyBench", bound="Bench")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaperResults:
    """What was written."""

    claims: pd.DataFrame | None  # ``claims.csv``; None where only some figures were asked for
    as_authors: pd.DataFrame | None = None  # ``as_authors.csv``, both verdicts of each claim
    pictures: tuple[Path, ...] = ()  # each with its data beside it, ``.csv``
    computed: int  # runs of a trace through a deployment, or design points whose time and memory were computed [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper(Generic[AnyBench]):
    """All experiments of a paper on serving policies."""

    #: Of a directory of traces, of short samples, and of an engine (None: the one that the profile has).
    bench: Callable[[Path | None, bool, str | None], AnyBench]
    profile: str  # efficiency profile
    text: PaperText  # its claims
    engines: tuple[str, ...]  # that its authors ran, as far as they say so
    engine: str = ""  # of the profile, whose runs need not be done twice
    #: Searches for a capacity, by workload and case, that are done before the claims are judged.
    searches: Callable[[], list[tuple[str, str]]] = list
    search: Callable[[AnyBench, str, str], object] = lambda *_: None
    tables: Mapping[str, Callable[[AnyBench], pd.DataFrame]] = field(default_factory=dict)

    def reproduce(self, out: Path, *, traces: Path | None, listener: RunListener, quick: bool) -> PaperResults:
        """Run the experiments; write tables and ``claims.csv`` below ``out``."""
        Store(out).prepare()
        bench, searches = self.bench(traces, quick, None), self.searches()
        ours, as_set_up = self.text.claims, self.text.as_authors
        listener.start(len(searches) + len(ours) + len(as_set_up))
        for workload, case in searches:
            self.search(bench, workload, case)
            listener.advance(1)
        claims = evaluate(ours, {self.profile: bench}, listener)
        theirs = {
            engine: bench if engine == self.engine else self.bench(traces, quick, engine) for engine in self.engines
        }
        as_authors = evaluate_as_authors(as_set_up, theirs, claims, listener)
        listener.finish()
        write_csv(out / "claims.csv", claims, digits=DIGITS)
        write_csv(out / "as_authors.csv", as_authors, digits=DIGITS)
        for name, table in self.tables.items():
            write_csv(out / f"{name}.csv", table(bench), digits=DIGITS)

        runs = bench.runs + sum(each.runs for each in theirs.values() if each is not bench)
        return PaperResults(claims=claims, as_authors=as_authors, computed=runs)


def paper(name: str) -> Paper[Bench]:
    """Find the experiments of a paper on serving policies."""
    check_word("paper", name, HOMES)
    found: Paper[Bench] = import_module(HOMES[name]).PAPER
    return found


def trace_file(traces: Path, *names: str) -> Path:
    """The first file of these names below a directory of traces; ``InputError`` when there is none."""
    for name in names:
        found = sorted(traces.rglob(name))
        if found:
            return found[0]
    raise InputError(f"{traces}: no trace {' or '.join(names)} there or below")
