"""The only home of 1e9 and 2**30: SI inside, engineers' units at the edge.

Everything inside the package is s, B, FLOP, B/s, FLOP/s, W, USD. ``parse_quantity`` reads the
YAML's ``"141 GB"``; ``report/`` and ``cli/`` divide by these names when they print.
"""

from __future__ import annotations

import re

from disagg_sim.errors import quoted

US = 1e-6  # [s]
MS = 1e-3  # [s]
KB = 1e3  # [B]
MB = 1e6  # [B]
GB = 1e9  # [B]
TB = 1e12  # [B]
KIB = 2.0**10  # [B]
MIB = 2.0**20  # [B]
GIB = 2.0**30  # [B]
MILLION = 1e6  # [1]
TERA = 1e12  # [1]
MINUTE = 60.0  # [s]
HOUR = 3600.0  # [s]
DAY = 86400.0  # [s]

_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 2.0**40}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS: dict[str, dict[str, float]] = {
    "B": {f"{p}B": s for p, s in _SCALE.items()},
    "B/s": {f"{p}B/s": s for p, s in _SCALE.items()},
    "FLOP/s": {f"{p}FLOP/s": s for p, s in _SCALE.items()} | {f"{p}FLOPS": s for p, s in _SCALE.items()},
    "s": {f"{p}s": s for p, s in _SMALL.items()} | {"min": MINUTE, "h": HOUR},
    "W": {"W": 1.0, "kW": 1e3},
}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*")


def parse_quantity(text: object, dimension: str) -> float:
    """Read ``"3.35 TB/s"`` as 3.35e12 when ``dimension`` is ``"B/s"``.

    Parameters
    ----------
    text
        A number and a unit, as in YAML.
    dimension
        SI unit of the result: ``"B"``, ``"B/s"``, ``"FLOP/s"``, ``"s"`` or ``"W"``.

    Returns
    -------
    float
        In the unit of ``dimension``. GB is 1e9 B, GiB is 2**30 B.

    Raises
    ------
    ValueError
        When there is no number, no unit, or a unit of another dimension.

    Examples
    --------
    >>> parse_quantity("3.35 TB/s", "B/s"), parse_quantity("141 GB", "B") / GB, parse_quantity("1 GiB", "B") / GIB
    (3350000000000.0, 141.0, 1.0)
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{quoted(text)} is not a number with a unit such as '1 {dimension}'")
    number, unit = match.groups()
    try:
        return float(number) * _UNITS[dimension][unit]
    except KeyError:
        wanted = ", ".join(u for u in _UNITS[dimension] if u)
        said = f"unit {quoted(unit)}" if unit else "no unit"
        raise ValueError(f"{quoted(text)} has {said}; allowed: {wanted}") from None
