"""Digest what a result depends on: values of specs, and the sources of rooms; record and compare spec files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from disagg_sim.facts.yaml_files import DIRECTORIES, find_file, read_mapping


def digest_of(value: Any) -> str:
    """Compute the digest of a value; the order of a mapping or set does not count."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


@cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Compute the digest of the sources of some rooms and of what all rooms share."""
    root = files("disagg_sim")
    texts = [pair for room in rooms for pair in _sources(root / room, room)]
    texts += [(name, (root / name).read_text()) for name in ("domain.py", "parquet.py", "units.py")]
    return digest_of(sorted(texts))


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        path = f"{name}/{item.name}"
        if item.is_dir():
            yield from _sources(item, path)
        elif item.name.endswith(".py"):
            yield path, item.read_text()


def _plain(value: Any) -> Any:
    """Nested lists and sorted mappings of plain values, the same in every process."""
    if is_dataclass(value):
        return [type(value).__name__, {f.name: _plain(getattr(value, f.name)) for f in fields(value)}]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Fraction) else value


#: File below a directory of specs, such as ``hw_specs/h100_sxm.yaml`` -> its ``key: value`` lines, units and all.
Inputs = Mapping[str, Mapping[str, Any]]
#: Characters of a value that are shown. [1]
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Change:
    """A value that two documents do not share."""

    where: str  # the document: a spec file, "versions", "options"
    key: str  # path of the value in it, such as ``peak_flops.fp8``
    old: str | None  # as text; None where the old document has none
    new: str | None

    def __str__(self) -> str:
        """``hbm_bandwidth: 3.35 TB/s -> 3.0 TB/s in hw_specs/h100_sxm.yaml``."""
        old, new = ("(none)" if value is None else value for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new} in {self.where}"


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A spec file as it was when a sweep was planned."""

    path: Path
    stamp: tuple[int, int]  # time of the last change [ns], size [B]
    digest: str  # SHA-256 of its bytes
    spec: tuple[str, str]  # kind and name

    @property
    def is_as_it_was(self) -> bool:
        """Whether it says the same here: another machine's installation has other times, and maybe other places."""
        stamp = _stamp(self.path)
        if stamp == self.stamp:
            return True
        path = self.path if self.path.exists() else find_file(*self.spec)
        return _digest(path, _stamp(path)) == self.digest


def inputs_of(specs: Iterable[str]) -> tuple[dict[str, dict[str, Any]], tuple[SpecFile, ...]]:
    """Content and files of the specs, given as ``kind/name``, and of those that their fits are inherited from."""
    found: dict[str, dict[str, Any]] = {}
    sources: list[SpecFile] = []
    for spec in specs:
        kind, _, name = spec.partition("/")
        _add(found, sources, kind, name)
    return dict(sorted(found.items())), tuple(sources)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every value that differs between two sets of documents, by name; one that a set lacks is a single change."""
    changes: list[Change] = []
    for where in dict.fromkeys([*old, *new]):
        if where in old and where in new:
            changes += _changes(where, "", old[where], new[where])
        else:
            changes.append(Change(where, "file", *("present" if where in side else None for side in (old, new))))
    return changes


def _stamp(path: Path) -> tuple[int, int]:
    try:
        held = path.stat()
    except OSError:
        return 0, 0
    return held.st_mtime_ns, held.st_size


def _add(found: dict[str, dict[str, Any]], sources: list[SpecFile], kind: str, name: str) -> None:
    path = find_file(kind, name)
    place = f"{DIRECTORIES[kind]}/{path.name}"
    if place in found:
        return
    stamp = _stamp(path)
    sources.append(SpecFile(path, stamp, _digest(path, stamp), (kind, name)))
    found[place] = content = _content(path, stamp)
    if kind in ("efficiency", "power"):
        parents = [content["inherits"]] if "inherits" in content else []
        for parent in [*parents, *(rows["system"] for rows in content.get("inherits_rows", []))]:
            _add(found, sources, kind, parent)


@lru_cache(maxsize=256)
def _digest(path: Path, stamp: tuple[int, int]) -> str:  # noqa: ARG001 - as of ``_content``
    """SHA-256 of the bytes of a file; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@lru_cache(maxsize=256)
def _content(path: Path, stamp: tuple[int, int]) -> dict[str, Any]:  # noqa: ARG001 - a new version of the file is another entry
    return read_mapping(path)


def _changes(where: str, key: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _changes(where, f"{key}.{name}" if key else str(name), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list):
        yield from _rows(where, key, old, new)
    elif old != new:
        yield Change(where, key, _text(old), _text(new))


def _rows(where: str, key: str, old: list[Any], new: list[Any]) -> Iterator[Change]:
    """Changes of a list, each place counted in the old one; what was put in or taken out moves no other row."""
    before, now = ([json.dumps(row, sort_keys=True) for row in rows] for rows in (old, new))
    for kind, begin, end, start, stop in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        olds, news = old[begin:end], new[start:stop]
        for place in range(max(len(olds), len(news))):
            pair = (rows[place] if place < len(rows) else None for rows in (olds, news))
            yield from _changes(where, f"{key}[{begin + place}]", *pair)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
