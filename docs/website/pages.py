"""Turn the pages of the repository into pages of the site: links, lists and marks as the site's Markdown has them.

The pages are written for a reader of the repository. On the site README is the first page, what ``docs/`` holds lies
beside it, a notebook is a page, and a link to any other file of the repository gets a copy of that file. Where a page
has ``<!-- site: NAME -->``, the site has a table that is made as it is built (``docs.computed.ON_SITE``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from docs.computed import ON_SITE, accuracy, counts, models, studies  # noqa: F401 - importing registers

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?P<said>!?\[[^\]]*\])\((?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
ON_THE_SITE = re.compile(r"<!-- site: ([\w-]+) -->\n")
COMMENT = re.compile(r"<!--.*?-->\n?", flags=re.DOTALL)
ITEM = re.compile(r"^(?P<indent> *)(?P<marker>(?:[*+-]|\d+\.) +)(?P<text>.*)$")
FENCE = re.compile(r"^ *```")
INDENT = 4  # of a nested list, as Python-Markdown counts [character]


def sources() -> dict[str, Path]:
    """Map the path of a page on the site to the file that it is made from."""
    docs = ROOT / "docs"
    pages = {"index.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
    pages |= {"changelog.md": ROOT / "CHANGELOG.md"}
    pages |= {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return pages | {f"notebooks/{path.stem}.md": path for path in notebooks}


def page(site_path: str, text: str, pages: Mapping[str, Path], copies: dict[str, Path]) -> str:
    """Make the text of a page of the site; ``copies`` collects the other files to which it links.

    Parameters
    ----------
    site_path : str
        Path of the page on the site.
    text : str
        The page as the repository has it.
    pages : mapping
        All pages, from ``sources``.
    copies : dict
        Path on the site of each file that is no page, and the file; it grows here.
    """
    lines, code = [], False
    text = ON_THE_SITE.sub(lambda found: ON_SITE[found[1]](), text)
    for line in COMMENT.sub("", text).splitlines():
        code ^= bool(FENCE.match(line))
        lines.append(line if code else _linked(line, site_path, pages, copies))
    return "\n".join(_nested(lines)) + "\n"


def _linked(line: str, site_path: str, pages: Mapping[str, Path], copies: dict[str, Path]) -> str:
    """Make the links of a line lead where the site has their targets."""
    places = {source: path for path, source in pages.items()}

    def replace(found: re.Match[str]) -> str:
        if not found["path"] or "://" in found["path"]:
            return found[0]
        target = (pages[site_path].parent / found["path"]).resolve()
        if target not in places:
            copies[target.relative_to(ROOT / "docs" if "docs" in target.parts else ROOT).as_posix()] = target
        place = places.get(target) or target.relative_to(ROOT / "docs" if "docs" in target.parts else ROOT).as_posix()
        path = os.path.relpath(place, PurePosixPath(site_path).parent)
        return f"{found['said']}({path}{found['anchor'] or ''})"

    return LINK.sub(replace, line)


def _nested(lines: list[str]) -> list[str]:
    """Part lists from the paragraph before them by an empty line, and indent nested ones as Python-Markdown asks.

    >>> _nested(["Two:", "1. one", "   * a", "     goes on", "2. two"])
    ['Two:', '', '1. one', '    * a', '        goes on', '2. two']
    """
    made: list[str] = []
    texts: list[int] = []  # the column at which the text of each enclosing item begins
    code = False
    for line in lines:
        indent, item = len(line) - len(line.lstrip()), ITEM.match(line)
        fence = bool(FENCE.match(line))
        before = made[-1] if made else ""
        if not (code or fence):
            if texts and line.strip() and indent == 0 and not item and not before:
                texts.clear()
            while texts and line.strip() and (item or indent) and indent < texts[-1]:
                texts.pop()
            if item and (texts or indent < INDENT):  # else a line of code
                if (
                    before
                    and not before.startswith(" ")
                    and not ITEM.match(before)
                    and not texts
                    and not _goes_on(made)
                ):
                    made.append("")
                made.append(" " * INDENT * len(texts) + item["marker"] + item["text"])
                texts.append(indent + len(item["marker"]))
                continue
        code ^= fence
        moved = texts and indent >= texts[-1]
        made.append(" " * INDENT * len(texts) + line[texts[-1] :] if moved else line)
    return made


def _goes_on(made: list[str]) -> bool:
    """Whether the last paragraph began as an item of a list."""
    for line in reversed(made):
        if not line or ITEM.match(line):
            return bool(line)
    return False
