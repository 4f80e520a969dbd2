"""Put what a wheel requires into an environment: ``linked.py WHEEL FROM TO``, linked from one site-packages to another.

Only what the wheel names, and what that names, is put there, so that a requirement that the wheel lacks is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import Distribution, PathDistribution, distributions
from importlib.util import cache_from_source
from pathlib import Path
from zipfile import Path as Member
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(start: Distribution, known: dict[str, Distribution]) -> list[Distribution]:
    """What a distribution requires, directly or not."""
    found: dict[str, Distribution] = {}
    rest = [(start, "")]
    while rest:
        one, extra = rest.pop()
        for line in one.requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                name = canonicalize_name(need.name)
                if name not in found:
                    found[name] = known[name]
                    rest.append((known[name], ""))
                rest += [(known[name], each) for each in need.extras if each != extra]
    return list(found.values())


def link(source: Path, target: Path) -> None:
    """The same file, or a copy of it on another disk."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main(wheel: Path, home: Path, target: Path) -> None:
    """Link every file of every distribution that the wheel requires."""
    with ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        start = PathDistribution(Member(archive, f"{info}/"))
        known = {canonicalize_name(each.name): each for each in distributions(path=[str(home)])}
        for one in required(start, known):
            for file in one.files or []:
                source = home / file
                if ".." in file.parts or not source.exists():  # commands, and byte code that nobody made
                    continue
                link(source, target / file)
                if source.suffix == ".py" and (code := Path(cache_from_source(source))).exists():
                    link(code, target / code.relative_to(home))


main(*map(Path, sys.argv[1:]))
