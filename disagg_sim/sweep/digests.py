"""Digest what a result depends on: values of specs, and the sources of rooms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any


def digest_of(value: Any) -> str:
    """Compute the digest of a value; the order of a mapping or set does not count.

    >>> digest_of({"isl": 1024, "osl": 128}) == digest_of({"osl": 128, "isl": 1024})
    True
    >>> digest_of((1024, 128)) == digest_of((128, 1024))
    False
    """
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


@cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Compute the digest of the sources of some rooms and of what all rooms share.

    >>> len({code_digest(rooms) for rooms in (("physics",), ("physics",), ("search",))})
    2
    """
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
