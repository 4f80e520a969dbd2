"""Parameters as a model's publisher states them: in the index of its weights, its card or its name."""

from __future__ import annotations

import re
from typing import NamedTuple

from disagg_sim.facts.hub.files import ModelFiles

#: ``235B`` or ``2.4T`` in a name, with ``-A22B`` behind it; not ``8x22B``, nor ``17B-128E``, whose 17B are active.
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbTt])(?![A-Za-z0-9])(?!-\d+E)(?:-A(\d+(?:\.\d+)?)B)?")
#: ``Number of Parameters: 32.8B`` and its like in a card.
_IN_CARD = re.compile(
    r"(?:number of|total|#\s*total)\s+param(?:eter)?s?\W{0,20}(?:\*\*)?\s*(\d+(?:[.,]\d+)?)\s*(B|T|billion|trillion)\b",
    re.IGNORECASE,
)
_UNITS = {"b": 1e9, "t": 1e12}


class Published(NamedTuple):
    """A count that is stated somewhere."""

    params: float  # [1]
    where: str
    digits: float  # last digit that is printed, such as 1e9 of 235B; half of it is rounding [1]

    def difference(self, counted: int) -> float:
        """Relative difference of the count, from the published figure. [1]"""
        return counted / self.params - 1


def published_params(files: ModelFiles) -> Published | None:
    """Find the published number of parameters: exact ones first, then the card, then the name."""
    if files.index is not None:
        metadata = files.index.get("metadata")
        total = metadata.get("total_parameters") if isinstance(metadata, dict) else None
        if isinstance(total, int) and not isinstance(total, bool) and total > 0:
            return Published(float(total), "index of its weights", 1.0)
    if found := _IN_CARD.search(files.card):
        return _figure(found[1].replace(",", "."), found[2], "its card")
    if found := _IN_NAME.search(files.hub_name.rpartition("/")[2]):
        return _figure(found[1], found[2], "its name")
    return None


def _figure(number: str, unit: str, where: str) -> Published:
    size = _UNITS[unit[0].lower()]
    decimals = len(number.partition(".")[2])
    return Published(float(number) * size, where, size / 10**decimals)
