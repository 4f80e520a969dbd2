"""Read values of options as people write them: ``90%``, ``800 Gbit/s``, ``600/min``, or a number alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import typer

from disagg_sim.errors import InputError
from disagg_sim.units import GB, asked_quantity


def reader(what: str, low: float = 0.0, high: float = math.inf, *, unit: float = 1.0) -> Callable[[object], float]:
    """Make the parser of an option."""

    def read(value: object) -> float:
        """A number."""
        try:
            number = asked_quantity(value, what, "") / unit
        except InputError as error:
            raise typer.BadParameter(str(error).strip()) from None
        if not low <= number <= high:
            upto = f" to {high:g}" if high < math.inf else ""
            raise typer.BadParameter(f"{number:g} is out of range; allowed: from {low:g}{upto}")
        return number

    return read


#: Shares from 0 to 1, or in percent. [1]
share = reader("share", high=1.0)
#: Bandwidths. [GB/s]
gb_per_s = reader("nic", unit=GB)
#: Rates. [1/s]
per_s = reader("rate", low=-math.inf)
#: Times. [s]
seconds = reader("seconds", low=-math.inf)
