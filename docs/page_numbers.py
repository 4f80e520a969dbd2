"""The numbers that pages state, computed: ``python docs/page_numbers.py`` writes them where README and docs mark them.

A value in a sentence stands between ``<!-- number: NAME -->`` and ``<!-- /number -->``, a table between
``<!-- table: NAME -->`` and ``<!-- /table -->``, each on a line of its own; a reader sees neither. A function of
``docs/computed/`` has the name, with ``_`` for ``-``, and returns the text. ``--all`` computes those that take minutes,
too; ``--check`` writes nothing, names every page whose text differs, and exits 1.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree, and the examples that tests and pages share

from docs import computed  # noqa: E402
from docs.computed import ENTRIES, examples  # noqa: E402, F401 - tests look at the examples

for _found in pkgutil.iter_modules(computed.__path__):  # importing registers
    importlib.import_module(f"docs.computed.{_found.name}")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"(<!-- (number|table): ([\w-]+) -->)(.*?)(<!-- /\2 -->)", flags=re.DOTALL)


class Place(NamedTuple):
    """A marked place: the page, the name, what is written there."""

    page: Path
    name: str
    written: str


def places() -> list[Place]:
    """Every marked place of every page."""
    return [
        Place(page, found[3], found[4]) for page in PAGES for found in MARK.finditer(page.read_text(encoding="utf-8"))
    ]


def made(names: Sequence[str]) -> dict[str, str]:
    """The texts of these names."""
    return {name: ENTRIES[name].make() for name in names}


def stale(texts: dict[str, str]) -> list[str]:
    """One line for every place that says something else."""
    return [
        f"{place.page.relative_to(ROOT)}: {place.name}: written {place.written.strip()!r}, "
        f"computed {texts[place.name].strip()!r}"
        for place in places()
        if place.name in texts and place.written != texts[place.name]
    ]


def write(texts: dict[str, str]) -> None:
    """Put the texts into the pages."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = MARK.sub(lambda found: f"{found[1]}{texts.get(found[3], found[4])}{found[5]}", before)
        if after != before:
            page.write_text(after, encoding="utf-8")


def main() -> int:
    """Write or check the numbers of the pages."""
    parser = argparse.ArgumentParser(description="Compute the numbers that README and docs mark, and write them there.")
    parser.add_argument("names", nargs="*", help="these alone; all quick ones by default")
    parser.add_argument("--all", action="store_true", help="compute those that take minutes, too")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page says something else")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(ENTRIES))
    if unknown:
        parser.error(f"no number {', '.join(unknown)}; known: {', '.join(sorted(ENTRIES))}")
    names = asked.names or [name for name, entry in ENTRIES.items() if asked.all or not entry.slow]
    texts = made(names)
    lines = stale(texts)
    print("\n".join([*lines, f"{len(texts)} numbers, {len(lines)} places {'differ' if asked.check else 'rewritten'}"]))
    if not asked.check:
        write(texts)
    return int(asked.check and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
