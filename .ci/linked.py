"""Put what a wheel requires into an environment: ``linked.py WHEEL FROM TO [EXTRA]``, linked between site-packages.

Only what the wheel, or an extra of it, names is put there, and what that names: a requirement that it lacks is missing.
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


def required(start: Distribution, known: dict[str, Distribution], extra: str = "") -> list[Distribution]:
    """What a distribution, or an extra of it, requires, directly or not."""
    own = canonicalize_name(start.name)
    known = {**known, own: start}
    found = {(own, extra)}
    rest = [*found]
    while rest:
        one, asked = rest.pop()
        for line in known[one].requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": asked}):
                name = canonicalize_name(need.name)
                new = {(name, each) for each in ("", *need.extras)} - found
                found |= new
                rest += new
    return [known[name] for name in sorted({name for name, _ in found} - {own})]


def link(source: Path, target: Path) -> None:
    """The same file, or a copy of it on another disk."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main(wheel: Path, home: Path, target: Path, extra: str = "") -> None:
    """Link every file of every distribution that the wheel requires."""
    with ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        start = PathDistribution(Member(archive, f"{info}/"))
        known = {canonicalize_name(each.name): each for each in distributions(path=[str(home)])}
        for one in required(start, known, extra):
            for file in one.files or []:
                source = home / file
                if ".." in file.parts or not source.exists():  # commands, and byte code that nobody made
                    continue
                link(source, target / file)
                if source.suffix == ".py" and (code := Path(cache_from_source(source))).exists():
                    link(code, target / code.relative_to(home))


main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
