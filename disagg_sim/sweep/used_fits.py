"""Name the fits behind the times of a case."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.physics.rates import Taken
from disagg_sim.sweep.cases import Case


@dataclass(frozen=True, slots=True)
class UsedFit:
    """A fit behind the times of a case."""

    taken: Taken
    system: str = ""  # whose pool it times; "" where the pools are alike

    @property
    def text(self) -> str:
        """Its provenance in words, the system first where the pools differ."""
        return f"{self.system}, {self.taken.text}" if self.system else self.taken.text


def fits_used(case: Case) -> tuple[UsedFit, ...]:
    """Every fit behind the case's times; empty for a profile without fits."""
    pools = case.pools
    sides = ((case.prefill_system, pools.prefill_precision), (case.decode_system, pools.precision))
    fits = [case.setup_of(*side).rates.used for side in sides]
    if pools.alike:
        return tuple(map(UsedFit, fits[0]))
    names = (pools.prefill_system, pools.system)
    return tuple(UsedFit(taken, name) for name, found in zip(names, fits, strict=True) for taken in found)


def inherited(fits: tuple[UsedFit, ...]) -> tuple[str, ...]:
    """Provenance of those that were made on another system."""
    return tuple(fit.text for fit in fits if fit.taken.inherited)
