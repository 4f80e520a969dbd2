"""Keys of a ``config.json``: each is checked as it is read, and what nobody read is told apart at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg_sim.errors import SpecError, quoted
from disagg_sim.facts.faults import out_of_range, value_text
from disagg_sim.facts.model import MOST_LAYERS
from disagg_sim.facts.yaml_files import spec_error

#: Largest size that a model's file may have, as in ``facts.layers``. [1]
MOST = 10**7


class Config:
    """Keys and values of the text model of a ``config.json``.

    ``assumed`` collects lines on what the file does not say; ``read`` the keys that were asked for.
    """

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path = path
        self.data = data
        self.assumed: list[str] = []
        self.read: set[str] = set()
        self.encoder: dict[str, int] | None = None  # vision tower beside the text model

    def fault(self, text: str) -> SpecError:
        """An error that names the file."""
        return spec_error(self.path, [text])

    def assume(self, text: str) -> None:
        """Note what was taken where the file is silent, once."""
        if text not in self.assumed:
            self.assumed.append(text)

    def find(self, *keys: str) -> tuple[str, Any]:
        """The first of the keys that has a value, and the value; null is no value."""
        self.read.update(keys)
        return next(((key, self.data[key]) for key in keys if self.data.get(key) is not None), (keys[0], None))

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value."""
        return self.find(*keys)[1] is not None

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number under the first of the keys that has one."""
        key, value = self.find(*keys)
        if value is None:
            if default is None:
                others = f" (or {', '.join(map(repr, keys[1:]))})" if len(keys) > 1 else ""
                raise self.fault(f"missing key {keys[0]!r}{others}")
            return default
        return self.whole(key, value, least, most)

    def whole(self, key: str, value: object, least: int = 1, most: int = MOST) -> int:
        """The value of a key, or of an entry of a list, as a whole number."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(f"{key}: {value_text(value)} is not a whole number")
        if not least <= value <= most:
            raise self.fault(f"{key}: {out_of_range(quoted(value), least, most)}")
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or false under the first of the keys that has a value."""
        key, value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(f"{key}: {value_text(value)} is not true or false")
        return value

    def word(self, key: str, default: str = "") -> str:
        """The text under a key."""
        value = self.find(key)[1]
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(f"{key}: {value_text(value)} is not text")
        return value

    def section(self, key: str) -> Config:
        """The keys inside a key, read on the same terms; empty where it is missing."""
        value = self.find(key)[1]
        if value is not None and not isinstance(value, dict):
            raise self.fault(f"{key}: {value_text(value)} is not 'key: value' pairs")
        inner = Config(self.path, value or {})
        inner.assumed = self.assumed
        return inner

    def series(self, key: str, *, length: int | None = None) -> list[Any]:
        """The list under a key, of one entry a layer where a length is given; longer ones are cut, as engines do."""
        value = self.find(key)[1]
        if not isinstance(value, list):
            raise self.fault(f"{key}: {value_text(value)} is not a list")
        if length is not None and len(value) < length:
            raise self.fault(f"{key}: {len(value)} entries for {length} layers")
        if len(value) > MOST_LAYERS:
            raise self.fault(f"{key}: {len(value)} entries; allowed: up to {MOST_LAYERS}")
        return value if length is None else value[:length]

    def words(self, key: str, allowed: Sequence[str], *, length: int | None = None) -> list[str]:
        """The list under a key, each entry one of a few words."""
        for index, each in enumerate(found := self.series(key, length=length)):
            if each not in allowed:
                raise self.fault(f"{key}[{index}]: {quoted(each)} is not understood; known: {', '.join(allowed)}")
        return found

    def switches(self, key: str, *, length: int) -> list[bool]:
        """The list under a key, of 0 or 1 for each layer."""
        entries = enumerate(self.series(key, length=length))
        return [bool(self.whole(f"{key}[{index}]", each, least=0, most=1)) for index, each in entries]

    def layer_numbers(self, key: str) -> set[int]:
        """The set of layers listed under a key."""
        return {self.whole(key, each, least=0) for each in self.series(key)}

    @property
    def layers(self) -> int:
        """Layers of the model. [1]"""
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        """Width of the residual stream. [1]"""
        return self.count("hidden_size")
