"""The only home of 1e9 and 2**30: SI inside, engineers' units at the edge.

Everything inside the package is s, B, FLOP, B/s, FLOP/s, W, USD. ``parse_quantity`` reads the
YAML's ``"141 GB"``, ``asked_quantity`` what people and agents ask for; ``report/`` and ``cli/`` divide by these names
when they print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from disagg_sim.errors import InputError, quoted

US = 1e-6  # [s]
MS = 1e-3  # [s]
KB = 1e3  # [B]
MB = 1e6  # [B]
GB = 1e9  # [B]
TB = 1e12  # [B]
KIB = 2.0**10  # [B]
MIB = 2.0**20  # [B]
GIB = 2.0**30  # [B]
#: Numbers beyond are slips of the pen, and squares of them are infinite or 0. [1]
LEAST, MOST = 1e-100, 1e100
MILLION = 1e6  # [1]
TERA = 1e12  # [1]
MINUTE = 60.0  # [s]
HOUR = 3600.0  # [s]
DAY = 86400.0  # [s]

_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 2.0**40}
_PER_SECOND = {"bit/s": 1 / 8, "bps": 1 / 8, "Bps": 1.0}.items()
_RATES = {"/s": 1.0, "/sec": 1.0, "/min": 1 / MINUTE, "/h": 1 / HOUR}.items()
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS: dict[str, dict[str, float]] = {
    "B": {f"{p}B": s for p, s in _SCALE.items()},
    "B/s": {f"{p}B/s": s for p, s in _SCALE.items()},
    "FLOP/s": {f"{p}FLOP/s": s for p, s in _SCALE.items()} | {f"{p}FLOPS": s for p, s in _SCALE.items()},
    "s": {f"{p}s": s for p, s in _SMALL.items()} | {"min": MINUTE, "h": HOUR},
    "W": {"W": 1.0, "kW": 1e3},
    "1": {"%": 0.01},
    "1/s": {"/s": 1.0, "/min": 1 / MINUTE, "/h": 1 / HOUR},
}
#: Other spellings, which messages do not list. "Gb/s" is none: some write it for Gbit/s, some for GB/s.
_SPELLED: dict[str, dict[str, float]] = {
    "B/s": {f"{p}{unit}": _SCALE[p] * size for p in ("", "k", "M", "G", "T") for unit, size in _PER_SECOND},
    "s": {"sec": 1.0, "second": 1.0, "seconds": 1.0, "msec": MS, "\u00b5s": US, "\u03bcs": US, "hours": HOUR, "d": DAY},
    "1": {"percent": 0.01},
    "1/s": {f"{what}{per}": s for what in ("requests", "req") for per, s in _RATES} | {"rps": 1.0, "qps": 1.0},
}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/%\u00b5\u03bc]*)\s*")


class Bare(NamedTuple):
    """What a number without a unit is, and from where on nobody can mean it."""

    unit: str  # that it is in
    most: float  # the largest that is taken so, in this unit
    other: str  # unit that people mean beyond
    dimension: str  # SI unit of the result


#: Numbers without a unit that are taken, by what they say; larger ones are refused with both spellings. No user waits
#: more than a minute for a first token, or more than a second for each further one (MLPerf Inference's longest limits
#: are 6 s and 0.2 s). No NIC has more than 200 GB/s a GPU (1.6 Tbit/s, VR NVL72). A share above 1 is in percent.
BARE: Mapping[str, Bare] = {
    "ttft": Bare("s", 60.0, "ms", "s"),
    "tpot": Bare("s", 1.0, "ms", "s"),
    "nic": Bare("GB/s", 200.0, "Gbit/s", "B/s"),
    "share": Bare("", 1.0, "%", "1"),
    "rate": Bare("/s", math.inf, "/min", "1/s"),
    "seconds": Bare("s", math.inf, "ms", "s"),
}


def parse_quantity(text: object, dimension: str) -> float:
    """Read ``"3.35 TB/s"`` as 3.35e12 when ``dimension``, an SI unit or ``"1"`` of a share, is ``"B/s"``.

    GB is 1e9 B, GiB is 2**30 B.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        example = "90 %" if dimension == "1" else f"1 {dimension}"
        raise ValueError(f"{quoted(text)} is not a number with a unit such as {example!r}")
    number, unit = match.groups()
    known = _UNITS[dimension] | _SPELLED.get(dimension, {})
    if unit in known:
        return float(number) * known[unit]
    wanted = ", ".join(u for u in _UNITS[dimension] if u)
    wanted += ", Gbit/s" if dimension == "B/s" else ""
    said = f"unit {quoted(unit)}" if unit else "no unit"
    raise ValueError(f"{quoted(text)} has {said}; allowed: {wanted}")


def asked_quantity(value: object, what: str, name: str) -> float:
    """Read a quantity that a person or an agent asks for: a number with a unit, or a number alone that is plausible."""
    bare = BARE[what]
    text = str(value).strip().removesuffix(".0")
    try:
        number = float(text)
        if math.isnan(number) or (number and not LEAST < abs(number) < MOST and text.lower().strip("+-")[:3] != "inf"):
            raise InputError(f"{name} {quoted(text)} is no number that can be computed with")
    except ValueError:
        try:
            return parse_quantity(text, bare.dimension)
        except ValueError as error:
            raise InputError(f"{name} {error}") from None
    if bare.unit and bare.most < number < math.inf:
        own = f"{text}{bare.unit}"
        raise InputError(f"{name} {text} has no unit, and nobody means {own}; say {text}{bare.other} or {own}")
    if not bare.unit and bare.most < number <= 100.0:
        raise InputError(f"{name} {text} is more than 1; say {text}% or {number / 100.0:g}")
    return number * (_UNITS[bare.dimension][bare.unit] if bare.unit else 1.0)
