"""Read entries of a sweep's file that are words or numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from disagg_sim.errors import LONGEST_SHOWN, quoted
from disagg_sim.facts.faults import out_of_range


def ratio(value: object) -> Fraction | None:
    """A ratio of whole numbers, such as 0.5, 3.5 or "1/3"; None = the best."""
    if value == "optimal":
        return None
    try:
        text = "" if isinstance(value, bool) else str(value)[: LONGEST_SHOWN + 1]
        exact = re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\d{1,9}/\d{1,9}", text.strip())  # else an exponent has no bound
        found = Fraction(text if exact else float(text)).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{quoted(value)} is not a ratio such as 0.5 or '1/3'; allowed, too: optimal") from None
    if not Fraction(1, 1000) <= found <= 1000:
        raise ValueError(out_of_range(quoted(value), 0.001, 1000))
    return found
