"""Locate a number in a spec file: file, line, and table and entry of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from disagg_sim.errors import UnknownNameError
from disagg_sim.facts.efficiency import SECTIONS, Fit
from disagg_sim.facts.load import load_efficiency
from disagg_sim.facts.profile import profile_and_skew
from disagg_sim.facts.yaml_files import find_file, shipped_root, shown
from disagg_sim.facts.yaml_text import MOST_BYTES
from disagg_sim.reading import read_file


class SpecLine(NamedTuple):
    """A line of a spec file."""

    file: str  # as messages show it
    line: int  # 0 = not found [1]
    entry: str  # "gemm[4]" or the name of a key

    def __str__(self) -> str:
        """``file:line entry``."""
        return f"{self.file}:{self.line} {self.entry}" if self.line else f"{self.file} {self.entry}"


def place_of_fit(fit: Fit, system: str) -> SpecLine:
    """Find file, line and entry of an efficiency file that a fit was read from; line 0 where it stands in none."""
    home = fit.inherited_from or system
    spec, path = load_efficiency(home), find_file("efficiency", home)
    section = next(name for name, kind in SECTIONS.items() if isinstance(fit, kind))
    rows = getattr(spec, section, ())
    bare = replace(fit, inherited_from="", stands_for="")
    index = rows.index(bare) if bare in rows else -1
    return SpecLine(_spec_place(path), _line(path, (section, index)), f"{section}[{index}]" if index >= 0 else section)


def place_of_key(kind: str, name: str, key: str) -> SpecLine:
    """Find the file and the line, from 1, of a key of a spec file; line 0 where there is none."""
    try:
        path = find_file(kind, profile_and_skew(name)[0] if kind == "profile" else name)
    except UnknownNameError:  # made by hand
        return SpecLine(f"{kind} {name!r}", 0, key)
    return SpecLine(_spec_place(path), _line(path, (key,)), key)


def _spec_place(path: Path) -> str:
    """A shipped file by its place among the specs, wherever the program is installed and runs; others as ``shown``."""
    own = shipped_root()
    return path.relative_to(own).as_posix() if path.is_relative_to(own) else shown(path)


def _line(path: Path, keys: Sequence[str | int]) -> int:
    """Line of a value below keys and indices, 0 where there is none. [1]"""
    node = _document(path, path.stat().st_mtime_ns)
    for key in keys:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            node = next((value for name, value in children if name.value == key), None)
        else:
            node = children[key] if isinstance(key, int) and 0 <= key < len(children) else None
    return 0 if node is None else node.start_mark.line + 1


@lru_cache(maxsize=64)
def _document(path: Path, stamp: int) -> Any:  # noqa: ARG001 - a new version of the file is another entry
    return yaml.compose(read_file(path, MOST_BYTES).decode("utf-8"), Loader=yaml.SafeLoader)
