"""Add columns to frontiers that a sweep asks for: prices of tokens, and energy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from disagg_sim.certainty.energy import with_energy
from disagg_sim.certainty.rows import Origin
from disagg_sim.certainty.token_prices import with_token_prices
from disagg_sim.serving.costs import JOULE

#: Kinds of columns: of ``token_prices.PRICE_COLUMNS`` and of ``energy.ENERGY_COLUMNS``.
KINDS = (TOKEN_PRICES, ENERGY) = ("token_prices", "energy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumns:
    """What the rows of a frontier say beside their own columns."""

    columns: tuple[str, ...] = ()  # of ``KINDS``
    utilisation: float = 1.0  # share of the reserved hours that are used, of prices of tokens [1]

    def added(self, front: pd.DataFrame, prices: Mapping[str, float], origin: Origin) -> pd.DataFrame:
        """The frontier of a case with these columns at its end; prices of a GPU by system. [USD/h]"""
        if TOKEN_PRICES in self.columns:
            front = with_token_prices(front, prices, utilisation=self.utilisation, origin=origin)
        return with_energy(front, origin=origin) if ENERGY in self.columns else front

    def faults(self, per: str) -> Iterator[str]:
        """What the keys say that does not go together."""
        if self.utilisation < 1.0 and TOKEN_PRICES not in self.columns:
            yield f"utilisation: acts with 'columns: {TOKEN_PRICES}' only"
        if ENERGY in self.columns and per == JOULE:
            yield f"columns: {ENERGY!r} is what 'per: {JOULE}' has already"


#: Nothing.
OWN_COLUMNS = ExtraColumns()
