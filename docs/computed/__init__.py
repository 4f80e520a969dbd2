"""Functions that make the numbers of the pages: each is registered here under its name, with ``-`` for ``_``.

A function owns the digits of its text: as many as a page needs, so that noise of the last digit does not show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from disagg_sim.facts.yaml_files import PATH_VARIABLE

#: Plain rooflines with which the worked examples were derived by hand.
PLAIN_FITS = Path(__file__).resolve().parents[2] / "tests" / "published" / "seed_fits"


class Entry(NamedTuple):
    """A function that makes a text, and whether it takes minutes."""

    make: Callable[[], str]
    slow: bool


ENTRIES: dict[str, Entry] = {}


def quick(make: Callable[[], str]) -> Callable[[], str]:
    """Register a text that takes at most a second or two."""
    ENTRIES[make.__name__.replace("_", "-")] = Entry(make, slow=False)
    return make


def slow(make: Callable[[], str]) -> Callable[[], str]:
    """Register a text that takes minutes."""
    ENTRIES[make.__name__.replace("_", "-")] = Entry(make, slow=True)
    return make


#: Tables that only the site shows, where a page has ``<!-- site: NAME -->``: what a reader looks up, and files have.
ON_SITE: dict[str, Callable[[], str]] = {}


def on_site(make: Callable[[], str]) -> Callable[[], str]:
    """Register a table that is made when the site is built."""
    ON_SITE[make.__name__.replace("_", "-")] = make
    return make


def plain(make: Callable[[], str]) -> Callable[[], str]:
    """Compute a text with the plain rooflines of the worked examples in place of the shipped fits."""

    def within() -> str:
        with plain_fits():
            return make()

    within.__name__ = make.__name__
    return within


@contextmanager
def plain_fits() -> Iterator[None]:
    """Efficiency files of ``PLAIN_FITS`` are found before the shipped ones."""
    before = os.environ.get(PATH_VARIABLE)
    os.environ[PATH_VARIABLE] = str(PLAIN_FITS)
    try:
        yield
    finally:
        if before is None:
            del os.environ[PATH_VARIABLE]
        else:
            os.environ[PATH_VARIABLE] = before


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def joined(values: Sequence[float], form: str) -> str:
    """Numbers of one form, with commas between them."""
    return ", ".join(format(value, form) for value in values)


def power(value: float, digits: int) -> str:
    """``1.84e15``: a mantissa and an exponent without its plus sign."""
    return f"{value:.{digits}e}".replace("e+", "e")
