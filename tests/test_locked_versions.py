"""What is locked is what ``pyproject.toml`` requires, at versions that it allows, with a hash of every file."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name != "measure"}
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LOCKED = (ROOT / ".ci" / "locked.txt").read_text(encoding="utf-8")


def pins(text: str) -> list[Requirement]:
    return [Requirement(line.removesuffix(" \\")) for line in text.splitlines() if line and line[0] not in " #"]


def test_both_files_hold_the_same_versions_and_nothing_but_versions():
    assert pins(CONSTRAINTS) == pins(LOCKED)
    for one in pins(CONSTRAINTS):
        assert re.fullmatch(r"==[\w.]+", str(one.specifier)), one
        assert not one.url
    assert "://" not in CONSTRAINTS + LOCKED
    assert not [line for line in LOCKED.splitlines() if line.startswith("--")]


def test_every_locked_version_has_hashes():
    for block in re.split(r"\n(?=\S)", LOCKED):
        name, *hashes = block.splitlines()
        if not name.startswith("#"):
            assert hashes, name
            assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), name


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *(line for needs in EXTRAS.values() for line in needs)])
def test_a_requirement_is_locked_at_versions_that_it_allows(line):
    """On every Python that it is installed on; after a change of ``pyproject.toml`` run ``make lock``."""
    need = Requirement(line)
    if need.name == PROJECT["name"]:
        assert need.extras <= {*EXTRAS}
        return
    mine = [one for one in pins(CONSTRAINTS) if canonicalize_name(one.name) == canonicalize_name(need.name)]
    for python in ("3.11", "3.12", "3.13", "3.14"):
        there = {"python_version": python, "python_full_version": f"{python}.9"}
        (found,) = [one for one in mine if one.marker is None or one.marker.evaluate(there)]
        (version,) = found.specifier
        assert need.specifier.contains(Version(version.version)), f"{found} is locked: run make lock"


def test_a_requirement_of_the_package_has_a_lowest_version():
    for line in [
        *PROJECT["dependencies"],
        *(line for needs in PROJECT["optional-dependencies"].values() for line in needs),
    ]:
        need = Requirement(line)
        assert need.name == PROJECT["name"] or ">=" in str(need.specifier), line
